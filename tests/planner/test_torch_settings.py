"""Settings of torch by which its partitioner chooses saved values: under a plan they have no effect, and that is said
once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

import fxoffload
from fxoffload.torch_private import partitioner
from tests.support import Stack, batch

OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "profile": "h200"}
SAYS = "torch's own settings beside fxoffload"


def train(by_layer: bool = False, steps: int = 1, reset: bool = True, **options: Any) -> tuple[list[Tensor], list[str]]:
    """Loss and gradients of the last step, and the warnings."""
    if reset:
        torch.compiler.reset()
    model = Stack(2, dropout=0.1)
    call: Any = model
    if by_layer:
        for layer in model.layers:
            layer.compile(backend="fxoffload", options={**OPTIONS, **options})
    else:
        call = torch.compile(model, backend="fxoffload", options={**OPTIONS, **options})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            torch.manual_seed(1)
            loss = call(batch(length=24)).sum()
            loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found, [str(w.message) for w in seen]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _other_values() -> list[Any]:
    """Of each setting; some of those that are alike are left to the slow tests."""
    quick = ("activation_memory_budget", "ban_recompute_used_far_apart", "enable_activation_offloading")
    return [
        pytest.param(k, not v if isinstance(v, bool) else 0.5, marks=() if k in quick else pytest.mark.slow)
        for k, v in partitioner._TAGS_DECIDE.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), _other_values())
def test_the_plan_wins_and_says_so_once(name: str, value: object) -> None:
    if not hasattr(functorch_config, name):
        pytest.skip(f"this torch has no {name}")
    expected, before = train()
    planned = fxoffload.plans()[-1]
    with functorch_config.patch({name: value}):
        found, messages = train()
        _, later = train(reset=False)
        assert getattr(functorch_config, name) == value, "the user's setting stays"
    assert not any(SAYS in m for m in before + later)
    assert [name in m and "activation_budget" in m for m in messages if SAYS in m] == [True]
    assert equal(found, expected)
    assert fxoffload.plans()[-1].predicted == planned.predicted


@pytest.mark.slow
def test_the_plan_wins_under_a_budget_and_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"activation_budget": "36KiB"}, {"by_layer": True, "steps": 4, "activation_budget": "36KiB"}):
        expected, _ = train(**options)
        moved = fxoffload.stats().bytes_offloaded
        with functorch_config.patch(activation_memory_budget=0.3):
            found, messages = train(**options)
        assert equal(found, expected)
        assert fxoffload.stats().bytes_offloaded - moved == moved > 0
        assert sum(SAYS in m for m in messages) == 1
        assert not caplog.records
        fxoffload.reset_stats()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.13 and newer")
@pytest.mark.parametrize("whole", [True, False])
def test_annotated_regions_do_not_decide_either(whole: bool) -> None:
    """A region over a part of the graph alone makes torch refuse."""

    class Annotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.region_activation_memory_budget(0.2):
                x = self.stack(x)
            return x if whole else x.square()

    model = Annotated()
    with pytest.warns(UserWarning, match=r"region_activation_memory_budget \(0\.2\)"):
        loss = torch.compile(model, backend="fxoffload", options=OPTIONS)(batch(length=24)).sum()
    loss.backward()


@pytest.mark.parametrize("policy", ["keep_all", "offload_all"])
def test_without_a_plan_torchs_setting_decides(policy: str) -> None:
    train(policy=policy)
    all_saved = _saved_bytes()
    with functorch_config.patch(activation_memory_budget=0.1):
        _, messages = train(policy=policy)
    assert _saved_bytes() < all_saved
    assert not any(SAYS in m for m in messages)


def _saved_bytes() -> int:
    return fxoffload.graphs()[-1].saved.candidate_bytes
