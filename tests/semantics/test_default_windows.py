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


LOGITS = 2 * 16 * 4096 * 4


class _LanguageModel(nn.Module):
    """Layers, then a head whose logits are larger than all that the layers save."""

    def __init__(self, vocabulary: int = 4096) -> None:
        super().__init__()
        self.stack = Stack(layers=4, width=32)
        self.lm_head = nn.Linear(32, vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.lm_head(self.stack(x)).flatten(0, 1), labels.flatten())


def _build_language_model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = _LanguageModel()
    return model, torch.compile(model, backend="fxoffload", options={**OPTIONS, "inner": "aot_eager"})  # type: ignore[return-value]


def test_what_the_head_saves_stays_and_the_layers_keep_to_their_window(same_code: Callable[..., Any]) -> None:
    model, step = same_code(_build_language_model)
    x, labels = torch.randn(2, 16, 32), torch.randint(4096, (2, 16))
    with fxoffload.override_policy("keep_all"):
        expected = _gradients(model, step(x, labels))
    fxoffload.reset_stats()
    loss = step(x, labels)
    stats = fxoffload.stats()
    assert LOGITS <= stats.bytes_kept_for_backward < 1.1 * LOGITS
    assert 0 < stats.bytes_offloaded < LOGITS
    assert _held()[0] < 0.5 * stats.bytes_offloaded
    assert _same(expected, _gradients(model, loss, retain_graph=True))
    assert _same(expected, _gradients(model, loss))
    assert _held() == (0, 0, 0, 0)
    assert fxoffload.stats().bytes_offloaded == stats.bytes_offloaded


def test_only_one_head_stays(same_code: Callable[..., Any]) -> None:
    """Two forwards, then two backwards: one set of logits on the device, not two."""
    model, step = same_code(_build_language_model)
    x, labels = torch.randn(2, 16, 32), torch.randint(4096, (2, 16))
    expected = _gradients(model, step(x, labels))
    fxoffload.reset_stats()
    first = step(x, labels)
    after_one = fxoffload.stats()
    second = step(x, labels)
    after_two = fxoffload.stats()
    assert after_two.bytes_kept_for_backward == after_one.bytes_kept_for_backward >= LOGITS
    assert after_two.bytes_offloaded - after_one.bytes_offloaded >= after_one.bytes_offloaded + LOGITS
    assert _held()[0] < LOGITS
    assert _same(expected, _gradients(model, second))
    assert _same(expected, _gradients(model, first))
    assert _held() == (0, 0, 0, 0)


def test_a_bound_that_the_user_sets_holds_for_the_head_too() -> None:
    torch.manual_seed(0)
    model = _LanguageModel()
    options = {**OPTIONS, "inner": "aot_eager", "in_flight_budget": 4096}
    step = torch.compile(model, backend="fxoffload", options=options)
    loss = step(torch.randn(2, 16, 32), torch.randint(4096, (2, 16)))
    assert _held()[0] <= 4096
    loss.backward()
    assert fxoffload.stats().bytes_reloaded >= LOGITS


@pytest.mark.slow
def test_where_the_head_is_light_the_last_layer_stays() -> None:
    """Nothing would hide its copies; a second forward that waits for its backward moves everything."""
    model, step = _build("aot_eager")
    x = torch.randn(2, 16, 32)
    with fxoffload.override_policy("keep_all"):
        expected = _gradients(model, step(x).sum())
    fxoffload.reset_stats()
    first = step(x).sum()
    one = fxoffload.stats()
    assert 0.2 * one.bytes_offloaded < one.bytes_kept_for_backward < 0.5 * one.bytes_offloaded
    second = step(x).sum()
    two = fxoffload.stats()
    assert two.bytes_kept_for_backward == one.bytes_kept_for_backward
    assert two.bytes_offloaded == 2 * one.bytes_offloaded + one.bytes_kept_for_backward
    assert _same(expected, _gradients(model, second))
    assert _same(expected, _gradients(model, first))
    assert _held() == (0, 0, 0, 0)


def test_of_two_graphs_the_last_one_turns() -> None:
    """The first graph's values are needed last: they go, once it has been seen that another forward follows."""
    torch.manual_seed(0)
    parts = [Stack(layers=3, width=32), Stack(layers=3, width=32)]
    steps = [torch.compile(p, backend="fxoffload", options={**OPTIONS, "inner": "aot_eager"}) for p in parts]
    x = torch.randn(2, 16, 32)

    def kept_by_each() -> list[int]:
        found, before = [], fxoffload.stats().bytes_kept_for_backward
        value = x
        for step in steps:
            value = step(value)
            after = fxoffload.stats().bytes_kept_for_backward
            found.append(after - before)
            before = after
        value.sum().backward()
        return found

    first = kept_by_each()
    assert first[0] > first[1] == 0
    for _ in range(2):
        later = kept_by_each()
        assert later[1] > later[0] == 0
    assert _held() == (0, 0, 0, 0)
