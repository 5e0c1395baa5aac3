"""What holds for every step, decision and window; and a few steps small enough to be worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.planner import (
    ConstantRates,
    SegmentStep,
    Simulation,
    StorageInfo,
    TrainingStep,
    simulate,
)
from fxoffload.planner.chain import with_turn
from fxoffload.planner.windows import no_windows
from fxoffload.step.choice import Windows
from tests.marks import examples
from tests.planner.chains import MB, everywhere, steps_under_windows

Planned = tuple[TrainingStep, tuple[bool, ...], Windows]
RATES = ConstantRates(4.0, 5.0, 3.0, 4.0)
rates = st.builds(
    lambda down, up, both: ConstantRates(down, up, down * both, up * both),
    st.sampled_from([1.0, 2.0, 5.0, 13.0, 50.0]),
    st.sampled_from([1.0, 2.0, 5.0, 13.0, 50.0]),
    st.sampled_from([1.0, 0.9, 0.6, 0.5]),
)


def run(planned: Planned, copies: ConstantRates = RATES) -> Simulation:
    step, decisions, windows = planned
    return simulate(step, decisions, copies=copies, windows=windows)


def copied(simulation: Simulation, track: str) -> int:
    return sum(e.nbytes for e in simulation.events if e.track == track)


# -- bytes -------------------------------------------------------------------------------------------------------------


@given(steps_under_windows())
def test_in_flight_stays_within_the_window_and_what_was_offloaded_since_the_last_release(planned: Planned) -> None:
    step, decisions, windows = planned
    releases, made = _releases(step), _offloaded_after(step, decisions)
    most = 0
    for i, boundary in enumerate(b for b in run(planned).boundaries if b.phase == "forward"):
        most += made[i]
        if i in releases:
            most = min(most, windows.in_flight[i])
        assert boundary.in_flight_bytes <= most


def _releases(step: TrainingStep) -> set[int]:
    """After which segments something is released, counted from 1; 0 is the entry."""
    last_write = {n: i for i, s in enumerate(step.forward, 1) for n in s.writes}
    last_read = {n: i for i, s in enumerate(step.forward, 1) for n in s.reads}
    groups: dict[tuple[int, bool], int] = {}
    for c in step.candidates:
        key = (last_write.get(c.name, 0), c.is_input)
        groups[key] = max(groups.get(key, 0), key[0], last_read.get(c.name, 0))
    return set(groups.values())


def _offloaded_after(step: TrainingStep, decisions: tuple[bool, ...]) -> list[int]:
    last_write = {n: i for i, s in enumerate(step.forward, 1) for n in s.writes}
    made = [0] * (len(step.forward) + 1)
    for c, offload in zip(step.candidates, decisions, strict=True):
        if offload:
            made[last_write.get(c.name, 0)] += c.moved_bytes or 0
    return made


@given(steps_under_windows())
def test_no_reload_is_asked_for_beyond_the_window(planned: Planned) -> None:
    """A narrower window asks for none, and takes back none that are ahead."""
    ahead = planned[2].ahead
    most = ahead[0]
    for i, boundary in enumerate(b for b in run(planned).boundaries if b.phase == "backward"):
        assert boundary.ahead_bytes <= max(most, ahead[i + 1])
        most = boundary.ahead_bytes


@given(steps_under_windows())
def test_bytes_are_conserved(planned: Planned) -> None:
    step, decisions, _ = planned
    simulation = run(planned)
    # After the last segment: the backward's results and the caller's tensors, not one byte of the candidates.
    stays = sum(s.nbytes for s in step.storages if s.is_gradient or s.is_output)
    assert simulation.boundaries[-1].after_bytes == stays
    assert simulation.boundaries[-1].ahead_bytes == 0
    # Every offloaded value came back or was taken back, once for each take after the first.
    once = sum(c.moved_bytes or 0 for c, offload in zip(step.candidates, decisions, strict=True) if offload)
    assert simulation.bytes_offloaded == once
    first = {}
    again = 0
    moved = dict(zip((c.name for c in step.candidates), decisions, strict=True))
    size = {c.name: c.moved_bytes or 0 for c in step.candidates}
    for take in step.takes or ():
        if take.storage in first and moved[take.storage]:
            again += size[take.storage]
        first[take.storage] = True
    assert simulation.bytes_reloaded + simulation.bytes_reclaimed == simulation.bytes_offloaded + again
    assert copied(simulation, "d2h") == simulation.bytes_offloaded
    assert copied(simulation, "h2d") == simulation.bytes_reloaded


@given(steps_under_windows(), rates, rates)
def test_bytes_do_not_depend_on_time(planned: Planned, some: ConstantRates, others: ConstantRates) -> None:
    def timeless(simulation: Simulation) -> list[object]:
        return [b._replace(begin_ms=0.0, end_ms=0.0) for b in simulation.boundaries]

    first, second = run(planned, some), run(planned, others)
    assert timeless(first) == timeless(second)
    assert (first.peak_bytes, first.bytes_reloaded) == (second.peak_bytes, second.bytes_reloaded)


@given(steps_under_windows())
def test_the_peak_is_the_most_of_any_boundary(planned: Planned) -> None:
    simulation = run(planned)
    assert simulation.peak_bytes == max(b.peak_bytes for b in simulation.boundaries)
    assert all(0 <= b.saved_bytes <= b.live_bytes <= b.peak_bytes for b in simulation.boundaries)
    assert all(b.after_bytes <= b.peak_bytes for b in simulation.boundaries)
    assert simulation.peak_without_gradients_bytes <= simulation.peak_bytes
    if simulation.peak_bytes:
        assert simulation.peak_segment in {b.segment for b in simulation.boundaries if b.phase == simulation.peak_phase}


# -- time --------------------------------------------------------------------------------------------------------------


@given(steps_under_windows(), rates)
def test_a_step_takes_no_less_than_compute_and_than_the_link_each_way(planned: Planned, copies: ConstantRates) -> None:
    step, *_ = planned
    simulation = run(planned, copies)
    floor = max(
        step.compute_ms,
        copies.copy_ms(simulation.bytes_offloaded, "d2h", False),
        copies.copy_ms(simulation.bytes_reloaded, "h2d", False),
    )
    assert simulation.step_ms >= floor - 1e-6
    assert simulation.step_ms == pytest.approx(step.compute_ms + simulation.exposed_ms)


@given(steps_under_windows())
def test_keeping_all_takes_the_time_of_the_segments(planned: Planned) -> None:
    step, decisions, windows = planned
    simulation = run((step, (False,) * len(decisions), windows))
    assert simulation.step_ms == pytest.approx(step.compute_ms)
    assert simulation.exposed_ms == simulation.bytes_offloaded == 0


@given(steps_under_windows(), rates)
def test_every_value_is_back_before_it_is_read(planned: Planned, copies: ConstantRates) -> None:
    step, *_ = planned
    simulation = run(planned, copies)
    events = simulation.events
    down = {e.name: e for e in events if e.track == "d2h"}
    forward = {b.segment: b for b in simulation.boundaries if b.phase == "forward"}
    backward = [b for b in simulation.boundaries if b.phase == "backward"]
    made_in = {n: s.name for s in step.forward for n in s.writes}
    for name, event in down.items():
        assert event.begin_ms >= (forward[made_in[name]].end_ms if name in made_in else 0.0)
    ups: dict[str, list[float]] = {}
    for event in events:
        if event.track == "h2d":
            assert event.begin_ms >= max(simulation.forward_ms, down[event.name].end_ms) - 1e-9
            ups.setdefault(event.name, []).append(event.end_ms)
    for take in step.takes or ():
        if take.storage not in down:
            continue
        begin = backward[take.before].begin_ms
        # Taken back: readable when its copy down has ended. Reloaded: one of its copies up has ended.
        assert min([down[take.storage].end_ms, *ups.get(take.storage, [])]) <= begin + 1e-9
        if not simulation.bytes_reclaimed:
            assert min(ups[take.storage]) <= begin + 1e-9
    for track in ("compute", "d2h", "h2d"):
        ends = 0.0
        for event in (e for e in events if e.track == track):
            assert event.begin_ms >= ends - 1e-9
            ends = event.end_ms


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(steps_under_windows(), rates, st.sampled_from([0.9, 0.5, 0.1]), st.sampled_from(["d2h", "h2d"]))
def test_a_slower_link_makes_no_step_faster(planned: Planned, copies: ConstantRates, factor: float, which: str) -> None:
    """The set of copies does not depend on time. So each event is the latest of others plus a duration, which can only
    grow with them. While both directions are busy that is no proof, since they slow each other down. But hypothesis
    found no exception in 30,000 steps."""
    slower = ConstantRates(
        *(
            rate * (factor if direction == which else 1.0)
            for rate, direction in (
                (copies.d2h_gb_per_s, "d2h"),
                (copies.h2d_gb_per_s, "h2d"),
                (copies.duplex_d2h_gb_per_s or 0.0, "d2h"),
                (copies.duplex_h2d_gb_per_s or 0.0, "h2d"),
            )
        )
    )
    before, after = (run(planned, c).step_ms for c in (copies, slower))
    assert after >= before - 1e-6


# -- by hand -----------------------------------------------------------------------------------------------------------


def two_layers(**changes: object) -> TrainingStep:
    """Each layer saves 10 MB and takes 1 ms forward, 2 ms backward; each makes a gradient of 1 MB."""
    return TrainingStep(
        storages=(
            StorageInfo("a", 10 * MB, moved_bytes=10 * MB),
            StorageInfo("b", 10 * MB, moved_bytes=10 * MB),
            StorageInfo("ga", MB, is_gradient=True),
            StorageInfo("gb", MB, is_gradient=True),
        ),
        forward=(SegmentStep("l0", "0", 1.0, (), ("a",)), SegmentStep("l1", "1", 1.0, ("a",), ("b",))),
        backward=(SegmentStep("l1", "1", 2.0, ("b",), ("gb",)), SegmentStep("l0", "0", 2.0, ("a",), ("ga",))),
        **changes,  # type: ignore[arg-type]
    )


SLOW = ConstantRates(10 * MB / 1e6 / 4, 10 * MB / 1e6 / 5)  # 10 MB in 4 ms down, in 5 ms up


def test_a_value_is_reloaded_while_the_one_before_is_read() -> None:
    step = two_layers()
    simulation = run((step, (True, True), everywhere(step, 0, 10 * MB)), SLOW)
    # a: made at 1, down until 5, and read by l1, whose end at 2 is where its release stands; b: down [5, 9].
    # After its backward's entry b is asked for: up [9, 14]; a after l1's wait, during l1: up [14, 19].
    assert simulation.forward_ms == pytest.approx(9)
    assert [(e.begin_ms, e.end_ms) for e in simulation.events if e.track == "h2d"] == [
        pytest.approx((9, 14)),
        pytest.approx((14, 19)),
    ]
    assert simulation.step_ms == pytest.approx(21)
    assert simulation.exposed_ms == pytest.approx(21 - 6)
    assert [b.live_bytes for b in simulation.boundaries] == [0, 10 * MB, 20 * MB, 11 * MB]
    assert [b.ahead_bytes for b in simulation.boundaries] == [0, 0, 10 * MB, 0]
    # Behind l1 both a and b are there; in the backward b with a on its way, and a gradient.
    assert simulation.peak_bytes == 20 * MB
    assert simulation.boundaries[-1].after_bytes == 2 * MB


def test_everything_moves_through_empty_windows() -> None:
    step = two_layers()
    simulation = run((step, (True, True), no_windows(step)), SLOW)
    # As before, but a is asked for when l0 needs it, at 16: up [16, 21].
    assert simulation.step_ms == pytest.approx(23)
    assert simulation.num_prefetch_misses == 2
    assert [b.ahead_bytes for b in simulation.boundaries] == [0, 0, 0, 0]
    assert [b.live_bytes for b in simulation.boundaries] == [0, 10 * MB, 10 * MB, 11 * MB]


def test_what_is_still_there_is_taken_back() -> None:
    step = two_layers()
    simulation = run((step, (True, True), everywhere(step, 1 << 40, 0)), SLOW)
    assert simulation.forward_ms == 2
    # b is readable when its copy down ends, at 9; a long before.
    assert simulation.step_ms == pytest.approx(9 + 4)
    assert (simulation.bytes_reclaimed, simulation.bytes_reloaded) == (20 * MB, 0)


def test_each_point_has_a_window_of_its_own() -> None:
    step = two_layers()
    simulation = run((step, (True, True), Windows((0, 0, 10 * MB), (0, 0, 10 * MB))), SLOW)
    # At 2 behind l1 the copy of a is waited for, until 5; b is under way, and taken back when its copy ends at 9.
    assert simulation.forward_ms == pytest.approx(5)
    assert (simulation.bytes_reclaimed, simulation.bytes_reloaded) == (10 * MB, 10 * MB)
    # a is asked for when b has been read, before l0, and not before l1: up [11, 16].
    assert [(e.begin_ms, e.end_ms) for e in simulation.events if e.track == "h2d"] == [pytest.approx((11, 16))]
    assert simulation.num_prefetch_misses == 1
    assert [b.ahead_bytes for b in simulation.boundaries] == [0, 0, 0, 0]


def test_working_memory_counts_inside_a_segment() -> None:
    step = two_layers()
    heavy = replace(step, backward=(replace(step.backward[0], temp_bytes=30 * MB), step.backward[1]))
    simulation = run((heavy, (False, False), no_windows(heavy)))
    assert (simulation.peak_bytes, simulation.peak_segment, simulation.peak_phase) == (50 * MB, "l1", "backward")
    assert simulation.peak_without_gradients_bytes == 50 * MB


def test_steps_that_contradict_themselves_are_refused() -> None:
    step = two_layers()
    early = replace(step, forward=(replace(step.forward[0], reads=("b",)), step.forward[1]))
    unknown = replace(step, forward=(replace(step.forward[0], writes=("c",)),))
    for wrong, decisions, match in (
        (step, (True,), "expected 2 decisions, found 1"),
        (early, (True, True), "written before, found b in forward segment l0"),
        (unknown, (True, True), "that the step lists, found c"),
    ):
        with pytest.raises(ValueError, match=match):
            run((wrong, decisions, no_windows(wrong)))
    with pytest.raises(ValueError, match="names of candidates, found x"):
        step.decide({"x": True})
    assert step.decide({"b": True}) == (False, True)


def test_windows_of_another_step_are_refused() -> None:
    step = two_layers()
    for wrong, found in (
        (Windows((0, 0), (0, 0, 0)), "2 and 3"),
        (Windows((0, 0, 0, 0), (0, 0, 0)), "4 and 3"),
        (Windows((0, 0, 0), (0, 0)), "3 and 2"),
        (Windows((0, 0, 0), (0, 0, 0, 0)), "3 and 4"),
    ):
        with pytest.raises(ValueError, match=f"expected windows of 3 to 3 points down and 3 up, found {found}"):
            run((step, (True, True), wrong))
    run((with_turn(step), (True, True), no_windows(step)))


# -- speed -------------------------------------------------------------------------------------------------------------


def uniform_step(segments: int) -> TrainingStep:
    """``segments`` forward segments that write 20 storages each, and their backward."""
    storages: list[StorageInfo] = []
    forward: list[SegmentStep] = []
    backward: list[SegmentStep] = []
    for k in range(segments):
        names = tuple(f"s{k}_{i}" for i in range(20))
        storages += [StorageInfo(n, MB + 64 * i, moved_bytes=MB + 64 * i) for i, n in enumerate(names)]
        forward.append(SegmentStep(f"f{k}", f"layers.{k}", 1.0, forward[-1].writes[:1] if forward else (), names))
        backward.append(SegmentStep(f"b{k}", f"layers.{k}", 2.0, names))
    return TrainingStep(tuple(storages), tuple(forward), tuple(reversed(backward)))


def calls(step: TrainingStep) -> int:
    """Python and C functions called while ``step`` is simulated: its cost, whatever else the machine does."""
    count = 0

    def profiler(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        run((step, (True,) * len(step.storages), everywhere(step, 30 * MB, 30 * MB)), ConstantRates(55, 55, 50, 50))
    finally:
        sys.setprofile(before)
    return count


def test_a_solver_can_call_it_hundreds_of_times() -> None:
    """200 segments with 20 storages each, in about 10 ms; counted in calls: a shared machine's clock proves nothing."""
    small, large = calls(uniform_step(50)), calls(uniform_step(200))
    assert large < 4.5 * small
    assert large < 60 * 4000
