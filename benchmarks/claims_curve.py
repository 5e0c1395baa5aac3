"""Comparisons of points of peak memory and step time: is one curve below another?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

# Two times closer than this are the same: the quartiles of a variant are about as far apart.
NOISE = 0.005
# The issue compares with checkpointing at a peak of up to this much more.
SLACK = 0.02


class Point(NamedTuple):
    label: str
    kind: str
    peak_bytes: int
    step_ms: float


def monotone(points: Sequence[Point]) -> tuple[bool, dict[str, Any]]:
    """Whether no point is slower than one before it. ``points``: in the order of their budgets."""
    rises = {}
    fastest = points[0]
    for point in points[1:]:
        if point.step_ms > fastest.step_ms * (1 + NOISE):
            rises[point.label] = {"slower_than": fastest.label, "by": point.step_ms / fastest.step_ms - 1}
        if point.step_ms < fastest.step_ms:
            fastest = point
    return not rises, {"rises": rises, "step_ms": {p.label: p.step_ms for p in points}}


def below(points: Sequence[Point], peers: Sequence[Point], *, all_peers: bool) -> tuple[bool, dict[str, Any]]:
    """Whether the points lie below the peers, looked at from both sides.

    At every point, the best peer of no larger peak must not be faster. At every peer, the best point of no larger peak
    (but for ``SLACK``), or the line between points, must not be slower. A peer that has a smaller peak than any point
    counts where ``all_peers``.
    """
    at_points = {point.label: _at_point(point, peers) for point in points}
    at_peers = {peer.label: _at_peer(peer, points) for peer in peers}
    held = all(
        found["time_vs_best_peer"] is None or found["time_vs_best_peer"] <= 1 + NOISE for found in at_points.values()
    )
    for found in at_peers.values():
        ratio = found["time_vs_peer"]
        held = held and (not all_peers if ratio is None else ratio <= 1 + NOISE)
    return held, {"points": at_points, "peers": at_peers}


def _at_point(point: Point, peers: Sequence[Point]) -> dict[str, Any]:
    best = min((p for p in peers if p.peak_bytes <= point.peak_bytes), key=lambda p: p.step_ms, default=None)
    line = interpolate(peers, point.peak_bytes)
    return {
        "best_peer": best.label if best else None,
        "time_vs_best_peer": point.step_ms / best.step_ms if best else None,
        "time_vs_line": point.step_ms / line if line else None,
    }


def _at_peer(peer: Point, points: Sequence[Point]) -> dict[str, Any]:
    limit = peer.peak_bytes * (1 + SLACK)
    best = min((p for p in points if p.peak_bytes <= limit), key=lambda p: p.step_ms, default=None)
    times = [best.step_ms if best else None, interpolate(points, peer.peak_bytes)]
    known = [time for time in times if time is not None]
    return {
        "best_point": best.label if best else None,
        "time_vs_peer": min(known) / peer.step_ms if known else None,
        "peak_vs_peer": best.peak_bytes / peer.peak_bytes if best else None,
    }


def interpolate(peers: Sequence[Point], peak_bytes: int) -> float | None:
    """The time of the line between the peers on both sides of a peak; None outside."""
    ordered = sorted(peers, key=lambda p: p.peak_bytes)
    for low, high in itertools.pairwise(ordered):
        if low.peak_bytes <= peak_bytes <= high.peak_bytes:
            if high.peak_bytes == low.peak_bytes:
                return min(low.step_ms, high.step_ms)
            part = (peak_bytes - low.peak_bytes) / (high.peak_bytes - low.peak_bytes)
            return low.step_ms + part * (high.step_ms - low.step_ms)
    return None
