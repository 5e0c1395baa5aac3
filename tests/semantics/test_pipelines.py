"""Forwards and backwards of several microbatches in the orders that pipelines run them: what comes back next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.runtime.engine import CopyEngine
from fxoffload.runtime.transfer import Group
from tests.support import Observed, Stack, assert_equal, assert_nothing_held, batch, compiled, effects, rehearsal

LAYERS = 3
# "F" is the next microbatch's forward, a digit the backward of that one.
ORDERS = {
    "one by one": "F0F1F2",
    "reversed": "FFF210",
    "forwards first": "FF01",
    "all forwards first": "FFFF0123",
    "one forward one backward": "FF0F1F23",
    "deeper": "FFF0F1F234",
    "mixed": "FFF1F032",
    "the youngest first": "FF1F2F30",
}


def make(kind: str) -> tuple[Stack, Callable[[Tensor], Tensor]]:
    """A model compiled as a whole, or layer by layer. There is room for all that is reloaded ahead."""
    model = Stack(LAYERS)
    if kind == "whole":
        return model, compiled(model, prefetch_budget="1MiB")
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(prefetch_budget="1MiB"))
    return model, model


def step(model: Stack, call: Callable[[Tensor], Tensor], order: str) -> Observed:
    """Runs the microbatches in this order; their losses and the gradients."""
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for one in order:
        if one == "F":
            losses.append((call(batch(len(losses))) ** 2).sum())
        else:
            losses[int(one)].backward()
    return {**{f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}, **effects(model)}


@dataclass
class Arrivals:
    """When backwards begin: whether everything that they need is on the device already."""

    ready: list[bool]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready = []
        request = CopyEngine.request

        def watched(engine: CopyEngine, group: Group, **kwargs: bool) -> None:
            transfers = group.in_need_order()
            assert transfers
            self.ready.append(all(t.there is not None for t in transfers))
            request(engine, group, **kwargs)

        monkeypatch.setattr(CopyEngine, "request", watched)


def kept(model: Stack, call: Callable[[Tensor], Tensor], orders: Sequence[str]) -> list[Observed]:
    """The same compiled code with everything kept."""
    with fxoffload.override_policy("keep_all"):
        return [step(model, call, order) for order in orders]


def came_too_soon(order: str, layers: int) -> list[bool]:
    """Of each backward of a step: whether it is the first one, or its forward ran after the previous one."""
    found = []
    count, before = 0, 0
    for one in order:
        if one == "F":
            count += 1
        else:
            found += [int(one) >= before] + [False] * (layers - 1)
            before = count
    return found


@pytest.mark.slow_except("one forward one backward-layers", "the youngest first-whole", "reversed-layers")
@pytest.mark.parametrize("kind", ["whole", "layers"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_the_second_step_is_foretold(kind: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = make(kind)
    step(model, call, "F0")
    (expected,) = kept(model, call, [order])
    assert_equal(step(model, call, order), expected)
    arrivals = Arrivals(monkeypatch)
    for _ in range(2):
        fxoffload.reset_stats()
        arrivals.ready.clear()
        assert_equal(step(model, call, order), expected)
        assert_nothing_held()
        stats = fxoffload.stats()
        assert (stats.num_wrong_predictions, stats.num_prefetch_misses) == (0, 0)
        assert stats.bytes_reloaded == stats.bytes_offloaded > 0  # nothing came back twice
        assert [not ready for ready in arrivals.ready] == came_too_soon(order, LAYERS if kind == "layers" else 1)


@pytest.mark.slow_except("layers")
@pytest.mark.parametrize("kind", ["whole", "layers"])
def test_an_order_that_changes_is_wrong_and_counted_and_learned_anew(kind: str) -> None:
    model, call = make(kind)
    orders = ["FFF210", "FFF012", "FFF120", "FFF201", "FF1F20", "FF0F12", "FFF210"]
    expected = kept(model, call, orders)
    wrong: list[int] = []
    for order, same in zip(orders, expected, strict=True):
        for repeated in range(3):
            fxoffload.reset_stats()
            assert_equal(step(model, call, order), same)
            assert_nothing_held()
            stats = fxoffload.stats()
            assert not (repeated and stats.num_wrong_predictions)
            wrong += [] if repeated else [stats.num_wrong_predictions]
    # The first one needs nothing to be learned. From the oldest to the youngest nothing is foretold at first. The last
    # one begins as the one with "201" did.
    assert wrong == [0, 0, 1, 1, 1, 0, 1]


@pytest.mark.slow_except("layers")
@pytest.mark.parametrize("kind", ["whole", "layers"])
def test_a_number_of_microbatches_that_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order learned for one number holds for others."""
    model, call = make(kind)
    for order in ("FFF012", "FF0F1F23"):
        step(model, call, order)
    orders = ["FF01", "FFFF0123", "FFFFF01234", "FF0F1F2F3F45", "FF0F12"]
    expected = kept(model, call, orders)
    arrivals = Arrivals(monkeypatch)
    for order, same in zip(orders, expected, strict=True):
        fxoffload.reset_stats()
        arrivals.ready.clear()
        assert_equal(step(model, call, order), same)
        assert fxoffload.stats().num_wrong_predictions == 0
        assert arrivals.ready[0] is False
        assert all(arrivals.ready[1:])


@pytest.mark.slow_except("4KiB")
@pytest.mark.parametrize("prefetch_budget", ["1MiB", "4KiB", 1])
def test_room_for_little_is_used_for_what_is_next(prefetch_budget: str | int) -> None:
    """Whatever fits, the same bits, and nothing is reloaded twice once the order is known."""
    model = Stack(LAYERS)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(prefetch_budget=prefetch_budget))
    (expected,) = kept(model, model, ["FF0F1F23"])
    for learned in (False, True, True):
        fxoffload.reset_stats()
        assert_equal(step(model, model, "FF0F1F23"), expected)
        stats = fxoffload.stats()
        if learned:
            assert stats.bytes_reloaded == stats.bytes_offloaded > 0
            assert stats.num_wrong_predictions == 0


def test_a_loss_that_somebody_keeps_is_not_reloaded_in_every_step() -> None:
    model, call = make("layers")
    expected = step(model, call, "FF10")
    kept_alive = call(batch())
    wrong, again = [], []
    for _ in range(4):
        fxoffload.reset_stats()
        assert_equal(step(model, call, "FF10"), expected)
        stats = fxoffload.stats()
        wrong.append(stats.num_wrong_predictions)
        again.append(stats.bytes_reloaded > stats.bytes_offloaded)
    # The first step ends with a reload of it; the second one begins with another group.
    assert wrong == [0, 1, 0, 0]
    assert again == [True, False, False, False]
    with torch.no_grad():
        assert kept_alive.isfinite().all()
