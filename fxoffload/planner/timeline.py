"""A simulated step as a trace for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

from typing import Any

from fxoffload.planner.simulate import Simulation

_TRACKS = {"compute": "compute", "d2h": "D2H", "h2d": "H2D"}
_COUNTER = "bytes on device"


def to_chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as JSON values: the tracks compute, D2H and H2D, and the counter "bytes on device". The counter shows
    the allocator's bytes at the time at which compute gets there."""
    events: list[dict[str, Any]] = [_named("process_name", 0, "simulated step")]
    for number, title in enumerate(_TRACKS.values()):
        events.append(_named("thread_name", number, title))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number, "args": {"sort_index": number}})
    numbers = {track: number for number, track in enumerate(_TRACKS)}
    for event in simulation.events:
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": _TRACKS[event.track],
                "pid": 0,
                "tid": numbers[event.track],
                "ts": event.begin_ms * 1e3,
                "dur": (event.end_ms - event.begin_ms) * 1e3,
                "args": {"bytes": event.nbytes} if event.nbytes else {},
            }
        )
    for boundary in simulation.boundaries:
        events.append(_count(boundary.begin_ms, boundary.live_bytes))
        events.append(_count((boundary.begin_ms + boundary.end_ms) / 2, boundary.peak_bytes))
        events.append(_count(boundary.end_ms, boundary.after_bytes))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(what: str, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": number, "args": {"name": name}}


def _count(at_ms: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": _COUNTER, "pid": 0, "tid": 0, "ts": at_ms * 1e3, "args": {"bytes": nbytes}}
