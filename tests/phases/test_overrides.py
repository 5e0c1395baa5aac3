"""Methods that are replaced again and again, while others replace them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxoffload.phases import OffloadedError
from fxoffload.phases.guarding.overrides import Override

from .phase_support import make, rehearse, train


class Thing:
    """Has a method."""

    def work(self, x: int) -> int:
        return x + 1


class Wrapper:
    """A callable object around a method."""

    def __init__(self, inner: Callable[..., int]) -> None:
        self.inner = inner

    def __call__(self, x: int) -> int:
        return self.inner(x) + 10


def closure(inner: Callable[..., int]) -> Callable[..., int]:
    return lambda x: inner(x) + 10


def of_the_function(inner: Any) -> Callable[..., int]:
    """As learning rate schedulers do it."""
    target, function = getattr(inner, "__self__", None), getattr(inner, "__func__", inner)

    @functools.wraps(function)
    def wrapper(*args: Any) -> int:
        return (function if target is None else function.__get__(target, type(target)))(*args) + 10

    return wrapper


def partial(inner: Callable[..., int]) -> Callable[..., int]:
    return functools.partial(lambda call, x: call(x) + 10, inner)


def bound(inner: Callable[..., int]) -> Callable[..., int]:
    return Wrapper(inner).__call__


class Slots:
    """A wrapper that is not looked into."""

    __slots__ = ("inner",)

    def __init__(self, inner: Callable[..., int]) -> None:
        self.inner = inner

    def __call__(self, x: int) -> int:
        return self.inner(x) + 10


def deep(inner: Callable[..., int]) -> Callable[..., int]:
    """One more layer than are looked through."""
    for _ in range(9):
        inner = (lambda call: lambda x: call(x))(inner)
    return lambda x: inner(x) + 10


WRAPPERS = [closure, of_the_function, partial, Wrapper, bound]
UNSEEN = [Slots, deep]  # that are wrapped around an override is known once they have called it


def counted(thing: Any) -> tuple[Override, list[int]]:
    calls: list[int] = []

    def call(original: Callable[..., int], x: int) -> int:
        calls.append(x)
        return original(x)

    return Override(thing, "work", call), calls


@pytest.mark.parametrize("wrap", WRAPPERS + UNSEEN)
def test_what_was_wrapped_around_an_override_calls_it_for_good(wrap: Callable[..., Any]) -> None:
    thing: Any = Thing()
    override, calls = counted(thing)
    undo = override.put()
    thing.work = wrap(thing.work)
    undo()
    for i in range(3):
        calls.clear()
        assert thing.work(i) == i + 11
        assert calls == [], "nothing is away"
        undo = override.put()
        assert thing.work(i) == i + 11
        assert calls == [i]
        undo()
    thing.work = wrap(thing.work)
    undo = override.put()
    calls.clear()
    assert (thing.work(0), calls) == (21, [0])
    undo()
    assert (thing.work(0), calls) == (21, [0])


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_was_wrapped_around_the_method_itself_is_called(wrap: Callable[..., Any]) -> None:
    """Before, between and while the override is there, by a caller that had saved it."""
    thing: Any = Thing()
    override, calls = counted(thing)
    own = thing.work
    override.put()()
    assert "work" not in vars(thing)
    theirs = thing.work = wrap(own)
    undo = override.put()
    assert (thing.work(0), calls) == (11, [0])
    thing.work = wrap(theirs)
    assert (thing.work(0), calls) == (21, [0]), "it does not call us"
    undo()
    again = override.put()
    assert (thing.work(0), calls) == (21, [0, 0])
    again()
    assert (thing.work(0), calls) == (21, [0, 0])


def test_an_override_that_was_saved_and_put_back_goes() -> None:
    thing: Any = Thing()
    override, calls = counted(thing)
    undo = override.put()
    saved = thing.work
    undo()
    thing.work = saved
    assert (thing.work(0), calls) == (1, [])
    undo = override.put()
    assert (thing.work(0), calls) == (1, [0])
    undo()
    assert "work" not in vars(thing)


def test_two_overrides_of_one_method_that_do_not_end_in_order() -> None:
    thing: Any = Thing()
    (one, calls), (other, others) = counted(thing), counted(thing)
    undo, undo_other = one.put(), other.put()
    undo()
    undo = one.put()
    assert (thing.work(0), calls, others) == (1, [0], [0])
    undo_other()
    assert (thing.work(1), calls, others) == (2, [0, 1], [0])
    undo()
    assert (thing.work(2), calls, others) == (3, [0, 1], [0])


@pytest.mark.parametrize("made", ["before", "while offloaded"])
def test_a_learning_rate_scheduler(made: str) -> None:
    """A first one made while something is away counts steps around the override, in every later cycle too."""
    model, optimizer = make()
    manager = rehearse(model, optimizer)
    reference, reference_optimizer = make()
    kind = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda i: 0.5**i)
    schedulers = [kind(reference_optimizer)]
    if made == "before":
        schedulers.append(kind(optimizer))
    manager.enter("rollout")
    if made == "while offloaded":
        schedulers.append(kind(optimizer))
    manager.enter("train")
    assert train(model, optimizer, 9) == train(reference, reference_optimizer, 9)  # else there is nothing to be away
    for i in range(3):
        manager.enter("rollout")
        with pytest.raises(OffloadedError, match=r"AdamW\.step\(\)"):
            optimizer.step()
        with manager.phase("train"):
            assert train(model, optimizer, i) == train(reference, reference_optimizer, i)
            for scheduler in schedulers:
                scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125e-2]
    manager.close()


class Raises:
    """A proxy of something that is not there."""

    def __getattribute__(self, name: str) -> Any:
        raise ReferenceError("it is gone")


def test_a_wrapper_that_holds_what_cannot_be_looked_into() -> None:
    thing: Any = Thing()
    held, many = Raises(), [{"row": i} for i in range(300_000)]
    inner = thing.work
    thing.work = lambda x: inner(x) + (10 if held is not None and many else 0)
    override, calls = counted(thing)
    undo = override.put()
    assert (thing.work(1), calls) == (12, [1])
    undo()
    assert thing.work(1) == 12
