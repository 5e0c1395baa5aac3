"""A link that is slower than its profile is found by what steps wait."""

from __future__ import annotations

import pytest

from fxoffload.machine.shelf import load_profile
from fxoffload.planner.fit_link import fit_link, waits_of
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.step.choice import Windows
from fxoffload.step.readings import Readings, Sample

MB = 1 << 20
RATES = ProfileRates(load_profile("h200"))
COUNT = 8


def chain(nbytes: int = 400 * MB) -> TrainingStep:
    """Layers that make and read as much as the link moves in somewhat more than their time."""
    names = [f"h{i}" for i in range(COUNT)]
    return TrainingStep(
        tuple(StorageInfo(n, nbytes, moved_bytes=nbytes) for n in names),
        forward=tuple(SegmentStep(f"f{i}", ms=8.0, writes=(n,)) for i, n in enumerate(names)),
        backward=tuple(SegmentStep(f"b{i}", ms=6.0, reads=(n,)) for i, n in enumerate(reversed(names))),
    )


def windows(step: TrainingStep, limit: int) -> Windows:
    found = windows_for(step, (True,) * COUNT, limit)
    assert found is not None
    return found


@pytest.mark.parametrize(("down", "up"), [(1.0, 1.0), (0.9, 1.0), (0.8, 0.95), (0.4, 0.35)])
def test_the_rates_that_a_step_ran_with_are_found(down: float, up: float) -> None:
    step = chain()
    tight = windows(step, 900 * MB)
    true = RATES.reaching(down, up)
    ran = simulate(step, (True,) * COUNT, copies=true, windows=tight)
    assert ran.exposed_ms > 5
    waits = {"forward": ran.forward_ms - 8.0 * COUNT, "backward": ran.backward_ms - 6.0 * COUNT}
    found = fit_link(step, (True,) * COUNT, tight, RATES, waits)  # type: ignore[arg-type]
    assert found.link == pytest.approx(true.link, rel=0.03)
    again = simulate(step, (True,) * COUNT, copies=found, windows=tight)
    assert again.step_ms == pytest.approx(ran.step_ms, rel=0.01)


def test_waits_that_no_link_explains_change_nothing() -> None:
    step = chain(MB)
    bare = no_windows(step)
    kept = fit_link(step, (False,) * COUNT, bare, RATES, {"forward": 50.0, "backward": 50.0})
    assert kept.link == (1.0, 1.0)
    late = fit_link(step, (True,) * COUNT, bare, RATES, {"forward": 50.0, "backward": 50.0})
    assert late.link == (1.0, 1.0)
    shorter = fit_link(step, (True,) * COUNT, bare, RATES, {"forward": 0.0, "backward": 0.0})
    assert shorter.link == (1.0, 1.0)


def test_a_host_that_is_late_now_and_then_is_no_slow_link() -> None:
    """As measured: the link has room to spare, and a little is waited for all the same."""
    step = chain(200 * MB)
    tight = windows(step, 900 * MB)
    kept = fit_link(step, (True,) * COUNT, tight, RATES, {"forward": 0.005 * 64, "backward": 0.007 * 48})
    assert kept.link == (1.0, 1.0)


def test_waits_are_what_is_in_no_segment() -> None:
    forward, backward = Sample(10.0, {"a": 3.0, "b": 5.0}), Sample(7.0, {"c": 8.0})
    assert waits_of(Readings({"forward": [forward], "backward": [backward]})) == {"forward": 2.0, "backward": 0.0}
