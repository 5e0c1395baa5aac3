"""The order in which Inductor runs the kernels of a segment; see [Note: How a segment's memory is walked] in
``estimate_memory``."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxoffload.analysis.segment_kernels import Kernel, SegmentKernels, is_inside


def likely_orders(segment: SegmentKernels) -> list[list[Kernel]]:
    """Orders that Inductor may take: the one with the smallest planned peak (of equals the first that it tries). Of a
    value that is read in parts it counts other bytes than all, so there any that it may think to be an improvement."""
    kernels = _depth_first(segment.kernels, key=lambda k: k.place)
    place = {k: i for i, k in enumerate(kernels)}
    weight = {
        k: (k.nbytes + sum(segment.size.get(b, 0) for b in k.reads if segment.known(b)), place[k]) for k in kernels
    }
    orders = (
        kernels,
        _greedy(segment, kernels, place),
        _first_served(kernels, place),
        _depth_first(kernels, key=weight.__getitem__),
    )
    found = [o for o in orders if len(o) == len(kernels)]
    planned = [planned_peak(segment, order) for order in found]
    best = min(planned)
    if not any(k.reads_parts for k in kernels):
        return [found[planned.index(best)]]
    return [o for o, peak in zip(found, planned, strict=True) if peak == best or peak < planned[0]]


def planned_peak(segment: SegmentKernels, order: Sequence[Kernel]) -> int:
    """Most bytes above those live when the segment begins, as Inductor counts them to choose an order.

    That is without hidden memory, and without results written in place.
    """
    live = peak = 0
    for kernel, freed in zip(order, segment.freed(order, segment.donated), strict=True):
        live += kernel.nbytes
        peak = max(peak, live)
        live -= sum(segment.size.get(buffer, 0) for buffer in freed)
    return peak


def _depth_first(kernels: Sequence[Kernel], key: Callable[[Kernel], Any]) -> list[Kernel]:
    """Each kernel in turn, after its dependencies."""
    order: dict[Kernel, None] = {}
    for kernel in sorted(kernels, key=key):
        stack = [(kernel, iter(sorted(kernel.before, key=key)))] if kernel not in order else []
        entered = {kernel}
        while stack:
            current, rest = stack[-1]
            found = next((k for k in rest if k not in order and k not in entered), None)
            if found is None:
                order[current] = None
                stack.pop()
            else:
                entered.add(found)
                stack.append((found, iter(sorted(found.before, key=key))))
    return list(order)


def _first_served(kernels: Sequence[Kernel], place: Mapping[Kernel, int]) -> list[Kernel]:
    """Of those that can run, the one whose inputs have been there the longest."""
    number: dict[Kernel, int] = {}
    missing = {k: len(k.before) for k in kernels}
    ready: list[tuple[list[int], int, Kernel]] = [([], place[k], k) for k in kernels if not k.before]
    heapq.heapify(ready)
    while ready:
        kernel = heapq.heappop(ready)[-1]
        number[kernel] = len(number)
        for later in kernel.after:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (sorted(number[k] for k in later.before), place[later], later))
    return list(number)


def _greedy(segment: SegmentKernels, kernels: Sequence[Kernel], place: Mapping[Kernel, int]) -> list[Kernel]:
    """Of those that can run and do not raise the peak, the one that leaves the least; else the one that allocates the
    least."""
    left = {b: len(readers) + (b in segment.kept) for b, readers in segment.readers.items() if segment.known(b)}
    known = {b: segment.size.get(b, 0) for b in left}
    live = sum(size for b, size in known.items() if not is_inside(b))
    peak = max(live, sum(segment.size.get(b, 0) for b in segment.kept if is_inside(b)))
    missing = {k: len(k.before) for k in kernels}
    ready = {k: None for k in kernels if not k.before}
    freed = {
        k: sum(known[b] for b in k.reads if left.get(b) == 1)
        + sum(size for b, size in k.writes.items() if b not in left and b not in segment.kept)
        for k in kernels
    }
    order: list[Kernel] = []
    while ready:
        gap = peak - live
        kernel = min(ready, key=lambda k: (k.nbytes if k.nbytes > gap else 0, k.nbytes - freed[k], place[k]))
        del ready[kernel]
        order.append(kernel)
        live += kernel.nbytes
        peak = max(peak, live)
        live -= freed[kernel]
        for later in kernel.after:
            missing[later] -= 1
            if not missing[later]:
                ready[later] = None
        for buffer in kernel.reads:
            if buffer in left:
                left[buffer] -= 1
                if left[buffer] == 1:
                    for reader in segment.readers[buffer]:
                        freed[reader] += known[buffer]
    return order
