"""When forwards and backwards run, how often, and the rest when they do not."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxoffload
from tests.support import (
    Observed,
    Stack,
    assert_close,
    assert_equal,
    assert_nothing_held,
    assert_offloaded,
    batch,
    check_flip,
    compiled,
    effects,
    num_dynamo_graphs,
    segment_calls,
    train_step,
)


def scenario(
    model: Stack, body: Callable[[Callable[..., Tensor]], None]
) -> Callable[[Callable[..., Tensor]], Observed]:
    """``body`` on an empty set of gradients; returns every gradient."""

    def run(call: Callable[..., Tensor]) -> Observed:
        model.zero_grad(set_to_none=True)
        body(call)
        return effects(model)

    return run


@pytest.mark.slow_except("(1, 2, 0)")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_several_forwards_before_backward(order: tuple[int, ...]) -> None:
    model = Stack()
    module = compiled(model)
    groups_held = []

    def body(call: Callable[..., Tensor]) -> None:
        losses = [(call(batch(i)) ** 2).sum() for i in range(3)]
        groups_held.append(fxoffload.stats().num_groups_on_tape)
        for i in order:
            losses[i].backward()

    run = scenario(model, body)
    eager = run(model)
    groups_held.clear()
    # The tape predicts reverse order; in another one it may prefetch values that are not needed next.
    flip = check_flip(lambda: run(module), reloads=1 if order == (2, 1, 0) else None)
    assert_close(flip.observed, eager)
    assert groups_held == [3, 0, 3]


def test_gradient_accumulation() -> None:
    model = Stack()
    module = compiled(model)

    def body(call: Callable[..., Tensor]) -> None:
        for i in range(4):
            ((call(batch(i)) ** 2).mean() / 4).backward()

    run = scenario(model, body)
    eager = run(model)
    assert_close(check_flip(lambda: run(module)).observed, eager)


@pytest.mark.slow_except("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_retain_graph(inner: str) -> None:
    """With Inductor, segments overwrite their inputs (donation): never values that a later backward needs."""
    model = Stack(layers=3)
    module = compiled(model, inner=inner)
    steps: list[Observed] = []

    def body(call: Callable[..., Tensor]) -> None:
        steps.clear()
        # The first backward of this code runs without retain_graph, later ones with it.
        (call(batch(0)) ** 2).sum().backward()
        model.zero_grad(set_to_none=True)
        loss = (call(batch(1)) ** 2).sum()
        for retain in (True, True, False):
            model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=retain)
            steps.append(effects(model))

    run = scenario(model, body)
    eager = run(model)
    # Two forwards; the second one's bytes come back three times.
    flip = check_flip(lambda: run(module), reloads=2)
    assert_close(flip.observed, eager)
    donates = [c.donates for c in segment_calls(flip.graphs[0].backward)]
    assert any(donates) is (inner == "inductor")
    for other in steps[1:]:
        assert_equal(other, steps[0])
    with fxoffload.override_policy("keep_all"):
        run(module)
    for other in steps[1:]:
        assert_equal(other, steps[0])


def _build() -> tuple[Stack, Callable[..., Tensor]]:
    model = Stack()
    return model, compiled(model)


def test_retained_graph_holds_its_host_memory_until_it_is_dropped(same_code: Callable[..., Any]) -> None:
    _, module = same_code(_build)
    loss = (module(batch()) ** 2).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        held = fxoffload.stats()
        assert held.host_bytes_in_use > 0
        assert held.num_groups_on_tape == 1
    del loss
    assert_nothing_held()


def test_backward_without_retain_graph_returns_the_memory_at_once(same_code: Callable[..., Any]) -> None:
    _, module = same_code(_build)
    loss = (module(batch()) ** 2).sum()
    assert fxoffload.stats().host_bytes_in_use > 0
    loss.backward()
    assert_nothing_held()  # `loss` is alive
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_dropped_graph_returns_its_memory(same_code: Callable[..., Any]) -> None:
    model, module = same_code(_build)
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        loss = (module(batch()) ** 2).sum()
        assert fxoffload.stats().host_bytes_in_use > 0
        assert fxoffload.stats().num_groups_on_tape == 1
        del loss
        assert_nothing_held()
    assert fxoffload.stats().bytes_reloaded == 0
    assert_close(train_step(model, lambda: module(batch()).sum())(), train_step(model, lambda: model(batch()).sum())())
    assert_nothing_held()


class _Trouble(Exception):
    pass


def _next_step_is_fine(model: Stack, module: Callable[..., Tensor], num_graphs: int) -> None:
    assert_nothing_held()
    fxoffload.reset_stats()
    after = train_step(model, lambda: (module(batch()) ** 2).sum())()
    assert_offloaded(fxoffload.stats())
    assert_nothing_held()
    with fxoffload.override_policy("keep_all"):
        assert_equal(after, train_step(model, lambda: (module(batch()) ** 2).sum())())
    assert_close(after, train_step(model, lambda: (model(batch()) ** 2).sum())())
    assert num_dynamo_graphs() == num_graphs


def test_error_of_the_caller_between_forward_and_backward(same_code: Callable[..., Any]) -> None:
    model, module = same_code(_build)
    (module(batch()) ** 2).sum().backward()
    graphs = num_dynamo_graphs()

    def step() -> None:
        loss = (module(batch()) ** 2).sum()
        assert fxoffload.stats().host_bytes_in_use > 0
        if loss.isfinite():
            raise _Trouble
        loss.backward()

    with pytest.raises(_Trouble):
        step()
    gc.collect()
    _next_step_is_fine(model, module, graphs)


def test_create_graph_gives_first_derivatives_and_torchs_own_error_for_second_ones() -> None:
    model = Stack()
    parameters = list(model.parameters())
    messages = []
    for backend in ("aot_eager", "fxoffload"):
        torch.compiler.reset()
        module = compiled(model) if backend == "fxoffload" else torch.compile(model, backend=backend)
        loss = (module(batch()) ** 2).sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        expected = torch.autograd.grad((model(batch()) ** 2).sum(), parameters)
        torch.testing.assert_close(first, expected)
        with pytest.raises(RuntimeError) as caught:
            sum((g**2).sum() for g in first).backward()
        messages.append(str(caught.value))
        del loss, first, caught
    assert messages[0] == messages[1]
    gc.collect()  # a graph of gradients is a cycle
    assert fxoffload.stats().bytes_offloaded > 0
    assert_nothing_held()


def test_exception_in_the_middle_of_the_forward() -> None:
    armed = False

    @torch._dynamo.disable
    def between(i: int, x: Tensor) -> Tensor:
        if armed and i == 1:
            held.append(fxoffload.stats().host_bytes_in_use)
            raise _Trouble
        return x

    held: list[int] = []
    model = Stack(between=between)
    module = compiled(model)
    (module(batch()) ** 2).sum().backward()
    graphs = num_dynamo_graphs()
    armed = True
    with pytest.raises(_Trouble):
        module(batch())
    armed = False
    assert held[0] > 0
    gc.collect()  # the traceback and its frames are a cycle
    _next_step_is_fine(model, module, graphs)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_exception_in_the_middle_of_the_backward(layer: int) -> None:
    armed = False

    def fail(grad: Tensor) -> None:
        if armed:
            raise _Trouble

    @torch._dynamo.disable
    def between(i: int, x: Tensor) -> Tensor:
        if i == layer:
            x.register_hook(fail)
        return x

    model = Stack(between=between)
    module = compiled(model, prefetch_budget="1MiB")  # the groups under it have been prefetched when it fails
    (module(batch()) ** 2).sum().backward()
    graphs = num_dynamo_graphs()
    armed = True
    loss = (module(batch()) ** 2).sum()
    with pytest.raises(_Trouble):
        loss.backward()
    armed = False
    assert fxoffload.stats().host_bytes_in_use > 0
    del loss
    gc.collect()
    _next_step_is_fine(model, module, graphs)


def test_exception_in_the_backward_of_one_graph_then_the_same_graph_again() -> None:
    """A failed backward of a retained graph can be repeated."""
    failures = iter([True])

    def fail(grad: Tensor) -> None:
        if next(failures, False):
            raise _Trouble

    @torch._dynamo.disable
    def between(i: int, x: Tensor) -> Tensor:
        x.register_hook(fail)
        return x

    model = Stack(between=between)
    module = compiled(model)
    loss = (module(batch()) ** 2).sum()
    with pytest.raises(_Trouble):
        loss.backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    actual = effects(model)
    del loss
    gc.collect()
    assert_nothing_held()
    model.zero_grad(set_to_none=True)
    (model(batch()) ** 2).sum().backward()
    assert_close(actual, effects(model))
