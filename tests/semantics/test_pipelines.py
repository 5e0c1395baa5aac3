"""Forwards and backwards of several microbatches in the orders that pipelines run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

import fxoffload
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


def kept(model: Stack, call: Callable[[Tensor], Tensor], orders: Sequence[str]) -> list[Observed]:
    """The same compiled code with everything kept."""
    with fxoffload.override_policy("keep_all"):
        return [step(model, call, order) for order in orders]


@pytest.mark.slow_except("one forward one backward-layers", "the youngest first-whole", "reversed-layers")
@pytest.mark.parametrize("kind", ["whole", "layers"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_microbatches_in_any_order(kind: str, order: str) -> None:
    """Whatever the save order expects. Their plan knows the order (``tests/gpu/test_pipelines.py``)."""
    model, call = make(kind)
    step(model, call, "F0")
    (expected,) = kept(model, call, [order])
    for _ in range(2):
        fxoffload.reset_stats()
        assert_equal(step(model, call, order), expected)
        assert_nothing_held()
        stats = fxoffload.stats()
        assert stats.bytes_reloaded >= stats.bytes_offloaded > 0
        if list(order.replace("F", "")) == sorted(order.replace("F", ""), reverse=True):
            assert stats.num_wrong_predictions == 0


@pytest.mark.slow_except("4KiB")
@pytest.mark.parametrize("prefetch_budget", ["1MiB", "4KiB", 1])
def test_room_for_little_gives_the_same_bits(prefetch_budget: str | int) -> None:
    model = Stack(LAYERS)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(prefetch_budget=prefetch_budget))
    (expected,) = kept(model, model, ["FF0F1F23"])
    for _ in range(2):
        fxoffload.reset_stats()
        assert_equal(step(model, model, "FF0F1F23"), expected)
        stats = fxoffload.stats()
        assert stats.bytes_reloaded == stats.bytes_offloaded > 0  # no backward expects another microbatch's
        assert stats.num_wrong_predictions == 0


def test_a_loss_that_the_caller_keeps_is_not_reloaded_in_every_step() -> None:
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
    # The first step ends with a reload of it. The second begins with another group, and expects it for the last time.
    assert wrong == [0, 1, 0, 0]
    assert again == [True, True, False, False]
    model.zero_grad(set_to_none=True)
    kept_alive.sum().backward()
    late = effects(model)
    model.zero_grad(set_to_none=True)
    call(batch()).sum().backward()
    assert_equal(late, effects(model))
