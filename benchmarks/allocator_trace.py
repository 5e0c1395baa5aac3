"""The peak without the gradients that the backward returns, replayed from the caching allocator's trace.

A whole-graph backward returns every gradient at once, and each stays live until AccumulateGrad has added it to its
buffer. That is a property of whole-graph compilation, the same for all compiled variants, and it hides what a variant
does about activations. So one extra step is traced, and its live bytes are counted twice: all of them, and without the
blocks that held an incoming gradient, from each block's allocation to its free.

[Note: Markers] A block is known by its address, and addresses are reused within a step. When AccumulateGrad receives a
gradient, a prehook allocates and frees a few bytes of an otherwise unused size. The trace then says which block lived
at that address at that moment. The prehook sits on the AccumulateGrad node, not on the parameter, because Dynamo sees
the hooks of a parameter and could compile again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from benchmarks.schema import TracedPeak
from benchmarks.steps import Stepper

MARKER_BYTES = 300_007
MAX_ENTRIES = 500_000


@dataclass(frozen=True)
class Arrival:
    """A gradient that reached AccumulateGrad: its storage, and the size of the marker allocated at that moment."""

    address: int
    marker_bytes: int


@dataclass(frozen=True)
class Replay:
    """What the trace says, relative to its start."""

    peak_bytes: int
    peak_without_gradients_bytes: int
    gradients_at_peak_bytes: int
    gradients_bytes: int
    num_matched_by_marker: int
    num_matched_by_last_allocation: int
    num_unmatched: int


def trace_step(stepper: Stepper) -> TracedPeak:
    """Run one step under the trace and replay it."""
    device = stepper.device
    arrivals: list[Arrival] = []
    hooked = _mark_arrivals(stepper, arrivals)
    stepper.job.zero_gradients()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=MAX_ENTRIES, clear_history=True
    )
    try:
        stepper.step()
        torch.cuda.synchronize(device)
        allocator_peak = torch.cuda.max_memory_allocated(device) - before
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        for _, handle in hooked:
            handle.remove()
    index = torch.cuda.current_device() if device.index is None else device.index
    events = snapshot.get("device_traces", [])[index]
    if len(events) >= MAX_ENTRIES:
        raise RuntimeError(f"the trace is cut: at least {MAX_ENTRIES} allocator events; raise MAX_ENTRIES")
    replayed = replay(events, arrivals)
    error = abs(replayed.peak_bytes - allocator_peak) / max(allocator_peak, 1)
    return TracedPeak(
        peak_bytes=replayed.peak_bytes,
        peak_without_returned_gradients_bytes=replayed.peak_without_gradients_bytes,
        returned_gradients_at_peak_bytes=replayed.gradients_at_peak_bytes,
        returned_gradients_bytes=replayed.gradients_bytes,
        num_events=len(events),
        num_gradients=len(arrivals),
        num_matched_by_marker=replayed.num_matched_by_marker,
        num_matched_by_last_allocation=replayed.num_matched_by_last_allocation,
        num_unmatched=replayed.num_unmatched,
        allocator_peak_bytes=allocator_peak,
        replay_error=error,
        agrees_within_1_percent=error <= 0.01,
    )


def _mark_arrivals(stepper: Stepper, arrivals: list[Arrival]) -> list[tuple[Node, Any]]:
    """Prehooks on AccumulateGrad. The nodes are returned because holding them is what keeps the hooks."""
    hooked = []
    for leaf in stepper.job.leaves().values():
        node = get_gradient_edge(leaf).node

        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    marker_bytes = MARKER_BYTES + len(arrivals)
                    arrivals.append(Arrival(gradient.untyped_storage().data_ptr(), marker_bytes))
                    torch.empty(marker_bytes, dtype=torch.uint8, device=gradient.device)

        hooked.append((node, node.register_prehook(note)))
    return hooked


@dataclass
class _Block:
    size: int
    first: int
    last: int


def replay(events: Sequence[Mapping[str, Any]], arrivals: Sequence[Arrival]) -> Replay:
    """Walk the trace twice: find the gradients' blocks, then count live bytes with and without them.

    A block counts from "alloc" to "free_requested", as ``max_memory_allocated`` counts it. Frees of blocks older than
    the trace count too: they lower the live bytes below the start.
    """
    blocks, by_event = _blocks(events)
    gradient_blocks, by_marker, by_last = _gradient_blocks(events, blocks, arrivals)
    live = without = peak = peak_without = gradients_at_peak = 0
    for position, event in enumerate(events):
        block = by_event.get(position)
        if event["action"] == "alloc":
            change = event["size"]
        elif event["action"] == "free_requested":
            change = -event["size"]
        else:
            continue
        live += change
        if block is None or id(block) not in gradient_blocks:
            without += change
        if live > peak:
            peak, gradients_at_peak = live, live - without
        peak_without = max(peak_without, without)
    return Replay(
        peak_bytes=peak,
        peak_without_gradients_bytes=peak_without,
        gradients_at_peak_bytes=gradients_at_peak,
        gradients_bytes=sum(block.size for block in gradient_blocks.values()),
        num_matched_by_marker=by_marker,
        num_matched_by_last_allocation=by_last,
        num_unmatched=len(arrivals) - by_marker - by_last,
    )


def _blocks(events: Sequence[Mapping[str, Any]]) -> tuple[dict[int, list[_Block]], dict[int, _Block]]:
    """Every block allocated in the trace: by address, and by the positions of its two events."""
    by_address: dict[int, list[_Block]] = {}
    by_event: dict[int, _Block] = {}
    for position, event in enumerate(events):
        if event["action"] == "alloc":
            block = _Block(event["size"], position, len(events))
            by_address.setdefault(event["addr"], []).append(block)
            by_event[position] = block
        elif event["action"] == "free_requested":
            history = by_address.get(event["addr"])
            if history and history[-1].last == len(events):
                history[-1].last = position
                by_event[position] = history[-1]
    return by_address, by_event


def _gradient_blocks(
    events: Sequence[Mapping[str, Any]], blocks: dict[int, list[_Block]], arrivals: Sequence[Arrival]
) -> tuple[dict[int, _Block], int, int]:
    """The blocks that held an arriving gradient, and how many were found by marker and by last allocation.

    The fallback is right for a backward that returns all its gradients at its end; it is counted for the reader.
    """
    markers = {event["size"]: position for position, event in enumerate(events) if event["action"] == "alloc"}
    found: dict[int, _Block] = {}
    by_marker = by_last = 0
    for arrival in arrivals:
        history = blocks.get(arrival.address, [])
        moment = markers.get(arrival.marker_bytes)
        living = [b for b in history if moment is not None and b.first < moment < b.last]
        if living:
            found[id(living[0])] = living[0]
            by_marker += 1
        elif history and moment is None:
            found[id(history[-1])] = history[-1]
            by_last += 1
    return found, by_marker, by_last
