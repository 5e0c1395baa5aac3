"""Recomputation in the calls of a chain: chosen by the solver, laid out, simulated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.compiler import search_rounds as rounds
from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.chain_search import ChainChoice, ChainSearch, no_faster_forward
from fxoffload.compiler.search_rounds import SearchAim
from fxoffload.machine.shelf import load_profile
from fxoffload.planner import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.chain import concatenate
from fxoffload.planner.chain_problem import chain_problem
from fxoffload.planner.formulate import problem_of
from fxoffload.planner.problem import Solution
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Scheduler
from fxoffload.step.edges import EdgeMemory, Edges, Moment
from tests.marks import examples

MB = 1 << 20


@functools.cache
def rates() -> ProfileRates:
    return ProfileRates(load_profile("h200"))


def layer(
    saved_mb: Sequence[int] = (64, 64), *, ms: float = 1.0, again_ms: float = 0.0, halves: int = 1, x: str = "x"
) -> TrainingStep:
    """Reads x, which it saves, and makes y; saves some values; its backward makes dx, dw and the recomputed values.
    ``halves``: segments of the backward."""
    own = [f"h{i}" for i in range(len(saved_mb))]
    backward = [SegmentStep(f"b{i}", ms=(2 * ms + again_ms) / halves, reads=("dy", x, *own)) for i in range(halves)]
    backward[-1] = SegmentStep(
        f"b{halves - 1}", ms=backward[-1].ms, reads=backward[-1].reads, writes=("dx", "dw"), temp_bytes=40 * MB
    )
    return TrainingStep(
        storages=(
            StorageInfo(x, 16 * MB, moved_bytes=16 * MB, is_input=True),
            *(StorageInfo(name, mb * MB, moved_bytes=mb * MB) for name, mb in zip(own, saved_mb, strict=True)),
            StorageInfo("y", 16 * MB, is_output=True),
            StorageInfo("dy", 16 * MB, is_tangent=True),
            StorageInfo("dx", 16 * MB, is_gradient=True),
            StorageInfo("dw", MB, is_gradient=True),
        ),
        forward=(SegmentStep("f", ms=ms, reads=(x,), writes=(*own, "y")),),
        backward=tuple(backward),
    )


def edges(x: str = "x") -> Edges:
    return Edges((x,), ("y",), ("dy",), ("dx", "dw"))


def passed(count: int) -> list[EdgeMemory]:
    """Observations of layers that run one after the other, and whose weights' gradients are added up and dropped."""
    found = [EdgeMemory(((0, "x"),), None)]
    found += [EdgeMemory(((k, "y"), (k + 1, "x")), Moment("forward", k + 1)) for k in range(count - 1)]
    found.append(EdgeMemory(((count - 1, "y"),), Moment("forward", count - 1)))
    for k in range(count - 1, 0, -1):
        found.append(EdgeMemory(((k, "dx"), (k - 1, "dy")), Moment("backward", k - 1)))
    found += [EdgeMemory(((k, "dw"),), Moment("backward", k)) for k in range(count)]
    return found


@dataclass(frozen=True)
class _Point:
    nbytes: int


@dataclass(eq=False)
class _Draft:
    step: TrainingStep
    edges: Edges


@dataclass(eq=False)
class _Recipe:
    """A graph whose variants are given. ``live``: of earlier plans; ``num_lost``: of theirs that did not compile."""

    given: list[_Draft | None]
    live: list[_Draft] = field(default_factory=list)
    num_lost: int = 0
    asked: list[int] = field(default_factory=list)
    is_checkpointed = False

    def points(self) -> Sequence[Mapping[str, Any]]:
        sizes = [10**9 - i for i in range(len(self.given))]
        return [{"": _Point(n)} for n in sizes]

    def variant(self, point: Mapping[str, Any]) -> Any:
        number = 10**9 - point[""].nbytes
        self.asked.append(number)
        return self.given[number]

    def variants(self) -> Sequence[Any]:
        """Of earlier plans."""
        return list(self.live)

    def room(self) -> int:
        """For this many more."""
        return 2 - len(self.live) - self.num_lost


def described(step: TrainingStep, variant_maker: _Recipe) -> GraphDescription:
    return GraphDescription(None, step, rates(), None, edges(), variant_maker)  # type: ignore[arg-type]


def drafts_of(variants: Sequence[TrainingStep]) -> list[_Draft]:
    names = [next(s.name for s in v.storages if s.is_input) for v in variants]
    return [_Draft(v, edges(x)) for v, x in zip(variants, names, strict=True)]


def ways(
    step: TrainingStep,
    variants: Sequence[TrainingStep],
    count: int,
    *,
    host_bytes: int | None = None,
    live: Sequence[TrainingStep] = (),
    num_lost: int = 0,
    reserves: bool = False,
) -> ChainSearch:
    """A chain of ``count`` calls of one graph."""
    variant_maker = _Recipe(list(drafts_of(variants)), drafts_of(live), num_lost)
    description = described(step, variant_maker)
    return ChainSearch(
        [description] * count,
        passed(count),
        lambda s: Scheduler(s, rates(), host_bytes=host_bytes),
        rates(),
        host_bytes,
        reserves=reserves,
    )


def best(found: Sequence[ChainChoice], aim: SearchAim) -> ChainChoice:
    return min(found, key=aim.key)


def again(choice: ChainChoice) -> int:
    return sum(v is not None for v in choice.variants)


def test_one_variant_is_the_chain_itself() -> None:
    chain = concatenate([layer()] * 4, passed(4))
    made = chain_problem([chain], [1] * 4, ["a"] * 4, rates())
    plain = problem_of(chain.step, rates())
    found = [i for la in made.layers for i in la.variants[0].storages]
    strip = {i.name.split(": ", 1)[1]: i for i in found}
    assert len(strip) == len(found)
    for item in plain.layers[0].variants[0].storages:
        mine = strip[item.name]
        assert (mine.held_bytes, mine.made_at, mine.copy_after, mine.freed_after, mine.needed_at, mine.dies_at) == (
            (item.held_bytes, item.made_at, item.copy_after, item.freed_after, item.needed_at, item.dies_at)
        )
    assert made.forward_bytes == plain.forward_bytes and made.backward_bytes == plain.backward_bytes
    assert not any(la.variants[0].extra_ms or la.variants[0].extra_bytes for la in made.layers)


def test_places_of_a_variant_with_other_segments() -> None:
    """A backward in three segments in the places of one, and the other way round."""
    one = concatenate([layer()] * 3, passed(3))
    three = concatenate([layer((8,), again_ms=3.0, halves=3)] * 3, passed(3))
    for first, second in ((one, three), (three, one)):
        problem = chain_problem([first, second], [2] * 3, ["a"] * 3, rates())
        for k, la in enumerate(problem.layers):
            spans = []
            for variant in la.variants:
                (item,) = [i for i in variant.storages if i.name.endswith("h0")]
                spans.append((item.needed_at, item.dies_at))
                assert item.made_at == item.copy_after == first.forward[k] + 1
            begin, size = first.backward[k], first.sizes[k][1]
            assert spans == [(begin, begin + size - 1)] * 2
    problem = chain_problem([one, three], [2] * 3, ["a"] * 3, rates())
    assert [la.variants[1].extra_ms for la in problem.layers] == [
        {one.backward[k]: pytest.approx(3.0)} for k in range(3)
    ]


def test_layouts_of_different_chains_are_refused() -> None:
    two, three = (concatenate([layer()] * n, passed(n)) for n in (2, 3))
    with pytest.raises(ValueError, match="layouts of one chain"):
        chain_problem([two, three], [2] * 2, ["a"] * 2, rates())


def test_where_copies_cannot_hide_layers_recompute() -> None:
    """A layer saves 128 MiB, 2.4 ms on the link, and its forward takes 1 ms: what moves would have to be waited for.
    Recomputing takes 0.5 ms."""
    found = ways(layer(), [layer((), again_ms=0.5)], 12)
    keep = found.as_compiled().scheduler.keep_all()
    aim = SearchAim(limit_bytes=keep.peak_bytes // 2)
    compiled = found.as_compiled(aim)
    choice = best(found.search(aim), aim)
    assert compiled.schedule is not None and choice.schedule is not None
    assert choice.schedule.simulation.peak_bytes <= keep.peak_bytes // 2
    assert choice.schedule.simulation.step_ms < compiled.schedule.simulation.step_ms
    assert 0 < again(choice) < 12
    # Most of it hides: only some calls recompute, which takes less than if all did.
    assert choice.schedule.simulation.step_ms < keep.step_ms + 12 * 0.5


def test_where_copies_hide_nothing_is_recomputed() -> None:
    found = ways(layer((16, 16), ms=10.0), [layer((), ms=10.0, again_ms=5.0)], 8)
    keep = found.as_compiled().scheduler.keep_all()
    aim = SearchAim(limit_bytes=keep.peak_bytes * 2 // 3)
    compiled = found.as_compiled(aim)
    assert compiled.schedule is not None
    assert compiled.schedule.simulation.step_ms <= 1.01 * keep.step_ms
    for choice in found.search(aim):
        assert aim.key(compiled) < aim.key(choice) or not again(choice)


def test_the_least_peak_within_a_slowdown() -> None:
    found = ways(layer(), [layer((64,), again_ms=0.02), layer((), again_ms=0.5)], 12)
    keep = found.as_compiled().scheduler.keep_all()
    aim = SearchAim(max_ms=1.05 * keep.step_ms)
    compiled, choice = found.as_compiled(aim), best(found.search(aim), aim)
    assert compiled.schedule is not None and choice.schedule is not None
    assert choice.schedule.simulation.step_ms <= 1.05 * keep.step_ms
    assert choice.schedule.simulation.peak_bytes < 0.8 * compiled.schedule.simulation.peak_bytes


def test_a_budget_that_only_recomputation_meets() -> None:
    """The host has no room."""
    found = ways(layer(), [layer((), again_ms=0.5)], 12, host_bytes=64 * MB)
    keep = found.as_compiled().scheduler.keep_all()
    aim = SearchAim(limit_bytes=keep.peak_bytes // 3)
    assert found.as_compiled(aim).schedule is None
    choice = best(found.search(aim), aim)
    assert choice.schedule is not None
    assert choice.schedule.simulation.peak_bytes <= keep.peak_bytes // 3


def test_of_equal_choices_that_of_the_solver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one, which recomputes all, promises nothing."""
    found = ways(layer(), [layer((), again_ms=0.5)], 12, host_bytes=64 * MB)
    aim = SearchAim(limit_bytes=found.as_compiled().scheduler.keep_all().peak_bytes // 3)
    raised: list[Any] = []
    the_same = Solution((1,) * 12, frozenset(), ms=1.0, exposed_ms=0.0, peak_bytes=1, bytes_offloaded=0, gap=0.0)
    monkeypatch.setattr(rounds, "search_rounds", lambda problem, aim, lay_out, **_: [lay_out(the_same)])
    monkeypatch.setattr(rounds, "faster_rounds", lambda problem, limit, best, *_, **__: raised.append(best) or [])
    most, choice = found.search(aim)
    assert most.variants == choice.variants and most.promised is None
    assert raised == [choice]


def test_at_most_two_variants_of_a_graph_are_taken() -> None:
    several = [layer((56 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(6)]
    found = ways(layer(), several, 10)
    keep = found.as_compiled().scheduler.keep_all()
    aim = SearchAim(limit_bytes=keep.peak_bytes * 2 // 3)
    for choice in found.search(aim):
        assert len({id(v) for v in choice.variants if v is not None}) <= 2


@pytest.mark.parametrize(("num_live", "num_lost"), [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)])
def test_plans_have_the_room_that_earlier_ones_left(num_live: int, num_lost: int) -> None:
    """What an earlier plan took is there for all; what did not compile has used up its place."""
    several = [layer((56 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(6)]
    live = [layer((60 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(num_live)]
    found = ways(layer(), several, 10, live=live, num_lost=num_lost)
    variant_maker: Any = found.calls[0].variant_maker
    aim = SearchAim(limit_bytes=found.as_compiled().scheduler.keep_all().peak_bytes * 2 // 3)
    options = found.search(aim)
    assert bool(options) == (num_lost < 2)
    assert bool(variant_maker.asked) == (num_live + num_lost < 2)
    offered = next(iter(found._variants_by_kind.values()))
    assert set(variant_maker.live) <= set(offered)
    sizes = [sum(c.nbytes for c in d.step.candidates) for d in offered]
    assert sizes == sorted(set(sizes), reverse=True)
    for choice in options:
        new = {v for v in choice.variants if v is not None}.difference(variant_maker.live)
        assert len(new) <= 2 - num_live - num_lost


def test_what_is_picked_where_variants_live() -> None:
    several = [layer((56 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(6)]
    live = [
        layer((60, 64), again_ms=0.01),
    ]
    found = ways(layer(), several, 10, live=live)
    variant_maker: Any = found.calls[0].variant_maker
    (offered,) = found._variants_by_kind.values()
    # As if the solver used all of them, the new ones most.
    used = [7, 7, 7, 6, 6, 5, 4, 3, 2, 1]
    with mock.patch.object(SearchAim, "solve", return_value=mock.Mock(variants=used)):
        narrowed = found._narrowed(SearchAim(limit_bytes=1))
    assert narrowed is not None
    ((first, *rest),) = narrowed.variants.values()
    assert first is None
    assert rest == [variant_maker.live[0], offered[6]]


def test_a_place_that_calls_do_not_need_is_for_a_smaller_budget() -> None:
    """A chain that is laid out may miss the budget that the solver thinks to meet."""
    several = [layer((56 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(6)]
    found = ways(layer(), several, 10)
    (offered,) = found._variants_by_kind.values()
    answers = [mock.Mock(variants=[0] * 9 + [2]), mock.Mock(variants=[0] * 4 + [3] * 4 + [1] * 2)]
    with mock.patch.object(SearchAim, "solve", autospec=True, side_effect=answers) as solve:
        narrowed = found._narrowed(SearchAim(limit_bytes=1000))
    assert narrowed is not None and [call.args[0].limit_bytes for call in solve.call_args_list] == [1000, 900]
    assert list(narrowed.variants.values()) == [[None, offered[1], offered[2]]]


@pytest.mark.parametrize(("num_live", "picked_new"), [(0, (3, 6)), (1, (6,)), (2, ())])
def test_where_sizes_vary_one_place_is_for_the_variant_that_saves_least(num_live: int, picked_new: Any) -> None:
    """Larger calls may come, which need it; what the solver uses most has the other place."""
    several = [layer((56 - 8 * i, 64), again_ms=0.05 * (i + 1)) for i in range(6)]
    live = [layer((63 - i, 64), again_ms=0.01) for i in range(num_live)]
    found = ways(layer(), several, 10, live=live, reserves=True)
    variant_maker: Any = found.calls[0].variant_maker
    (offered,) = found._variants_by_kind.values()
    used = [num_live + i for i in (3, 3, 3, 3, 2, 2, 2, 1, 1)]
    with mock.patch.object(SearchAim, "solve", return_value=mock.Mock(variants=[*used, 0])):
        narrowed = found._narrowed(SearchAim(limit_bytes=1))
    assert narrowed is not None
    (rest,) = narrowed.variants.values()
    new = [v for v in rest[1:] if v not in variant_maker.live]
    assert new == [offered[num_live + i - 1] for i in picked_new]
    if picked_new:
        assert new[-1] is offered[-1]


def test_a_new_variant_like_a_live_one_is_not_offered() -> None:
    found = ways(layer(), [layer((56, 64)), layer((48, 64))], 4, live=[layer((56, 64))])
    (offered,) = found._variants_by_kind.values()
    variant_maker: Any = found.calls[0].variant_maker
    assert offered == [variant_maker.live[0], variant_maker.given[1]]


def test_a_variant_that_saves_no_less_is_not_planned_for_nothing() -> None:
    found = ways(layer((8,)), [layer((64,), again_ms=0.1)], 4)
    assert found.search(SearchAim(limit_bytes=50 * MB)) == []


def test_an_input_that_only_a_variant_saves() -> None:
    """The layer's input dies in its own forward, unless a variant saves it: then it is that variant's to move."""
    compiled = layer()
    without = TrainingStep(
        tuple(s for s in compiled.storages if not s.is_input),
        tuple(SegmentStep(s.name, ms=s.ms, writes=s.writes) for s in compiled.forward),
        tuple(
            SegmentStep(s.name, ms=s.ms, reads=tuple(r for r in s.reads if r != "x"), writes=s.writes)
            for s in compiled.backward
        ),
    )
    variant_maker = _Recipe([_Draft(layer((), again_ms=0.5, x="view of x"), edges("view of x"))])
    description = described(without, variant_maker)
    found = ChainSearch([description] * 6, passed(6), lambda s: Scheduler(s, rates()), rates(), None)
    assert all("x" not in names for names in found.as_compiled().chain.candidates)
    choice = found.search(SearchAim(limit_bytes=300 * MB))[0]
    assert again(choice) == 6
    assert choice.chain.candidates[1:] == tuple((f"call {k}/y",) for k in range(5))


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.integers(1, 96), min_size=1, max_size=4),
    st.floats(0.2, 6.0),
    st.floats(0.05, 3.0),
    st.integers(2, 8),
    st.floats(0.0, 1.0),
)
def test_no_option_exceeds_the_budget_and_none_plain_is_faster(
    saved: list[int], ms: float, again_ms: float, count: int, share: float
) -> None:
    variant = layer(saved[: len(saved) // 2], ms=ms, again_ms=again_ms)
    found = ways(layer(saved, ms=ms), [variant], count)
    plain = found.as_compiled()
    keep = plain.scheduler.keep_all()
    uniform = concatenate([variant] * count, passed(count))
    recompute = Scheduler(uniform.step, rates()).keep_all()
    least = min(recompute.peak_bytes, plain.scheduler.smallest().simulation.peak_bytes)
    budget = round(least + share * (keep.peak_bytes - least))
    aim = SearchAim(limit_bytes=budget)
    options = [found.as_compiled(aim), *found.search(aim)]
    for choice in options:
        if choice.schedule is not None:
            assert choice.schedule.simulation.peak_bytes <= budget
            assert len(choice.schedule.offload) == len(choice.chain.step.candidates)
    chosen = best(options, aim).schedule
    assert chosen is not None
    for other in (keep, recompute):
        if other.peak_bytes <= budget:
            assert chosen.simulation.step_ms <= other.step_ms + 1e-3


def test_what_a_forward_saves_by_writing_less_is_not_counted_on() -> None:
    compiled, faster, slower = layer(ms=1.0), layer((64,), ms=0.5), layer((64,), ms=1.5)
    found = no_faster_forward(faster, compiled)
    assert [s.ms for s in found.forward] == [pytest.approx(1.0)]
    assert (found.backward, found.storages, found.takes) == (faster.backward, faster.storages, faster.takes)
    assert no_faster_forward(slower, compiled) is slower
    assert no_faster_forward(compiled, compiled) is compiled
    count = 4
    found = ways(compiled, [faster], count).search(SearchAim(limit_bytes=400 * MB))
    assert any(again(choice) for choice in found)
    for choice in found:
        assert sum(s.ms for s in choice.chain.step.forward) == pytest.approx(count * 1.0)
