"""Bit-equality on a GPU: copies delayed at random, freed memory poisoned; and each wait taken out in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.runtime.copies.streams import Wait
from tests.gpu.gpu_support import (
    MIB,
    Stack,
    build,
    deterministic,
    differing,
    disturbed,
    engine,
    fresh_input,
    gradients,
    sleep,
)

pytestmark = pytest.mark.gpu

OPTIONS = {
    "policy": "offload_all",
    "min_bytes": 1,
    "in_flight_budget": 8 * MIB,
    "prefetch_budget": 24 * MIB,
}


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Stack, Callable[[Tensor], Tensor]]]:
    """One model, compiled once, whole; the tests flip its decisions at run time."""
    torch.compiler.reset()
    model = build()
    step = torch.compile(model, backend="fxoffload", options=OPTIONS)
    with deterministic():
        for seed in (1, 2):
            gradients(model, lambda s=seed: step(fresh_input(s)))
        yield model, step


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Replaces the suite-wide fixture: the module's compiled model must live from test to test."""
    fxoffload.reset_stats()
    yield


def _expected(model: Stack, step: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    with fxoffload.override_policy("keep_all"):
        return gradients(model, lambda: step(x))


def test_keeping_twice_is_bit_equal(compiled: tuple[Stack, Callable[[Tensor], Tensor]]) -> None:
    model, step = compiled
    x = fresh_input(3)
    assert differing(_expected(model, step, x), _expected(model, step, x)) == 0


def test_offloading_is_bit_equal_over_20_delay_schedules(compiled: tuple[Stack, Callable[[Tensor], Tensor]]) -> None:
    model, step = compiled
    before = fxoffload.stats().num_segments_compiled
    for seed in range(20):
        x = fresh_input(100 + seed)
        expected = _expected(model, step, x)
        with disturbed(seed):
            sleep(5.0)  # the host runs ahead of the device
            found = gradients(model, lambda x=x: step(x.clone()))
        assert differing(expected, found) == 0, f"schedule {seed}"
    stats = fxoffload.stats()
    assert stats.num_segments_compiled == before, "flipping the decision must not compile"
    assert stats.bytes_offloaded > 20 * 4 * 20 * MIB
    assert stats.bytes_reloaded + stats.bytes_reclaimed == stats.bytes_offloaded
    assert stats.bytes_reloaded > stats.bytes_offloaded // 2
    assert stats.num_groups_on_tape == 0
    assert stats.host_bytes_in_use == 0


@pytest.mark.parametrize("wait", [Wait.SOURCE_READY, Wait.SOURCE_DONE, Wait.TARGET_FREE, Wait.TARGET_READY])
def test_without_one_wait_the_gradients_are_wrong(
    compiled: tuple[Stack, Callable[[Tensor], Tensor]], wait: Wait
) -> None:
    model, step = compiled
    wrong = 0
    for seed in range(3):
        x = fresh_input(200 + seed)
        expected = _expected(model, step, x)
        with disturbed(seed, left_out=wait):
            sleep(20.0)
            # A copy: the input is offloaded too, and freed memory is poisoned.
            wrong += differing(expected, gradients(model, lambda x=x: step(x.clone()))) > 0
        # Nothing of the broken run may leak into the next one.
        assert differing(expected, gradients(model, lambda x=x: step(x))) == 0
    assert wrong > 0, f"taking {wait} out changed nothing: the wait is not needed, or this test cannot see it"


def _two_streams(compiled: tuple[Stack, Callable[[Tensor], Tensor]], left_out: Wait | None) -> int:
    """Train on stream A, then on stream B, which reuses A's host blocks while A's reloads are still delayed."""
    model, step = compiled
    xs = [fresh_input(300), fresh_input(301)]
    expected = [_expected(model, step, x) for x in xs]
    lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    torch.cuda.synchronize()
    with disturbed(0, left_out=left_out, longest_ms=8.0):
        for x, lane in zip(xs, lanes, strict=True):
            with torch.cuda.stream(lane):
                found.append(gradients(model, lambda x=x: step(x.clone())))
    torch.cuda.synchronize()
    return sum(differing(a, b) for a, b in zip(expected, found, strict=True))


def test_two_compute_streams_share_host_blocks(compiled: tuple[Stack, Callable[[Tensor], Tensor]]) -> None:
    assert _two_streams(compiled, None) == 0
    assert _two_streams(compiled, Wait.HOST_READ) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_whose_seed_is_on_the_host(dtype: torch.dtype) -> None:
    """Memory-efficient (float32) and flash attention save a seed and an offset, which are on the host without dropout,
    whatever their fake tensors say."""
    torch.compiler.reset()
    model = build(2).to(dtype)
    step = torch.compile(model, backend="fxoffload", options=OPTIONS)
    with deterministic():
        x = fresh_input(1).to(dtype)
        found = gradients(model, lambda: step(x))
        with fxoffload.override_policy("keep_all"):
            assert differing(found, gradients(model, lambda: step(x))) == 0
    assert fxoffload.stats().bytes_offloaded > 0


@pytest.mark.parametrize("left_out", [None, Wait.SOURCE_DONE])
def test_the_caller_may_write_to_an_input_after_the_forward(left_out: Wait | None) -> None:
    """Under per-layer compile the residual stream is a graph input, and its owner may reuse it at once."""
    torch.compiler.reset()
    model = build(2)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=OPTIONS)

    def step(x: Tensor, *, overwrite: bool) -> Tensor:
        first, second = model.layers
        hidden = x.clone()
        middle = first(hidden)
        if overwrite:
            with torch.no_grad():
                hidden.data.fill_(float("nan"))
        return second(middle).float().square().mean()

    with deterministic():
        gradients(model, lambda: step(fresh_input(1), overwrite=False))
        x = fresh_input(2)
        with fxoffload.override_policy("keep_all"):
            expected = gradients(model, lambda: step(x, overwrite=False))
        with disturbed(0, left_out=left_out, longest_ms=10.0):
            found = gradients(model, lambda: step(x, overwrite=True))
    assert (differing(expected, found) > 0) is (left_out is not None)


def test_a_step_neither_pins_nor_synchronises(compiled: tuple[Stack, Callable[[Tensor], Tensor]]) -> None:
    model, step = compiled
    x = fresh_input(4)
    gradients(model, lambda: step(x))
    fxoffload.reset_stats()
    reserved = engine().arena.reserved_bytes
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            gradients(model, lambda: step(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stats = fxoffload.stats()
    assert stats.num_host_growths == 0
    assert stats.host_wait_ms == 0.0
    assert engine().arena.reserved_bytes == reserved


def test_retain_graph_with_donated_buffers(compiled: tuple[Stack, Callable[[Tensor], Tensor]]) -> None:
    model, step = compiled
    x = fresh_input(5)
    for policy in ("keep_all", "offload_all"):
        expected = _expected(model, step, x)
        with fxoffload.override_policy(policy):
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                loss = step(x)
                loss.backward(retain_graph=True)
                once = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                model.zero_grad(set_to_none=True)
                loss.backward()
                twice = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                assert differing(expected, once) == 0
                assert differing(expected, twice) == 0
