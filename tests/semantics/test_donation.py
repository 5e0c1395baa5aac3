"""Inductor reuses the memory of a segment's inputs after their last use. It must never be memory with another owner."""

from __future__ import annotations

from collections.abc import Iterator

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
    batch,
    check_flip,
    compiled,
    effects,
    segment_calls,
)

pytestmark = pytest.mark.inductor


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Inductor's own CPU code adds gradients atomically; with one thread the order is fixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_nothing_of_the_callers_is_overwritten() -> None:
    """Input, its gradient, parameters, ``grad_output``, outputs, and gradients that were there before."""
    model = Stack(layers=3)
    module = compiled(model, inner="inductor")
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}

    def run(call=module) -> Observed:
        model.zero_grad(set_to_none=True)
        x = batch().requires_grad_()
        out = call(x)
        seen = out.detach().clone()
        grad_output = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        given = grad_output.clone()
        out.backward(grad_output)
        assert torch.equal(grad_output, given)
        assert torch.equal(out, seen)
        assert torch.equal(x, batch())
        first = effects(model)
        held = {n: p.grad for n, p in model.named_parameters()}
        # A second step leaves the first one's gradients alone: it adds to them.
        again = call(batch(1))
        again.backward(grad_output)
        assert torch.equal(grad_output, given)
        for name, p in model.named_parameters():
            assert p.grad is held[name]
            assert torch.equal(p, parameters[name])
        assert x.grad is not None
        return {**first, "out": seen, "grad x": x.grad, **{f"sum {n}": g for n, g in effects(model).items()}}

    eager = run(model)
    flip = check_flip(run)
    assert_close(flip.observed, eager)
    donates = [c.donates for c in segment_calls(flip.graphs[0].backward)]  # type: ignore[attr-defined]
    assert any(donates), "nothing is donated: the test tests nothing"


def test_donation_changes_no_bit() -> None:
    model = Stack(layers=3)

    def gradients(**options: object) -> Observed:
        torch.compiler.reset()
        model.zero_grad(set_to_none=True)
        (compiled(model, inner="inductor", **options)(batch()) ** 2).sum().backward()
        return effects(model)

    assert_equal(gradients(), gradients(disable=("donation",)))


def test_kept_values_survive_a_backward_that_keeps_its_graph() -> None:
    """Under keep_all autograd hands the same tensors out again: a segment may overwrite a copy of them only."""
    model = Stack(layers=3)
    module = compiled(model, inner="inductor", policy="keep_all")
    loss = (module(batch()) ** 2).sum()
    saved = [t for t in loss.grad_fn.next_functions[0][0].next_functions[0][0].saved_tensors if t is not None]  # type: ignore[union-attr]
    before = [t.clone() for t in saved]
    assert saved
    grads: list[Observed] = []
    for retain in (True, True, False):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=retain)
        grads.append(effects(model))
        if retain:
            assert all(torch.equal(a, b) for a, b in zip(saved, before, strict=True))
    assert_equal(grads[1], grads[0])
    assert_equal(grads[2], grads[0])
    assert fxoffload.stats().num_copies == 0


def test_mixed_decisions_in_one_call() -> None:
    """Some saved values are kept and donated, others reloaded: whichever they are, the bits are the same."""
    alive = set(fxoffload.graphs())
    model = Stack(layers=3)
    module = compiled(model, inner="inductor")

    def run() -> Observed:
        model.zero_grad(set_to_none=True)
        (module(batch()) ** 2).sum().backward()
        return effects(model)

    everything = run()
    (graph,) = [g for g in fxoffload.graphs() if g not in alive]
    names = [c.name for c in graph.saved.candidates]
    with fxoffload.override_policy("keep_all"):
        kept = run()
    assert_equal(everything, kept)
    for step in (2, 3):
        for start in range(step):
            graph.decisions = {name: i % step == start for i, name in enumerate(names)}
            fxoffload.reset_stats()
            assert_equal(run(), kept)
            assert 0 < fxoffload.stats().bytes_offloaded < graph.saved.candidate_bytes
            assert_nothing_held()


def test_gradients_that_are_returned_and_read_on() -> None:
    """A value added to the residual stream has the stream's own gradient: one segment returns it, the next reads it."""

    class Additions(Stack):
        def forward(self, x: Tensor, *additions: Tensor) -> Tensor:  # type: ignore[override]
            for layer, addition in zip(self.layers, additions, strict=True):
                x = layer(x) + addition
            return self.head(x)

    model = Additions(layers=3)
    module = compiled(model, inner="inductor")

    def run(call=module) -> Observed:
        model.zero_grad(set_to_none=True)
        inputs = [batch(i).requires_grad_() for i in range(4)]
        (call(*inputs) ** 2).sum().backward()
        return {**effects(model), **{f"grad {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}}

    eager = run(model)
    assert_close(check_flip(run).observed, eager)


def test_gradient_that_aliases_an_incoming_gradient() -> None:
    """A residual hands its incoming gradient on: what arrives is also what leaves."""

    class Residual(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    model = Residual(layers=3)
    module = compiled(model, inner="inductor")

    def run(call=module) -> Observed:
        model.zero_grad(set_to_none=True)
        x = batch().requires_grad_()
        grad_output = torch.ones(2, 6, 16)
        call(x).backward(grad_output)
        assert torch.equal(grad_output, torch.ones(2, 6, 16))
        assert x.grad is not None
        return {"x": x.grad, **effects(model)}

    eager = run(model)
    assert_close(check_flip(run).observed, eager)
