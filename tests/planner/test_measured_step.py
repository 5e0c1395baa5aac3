"""A measured step: from the samples of a clock to ``Plan.measured_step``."""

from __future__ import annotations

from fxoffload.planner.measured import measured_step_of
from fxoffload.step.readings import Readings, Sample


def forward(phase_ms: float, wait_ms: float = 0.0) -> Sample:
    """Two segments; compute stands still between them."""
    return Sample(
        phase_ms,
        {"a": 4.0, "b": 5.0},
        live_before={"a": 0, "b": 10},
        live_after={"a": 10, "b": 30},
        peaks={"a": None, "b": 40},
        begin_ms={"a": 0.0, "b": 4.0 + wait_ms},
    )


def backward(phase_ms: float) -> Sample:
    return Sample(phase_ms, {"b": 7.0}, live_before={"b": 30}, live_after={"b": 5}, begin_ms={"b": 2.0})


def test_the_step_whose_time_is_nearest_to_the_median() -> None:
    readings = Readings({"forward": [forward(90.0), forward(12.0, 3.0), forward(9.0)], "backward": [backward(9.0)] * 3})
    found = measured_step_of(readings, {("forward", "b"): "layers.1", ("backward", "b"): "layers.1"})
    assert found is not None and (found.forward_ms, found.step_ms) == (12.0, 21.0)
    assert [(s.phase, s.place, s.begin_ms, s.end_ms) for s in found.segments] == [
        ("forward", "a", 0.0, 4.0),
        ("forward", "layers.1", 7.0, 12.0),
        ("backward", "layers.1", 14.0, 21.0),
    ]
    assert [(s.live_bytes, s.peak_bytes, s.after_bytes) for s in found.segments] == [
        (0, None, 10),
        (10, 40, 30),
        (30, None, 5),
    ]


def test_compute_stands_still_behind_forwards_and_before_backwards() -> None:
    readings = Readings({"forward": [forward(14.0, 3.0)], "backward": [backward(11.0)]})
    found = measured_step_of(readings, {})
    assert found is not None
    assert [(s.begin_ms, s.end_ms, s.segment.phase, s.segment.segment) for s in found.stands_still()] == [
        (4.0, 7.0, "forward", "a"),
        (12.0, 14.0, "forward", "b"),
        (14.0, 16.0, "backward", "b"),
        (23.0, 25.0, "backward", "b"),
    ]


def test_of_phases_that_take_turns_there_is_none() -> None:
    readings = Readings({"forward": [forward(9.0)], "backward": [backward(9.0)]})
    turns = dict.fromkeys([("forward", "a"), ("backward", "b"), ("forward", "b")], "")
    assert measured_step_of(readings, turns) is None  # type: ignore[arg-type]


def test_without_a_backward_there_is_none() -> None:
    assert measured_step_of(Readings({"forward": [forward(9.0)]}), {}) is None
