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
from tests.marks import examples
from tests.planner.chains import MB, budgets, decided_steps

Decided = tuple[TrainingStep, tuple[bool, ...]]
RATES = ConstantRates(4.0, 5.0, 3.0, 4.0)
rates = st.builds(
    lambda down, up, both: ConstantRates(down, up, down * both, up * both),
    st.sampled_from([1.0, 2.0, 5.0, 13.0, 50.0]),
    st.sampled_from([1.0, 2.0, 5.0, 13.0, 50.0]),
    st.sampled_from([1.0, 0.9, 0.6, 0.5]),
)


def run(decided: Decided, in_flight: int | None, prefetch: int | None, copies: ConstantRates = RATES) -> Simulation:
    step, decisions = decided
    return simulate(step, decisions, copies=copies, in_flight_budget=in_flight, prefetch_budget=prefetch)


def copied(simulation: Simulation, track: str) -> int:
    return sum(e.nbytes for e in simulation.events if e.track == track)


# -- bytes -------------------------------------------------------------------------------------------------------------


@given(decided_steps(), budgets.filter(lambda b: b is not None), budgets)
def test_in_flight_stays_within_the_window_and_what_was_offloaded_since_the_last_release(
    decided: Decided, in_flight: int, prefetch: int | None
) -> None:
    step, decisions = decided
    simulation = run(decided, in_flight, prefetch)
    releases, made = _releases(step), _offloaded_after(step, decisions)
    since = 0 if 0 in releases else made[0]
    for i, boundary in enumerate(b for b in simulation.boundaries if b.phase == "forward"):
        assert boundary.in_flight_bytes <= in_flight + since
        since = 0 if i + 1 in releases else since + made[i + 1]


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


@given(decided_steps(), budgets, budgets.filter(lambda b: b is not None))
def test_ahead_stays_within_the_budget_or_is_one_storage(
    decided: Decided, in_flight: int | None, prefetch: int
) -> None:
    largest = max((c.moved_bytes or 0 for c in decided[0].candidates), default=0)
    assert all(b.ahead_bytes <= max(prefetch, largest) for b in run(decided, in_flight, prefetch).boundaries)


@given(decided_steps(), budgets, budgets)
def test_bytes_are_conserved(decided: Decided, in_flight: int | None, prefetch: int | None) -> None:
    step, decisions = decided
    simulation = run(decided, in_flight, prefetch)
    # After the last segment: the backward's results and the caller's tensors, not one byte of the candidates.
    stays = sum(s.nbytes for s in step.storages if s.is_gradient or s.is_output)
    assert simulation.boundaries[-1].after_bytes == stays
    assert simulation.boundaries[-1].ahead_bytes == 0
    # Every offloaded value came back or was taken back, once for each take after the first.
    once = sum(c.moved_bytes or 0 for c, offload in zip(step.candidates, decisions, strict=True) if offload)
    turn = sum(c.moved_bytes or 0 for c, o in zip(step.candidates, decisions, strict=True) if o and c.of_turn)
    default = in_flight is None and prefetch is None
    assert simulation.bytes_offloaded == once - (turn if default else 0)
    first = {}
    again = 0
    moved = dict(zip((c.name for c in step.candidates), decisions, strict=True))
    size = {c.name: c.moved_bytes or 0 for c in step.candidates if not (default and c.of_turn)}
    for take in step.takes or ():
        if take.storage in first and moved[take.storage]:
            again += size.get(take.storage, 0)
        first[take.storage] = True
    assert simulation.bytes_reloaded + simulation.bytes_reclaimed == simulation.bytes_offloaded + again
    assert copied(simulation, "d2h") == simulation.bytes_offloaded
    assert copied(simulation, "h2d") == simulation.bytes_reloaded


@given(decided_steps(), budgets, budgets, rates, rates)
def test_bytes_do_not_depend_on_time(
    decided: Decided, in_flight: int | None, prefetch: int | None, some: ConstantRates, others: ConstantRates
) -> None:
    def timeless(simulation: Simulation) -> list[object]:
        return [b._replace(begin_ms=0.0, end_ms=0.0) for b in simulation.boundaries]

    first, second = run(decided, in_flight, prefetch, some), run(decided, in_flight, prefetch, others)
    assert timeless(first) == timeless(second)
    assert (first.peak_bytes, first.bytes_reloaded) == (second.peak_bytes, second.bytes_reloaded)


@given(decided_steps(), budgets, budgets)
def test_the_peak_is_the_most_of_any_boundary(decided: Decided, in_flight: int | None, prefetch: int | None) -> None:
    simulation = run(decided, in_flight, prefetch)
    assert simulation.peak_bytes == max(b.peak_bytes for b in simulation.boundaries)
    assert all(0 <= b.saved_bytes <= b.live_bytes <= b.peak_bytes for b in simulation.boundaries)
    assert all(b.after_bytes <= b.peak_bytes for b in simulation.boundaries)
    assert simulation.peak_without_gradients_bytes <= simulation.peak_bytes
    if simulation.peak_bytes:
        assert simulation.peak_segment in {b.segment for b in simulation.boundaries if b.phase == simulation.peak_phase}


# -- time --------------------------------------------------------------------------------------------------------------


@given(decided_steps(), budgets, budgets, rates)
def test_a_step_takes_no_less_than_compute_and_than_the_link_each_way(
    decided: Decided, in_flight: int | None, prefetch: int | None, copies: ConstantRates
) -> None:
    step, _ = decided
    simulation = run(decided, in_flight, prefetch, copies)
    floor = max(
        step.compute_ms,
        copies.copy_ms(simulation.bytes_offloaded, "d2h", False),
        copies.copy_ms(simulation.bytes_reloaded, "h2d", False),
    )
    assert simulation.step_ms >= floor - 1e-6
    assert simulation.step_ms == pytest.approx(step.compute_ms + simulation.exposed_ms)


@given(decided_steps(), budgets, budgets)
def test_keeping_all_takes_the_time_of_the_segments(
    decided: Decided, in_flight: int | None, prefetch: int | None
) -> None:
    step, decisions = decided
    simulation = run((step, (False,) * len(decisions)), in_flight, prefetch)
    assert simulation.step_ms == pytest.approx(step.compute_ms)
    assert simulation.exposed_ms == simulation.bytes_offloaded == 0


@given(decided_steps(), budgets, budgets, rates)
def test_every_value_is_back_before_it_is_read(
    decided: Decided, in_flight: int | None, prefetch: int | None, copies: ConstantRates
) -> None:
    step, _ = decided
    simulation = run(decided, in_flight, prefetch, copies)
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
@given(decided_steps(), budgets, budgets, rates, st.sampled_from([0.9, 0.5, 0.1]), st.sampled_from(["d2h", "h2d"]))
def test_a_slower_link_makes_no_step_faster(
    decided: Decided, in_flight: int | None, prefetch: int | None, copies: ConstantRates, factor: float, which: str
) -> None:
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
    before, after = (run(decided, in_flight, prefetch, c).step_ms for c in (copies, slower))
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


def test_everything_moves_through_empty_windows() -> None:
    simulation = run((two_layers(), (True, True)), 0, 0, SLOW)
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


def test_what_is_still_there_is_taken_back() -> None:
    simulation = run((two_layers(), (True, True)), 1 << 40, 0, SLOW)
    assert simulation.forward_ms == 2
    # b is readable when its copy down ends, at 9; a long before.
    assert simulation.step_ms == pytest.approx(9 + 4)
    assert (simulation.bytes_reclaimed, simulation.bytes_reloaded) == (20 * MB, 0)


def test_the_default_windows_and_the_turn() -> None:
    step = two_layers()
    turn = replace(step, storages=(step.storages[0], replace(step.storages[1], of_turn=True), *step.storages[2:]))
    simulation = run((turn, (True, True)), None, None, SLOW)
    assert simulation.bytes_kept_for_backward == 10 * MB
    assert simulation.bytes_offloaded == simulation.bytes_reclaimed == 10 * MB
    assert simulation.forward_ms == 2
    # A window that the user sets binds the turn too.
    assert run((turn, (True, True)), None, 0, SLOW).bytes_kept_for_backward == 0


def test_working_memory_counts_inside_a_segment() -> None:
    step = two_layers()
    heavy = replace(step, backward=(replace(step.backward[0], temp_bytes=30 * MB), step.backward[1]))
    simulation = run((heavy, (False, False)), None, None)
    assert (simulation.peak_bytes, simulation.peak_segment, simulation.peak_phase) == (50 * MB, "l1", "backward")
    assert simulation.peak_without_gradients_bytes == 50 * MB


def test_steps_that_contradict_themselves_are_refused() -> None:
    step = two_layers()
    with pytest.raises(ValueError, match="expected 2 decisions, found 1"):
        run((step, (True,)), None, None)
    with pytest.raises(ValueError, match="written before, found b in forward segment l0"):
        run((replace(step, forward=(replace(step.forward[0], reads=("b",)), step.forward[1])), (True,) * 2), None, None)
    with pytest.raises(ValueError, match="that the step lists, found c"):
        run((replace(step, forward=(replace(step.forward[0], writes=("c",)),)), (True,) * 2), None, None)
    with pytest.raises(ValueError, match="names of candidates, found x"):
        step.decide({"x": True})
    assert step.decide({"b": True}) == (False, True)


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
        run((step, (True,) * len(step.storages)), None, None, ConstantRates(55, 55, 50, 50))
    finally:
        sys.setprofile(before)
    return count


def test_a_solver_can_call_it_hundreds_of_times() -> None:
    """200 segments with 20 storages each, in about 10 ms; counted in calls: a shared machine's clock proves nothing."""
    small, large = calls(uniform_step(50)), calls(uniform_step(200))
    assert large < 4.5 * small
    assert large < 60 * 4000
