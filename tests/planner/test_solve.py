"""The solver against everything there is to choose, on problems small enough to enumerate; and what holds for all."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, milp

from fxoffload.planner import solve, solve_improve, solve_model
from fxoffload.planner.problem import LayerVariant, Problem, ProblemLayer, ProblemStorage, Solution
from fxoffload.planner.solve import least_peak, least_time, smallest_peak
from fxoffload.planner.solve_model import MOVE_PRICE, Model
from fxoffload.planner.solve_schedule import Loads
from tests.marks import examples

_GAP = 1.2e-3
MIB = 1 << 20
GIB = 1 << 30

# -- problems ----------------------------------------------------------------------------------------------------------


@st.composite
def items(draw: st.DrawFn, name: str, forward: int, backward: int) -> ProblemStorage:
    made = draw(st.integers(-1, forward - 1))
    copied = draw(st.integers(made, forward - 1))
    needed = draw(st.integers(0, backward))
    held = draw(st.integers(0, 24)) if draw(st.integers(0, 5)) else 0
    # As a rule all of a storage moves; or a range of it, or a few bytes more.
    moved = held or draw(st.integers(0, 12))
    moved = draw(st.sampled_from([moved, moved, moved, 0, moved // 2, moved + 1]))
    return ProblemStorage(
        name,
        held,
        moved,
        made,
        copied,
        draw(st.integers(made, forward - 1)),
        needed,
        draw(st.integers(needed, backward)),
        draw(st.sampled_from([None, None, None, None, False, True])) if moved else None,
    )


@st.composite
def problems(draw: st.DrawFn, max_layers: int = 3, max_alternatives: int = 2, max_items: int = 3) -> Problem:
    forward, backward = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ms = st.integers(0, 16).map(lambda n: n / 4)
    layers = []
    for at in range(draw(st.integers(1, max_layers))):
        pool = [draw(items(f"{at}.{i}", forward, backward)) for i in range(draw(st.integers(0, max_items)))]
        variants = []
        for a in range(draw(st.integers(1, max_alternatives))):
            saved = [i for i in pool if draw(st.booleans())] if a else pool
            if saved and a and draw(st.integers(0, 3)) == 0:
                saved[0] = replace(saved[0], freed_after=forward - 1)
            where = st.dictionaries(st.integers(0, backward - 1), st.integers(0, 8), max_size=2)
            extra_ms = {k: v / 4 for k, v in draw(where).items()} if a else {}
            variants.append(LayerVariant(f"a{a}", tuple(saved), extra_ms, draw(where) if a else {}))
        layers.append(ProblemLayer(f"l{at}", draw(st.integers(0, 1)), tuple(variants)))
    return Problem(
        tuple(layers),
        tuple(draw(ms) for _ in range(forward)),
        tuple(draw(ms) for _ in range(backward)),
        tuple(draw(st.integers(0, 10)) for _ in range(forward)),
        tuple(draw(st.integers(0, 10)) for _ in range(backward)),
        draw(st.sampled_from([1.0, 3.0, 7.0])),
        draw(st.sampled_from([1.0, 3.0, 7.0])),
        draw(st.sampled_from([None, None, 1000, 30])),
    )


# -- the model once more, item by item ---------------------------------------------------------------------------------


class Choice:
    """One choice, worked out the long way."""

    def __init__(self, problem: Problem, variants: tuple[int, ...], offloaded: frozenset[str]) -> None:
        self.problem, self.numbers, self.offloaded = problem, variants, offloaded
        self.chosen = [la.variants[a] for la, a in zip(problem.layers, variants, strict=True)]
        saved = [i for a in self.chosen for i in a.storages]
        self.saved = saved
        last = len(problem.forward_ms) - 1
        taken_back = {i.name for i in saved if i.fixed and i.held_bytes and i.copy_after == last}
        self.kept = [i for i in saved if i.name not in offloaded or i.name in taken_back]
        self.away = [i for i in saved if i.name in offloaded and i.name not in taken_back]

    def is_allowed(self) -> bool:
        for storage in self.saved:
            offload = storage.name in self.offloaded
            if (storage.fixed is not None and storage.fixed is not offload) or (offload and not storage.moved_bytes):
                return False
        return self.problem.host_bytes is None or self.moved_bytes() <= self.problem.host_bytes

    def moved_bytes(self) -> int:
        return sum(i.moved_bytes for i in self.saved if i.name in self.offloaded)

    def backward_ms(self, at: int) -> float:
        return self.problem.backward_ms[at] + sum(a.extra_ms.get(at, 0) for a in self.chosen)

    def compute_ms(self) -> float:
        segments = range(len(self.problem.backward_ms))
        return sum(self.problem.forward_ms) + sum(self.backward_ms(j) for j in segments)

    def made(self, at: int) -> int:
        """Bytes in a forward segment if nothing is copied."""
        return sum(i.held_bytes for i in self.saved if i.made_at <= at) + self.problem.forward_bytes[at]

    def unread(self, at: int) -> int:
        """Of these, what may be gone."""
        return sum(i.held_bytes for i in self.away if i.copy_after < at and i.freed_after < at)

    def ready(self, at: int) -> int:
        """What could be copied by the end of a forward segment; the caller's memory can wait."""
        return sum(max(i.held_bytes, i.moved_bytes) for i in self.away if i.copy_after < at and i.held_bytes)

    def kept_bytes(self, at: int) -> int:
        """Bytes in a backward segment, but for all that was offloaded."""
        extra = sum(a.extra_bytes.get(at, 0) for a in self.chosen)
        return sum(i.held_bytes for i in self.kept if i.dies_at >= at) + self.problem.backward_bytes[at] + extra

    def there(self, at: int) -> int:
        return sum(i.moved_bytes for i in self.away if i.needed_at <= at <= i.dies_at)

    def needed(self, at: int) -> int:
        return sum(i.moved_bytes for i in self.away if i.needed_at <= at)

    def inputs(self) -> int:
        return sum(i.moved_bytes for i in self.away if not i.held_bytes)

    def least_bytes(self) -> int:
        down = [self.made(m) - self.unread(m) for m in range(len(self.problem.forward_ms))]
        return max([*down, *(self.kept_bytes(j) + self.there(j) for j in range(len(self.problem.backward_ms)))])

    def ms(self, budget: float) -> float:
        """The shortest step within ``budget``; inf: it does not fit."""
        problem = self.problem
        forward, backward = len(problem.forward_ms), len(problem.backward_ms)
        if self.least_bytes() > budget:
            return math.inf
        clock = copied = 0.0
        for m in range(forward):
            missing = max(self.made(m) - budget - copied, 0.0)
            copied += missing
            clock += missing / problem.d2h_bytes_per_ms + problem.forward_ms[m]
            copied = min(copied + problem.forward_ms[m] * problem.d2h_bytes_per_ms, self.ready(m))
        # How much may be ahead of need at the end of each backward segment, so that all later ones fit too.
        ahead = [budget - self.kept_bytes(j) - self.there(j) + self.needed(j) for j in range(backward)]
        clock += (self.ready(forward) - copied) / problem.d2h_bytes_per_ms
        clock = max(clock, (self.ready(forward) + self.inputs()) / problem.d2h_bytes_per_ms)
        back = 0.0
        for j in range(backward):
            missing = max(self.needed(j) - back, 0.0)
            back += missing
            clock += missing / problem.h2d_bytes_per_ms + self.backward_ms(j)
            back = max(back, min(back + self.backward_ms(j) * problem.h2d_bytes_per_ms, min(ahead[j:])))
        return clock + max(self.needed(backward) - back, 0.0) / problem.h2d_bytes_per_ms

    def ms_as_program(self, budget: float) -> float:
        """The same as a linear program: any waits and any flow of copies that the rules allow."""
        p = self.problem
        forward, backward = len(p.forward_ms), len(p.backward_ms)
        # Waits (one more at the turn), copied at begin and end, waits (one more at the end), reloaded at begin and end.
        wait, begin, end = 0, forward + 1, 2 * forward + 1
        pause = 3 * forward + 1
        first, last = pause + backward + 1, pause + 2 * backward + 1
        size = last + backward
        rows: list[np.ndarray] = []
        limits: list[float] = []

        def add(limit: float, *terms: tuple[int, float]) -> None:
            row = np.zeros(size)
            for variable, factor in terms:
                row[variable] += factor
            rows.append(row)
            limits.append(limit)

        d2h, h2d = p.d2h_bytes_per_ms, p.h2d_bytes_per_ms
        for m in range(forward):
            before = [(end + m - 1, -1.0)] if m else []
            add(0.0, (begin + m, 1.0), (wait + m, -d2h), *before)
            add(p.forward_ms[m] * d2h, (end + m, 1.0), (begin + m, -1.0))
            add(self.ready(m), (end + m, 1.0))
            if self.made(m) - self.unread(m) > budget:
                return math.inf
            add(budget - self.made(m), (begin + m, -1.0))
        add(-self.ready(forward), (end + forward - 1, -1.0), (wait + forward, -d2h))
        free = sum(p.forward_ms) * d2h - self.ready(forward) - self.inputs()
        if self.inputs():
            add(free, *((wait + m, -d2h) for m in range(forward + 1)))
        for j in range(backward):
            before = [(last + j - 1, 1.0)] if j else []
            add(0.0, (first + j, 1.0), (pause + j, -h2d), *((v, -f) for v, f in before))
            add(0.0, (first + j, -1.0), *before)
            add(-self.needed(j), (first + j, -1.0))
            add(self.backward_ms(j) * h2d, (last + j, 1.0), (first + j, -1.0))
            add(0.0, (last + j, -1.0), (first + j, 1.0))
            add(budget - self.kept_bytes(j) - self.there(j) + self.needed(j), (last + j, 1.0))
        add(-self.needed(backward), (last + backward - 1, -1.0), (pause + backward, -h2d))
        cost = np.zeros(size)
        cost[wait : wait + forward + 1] = cost[pause : pause + backward + 1] = 1.0
        result = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), bounds=(0, None))
        return math.inf if result.status == 2 else self.compute_ms() + result.fun


def choices(problem: Problem) -> Iterator[Choice]:
    """All of them."""
    for numbers in itertools.product(*(range(len(la.variants)) for la in problem.layers)):
        names = [i.name for la, a in zip(problem.layers, numbers, strict=True) for i in la.variants[a].storages]
        for bits in itertools.product((False, True), repeat=len(names)):
            choice = Choice(problem, numbers, frozenset(itertools.compress(names, bits)))
            if choice.is_allowed():
                yield choice


def of(problem: Problem, solution: Solution) -> Choice:
    return Choice(problem, solution.variants, solution.offloaded)


def is_solvable(problem: Problem) -> bool:
    return next(choices(problem), None) is not None


def check(problem: Problem, solution: Solution) -> None:
    """Its own numbers are true."""
    choice = of(problem, solution)
    assert choice.is_allowed()
    assert solution.offloaded <= {i.name for i in choice.saved}
    assert solution.bytes_offloaded == choice.moved_bytes()
    assert choice.ms(solution.peak_bytes) == pytest.approx(solution.ms)
    assert solution.exposed_ms == pytest.approx(solution.ms - choice.compute_ms(), abs=1e-6)
    assert choice.ms(solution.peak_bytes - 1) > solution.ms


few = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
small = problems(max_layers=2, max_items=2)


# -- against everything there is to choose -----------------------------------------------------------------------------


@given(problems(), st.data(), st.integers(0, 150))
@settings(few, max_examples=examples(300))
def test_the_closed_form_is_the_best_schedule(problem: Problem, data: st.DataObject, budget: int) -> None:
    numbers = tuple(data.draw(st.integers(0, len(la.variants) - 1)) for la in problem.layers)
    saved = [i for la, a in zip(problem.layers, numbers, strict=True) for i in la.variants[a].storages]
    offloaded = frozenset(i.name for i in saved if i.fixed or (i.moved_bytes and data.draw(st.booleans())))
    choice = Choice(problem, numbers, offloaded)
    loads = Loads(problem, numbers, offloaded)
    schedule = loads.schedule(budget)
    ms = math.inf if schedule is None else schedule.ms
    assert ms == pytest.approx(choice.ms(budget))
    assert ms == pytest.approx(choice.ms_as_program(budget), abs=1e-6)
    assert loads.least_bytes() == choice.least_bytes()


@pytest.mark.slow
@given(problems(max_items=4, max_alternatives=1), st.data(), st.integers(0, 150))
@settings(few, max_examples=examples(300))
def test_the_program_says_what_the_closed_form_says(problem: Problem, data: st.DataObject, budget: int) -> None:
    """Of a choice that leaves nothing open."""
    layers = []
    for layer in problem.layers:
        (only,) = layer.variants
        decided = tuple(replace(i, fixed=bool(i.moved_bytes) and data.draw(st.booleans())) for i in only.storages)
        layers.append(replace(layer, variants=(replace(only, storages=decided),)))
    problem = replace(problem, layers=tuple(layers), host_bytes=None)
    loads = Loads(problem, [0] * len(layers), [i.name for la in layers for i in la.variants[0].storages if i.fixed])
    answer = Model(problem, exact=True, is_timed=True).least_time(budget, gap=0.0)
    schedule = loads.schedule(budget)
    assert (answer.status == 2) == (schedule is None)
    if schedule is not None:
        assert answer.bound == pytest.approx(schedule.ms, rel=2 * MOVE_PRICE, abs=1e-5)
        # With no more room than HiGHS's own tolerance, 1e-6, it may end without an answer (status 4).
        least = Model(problem, exact=True, is_timed=True).least_peak(schedule.ms + 1e-5, gap=0.0)
        assert least.bound == pytest.approx(loads.peak_bytes(schedule.ms), abs=1)
    free = Model(problem, exact=True, is_timed=False).least_peak(None, gap=0.0)
    assert free.bound == pytest.approx(loads.least_bytes(), abs=1e-3)


@given(small, st.integers(0, 100))
@few
def test_no_choice_is_faster(problem: Problem, budget: int) -> None:
    assume(is_solvable(problem))
    best = min(c.ms(budget) for c in choices(problem))
    solution = least_time(problem, budget)
    if solution is None:
        assert best == math.inf
        return
    check(problem, solution)
    assert solution.peak_bytes <= budget
    assert best - 1e-6 <= solution.ms <= best * (1 + _GAP) + 1e-6
    assert solution.gap <= _GAP
    assert best >= solution.ms * (1 - solution.gap) - 1e-6


def _peak(choice: Choice, max_ms: float) -> float:
    bytes_ = range(choice.least_bytes(), choice.least_bytes() + 250)
    return next((b for b in bytes_ if choice.ms(b) <= max_ms * (1 + 1e-9) + 1e-9), math.inf)


@given(small, st.integers(0, 200))
@few
def test_no_choice_is_smaller(problem: Problem, quarters: int) -> None:
    max_ms = quarters / 4
    assume(is_solvable(problem))
    best = min(_peak(c, max_ms) for c in choices(problem))
    solution = least_peak(problem, max_ms)
    if solution is None:
        assert best == math.inf
        return
    check(problem, solution)
    assert solution.ms <= max_ms * (1 + 1e-9) + 1e-9
    assert best <= solution.peak_bytes <= best * (1 + _GAP)


@given(small)
@few
def test_the_smallest_of_all(problem: Problem) -> None:
    assume(is_solvable(problem))
    solution = smallest_peak(problem)
    check(problem, solution)
    least = min(c.least_bytes() for c in choices(problem))
    best = min(c.ms(least) for c in choices(problem))
    assert solution.peak_bytes == least
    assert best - 1e-6 <= solution.ms <= best * (1 + _GAP) + 1e-6


# -- what holds for all ------------------------------------------------------------------------------------------------


@given(problems(5, 4, 5), st.integers(0, 400))
@few
def test_bounds_are_kept_and_simple_choices_are_no_better(problem: Problem, budget: int) -> None:
    assume(smallest_or_none(problem) is not None)
    solution = least_time(problem, budget)
    simple = []
    for a in range(4):
        numbers = tuple(min(a, len(la.variants) - 1) for la in problem.layers)
        saved = [i for la, n in zip(problem.layers, numbers, strict=True) for i in la.variants[n].storages]
        for names in (
            {i.name for i in saved if i.fixed},
            {i.name for i in saved if i.fixed is not False and i.moved_bytes},
        ):
            choice = Choice(problem, numbers, frozenset(names))
            if choice.is_allowed():
                simple.append(choice.ms(budget))
    if solution is None:
        assert all(ms == math.inf for ms in simple)
        return
    check(problem, solution)
    assert solution.peak_bytes <= budget
    assert solution.ms <= min(simple, default=math.inf) * (1 + _GAP) + 1e-6


def smallest_or_none(problem: Problem) -> Solution | None:
    try:
        return smallest_peak(problem)
    except ValueError:
        return None


@pytest.mark.slow
@given(problems(5, 4, 5))
@few
def test_more_room_is_never_slower_and_too_little_is_none(problem: Problem) -> None:
    smallest = smallest_or_none(problem)
    assume(smallest is not None)
    assert smallest is not None
    least = smallest.peak_bytes
    assert least_time(problem, least - 1) is None
    budgets = [least, least + 5, least + 40, least + 1000]
    times = []
    for budget in budgets:
        solution = least_time(problem, budget)
        assert solution is not None
        times.append(solution.ms)
    for slower, faster in itertools.pairwise(times):
        assert faster <= slower * (1 + _GAP) + 1e-6


@given(problems(5, 4, 5), st.integers(0, 400))
@few
def test_alternatives_first_then_items(problem: Problem, budget: int) -> None:
    """The fallback where there is much to decide."""
    whole = least_time(problem, budget) if smallest_or_none(problem) is not None else None
    assume(whole is not None)
    assert whole is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxoffload.planner.solve._MOST_AT_ONCE", -1)
        solution = least_time(problem, budget)
    assert solution is not None
    check(problem, solution)
    assert solution.peak_bytes <= budget
    assert whole.ms >= solution.ms * (1 - solution.gap) - 1e-6
    assert solution.gap > 0 or whole.ms >= solution.ms - 1e-6


# -- by hand -----------------------------------------------------------------------------------------------------------


def chain(
    *storages: ProblemStorage, segments: int = 4, ms: float = 10.0, rate: float = 10.0, host: int | None = None
) -> Problem:
    """Layers of one variant; all segments alike."""
    layers = tuple(ProblemLayer(i.name, 0, (LayerVariant("only", (i,), {}, {}),)) for i in storages)
    return Problem(layers, (ms,) * segments, (ms,) * segments, (0,) * segments, (0,) * segments, rate, rate, host)


def saved(name: str, at: int, nbytes: int = 100, *, segments: int = 4, fixed: bool | None = None) -> ProblemStorage:
    return ProblemStorage(name, nbytes, nbytes, at, at, at, segments - 1 - at, segments - 1 - at, fixed)


def test_roomy_budget_moves_nothing() -> None:
    solution = least_time(chain(*(saved(str(k), k) for k in range(4))), 400)
    assert solution is not None
    assert (solution.offloaded, solution.ms, solution.exposed_ms, solution.peak_bytes) == (frozenset(), 80.0, 0.0, 400)
    assert solution.gap <= _GAP


def test_what_is_made_first_moves() -> None:
    """One segment hides each copy; the results of the last two segments are needed too soon."""
    solution = least_time(chain(*(saved(str(k), k) for k in range(4))), 300)
    assert solution is not None
    assert solution.ms == pytest.approx(80.0)
    assert len(solution.offloaded) == 1
    assert solution.offloaded < {"0", "1"}


def test_too_little_room() -> None:
    problem = chain(*(saved(str(k), k) for k in range(4)))
    smallest = smallest_peak(problem)
    assert smallest.peak_bytes == 100
    assert least_time(problem, 99) is None
    assert least_peak(problem, 79.9) is None


def test_fixed_items_are_obeyed() -> None:
    must, stays = saved("must", 1, fixed=True), saved("stays", 0, fixed=False)
    problem = chain(must, stays)
    for budget in (200, 10_000):
        solution = least_time(problem, budget)
        assert solution is not None
        assert solution.offloaded == {"must"}
    assert least_time(problem, 199) is None


def test_what_must_move_too_late_is_taken_back() -> None:
    solution = least_time(chain(saved("last", 3, fixed=True)), 100)
    assert solution is not None
    assert (solution.offloaded, solution.ms) == ({"last"}, 80.0)


def test_a_late_reader_in_the_forward_keeps_the_source() -> None:
    storage = replace(saved("read", 0), freed_after=2)
    assert smallest_peak(chain(storage, saved("big", 3, 100))).peak_bytes == 100
    assert smallest_peak(chain(storage, saved("big", 2, 100))).peak_bytes == 200


def test_long_lives_are_counted() -> None:
    """Needed at once, dead at the end: an offload helps the forward only."""
    storage = ProblemStorage("long", 100, 100, 0, 0, 0, 0, 4)
    problem = chain(storage, replace(saved("x", 2, 50), fixed=False))
    assert smallest_peak(problem).peak_bytes == 150
    dies = replace(storage, dies_at=0)
    assert smallest_peak(chain(dies, replace(saved("x", 2, 50), fixed=False))).peak_bytes == 150
    late = replace(storage, needed_at=2)
    assert smallest_peak(chain(late, replace(saved("x", 2, 50), fixed=False))).peak_bytes == 100


def test_the_callers_memory_is_left_alone() -> None:
    """Its copy would free nothing, and the reload takes room."""
    given_ = ProblemStorage("input", 0, 100, -1, -1, 3, 1, 1)
    solution = smallest_peak(chain(given_, saved("x", 0, 30)))
    assert "input" not in solution.offloaded
    forced = smallest_peak(chain(replace(given_, fixed=True), saved("x", 0, 30)))
    assert "input" in forced.offloaded
    assert forced.peak_bytes == 100


def test_the_host_is_bounded() -> None:
    items_ = [saved(str(k), k) for k in range(4)]
    assert smallest_peak(chain(*items_, host=100)).peak_bytes == 300
    with pytest.raises(ValueError, match="host"):
        smallest_peak(chain(*(replace(i, fixed=True) for i in items_), host=100))


def test_a_recomputation_where_the_link_is_slow() -> None:
    """Recompute one of two equal layers, exactly as much as the budget asks for."""

    def layer(at: int) -> ProblemLayer:
        kept = LayerVariant("keep", (saved(f"{at}", at),), {}, {})
        return ProblemLayer(str(at), 0, (kept, LayerVariant("recompute", (), {3 - at: 5.0}, {3 - at: 100})))

    problem = replace(chain(rate=0.01), layers=tuple(layer(at) for at in range(4)))
    for budget, recomputed in ((400, 0), (300, 1), (200, 2), (100, 3)):
        solution = least_time(problem, budget)
        assert solution is not None
        assert solution.ms == pytest.approx(80.0 + 5.0 * recomputed)
        assert sum(solution.variants) == recomputed
        dual = least_peak(problem, solution.ms)
        assert dual is not None
        assert dual.peak_bytes == budget


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"needed_at": 3, "dies_at": 2}, "backward"),
        ({"copy_after": -1}, "forward"),
        ({"freed_after": 4}, "forward"),
        ({"moved_bytes": 0, "fixed": True}, "no bytes to move"),
    ],
)
def test_contradictions_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(replace(saved("x", 1), **change))  # type: ignore[arg-type]


# -- size --------------------------------------------------------------------------------------------------------------

# Of a decoder layer of 16k tokens: MiB and ms to recompute; None: always saved.
_STORAGES: dict[str, tuple[int, float | None]] = {
    "hidden": (128, None),
    "norm": (128, 0.3),
    "q": (128, 2.0),
    "kv": (64, 1.0),
    "attention": (128, 6.0),
    "lse": (4, None),
    "middle": (128, None),
    "norm2": (128, 0.3),
    "gate": (384, 6.0),
    "up": (384, 6.0),
    "product": (384, 0.4),
}
_RECOMPUTED = [
    "",
    "norm",
    "norm norm2",
    "norm norm2 product",
    "norm norm2 product q",
    "norm norm2 product up",
    "norm norm2 product up gate",
    "norm norm2 product q kv",
    "norm norm2 product up gate q kv",
    "norm norm2 product up gate q kv attention",
]


def decoder(layers: int, variants: int) -> Problem:
    def layer(at: int) -> ProblemLayer:
        found = []
        for text in _RECOMPUTED[:variants]:
            again = text.split()
            items_ = tuple(
                ProblemStorage(f"{at}.{name}", size * MIB, size * MIB, at, at, at, layers - 1 - at, layers - 1 - at)
                for name, (size, _) in _STORAGES.items()
                if name not in again
            )
            ms = sum(_STORAGES[name][1] or 0.0 for name in again)
            nbytes = sum(_STORAGES[name][0] for name in again) * MIB
            found.append(LayerVariant(text, items_, {layers - 1 - at: ms}, {layers - 1 - at: nbytes}))
        return ProblemLayer(str(at), "decoder", tuple(found))

    return Problem(
        tuple(layer(at) for at in range(layers)),
        (15.0,) * layers,
        (30.0,) * layers,
        (700 * MIB,) * layers,
        tuple((900 + 100 * at) * MIB for at in range(layers)),
        55e6,
        55e6,
    )


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("variants", [10, 1])
def test_eighty_layers(variants: int) -> None:
    problem = decoder(80, variants)
    for budget in (16 * GIB, 30 * GIB, 60 * GIB):
        solution = least_time(problem, budget)
        assert solution is not None
        check(problem, solution)
        assert solution.peak_bytes <= budget
        assert solution.gap < 0.01


# -- counts ------------------------------------------------------------------------------------------------------------


def answers(problem: Problem) -> list[Solution | None]:
    """One of each question, with little room and little time."""
    least = smallest_peak(problem)
    return [least, least_time(problem, least.peak_bytes + 2 * GIB), least_peak(problem, problem.compute_ms * 1.05)]


def test_a_slow_clock_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on busy machines find what the others find."""
    problem = decoder(12, 4)
    expected = answers(problem)
    readings = itertools.count(0.0, 100.0)
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, clock, lambda: next(readings))
    asked: list[dict[str, object]] = []

    def watched(*args: object, **rest: Any) -> object:
        asked.append(dict(rest["options"]))  # milp takes some out
        return milp(*args, **rest)

    monkeypatch.setattr(solve_model, "milp", watched)
    assert answers(problem) == expected
    assert next(readings) == 0.0, "somebody looked at a clock"
    assert asked and all("node_limit" in options and "time_limit" not in options for options in asked)


@pytest.mark.slow_except("fxoffload.planner.solve-MOST_INTEGERS")
@pytest.mark.parametrize(
    ("module", "limit"), [(solve, "MOST_INTEGERS"), (solve_model, "MOST_NODES"), (solve_improve, "_MOST_SEGMENTS")]
)
def test_past_each_limit_the_answer_fits(module: ModuleType, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = decoder(40, 10)
    with monkeypatch.context() as patch:
        patch.setattr(module, limit, 0)
        solution = least_time(problem, 9 * GIB)
    assert solution is not None
    check(problem, solution)
    assert solution.peak_bytes <= 9 * GIB
    unlimited = least_time(problem, 9 * GIB)
    assert unlimited is not None and unlimited.ms <= solution.ms * (1 + _GAP)


def test_no_more_exchanges_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes three: the first one helps, the others do not."""
    problem = decoder(4, 3)
    objective = solve_improve.SolverObjective(budget_bytes=60 * GIB)
    for exchanges, changed in ((0, 0), (1, 1), (3, 1), (4, 2)):
        loads = Loads(problem, [2] * 4, ())
        monkeypatch.setattr(solve_improve, "_MOST_SEGMENTS", 8 * exchanges)
        solve_improve.improve(loads, objective)
        assert sum(a != 2 for a in loads.variants) == changed
