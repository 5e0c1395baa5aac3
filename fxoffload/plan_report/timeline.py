"""A step as a trace for Perfetto or ``chrome://tracing``: as it was simulated, and as it was measured.

Every bar says direction and layer: "forward layers.3", "D2H layers.3.mlp.gate_proj [16384, 12288] bf16", "wait for H2D
before backward layers.3". An arrow leads from each offload to its reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fxoffload.planner.measured import MeasuredSegment, MeasuredStep
from fxoffload.planner.simulate import Boundary, SimEvent, Simulation
from fxoffload.step.segment_names import in_words, lies_between

_TRACKS = {"compute": "compute", "d2h": "D2H", "h2d": "H2D"}
_SIMULATED, _MEASURED = 0, 1  # processes

_TraceEvent = dict[str, Any]


def to_chrome_trace(simulation: Simulation, measured: MeasuredStep | None = None) -> dict[str, Any]:
    """The trace as JSON values. The process "simulated step" has the tracks compute, D2H and H2D. Its counter "bytes on
    device" has the allocator's bytes at the time at which compute gets there. The process "measured step", where one
    was measured, has compute and the counter; copies were not timed one by one."""
    events = list(_process(_SIMULATED, "simulated step", tuple(_TRACKS.values())))
    numbers = {track: number for number, track in enumerate(_TRACKS)}
    boundaries = simulation.boundaries
    for event in simulation.events:
        arguments: dict[str, Any] = {"bytes": event.nbytes} if event.nbytes else {}
        if event.track != "compute":
            arguments["value"] = event.name
        elif event.name != "wait":
            arguments["segment"] = event.name
        name = name_of(event, boundaries)
        bar = _bar(_SIMULATED, numbers[event.track], name, event.begin_ms, event.end_ms, arguments)
        events.append(bar | {"cat": _TRACKS[event.track]})
    events += _arrows(simulation.events, numbers)
    events += _counts(_SIMULATED, boundaries)
    if measured is not None:
        events += _measured(measured)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def name_of(event: SimEvent, boundaries: tuple[Boundary, ...]) -> str:
    """What a bar of the timeline is called: direction and layer, and of a copy its value."""
    at = boundaries[event.at] if event.at >= 0 else None
    if event.track == "compute":
        assert at is not None
        if event.name != "wait":
            return f"{at.phase} {_place(at, boundaries)}"
        side = "behind" if at.phase == "forward" else "before"
        return f"wait for {event.label} {side} {at.phase} {_place(at, boundaries)}"
    place = _place(at, boundaries) if at is not None else "entry"
    is_said = " in " not in place and place.rpartition(" ")[2] in event.label
    return f"{_TRACKS[event.track]} {'' if is_said else f'{place}: '}{event.label}"


def _place(at: Boundary | MeasuredSegment, segments: Sequence[Boundary] | Sequence[MeasuredSegment]) -> str:
    """Its layer; outside the layers the layer that it follows or precedes, where there is one."""
    if at.layer or lies_between(at.segment):
        return at.place
    return in_words(segments, at.phase, at.segment).removeprefix(f"the {at.phase}").strip() or at.place


def _arrows(events: tuple[SimEvent, ...], numbers: dict[str, int]) -> Iterator[_TraceEvent]:
    """One from each copy to the host to each copy back of the same value."""
    downs = {e.candidate: e for e in events if e.track == "d2h"}
    for number, up in enumerate(e for e in events if e.track == "h2d"):
        down = downs[up.candidate]
        about = {"name": "offload to reload", "cat": "copies", "id": number, "pid": _SIMULATED}
        yield about | {"ph": "s", "tid": numbers["d2h"], "ts": down.begin_ms * 1e3}
        yield about | {"ph": "f", "bp": "e", "tid": numbers["h2d"], "ts": up.begin_ms * 1e3}


def _measured(step: MeasuredStep) -> Iterator[_TraceEvent]:
    yield from _process(_MEASURED, "measured step", ("compute",))
    for s in step.segments:
        yield _bar(_MEASURED, 0, f"{s.phase} {_place(s, step.segments)}", s.begin_ms, s.end_ms, {"segment": s.segment})
    for begin, end, s in step.stands_still():
        side = "behind" if s.phase == "forward" else "before"
        yield _bar(_MEASURED, 0, f"wait {side} {s.phase} {s.place}", begin, end, {})
    yield from _counts(_MEASURED, step.segments)


def _process(process: int, title: str, tracks: tuple[str, ...]) -> Iterator[_TraceEvent]:
    yield _named("process_name", process, 0, title)
    for number, track in enumerate(tracks):
        yield _named("thread_name", process, number, track)
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}


def _bar(process: int, track: int, name: str, begin_ms: float, end_ms: float, args: dict[str, Any]) -> _TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": track,
        "ts": begin_ms * 1e3,
        "dur": (end_ms - begin_ms) * 1e3,
        "args": args,
    }


def _named(what: str, process: int, number: int, name: str) -> _TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": number, "args": {"name": name}}


def _counts(process: int, segments: Sequence[Boundary] | Sequence[MeasuredSegment]) -> Iterator[_TraceEvent]:
    """Bytes when each begins, inside it and when it ends, as far as they are known."""
    for s in segments:
        middle = (s.begin_ms + s.end_ms) / 2
        for at, nbytes in ((s.begin_ms, s.live_bytes), (middle, s.peak_bytes), (s.end_ms, s.after_bytes)):
            if nbytes is not None:
                counter = {"ph": "C", "name": "bytes on device", "pid": process, "tid": 0}
                yield counter | {"ts": at * 1e3, "args": {"bytes": nbytes}}
