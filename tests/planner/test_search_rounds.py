from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

from fxoffload.compiler import search_rounds as rounds_module
from fxoffload.compiler.search_rounds import SearchAim, faster_rounds, search_rounds

RATE = 100.0  # bytes per millisecond to the host


def solution(ms: float, peak: int = 900, exposed: float = 0.0) -> Any:
    return SimpleNamespace(ms=ms, peak_bytes=peak, exposed_ms=exposed)


def tried(ms: float | None, peak: int = 900, *, exposed: float = 0.0, compute: float = 10.0, least: int = 0) -> Any:
    """Laid out; ``ms``: of its schedule, None where none meets the aim."""
    simulation = SimpleNamespace(step_ms=ms, peak_bytes=peak, exposed_ms=exposed)
    smallest = SimpleNamespace(simulation=SimpleNamespace(peak_bytes=least))
    return SimpleNamespace(
        schedule=None if ms is None else SimpleNamespace(simulation=simulation),
        scheduler=SimpleNamespace(step=SimpleNamespace(compute_ms=compute), smallest=lambda: smallest),
    )


class Asked:
    """What the solver was asked for, and its answers: one choice after the other."""

    def __init__(self, answers: list[Any], monkeypatch: pytest.MonkeyPatch, *, same: bool = False) -> None:
        self.aims: list[SearchAim] = []
        self._answers: Iterator[Any] = iter(answers)
        monkeypatch.setattr(SearchAim, "solve", lambda aim, problem: self._solve(aim))
        self._same = same

    def _solve(self, aim: SearchAim) -> Any:
        self.aims.append(aim)
        found = copy(next(self._answers, None))
        if found is not None:
            found.variants = (0 if self._same else len(self.aims),)
        return found


def rounds(aim: SearchAim, tries: list[Any], **how: Any) -> list[Any]:
    waiting = iter(tries)
    problem: Any = SimpleNamespace(d2h_bytes_per_ms=RATE)
    return list(search_rounds(problem, aim, lambda _: next(waiting), **how))


def test_a_kept_promise_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked([solution(100.0), solution(100.0)], monkeypatch)
    assert len(rounds(SearchAim(limit_bytes=1000), [tried(100.4)])) == 1
    assert asked.aims == [SearchAim(limit_bytes=1000)]


@pytest.mark.parametrize(
    ("first", "next_limit"),
    [
        (tried(110.0, exposed=1.0), 940),  # 0.6 of the bytes that were copied while compute waited
        (tried(110.0), 980),  # at least 2 %
        (tried(210.0, exposed=100.0), 900),  # at most 10 %
        (tried(None, least=1007), 990),  # nothing meets it, nearly
        (tried(None, least=1150), 850),
    ],
)
def test_what_a_try_lacks_is_taken_off_the_next_budget(
    first: Any, next_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked([solution(100.0), solution(100.0)], monkeypatch)
    assert len(rounds(SearchAim(limit_bytes=1000), [first, tried(100.0)])) == 2
    assert [aim.limit_bytes for aim in asked.aims] == [1000, next_limit]


@pytest.mark.parametrize(
    ("first", "next_ms"),
    [
        (tried(None, compute=104.0), 199.8 - 4.0),  # it computes 4 ms longer than the 100 that were promised
        (tried(199.0, peak=950, compute=90.0), 199.8),  # less memory was promised
    ],
)
def test_a_try_that_computes_longer_leaves_less_time_for_copies(
    first: Any, next_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked([solution(103.0, exposed=3.0), solution(103.0)], monkeypatch)
    rounds(SearchAim(max_ms=200.0), [first, tried(199.0)])
    assert [aim.max_ms for aim in asked.aims] == [200.0, pytest.approx(next_ms)]


def test_the_first_question_may_ask_for_more_than_the_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked([solution(100.0)], monkeypatch)
    rounds(SearchAim(max_ms=200.0), [tried(199.0)], ask=SearchAim(max_ms=190.0))
    assert asked.aims == [SearchAim(max_ms=190.0)]


def test_where_it_ends_without_a_kept_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    aim, missed = SearchAim(limit_bytes=1000), [tried(110.0)] * 9
    Asked([solution(100.0)] * 9, monkeypatch)
    assert len(rounds(aim, missed)) == 5
    Asked([solution(100.0)], monkeypatch)
    assert len(rounds(aim, missed)) == 1  # no choice
    Asked([solution(100.0)] * 9, monkeypatch)
    assert rounds(aim, [None]) == []  # nothing that may move


def test_the_same_choice_is_asked_for_less_until_it_keeps_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It recomputes the same, and may move more. It is laid out once."""
    asked = Asked([solution(100.0), solution(104.0), solution(109.8), solution(100.0)], monkeypatch, same=True)
    assert len(rounds(SearchAim(limit_bytes=1000), [tried(110.0)])) == 1
    assert [aim.limit_bytes for aim in asked.aims] == [1000, 980, 960]


@pytest.mark.parametrize(("peak", "count"), [(1100, 2), (900, 5)])
def test_below_the_least_peak_the_answer_is_the_same(peak: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked([solution(100.0, peak=peak)] * 9, monkeypatch, same=True)
    assert len(rounds(SearchAim(limit_bytes=1000), [tried(None, least=1001)])) == 1
    assert len(asked.aims) == count


def choice(number: int, ms: float, peak: int) -> Any:
    found = solution(ms, peak=peak)
    found.variants = (number,)
    return found


def test_the_same_choice_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module.solve, "least_time", lambda _, nbytes: choice(1, 95.0, nbytes))
    best = promised(100.0, 1000, 970, monkeypatch)
    assert len(faster(1000, [tried(None)] * 9, best, enough_ms=90.0)) == 1


def faster(limit: int, tries: list[Any], best: Any, **how: Any) -> list[Any]:
    waiting = iter(tries)
    problem: Any = SimpleNamespace(d2h_bytes_per_ms=RATE)
    return list(faster_rounds(problem, limit, best, lambda _: next(waiting), **how))


def promised(ms: float, peak: int, laid_out: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A try that was promised to take ``peak`` bytes, and takes ``laid_out``."""
    monkeypatch.setattr(rounds_module, "least_peak_bytes", lambda step, offload: laid_out)
    found = tried(ms)
    found.promised = solution(ms, peak=peak)
    found.promised.offloaded, found.scheduler.names = (), ()
    return found


def test_where_less_is_taken_than_promised_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    answers = iter([choice(1, 95.0, 1030), None])
    monkeypatch.setattr(rounds_module.solve, "least_time", lambda _, nbytes: asked.append(nbytes) or next(answers))
    best, better = promised(100.0, 1000, 970, monkeypatch), promised(95.0, 1030, 970, monkeypatch)
    assert faster(1000, [better], best, enough_ms=90.0) == [better]
    assert asked == [1035, 1065]  # the rest, and half a percent


@pytest.mark.parametrize("why", ["none", "not asked", "fast enough", "promises no more"])
def test_where_no_more_is_asked_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module.solve, "least_time", lambda *_: solution(99.95))
    best = promised(100.0, 1000, 970, monkeypatch)
    if why == "not asked":
        best.promised = None
    enough_ms = 101.0 if why == "fast enough" else 90.0
    assert faster(1000, [], None if why == "none" else best, enough_ms=enough_ms) == []


def test_after_a_try_that_is_no_faster_half_as_much_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        rounds_module.solve, "least_time", lambda _, nbytes: asked.append(nbytes) or choice(len(asked), 95.0, nbytes)
    )
    best = promised(100.0, 1000, 970, monkeypatch)
    assert len(faster(1000, [tried(None)] * 9, best, enough_ms=90.0)) == 3
    assert asked == [1035, 1017, 1008]


def test_without_a_budget_one_more_choice_is_made_within_the_best_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is one that takes no longer than is allowed, be it one that the solver does not know."""
    first = Asked([solution(99.0)], monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(rounds_module.solve, "least_time", lambda _, nbytes: asked.append(nbytes) or choice(7, 90.0, 0))
    late, known, found = tried(120.0, 500), tried(99.0, 800), tried(100.0, 900)
    for one in (late, known, found):
        one.promised = None
    aims: list[SearchAim] = []

    def attempt(_: Any, aim: SearchAim) -> Any:
        aims.append(aim)
        return found

    problem: Any = SimpleNamespace(d2h_bytes_per_ms=RATE)
    aim = SearchAim(max_ms=100.0)
    tries = rounds_module.search_choices(problem, aim, attempt, [late, known], enough_ms=0.0, slack_ms=1.0)
    assert tries == [late, known, found, found]
    assert first.aims == [SearchAim(max_ms=99.0)]
    assert asked == [800]
    assert aims == [aim, SearchAim(limit_bytes=800, max_ms=100.0)]


@pytest.mark.parametrize(("ms", "is_met"), [(100.0, True), (100.1, False)])
def test_an_aim_of_bytes_and_time(ms: float, is_met: bool) -> None:
    schedule = SimpleNamespace(simulation=SimpleNamespace(step_ms=ms))
    scheduler: Any = SimpleNamespace(least_time=lambda nbytes: schedule if nbytes == 800 else None)
    found: Any = SearchAim(limit_bytes=800, max_ms=100.0).schedule(scheduler)
    assert found is (schedule if is_met else None)
