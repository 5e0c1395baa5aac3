"""The variant ``small_copies`` of ``pinning``: how long a copy of 4 KiB waits for large ones of another stream."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.activations.available import NotAvailable
from fxoffload.runtime.copies.giving_way import GivingWay

MIB = 1 << 20
# Large copies in all, and MiB of each; small ones meanwhile, each after 0.25 ms of a kernel.
LARGE_MIB, PART_MIB, NUM_SMALL, SMALL_BYTES, SLEEP_CYCLES = 2048, 64, 60, 4096, 500_000
HOW = {False: "one stream", True: "two in turn"}


def measure_small_copies(device: torch.device) -> list[dict[str, Any]]:
    """A row for each direction, with fxoffload's copies on one stream and on two in turn.

    ``waits_ms``: of the small copies that began while large ones were left (``samples``), the median;
    ``longest_wait_ms``; ``gbs``: of the large ones, from the first to the last.

    Raises:
        NotAvailable: there is no GPU: copies of a CPU are made at once.
    """
    if device.type != "cuda":
        raise NotAvailable("expected a GPU, found a CPU, whose copies are made at once: nothing can wait for them")
    host = torch.empty(LARGE_MIB * MIB, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(LARGE_MIB * MIB, dtype=torch.uint8, device=device)
    torch.cuda._sleep(1)  # loads the kernel, which takes longer than the copies
    torch.cuda.synchronize(device)
    rows = []
    for down in (False, True):
        target, source = (host, on_device) if down else (on_device, host)
        for in_turn in HOW:
            _measure(device, target, source, down, in_turn)  # warm-up
            rows.append(_measure(device, target, source, down, in_turn))
    return rows


def _measure(
    device: torch.device, target: torch.Tensor, source: torch.Tensor, down: bool, in_turn: bool
) -> dict[str, Any]:
    small_host = torch.empty(SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
    small = torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device)
    to, of = (small_host, small) if down else (small, small_host)
    way = GivingWay(device)
    parts = list(zip(target.split(PART_MIB * MIB), source.split(PART_MIB * MIB), strict=True))
    torch.cuda.synchronize(device)
    began, ended = _event(), _event()
    began.record(way.stream)
    with torch.cuda.stream(way.stream):
        way.copy(parts, gives_way=in_turn)
    ended.record(way.stream)
    pairs = []
    for _ in range(NUM_SMALL):
        torch.cuda._sleep(SLEEP_CYCLES)
        before, after = _event(), _event()
        before.record()
        to.copy_(of, non_blocking=True)
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize(device)
    large_ms = began.elapsed_time(ended)
    waits = [before.elapsed_time(after) for before, after in pairs if began.elapsed_time(before) < large_ms]
    return {
        "small_copies": HOW[in_turn],
        "down": down,
        "samples": len(waits),
        "waits_ms": statistics.median(waits),
        "longest_wait_ms": max(waits),
        "gbs": LARGE_MIB * MIB / 1e6 / large_ms,
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
