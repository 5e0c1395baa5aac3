"""The default copy windows: values are reclaimed as well as reloaded. The other semantic tests turn reclaiming off."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.runtime.engine import engine_for
from tests.support import Stack

OPTIONS = {"policy": "offload_all", "min_bytes": 1, "device_types": ("cpu",), "host_budget": "256MiB"}


def _build(inner: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Stack(layers=4, width=32)
    return model, torch.compile(model, backend="fxoffload", options={**OPTIONS, "inner": inner})  # type: ignore[return-value]


def _gradients(model: nn.Module, loss: Tensor, **kwargs: bool) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward(**kwargs)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _held() -> tuple[int, int, int, int]:
    engine = engine_for(torch.device("cpu"))
    engine.host_bytes_in_use()
    return engine._in_flight_bytes, engine._ahead_bytes, engine._reclaimed_bytes, len(engine._dead)


@pytest.mark.slow_except("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_reclaimed_values_donation_and_retain_graph(inner: str, same_code: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    model, step = same_code(_build, inner)
    x = torch.randn(2, 16, 32)
    with fxoffload.override_policy("keep_all"):
        expected = _gradients(model, step(x).sum())
    fxoffload.reset_stats()
    for _ in range(2):
        loss = step(x).sum()
        assert _same(expected, _gradients(model, loss, retain_graph=True))
        assert _same(expected, _gradients(model, loss, retain_graph=True))
        assert _same(expected, _gradients(model, loss))
        del loss
    stats = fxoffload.stats()
    assert stats.bytes_reclaimed > 0
    assert stats.bytes_reloaded > stats.bytes_offloaded  # the second and third backward reload everything
    assert _held() == (0, 0, 0, 0)
    assert stats.host_bytes_in_use == 0


def test_a_dropped_graph_gives_up_its_sources(same_code: Callable[..., Any]) -> None:
    model, step = same_code(_build, "aot_eager")
    x = torch.randn(2, 16, 32)
    _gradients(model, step(x).sum())
    loss = step(x).sum()
    assert _held()[0] > 0
    del loss
    gc.collect()
    assert _held() == (0, 0, 0, 0)


def test_after_a_backward_that_fails(same_code: Callable[..., Any]) -> None:
    model, step = same_code(_build, "aot_eager")
    x = torch.randn(2, 16, 32)
    expected = _gradients(model, step(x).sum())
    out = step(x)

    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    out.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        out.sum().backward()
    del out
    gc.collect()
    assert _held() == (0, 0, 0, 0)
    assert _same(expected, _gradients(model, step(x).sum()))


@pytest.mark.slow
def test_a_short_first_batch_does_not_switch_offloading_off() -> None:
    torch.manual_seed(0)
    model = Stack(layers=4, width=32)
    step = torch.compile(
        model, backend="fxoffload", dynamic=True, options={**OPTIONS, "inner": "aot_eager", "min_bytes": 8192}
    )
    for length, moves in ((8, False), (16, False), (512, True)):
        fxoffload.reset_stats()
        step(torch.randn(1, length, 32)).sum().backward()
        assert (fxoffload.stats().bytes_offloaded > 0) is moves, length
