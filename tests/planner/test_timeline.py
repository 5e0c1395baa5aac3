from __future__ import annotations

import json

from hypothesis import given

from fxoffload.plan_report.timeline import to_chrome_trace
from fxoffload.planner import ConstantRates, TrainingStep, simulate
from fxoffload.step.choice import Windows
from tests.planner.chains import steps_under_windows


@given(steps_under_windows())
def test_a_trace_shows_every_segment_and_copy(planned: tuple[TrainingStep, tuple[bool, ...], Windows]) -> None:
    step, decisions, windows = planned
    simulation = simulate(step, decisions, copies=ConstantRates(4, 5, 3, 4), windows=windows)
    trace = json.loads(json.dumps(to_chrome_trace(simulation)))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "D2H", "H2D"]
    bars = [e for e in events if e["ph"] == "X"]
    tracks = {title: [e for e in bars if names[e["tid"]] == title] for title in names.values()}
    segments = [e["args"]["segment"] for e in tracks["compute"] if not e["name"].startswith("wait for ")]
    assert sorted(segments) == sorted(s.name for s in (*step.forward, *step.backward))
    assert sum(e["args"].get("bytes", 0) for e in tracks["D2H"]) == simulation.bytes_offloaded
    assert sum(e["args"].get("bytes", 0) for e in tracks["H2D"]) == simulation.bytes_reloaded
    waits = sum(e["dur"] for e in tracks["compute"] if e["name"].startswith("wait for "))
    assert abs(waits - 1e3 * simulation.exposed_ms) < 1e-3
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert len(starts) == len(ends) == len(tracks["H2D"])
    counter = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counter} == {"bytes on device"}
    assert max(e["args"]["bytes"] for e in counter) == simulation.peak_bytes
    times = [e["ts"] for e in counter]
    assert times == sorted(times)
