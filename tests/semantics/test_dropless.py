"""Mixtures of experts that drop no token: how many rows an expert gets is known when the router has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from tests.support import Stack, assert_close, assert_nothing_held, batch, check_flip, num_dynamo_graphs, rehearsal

WIDTH, EXPERTS = 16, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Dropless(nn.Module):
    """Each token goes to one expert; every expert computes the rows that it was given, however many."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(tokens[rows]) * weight[rows].unsqueeze(-1))
        return x + out.view_as(x)


def compile_in(model: Stack, kind: str, **changes: Any) -> Stack:
    layers: list[nn.Module] = [model] if kind == "whole" else list(model.layers)
    for layer in layers:
        layer.compile(backend="fxoffload", fullgraph=True, options=rehearsal(**changes))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "layers"])
def test_what_experts_save_is_offloaded_like_anything_else(kind: str) -> None:
    """One compilation for all routings; the bytes that move are those of the rows that there are."""
    model, reference = compile_in(Stack(3, block=Dropless), kind), Stack(3, block=Dropless)

    def step_of(on: Stack, index: int) -> dict[str, Tensor]:
        on.zero_grad(set_to_none=True)
        loss = on(batch(index, length=20)).square().mean()
        loss.backward()
        # An expert without tokens has gradients of zero.
        return {
            "loss": loss.detach().clone(),
            **{n: p.grad.clone() for n, p in on.named_parameters() if p.grad is not None},
        }

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for index in range(3):

            def run(index: int = index) -> dict[str, Tensor]:
                return step_of(model, index)

            if not index:
                flip = check_flip(run, min_segments=2 if kind == "whole" else 1)
                candidates = [c for g in flip.graphs for c in g.saved.candidates]
                assert any(c.nbytes is None for c in candidates)
                graphs = num_dynamo_graphs()
                observed = flip.observed
            else:
                fxoffload.reset_stats()
                observed = run()
                stats = fxoffload.stats()
                assert stats.bytes_offloaded == stats.bytes_reloaded > 0
                with fxoffload.override_policy("keep_all"):
                    kept = run()
                assert all(torch.equal(observed[n], kept[n]) for n in kept)
            assert_nothing_held()
            assert_close(observed, step_of(reference, index))
        assert num_dynamo_graphs() == graphs


@pytest.mark.slow
def test_more_tokens_for_one_expert_move_as_many_bytes() -> None:
    """All rows to one expert, or spread: the sum is the same, and nothing is padded to a bound."""
    model = compile_in(Stack(1, block=Dropless), "layers")
    router = model.layers[0].router
    moved = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for bias in (0.0, 1e3):
            with torch.no_grad():
                router.bias.zero_()[0] = bias  # type: ignore[union-attr,index]
            fxoffload.reset_stats()
            model(batch(length=20)).square().mean().backward()
            moved.append(fxoffload.stats().bytes_offloaded)
    per_row = 4 * (WIDTH + 2 * 2 * WIDTH)
    assert moved[1] >= 2 * 20 * per_row
    assert abs(moved[1] - moved[0]) < 2 * 20 * 4 * WIDTH  # alignment of ranges, and values of one per expert


@pytest.mark.slow
def test_a_budget_cannot_be_planned_for_and_everything_is_offloaded() -> None:
    """What experts save weighs nothing in a plan: it would keep all of it, or refuse a budget that is large enough."""
    model = Stack(2, block=Dropless)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.warns(UserWarning, match="sizes depend on data"):
            compile_in(model, "whole", policy="auto", activation_budget="1KiB")
            loss = model(batch(length=20)).square().mean()
            loss.backward()
        fxoffload.reset_stats()
        model(batch(length=20)).square().mean().backward()
    moved = fxoffload.stats().bytes_offloaded
    assert moved >= 2 * 20 * 4 * (WIDTH + 2 * 2 * WIDTH)


@pytest.mark.slow
def test_a_budget_for_layers_that_cannot_be_planned_together() -> None:
    model = Stack(2, block=Dropless)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(UserWarning, match="sizes vary from call to call.*budget is not checked"),
    ):
        compile_in(model, "layers", policy="auto", activation_budget="1KiB")
        model(batch(length=20)).square().mean().backward()


@pytest.mark.slow
def test_without_a_budget_what_is_known_is_planned() -> None:
    model = Stack(2, block=Dropless)
    before = {p.graph for p in fxoffload.plans()}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compile_in(model, "whole", policy="auto")
        model(batch(length=20)).square().mean().backward()
    assert len([p for p in fxoffload.plans() if p.graph not in before]) == 1
