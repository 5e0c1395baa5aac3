"""State that optimizers' wrappers keep, and ``extra`` objects: found, or refused, and never left alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxoffload.phases import OffloadedError, PhaseManager, Where
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.optimizers import leaves, named_state

from .phase_support import rehearse


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def stepped(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_device(tensors: list[Tensor]) -> list[bool]:
    with untouched():
        return [tensor.untyped_storage().nbytes() > 0 for tensor in tensors]


class Lookahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, made at the first step. As usual it does not call ``super().__init__``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, {}
        self.state: Any = defaultdict(dict)
        self.fast_state = optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_a_wrappers_own_state_leaves_too_also_if_it_came_late() -> None:
    model, expected = network(), network()
    optimizer, expected_optimizer = (Lookahead(torch.optim.AdamW(m.parameters())) for m in (model, expected))
    manager = rehearse(model, optimizer)
    manager.offload()
    manager.onload()
    assert manager.optimizers == [optimizer.optimizer]
    for _ in range(3):
        stepped(model, optimizer)
        stepped(expected, expected_optimizer)
        assert manager.optimizers == [optimizer.optimizer, optimizer]
        slow = [entry["slow"] for entry in optimizer.state.values()]
        manager.offload("optimizer")
        assert on_device(slow) == [False] * 4
        num_tensors = len(slow) + 3 * 4
        assert len(manager._transit.ledger.held(groups=("optimizer",))) == num_tensors, "each storage moves once"
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(OffloadedError, match=r"step\(\) needs"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        manager.onload("optimizer")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    manager.close()


class SharpnessAware(torch.optim.Optimizer):
    """A wrapper that does call it, and makes its state at the first step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base_optimizer = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.detach().clone()
        self.base_optimizer.step()


def test_state_dicts_of_a_wrapper_whose_state_came_late_are_read_from_the_host() -> None:
    model = network()
    optimizer = SharpnessAware(torch.optim.AdamW(model.parameters()))
    manager = rehearse(model, optimizer)
    manager.offload()
    manager.onload()
    stepped(model, optimizer)
    expected = [entry["old_p"].clone() for entry in optimizer.state.values()]
    manager.offload("optimizer")
    saved = optimizer.state_dict()
    found = [entry["old_p"] for entry in saved["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    optimizer.load_state_dict(saved)
    assert manager.where("optimizer") is Where.DEVICE
    manager.close()


def test_a_wrapper_whose_state_is_that_of_what_it_wraps_is_none() -> None:
    model = network()
    inner = torch.optim.AdamW(model.parameters())
    stepped(model, inner)

    class Thin:
        def __init__(self) -> None:
            self._base_optimizer, self.state, self.param_groups = inner, inner.state, inner.param_groups

        def step(self) -> None:
            inner.step()

    assert leaves(Thin()) == [inner]


def test_state_of_a_wrapper_without_a_model_is_not_the_parameters() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Copies:
        def __init__(self) -> None:
            self.optim = inner
            self.all_parameters = list(model.parameters())
            self.state = {p: {"copy": p.detach().clone(), "same": p} for p in model.parameters()}
            self.by_parameter = {p: torch.ones(2) for p in model.parameters()}

        def step(self) -> None:
            inner.step()

    wrapper = Copies()
    found = dict(named_state(wrapper, {}, masters=False))
    assert not {id(p) for p in model.parameters()} & {id(t) for t in found.values()}
    assert found.keys() == {"parameter['copy']", "by_parameter[parameter]"}
    manager = rehearse((), wrapper)
    manager.offload("optimizer")
    assert all(on_device(list(model.parameters())))
    assert not any(on_device([entry["copy"] for entry in wrapper.state.values()]))
    manager.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(os.environ.get("WORLD_SIZE", "1") != "1", reason="a process group of one")
@pytest.mark.usefixtures("alone")
def test_the_optimizer_inside_zero_redundancy_optimizer_is_found() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    stepped(model, optimizer)
    state = [t for entry in optimizer.optim.state.values() for t in entry.values()]
    manager = rehearse(model, optimizer)
    manager.offload("optimizer")
    assert len(state) == 12 and not any(on_device(state))
    with pytest.raises(OffloadedError):
        stepped(model, optimizer)
    manager.onload()
    stepped(model, optimizer)
    manager.close()


class Average:
    """An EMA that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Average, r"found Average: .*extra=\{'ema': \[\.\.\.\]\}"),
        (lambda m: [Average(m)], "found Average in it"),
        (lambda m: dict(m.named_parameters()).values(), "found dict_values"),
        (lambda m: 3, "found int"),
        (lambda m: "average", "found str"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "found SGD"),
    ],
)
def test_an_extra_that_could_not_be_moved_is_refused(make: Callable[[nn.Module], Any], message: str) -> None:
    model = network()
    with pytest.raises(TypeError, match=rf"expected extra\['ema'\] as a tensor, a module, or a tree.*{message}"):
        PhaseManager(model, extra={"ema": make(model)})


def test_an_extra_may_have_plain_data_in_it_be_empty_and_grow() -> None:
    model = network()
    average: dict[str, Any] = {"decay": 0.9, "name": "average", "updates": 3, "shadow": [], "other": None}
    manager = rehearse(model, extra={"ema": average, "none": None, "nothing": {}})
    average["shadow"] += Average(model).shadow
    manager.offload("extra")
    assert not any(on_device(average["shadow"]))
    assert manager.where("extra") is Where.HOST
    manager.close()
