"""Which backward is expected next, over orders of forwards and backwards as pipelines have them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from fxoffload.runtime import backward_order
from fxoffload.runtime.backward_order import BackwardOrder, Waiting

Event = tuple[str, int]  # ("F", graph) or ("B", number of its forward)


@dataclass
class Guess:
    """The expectation when a backward began, and the call that came."""

    expected: list[int]
    is_open: bool
    others_wait: bool
    came: list[int] = field(default_factory=list)  # until the step's end
    not_run: set[int] = field(default_factory=set)  # of these, forwards that had not run

    @property
    def is_right(self) -> bool:
        """Whether the next was foretold, or that its forward had not run."""
        if not self.came:
            return not self.expected
        if self.came[0] in self.not_run:
            return not self.expected and not (self.others_wait and self.is_open)
        return self.expected[:1] == self.came[:1]

    @property
    def is_exact(self) -> bool:
        """Whether all of it was, up to the first one whose forward had not run."""
        known = itertools.takewhile(lambda n: n not in self.not_run, self.came)
        return self.expected == list(known)


def run(order: BackwardOrder, events: Iterable[Event]) -> list[Guess]:
    """One step."""
    order.restart()
    waiting: list[Waiting] = []
    guesses: list[Guess] = []
    counts: list[int] = []  # forwards before each
    count = 0
    for kind, which in events:
        if kind == "F":
            number = order.forward(which)
            assert number == count
            count += 1
            waiting.append(Waiting(number, which))
            continue
        order.backward(which, waiting)
        waiting = [w for w in waiting if w.number != which]
        for at, guess in enumerate(guesses):
            guess.came.append(which)
            if which >= counts[at]:
                guess.not_run.add(which)
        guesses.append(Guess(*order.expected(waiting), bool(waiting)))
        counts.append(count)
    assert not waiting
    return guesses


def passes(order: str, layers: int = 1, *, graphs: int = 1) -> list[Event]:
    """``order``: "F" is a forward pass, a digit the backward pass of that one. A pass calls this many layers."""
    events: list[Event] = []
    for one in order:
        if one == "F":
            events += [("F", i % graphs) for i in range(layers)]
        else:
            events += [("B", int(one) * layers + i) for i in reversed(range(layers))]
    return events


def one_forward_one_backward(microbatches: int, depth: int, layers: int = 1, *, graphs: int = 1) -> list[Event]:
    """As on a pipeline's stage that lets ``depth`` forwards run ahead."""
    order = "F" * min(depth, microbatches)
    for i in range(microbatches):
        order += str(i)
        order += "F" * (i + depth < microbatches)
    return passes(order, layers, graphs=graphs)


def at_random(seed: int) -> list[Event]:
    generator = random.Random(seed)
    events: list[Event] = []
    waiting: list[int] = []
    left, count = 12, 0
    while left or waiting:
        if left and (not waiting or generator.random() < 0.5):
            events.append(("F", generator.randrange(3)))
            waiting.append(count)
            left, count = left - 1, count + 1
        else:
            events.append(("B", waiting.pop(generator.randrange(len(waiting)))))
    return events


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("graphs", [1, 2])
def test_ordinary_steps_are_foretold_from_the_first_one_on(layers: int, graphs: int) -> None:
    order = BackwardOrder()
    for step in ("F0", "FF10", "F0", "F0F1F2", "FFF210", "FFFFF43210", "FF10F2"):
        for _ in range(2):
            assert all(g.is_exact for g in run(order, passes(step, layers, graphs=graphs)))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_repeats_is_foretold_exactly(seed: int) -> None:
    order = BackwardOrder()
    events = at_random(seed)
    assert not all(g.is_exact for g in run(order, events))
    for _ in range(3):
        assert all(g.is_exact and g.is_right for g in run(order, events))
    # Others in between change nothing about it.
    others = at_random(seed + 100)
    run(order, others)
    assert all(g.is_exact for g in run(order, events))
    assert all(g.is_exact for g in run(order, others))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("graphs", [1, 3])
def test_another_number_of_microbatches_in_the_order_of_the_forwards(layers: int, graphs: int) -> None:
    order = BackwardOrder()
    run(order, passes("FFF012", layers, graphs=graphs))
    for step in ("FF01", "FFFFF01234", "F0", "FFFF0123"):
        assert all(g.is_exact for g in run(order, passes(step, layers, graphs=graphs)))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("depth", [2, 4])
def test_another_number_of_microbatches_in_a_pipeline(layers: int, depth: int) -> None:
    """Only the next one may not be wrong; later expectations do not matter."""
    order = BackwardOrder()
    run(order, one_forward_one_backward(5, depth, layers, graphs=2))
    for count in (6, 9, 7, 4):
        guesses = run(order, one_forward_one_backward(count, depth, layers, graphs=2))
        assert all(g.is_right for g in guesses)
        assert any(g.expected for g in guesses)


def test_a_new_order_is_wrong_once() -> None:
    order = BackwardOrder()
    steps: Sequence[Sequence[Event]] = [passes(s, 2) for s in ("FFF012", "FFF120", "FFF210", "FF10", "FFF201")]
    for events in steps:
        run(order, events)
        assert all(g.is_exact for g in run(order, events))


def test_the_forward_that_is_missing_comes_first() -> None:
    """Nothing is reloaded that long ahead."""
    order = BackwardOrder()
    events = passes("FF1F20")
    first = run(order, events)
    assert [g.is_right for g in first] == [False, False, True]
    second = run(order, events)
    assert [(g.expected, g.is_open) for g in second] == [([], False), ([0], True), ([], True)]


def test_what_died_is_left_out() -> None:
    order = BackwardOrder()
    for _ in range(2):
        order.restart()
        waiting = [Waiting(order.forward(0), 0) for _ in range(4)]
        for at in (1, 3, 0, 2):
            order.backward(at, waiting)
            waiting = [w for w in waiting if w.number != at]
    order.restart()
    waiting = [Waiting(order.forward(0), 0) for _ in range(4)]
    order.backward(1, waiting)
    assert order.expected([waiting[0], waiting[2]])[0] == [0, 2]


def test_a_second_backward_of_the_same_forward() -> None:
    """``retain_graph``: it waits no more, and what follows is known all the same."""
    order = BackwardOrder()
    for step in range(2):
        order.restart()
        waiting = [Waiting(order.forward(0), 0) for _ in range(3)]
        order.backward(0, waiting)
        order.backward(0, waiting[1:])
        assert order.expected(waiting[1:]) == (([1, 2], True) if step else ([], True))
        order.backward(1, waiting[1:])
        order.backward(2, waiting[2:])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_order, "_MOST_REMEMBERED", 50)
    order = BackwardOrder()
    for seed in range(40):
        run(order, [(kind, seed if kind == "F" else which) for kind, which in at_random(seed)])
    assert len(order._next) == len(order._next_place) == 50
    # The youngest are remembered.
    assert all(g.is_exact for g in run(order, [(k, 39 if k == "F" else w) for k, w in at_random(39)]))
