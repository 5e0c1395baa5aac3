"""Pinned memory that only the steps before a plan over several graphs needed goes, on a GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.runtime.copies.streams import CudaCopies
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory.arena import CudaPinner, HostArena
from fxoffload.runtime.host_memory.trim import HostTrim
from tests.gpu.gpu_support import MIB, deterministic, differing, disturbed, engine, gradients, sleep
from tests.gpu.test_chain_clock import DEPTH, TOKENS, WIDTH, build, join

pytestmark = pytest.mark.gpu

# Steps that are recorded, skipped, measured, planned again, skipped, measured, read; then those that count.
STEPS = 40
CHUNK = 32 * MIB


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pinned memory, chunks of a quarter of a layer, and nothing known of models of other tests."""
    found = engine()
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(found.calls, "_trim", HostTrim(found))
    monkeypatch.setattr(found.calls, "_tracked_graphs", weakref.WeakSet())
    start_anew()
    yield


def start_anew() -> None:
    torch.compiler.reset()
    engine().calls._step = None
    gc.collect()
    fxoffload.release_host_memory()
    fxoffload.reset_stats()


def batch() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("delays", [False, True])
def test_pinned_memory_falls_to_what_the_plan_needs_and_no_bit_changes(delays: bool) -> None:
    """Once measured and planned again, once with every copy delayed at random and freed memory poisoned."""
    x = batch()
    disable = ("tape_recompute", "calibration") if delays else ("tape_recompute",)
    # The link is far slower than these layers: few of them can move within that.
    model = build(disable=disable, max_slowdown=0.05)
    with deterministic():
        with fxoffload.override_policy("keep_all"):
            expected = gradients(model, lambda: model(x))
        found, reserved = [], []
        for index in range(STEPS):
            with disturbed(index) if delays else contextlib.nullcontext():
                found.append(gradients(model, lambda: model(x)))
            reserved.append(fxoffload.stats().host_bytes_reserved)
            for name in ("fxoffload-chain-plan", "fxoffload-replan"):
                join(name)
        found.append(gradients(model, lambda: model(x)))
    torch.cuda.synchronize()
    assert [differing(grads, expected) for grads in found] == [0] * len(found)
    plan, stats = fxoffload.plans()[-1], fxoffload.stats()
    assert f"over {DEPTH} calls" in plan.summary
    assert 0 < plan.predicted.bytes_offloaded < 0.8 * max(reserved), "the plan needs as much as the steps before it"
    assert stats.bytes_host_trimmed > 0
    assert stats.host_bytes_reserved < max(reserved)
    assert stats.bytes_kept_host_full == 0
    # The next step finds the memory that it needs, and in whole chunks no more.
    fxoffload.reset_stats()
    engine().arena.mark()
    with deterministic():  # otherwise other graphs
        gradients(model, lambda: model(x))
    after = fxoffload.stats()
    assert (after.num_host_growths, after.bytes_host_trimmed) == (0, 0)
    assert after.bytes_offloaded > 0
    assert after.host_bytes_reserved < engine().arena.highest_bytes + CHUNK


def test_memory_that_was_given_back_is_pinned_again_and_copied_to() -> None:
    """By real registrations, with a copy under way when the trim begins."""
    device = torch.device("cuda", torch.cuda.current_device())
    arena = HostArena(CudaPinner(device), 1 << 30, chunk_bytes=CHUNK)
    value = torch.randint(256, (128 * MIB,), dtype=torch.uint8, device=device)
    streams = engine().streams
    for _ in range(3):
        block = arena.allocate(value.numel(), 1 << 30)
        assert block is not None, arena.refusal
        while arena.is_growing:
            time.sleep(0.001)
        streams.offload_waits_for_compute()
        with streams.offloading():
            streams.offload((piece, value[at : at + piece.numel()]) for at, piece in arena.pieces(block, value.numel()))
        streams.synchronize()
        back = torch.zeros_like(value)
        streams.reload_waits_for_compute()
        with streams.reloading():
            streams.reload((back[at : at + piece.numel()], piece) for at, piece in arena.pieces(block, value.numel()))
        arena.free(block, None)  # without a fence
        trimming = threading.Thread(target=arena.trim, args=(40 * MIB, streams.wait_for_copies))
        trimming.start()
        trimming.join(60)
        assert arena.reserved_bytes == 64 * MIB
        streams.synchronize()
        assert torch.equal(back, value)
        value = value.roll(1)  # other bytes in the next round
    assert arena.release() == 64 * MIB


def test_the_wait_for_copies_is_one() -> None:
    streams = engine().streams
    assert isinstance(streams, CudaCopies)
    for stream in (streams.offload_stream, streams.reload_stream):
        with torch.cuda.stream(stream):
            sleep(200.0)
            event = torch.cuda.Event()
            event.record()
        assert not event.query()
        streams.wait_for_copies()
        assert event.query()
