"""``activation_budget="auto"``: its bytes, when it is worked out, and messages where it cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import fxoffload
from fxoffload import auto_budget, memory_budget
from fxoffload.errors import BudgetError, OptionsError
from fxoffload.machine import load_profile
from fxoffload.memory_budget import DeviceMemory
from fxoffload.options import Options
from fxoffload.reset import reset

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stands for a device of 1 GiB with memory of its own, of which 100 MiB are in use by others. Only
    objects that the test makes are found."""
    before = {id(thing) for thing in auto_budget._living()}
    living = auto_budget._living
    monkeypatch.setattr(auto_budget, "_DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.setattr(memory_budget, "device_memory", lambda device: DeviceMemory(GIB, others=100 << 20))
    monkeypatch.setattr(auto_budget, "_living", lambda: [thing for thing in living() if id(thing) not in before])
    yield
    auto_budget._found.clear()


def room(taken: int) -> int:
    """The bytes that ``gpu_like`` leaves where training takes ``taken``."""
    return int(0.9 * GIB) - (100 << 20) - taken


def budget(asked: str = "auto") -> int:
    found = auto_budget.in_bytes(Options(activation_budget=asked), CPU).activation_budget
    assert isinstance(found, int)
    return found


def nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [("auto", "auto"), (" AUTO ", "auto"), ("100%", "auto"), ("80%", "80%"), (" 62.5 % ", "62.5%"), ("2G", 2 * 10**9)],
)
def test_forms(given: str, kept: str | int) -> None:
    assert Options(activation_budget=given).activation_budget == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0%", r"activation_budget is '0%'; expected more than 0 % and at most 100 % of what 'auto' gives"),
        ("120 %", "at most 100 %"),
        ("-5%", r"'auto' for what the device leaves, '80%' for a share of that"),
        ("atuo", "expected a number of bytes .* or 'auto'"),
        (0.8, "activation_budget is 0.8; expected bytes, or '80%' of what the device leaves"),
    ],
)
def test_other_forms_are_told(given: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Options(activation_budget=given)
    with pytest.raises(OptionsError, match="host_budget is 'auto'"):
        Options(host_budget="auto")


def test_shares_have_keys_of_their_own() -> None:
    keys = {Options(activation_budget=b).cache_key() for b in ("auto", "80%", "81%", 80, None)}
    assert len(keys) == 5
    with pytest.raises(AssertionError, match="expected a budget in bytes, found 'auto'"):
        _ = Options(activation_budget="auto").budget_bytes


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu_like")
def test_gradients_and_state_of_what_the_optimizer_trains(caplog: pytest.LogCaptureFixture) -> None:
    model, frozen = nn.Linear(64, 64), nn.Linear(64, 64)
    trained = optim.AdamW(model.parameters())
    steps = 4 * 2  # AdamW's step counts
    with caplog.at_level(logging.INFO, "fxoffload"):
        left = budget()
    assert left == room(3 * nbytes(model) + steps)
    assert "optimizer state 32.5 KiB" in caplog.text and "others 100.0 MiB" in caplog.text
    assert budget("50%") == left // 2
    # It stays as it is: graphs of one step have to agree. After a reset the change counts.
    trained.add_param_group({"params": frozen.parameters()})
    assert budget() == left
    reset()
    assert budget() == room(3 * nbytes(model) + 3 * nbytes(frozen) + 2 * steps)
    assert caplog.text.count("are left of") == 1


@pytest.mark.usefixtures("gpu_like")
def test_state_and_gradients_that_are_there_are_in_use_already() -> None:
    model = nn.Linear(64, 64)
    trained = optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    trained.step()
    assert budget() == room(0)


@pytest.mark.usefixtures("gpu_like")
def test_wrappers_and_optimizers_that_are_gone_count_once_or_not() -> None:
    class Wrapper(optim.Optimizer):  # accelerate's
        def __init__(self, inner: optim.Optimizer) -> None:
            self.optimizer = inner

    model, other = nn.Linear(64, 64, bias=False), nn.Linear(32, 32, bias=False)
    kept = Wrapper(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    gone = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    gone.itself = gone  # type: ignore[attr-defined]
    del gone
    assert budget() == room(2 * nbytes(model))
    del kept
    optim.SGD(other.parameters(), lr=0.1)
    keeps = optim.SGD(other.parameters(), lr=0.1)
    assert budget() == room(nbytes(other)), "worked out anew, as what was counted is gone"
    del keeps


@pytest.mark.usefixtures("gpu_like")
def test_without_an_optimizer_adamw_is_counted_and_told() -> None:
    model = nn.Linear(64, 64)
    model.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match="found none: AdamW's two values are counted .* Make the optimizer before"):
        assert budget() == room(3 * model.weight.nbytes)
    assert budget() == room(3 * model.weight.nbytes)  # told once


def test_parameters_of_other_types_are_found() -> None:
    class Sharded(torch.Tensor):  # as a DTensor
        pass

    plain, kept = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2).as_subclass(Sharded))
    assert type(kept) is Sharded
    found = auto_budget._living()
    assert any(one is plain for one in found) and any(one is kept for one in found)
    assert not any(type(one) is torch.Tensor for one in found)


@pytest.mark.usefixtures("gpu_like")
def test_an_optimizer_that_cannot_be_tried_is_told() -> None:
    model = nn.Linear(64, 64)
    trained = optim.LBFGS(model.parameters())
    with pytest.warns(UserWarning, match="AdamW's two values are counted.*LBFGS"):
        assert budget() == room(3 * nbytes(model))
    del trained


def test_a_device_without_memory_of_its_own_is_told() -> None:
    with pytest.raises(OptionsError, match=r"is '80%', .* the model is on cpu. Give bytes.*activation_budget='80%'\)"):
        budget("80%")


@pytest.mark.usefixtures("gpu_like")
def test_nothing_trained_or_nothing_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionsError, match=r"expected parameters on cpu that require grad, .* found none"):
        budget()
    model = nn.Linear(64, 64)
    trained = optim.AdamW(model.parameters())
    monkeypatch.setattr(memory_budget, "device_memory", lambda device: DeviceMemory(GIB, here=GIB))
    with pytest.raises(OptionsError, match=r"found 102\.\d MiB too little: in use by this process on cpu 1\.0 GiB"):
        budget()
    del trained


# -- where it is used --------------------------------------------------------------------------------------------------

REHEARSED: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "profile": "h200"}


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))


@pytest.mark.usefixtures("gpu_like")
def test_a_compiled_model_plans_for_it() -> None:
    model = layers()
    trained = optim.AdamW(model.parameters())
    compiled = fxoffload.compile(model, activation_budget="auto", **REHEARSED)
    for batch in (8, 16):
        compiled(torch.ones(batch, 64)).sum().backward()
        assert fxoffload.last_plan().activation_budget == room(3 * nbytes(model) + 4 * 6)
        trained.step()


@pytest.mark.usefixtures("gpu_like")
def test_one_that_is_too_small_says_what_gradients_have_to_do_with_it() -> None:
    model = layers()
    trained = optim.AdamW(model.parameters())
    compiled = fxoffload.compile(model, activation_budget="0.001%", **REHEARSED)
    with pytest.raises(BudgetError, match=r"leaves 48\.8 KiB for gradients .* gradients_persist=False") as told:
        compiled(torch.ones(64, 64)).sum().backward()
    assert told.value.smallest_bytes > 8000
    del trained


def test_plans_for_a_device_that_is_not_here() -> None:
    with torch.device("meta"):
        model, x = layers(), torch.ones(8, 64)
    total = int(0.9 * load_profile("h200").device_memory_bytes)
    found = fxoffload.plan(model, example_args=(x,), device="h200", activation_budget="auto", min_bytes=1)
    assert found.activation_budget == total - 4 * sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    with pytest.warns(UserWarning, match=r"NVIDIA H200, 139\.\d GiB, found 838190\.3 GiB: it bounds nothing"):
        fxoffload.plan(model, example_args=(x,), device="h200", activation_budget="900TB", min_bytes=1)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    half: dict[str, Any] = {"activation_budget": "50%", "optimizer": sgd}
    found = fxoffload.plan(model, example_args=(x,), device="h200", min_bytes=1, **half)
    assert found.activation_budget == (total - 2 * sum(-(-p.nbytes // 512) * 512 for p in model.parameters())) // 2


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu_like")
def test_state_of_parameters_elsewhere_does_not_count() -> None:
    model, elsewhere = nn.Linear(64, 64), nn.Linear(4096, 4096, device="meta")
    alone = budget_with(optim.AdamW(model.parameters()))
    assert budget_with(optim.AdamW([*model.parameters(), *elsewhere.parameters()])) == alone


def budget_with(optimizer: optim.Optimizer) -> int:
    """``optimizer`` lives meanwhile."""
    reset()
    found = budget()
    del optimizer
    return found


@pytest.mark.usefixtures("gpu_like")
def test_all_ranks_take_what_the_first_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    model = nn.Linear(64, 64)
    trained = optim.AdamW(model.parameters())
    first = budget()

    def as_another_rank(others: int) -> int:
        reset()
        auto_budget._times.clear()  # of another process
        monkeypatch.setattr(memory_budget, "device_memory", lambda device: DeviceMemory(GIB, others=others))
        return budget()

    assert as_another_rank(others=120 << 20) == first
    with pytest.warns(UserWarning, match="to leave what another rank's device does.* Give every rank the smaller one"):
        assert as_another_rank(others=300 << 20) == first
    reset()  # in all ranks: they agree anew
    assert budget() < first - (100 << 20)
    trained.add_param_group({"params": nn.Linear(8, 8).parameters()})  # another stage of a pipeline
    assert as_another_rank(others=100 << 20) == first - 3 * 72 * 4 - 8
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", mock.Mock(side_effect=RuntimeError))
    with pytest.warns(UserWarning, match="the ranks could not agree on one activation_budget"):
        as_another_rank(others=0)
