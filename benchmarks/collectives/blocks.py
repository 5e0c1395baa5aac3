"""The profiler's records of a round, block by block, and what collectives took in all rounds on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.collective_trace import KERNEL, Event
from benchmarks.copy_trace import Interval, busy_ms, span_ms, way_of_copy
from benchmarks.idle_copies import PIECE_BYTES
from benchmarks.quartiles import summarize
from benchmarks.schema import CollectiveBeside

# Whether copies go down and up. The first is what the others are compared with.
WAYS: dict[str, tuple[bool, bool]] = {
    "none": (False, False),
    "down": (True, False),
    "up": (False, True),
    "both": (True, True),
}
KINDS = ("AllGather", "ReduceScatter")
# Of each kind in a block, after one more that brings the ranks together.
PER_BLOCK = 8

# So much of a collective's time may pass between one copy, or product, and the next.
_GAPS = 0.05
# A block begins with a kernel that holds the device up.
_HOLDS_UP = "spin_kernel"
_PRODUCTS = ("gemm", "nvjet")


@dataclass
class Block:
    """Some collectives during copies of one way, on one rank.

    ``each_ms``: by kind; None where something did not run all the while. ``gb_per_s``: of each way that was copied,
    while the collectives ran.
    """

    each_ms: dict[str, list[float | None]]
    gb_per_s: dict[str, float] = field(default_factory=dict)


Round = dict[str, Block]


@dataclass
class Traced:
    """A block's records. ``products`` is None where there are to be none."""

    collectives: dict[str, list[Interval]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    copies: dict[str, list[Interval]] = field(default_factory=lambda: {"down": [], "up": []})
    products: list[Interval] | None = None

    @property
    def took_ms(self) -> float:
        """Without the first of each kind, which waits for the others."""
        return sum(_ms(one) for kind in KINDS for one in self.collectives[kind][1:])

    def judge(self, down: bool, up: bool) -> Block:
        """What each collective took, and how fast copies were.

        Raises:
            RuntimeError: another number of collectives was recorded than was queued.
        """
        beside = [self.copies[way] for way, wanted in (("down", down), ("up", up)) if wanted]
        beside += [] if self.products is None else [self.products]
        each: dict[str, list[float | None]] = {}
        for kind, found in self.collectives.items():
            if len(found) != 1 + PER_BLOCK:
                raise RuntimeError(f"expected {1 + PER_BLOCK} kernels {kind} in a block, the profiler has {len(found)}")
            each[kind] = [_ms(one) if all(covers(others, one) for others in beside) else None for one in found[1:]]
        return Block(each, {way: rate for way, found in self.copies.items() if (rate := self._rate(found))})

    def _rate(self, copies: Sequence[Interval]) -> float | None:
        """GB/s from the first to the last copy that began and ended while the collectives ran, gaps and all."""
        ran = [one for kind in KINDS for one in self.collectives[kind][1:]]
        began, ended = min(i.start_us for i in ran), max(i.end_us for i in ran)
        inside = [c for c in copies if began <= c.start_us and c.end_us <= ended]
        return len(inside) * PIECE_BYTES / 1e6 / span_ms(inside) if inside else None


def _ms(one: Interval) -> float:
    return (one.end_us - one.start_us) / 1e3


def covers(others: Sequence[Interval], one: Interval) -> bool:
    """Whether ``others`` ran while ``one`` did, but for ``_GAPS`` of its time: between one copy and the next."""
    inside = [Interval(max(o.start_us, one.start_us), min(o.end_us, one.end_us)) for o in others]
    ran_ms = busy_ms(o for o in inside if o.start_us < o.end_us)
    return ran_ms >= (1 - _GAPS) * _ms(one)


def split_blocks(events: Iterable[Event], count: int, *, products: bool) -> list[Traced]:
    """The records of ``count`` blocks.

    Raises:
        RuntimeError: there is another number of blocks.
    """
    ordered = sorted(events, key=lambda e: e.time_range.start)
    blocks: list[Traced] = []
    for event in ordered:
        if _HOLDS_UP in event.name:
            blocks.append(Traced(products=[] if products else None))
        elif blocks:
            _take(blocks[-1], event.name, Interval(event.time_range.start, event.time_range.end))
    if len(blocks) != count:
        names = sorted({event.name[:60] for event in ordered})
        raise RuntimeError(f"expected {count} blocks, each behind a {_HOLDS_UP}, found {len(blocks)} among {names}")
    return blocks


def _take(block: Traced, name: str, interval: Interval) -> None:
    named = KERNEL.match(name)
    if named and named[1] in KINDS:
        block.collectives[named[1]].append(interval)
    elif way := way_of_copy(name):
        block.copies[way].append(interval)
    elif block.products is not None and any(word in name for word in _PRODUCTS):
        block.products.append(interval)


def summarize_rounds(by_rank: Sequence[Sequence[Round]], nbytes: int) -> list[CollectiveBeside]:
    """All ranks' rounds as one row for each kind and way of copying.

    Args:
        nbytes: of the whole tensor.

    Raises:
        RuntimeError: of one of them no collective counts.
    """
    rounds = list(zip(*by_rank, strict=True))
    rows = []
    for kind in KINDS:
        alone = [shortest(of_ranks, "none", kind) for of_ranks in rounds]
        for way in by_rank[0][0]:
            each = [shortest(of_ranks, way, kind) for of_ranks in rounds]
            if not any(each):
                raise RuntimeError(
                    f"{kind}, copies {way}: expected some collective with copies beside it all the while"
                )
            pairs = [(mine, theirs) for mine, theirs in zip(each, alone, strict=True) if mine and theirs]
            ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs]
            rates = [one[way].gb_per_s for of_ranks in rounds for one in of_ranks]
            row = CollectiveBeside(kind, way, nbytes, summarize([ms for one in each for ms in one]))
            if way != "none" and ratios:
                row.vs_none = summarize(ratios)
            down, up = WAYS[way]
            row.d2h_gb_per_s = _median([found["down"] for found in rates if "down" in found]) if down else None
            row.h2d_gb_per_s = _median([found["up"] for found in rates if "up" in found]) if up else None
            rows.append(row)
    return rows


def shortest(of_ranks: Sequence[Round], way: str, kind: str) -> list[float]:
    """Each collective's time on the rank where it was shortest; without what does not count on one of them."""
    each = zip(*(one[way].each_ms[kind] for one in of_ranks), strict=True)
    return [min(ms for ms in times if ms is not None) for times in each if None not in times]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
