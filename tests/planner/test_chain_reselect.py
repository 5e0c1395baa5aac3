"""Steps of calls with measurements in the place of estimates."""

from __future__ import annotations

from typing import Any

import pytest

from fxoffload.compiler.chain_reselect import MeasuredRecompute, reselect_variants
from fxoffload.compiler.chain_search import ChainChoice, ChainObjective
from fxoffload.compiler.measured_chain import MeasuredChain, measured_calls, ratios_of, scaled
from fxoffload.planner.chain import NO_EXTRA_MEMORY, ExtraMemory, concatenate
from fxoffload.planner.schedule import Scheduler
from fxoffload.planner.steps import TrainingStep
from tests.planner.test_chain_search import MB, layer, passed, rates, ways

PLAIN, AGAIN = layer(halves=2), layer((64,), again_ms=0.5)


def seconds(step: TrainingStep) -> tuple[list[float], list[float]]:
    return [s.ms for s in step.forward], [s.ms for s in step.backward]


def needs(step: TrainingStep) -> tuple[list[int], list[int]]:
    return [s.temp_bytes for s in step.forward], [s.temp_bytes for s in step.backward]


def test_calls_of_one_kind_take_what_the_median_took_and_need_what_the_largest_needed() -> None:
    found = MeasuredChain(
        {
            "forward": {"call 0/f": 5.0, "call 1/f": 7.0, "call 2/f": 9.0, "call 3/f": 2.0},
            "backward": {"call 0/b0": 1.0, "call 1/b0": 2.0, "call 2/b0": 4.0, "call 3/b0": 8.0},
        },
        {"backward": {"call 0/b1": 7, "call 1/b1": None, "call 2/b1": 9, "call 3/b0": -5}},
        NO_EXTRA_MEMORY,
    )
    steps = [PLAIN, PLAIN, PLAIN, AGAIN]
    calls = measured_calls(steps, ["plain", "plain", "plain", "again"], found)
    assert set(calls) == {"plain", "again"}
    assert seconds(calls["plain"]) == ([7.0], [2.0, PLAIN.backward[1].ms])
    assert seconds(calls["again"]) == ([2.0], [8.0])
    assert needs(calls["plain"]) == (needs(PLAIN)[0], [PLAIN.backward[0].temp_bytes, 9])
    assert needs(calls["again"])[1] == [0], "a working set is not less than nothing"
    assert calls["plain"].candidates == PLAIN.candidates


def test_what_nobody_has_run_is_as_much_slower_as_what_ran() -> None:
    chain = concatenate([PLAIN, PLAIN], passed(2))
    ms = {"forward": {"call 0/f": 3.0, "call 1/f": 1.0}, "backward": {"call 0/b0": 2.0, "call 9/b0": 100.0}}
    ratios = ratios_of(chain, ms)  # type: ignore[arg-type]
    (f,), (b0, b1) = seconds(PLAIN)
    assert ratios == {
        "forward": pytest.approx(4.0 / (2 * f)),
        "backward": pytest.approx((2.0 + b0 + 2 * b1) / (2 * (b0 + b1))),
    }
    slower = scaled(AGAIN, {"forward": 2.0, "backward": 3.0})
    assert seconds(slower) == ([2.0 * s.ms for s in AGAIN.forward], [3.0 * s.ms for s in AGAIN.backward])
    assert seconds(scaled(AGAIN, {})) == seconds(AGAIN)


# -- choices -----------------------------------------------------------------------------------------------------------

COUNT = 12


class Planned:
    """A chain of layers with one compiled variant that saves nothing, of which ``varied`` calls run it."""

    def __init__(self, varied: int = 0, *, ms: float = 1.0, again_ms: float = 0.5) -> None:
        self.chain_search = ways(layer(ms=ms), [], COUNT, live=[layer((), ms=ms, again_ms=again_ms)])
        (self.variant,) = self.chain_search.calls[0].variant_maker.compiled_variants()  # type: ignore[union-attr]
        self.choice = self.chain_search.with_variants(tuple(self.variant if k < varied else None for k in range(COUNT)))

    def scheduler_for(self, found: Any, host_bytes: int | None) -> Any:
        return lambda step: Scheduler(step, found, host_bytes=host_bytes)

    @property
    def half(self) -> int:
        return self.chain_search.as_compiled().scheduler.keep_all().peak_bytes // 2

    def measured(
        self, times: float = 1.0, between: float = 0.0, extra_memory: ExtraMemory = NO_EXTRA_MEMORY
    ) -> MeasuredChain:
        """Segments took this many times their estimate, and ``between`` two calls there were milliseconds."""
        step = self.choice.chain.step
        ms: Any = {
            phase: {s.name: between if s.name.endswith("entry") else times * s.ms for s in segments}
            for phase, segments in (("forward", step.forward), ("backward", step.backward))
        }
        ms["forward"]["turn entry"] = 0.0
        return MeasuredChain(ms, {}, extra_memory)

    def again(
        self, found: MeasuredChain, aim: ChainObjective, link: float = 1.0, host_bytes: int | None = None
    ) -> int | None:
        """How many calls recompute."""
        planning: Any = self
        chosen = reselect_variants(planning, found, rates().reaching(link, link), aim, host_bytes)
        return None if chosen is None else sum(v is not None for v in chosen.variants)


@pytest.mark.slow
def test_a_slower_link_is_spared() -> None:
    planned = Planned(4)
    aim = ChainObjective(limit_bytes=planned.half)
    fast, slow = (planned.again(planned.measured(), aim, link) for link in (1.0, 0.6))
    assert fast is not None and slow is not None and 0 < fast < slow <= COUNT


@pytest.mark.slow
def test_slower_graphs_hide_more() -> None:
    planned = Planned(4)
    aim = ChainObjective(limit_bytes=planned.half)
    quick, slow = (planned.again(planned.measured(times), aim) for times in (1.0, 4.0))
    assert quick is not None and slow is not None and quick > slow


@pytest.mark.slow
def test_copies_hide_behind_what_runs_between_calls() -> None:
    planned = Planned(4)
    aim = ChainObjective(limit_bytes=planned.half)
    alone, extra_memory = (planned.again(planned.measured(between=ms), aim) for ms in (0.0, 3.0))
    assert alone is not None and extra_memory is not None and alone > extra_memory


def test_extra_memory_counts() -> None:
    planned = Planned(4)
    aim = ChainObjective(limit_bytes=planned.half)
    extra_memory = ExtraMemory(((100 * MB,) * COUNT, (100 * MB,) * COUNT), (("turn entry", 0),))
    without, found = (planned.again(planned.measured(extra_memory=b), aim) for b in (NO_EXTRA_MEMORY, extra_memory))
    assert without is not None and found is not None and without < found
    # What lies between the last forward and the first backward is in no option of the search.
    turn = ExtraMemory((), (("turn entry", planned.half),))
    assert planned.again(planned.measured(extra_memory=turn), aim) is None


@pytest.mark.slow
def test_no_more_is_moved_than_there_is_host_memory_for() -> None:
    planned = Planned(4)
    aim = ChainObjective(limit_bytes=planned.half)
    free, bound = (planned.again(planned.measured(), aim, host_bytes=n) for n in (None, 256 * MB))
    assert free is not None and bound is not None and bound > free


@pytest.mark.slow
def test_a_slowdown_in_measured_time() -> None:
    """Calls that recompute took half a millisecond more than predicted."""
    planned = Planned(6, again_ms=0.05)
    plain = planned.chain_search.as_compiled().scheduler.keep_all().step_ms
    aim = ChainObjective(max_ms=1.03 * plain)
    found = planned.measured()
    ran = {f"call {k}/b0" for k in range(6)}
    dearer = {name: ms + 0.5 * (name in ran) for name, ms in found.ms["backward"].items()}
    cheap, dear = (
        planned.again(m, aim) for m in (found, MeasuredChain({**found.ms, "backward": dearer}, {}, NO_EXTRA_MEMORY))
    )
    assert cheap is not None and dear is not None and cheap > dear


def test_nothing_to_choose_from() -> None:
    planned = Planned(0)
    planned.chain_search.calls[0].variant_maker.live.clear()  # type: ignore[union-attr]
    assert planned.again(planned.measured(), ChainObjective(limit_bytes=planned.half)) == 0
    assert planned.again(planned.measured(), ChainObjective(limit_bytes=1)) is None


def test_estimates_are_left_as_they_are() -> None:
    """The inputs of the plan are compared with measurements once more."""
    planned = Planned(4)
    before = planned.chain_search.as_compiled().chain.step.compute_ms
    planning: Any = planned
    found = MeasuredRecompute(planning, planned.measured(3.0), rates(), None)
    choice: ChainChoice = found.as_compiled(ChainObjective(limit_bytes=1 << 60))
    assert choice.chain.step.compute_ms == pytest.approx(3.0 * before)
    assert planned.chain_search.as_compiled().chain.step.compute_ms == before
    aim = ChainObjective(limit_bytes=planned.half)
    varied = found.search(aim)[0]  # all calls run the variant
    assert varied.chain.step.compute_ms > 3.0 * before


def test_calls_of_a_variant_take_what_others_of_it_took() -> None:
    planned = Planned(3)
    planning: Any = planned
    found = planned.measured()
    ran = {f"call {k}/b0": ms for k, ms in enumerate((5.0, 9.0, 7.0))}
    found = MeasuredChain({**found.ms, "backward": {**found.ms["backward"], **ran}}, {}, NO_EXTRA_MEMORY)
    aim = ChainObjective(limit_bytes=1 << 60)
    all_of_it = MeasuredRecompute(planning, found, rates(), None).search(aim)[0]
    (f,) = planned.variant.step.forward
    assert all_of_it.chain.step.compute_ms == pytest.approx(COUNT * (f.ms + 7.0))


def test_a_graph_that_no_call_ran_as_compiled_is_as_much_slower() -> None:
    planned = Planned(COUNT)
    planning: Any = planned
    before = planned.chain_search.as_compiled().chain.step.compute_ms
    found = MeasuredRecompute(planning, planned.measured(3.0, between=2.0), rates(), None).as_compiled()
    between = sum(s.name.endswith("entry") for s in (*found.chain.step.forward, *found.chain.step.backward))
    assert between > COUNT
    assert found.chain.step.compute_ms == pytest.approx(3.0 * before + 2.0 * between)
