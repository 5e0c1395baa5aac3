"""Contexts that a training step runs in: no gradient, eval, autocast, a scaler, changing shapes, dropout."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache as fresh_inductor_cache
from torch.utils.checkpoint import checkpoint

import fxoffload
from tests.capture import Tower, example_input
from tests.marks import slow
from tests.support import (
    Block,
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
    rehearsal,
    train_step,
)


def _assert_plain() -> None:
    stats = fxoffload.stats()
    assert (stats.bytes_offloaded, stats.num_copies, stats.host_bytes_in_use) == (0, 0, 0)
    assert (stats.num_segments_compiled, stats.num_groups_on_tape, stats.num_fallbacks) == (0, 0, 0)
    assert not stats.calls_kept


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_gradients_nothing_is_touched(
    context: Callable[[], contextlib.AbstractContextManager[None]], training: bool
) -> None:
    model = Stack(dropout=0.5 if not training else 0.0).train(training)
    module = compiled(model)
    with context():
        actual = module(batch())
        expected = model(batch())
    torch.testing.assert_close(actual, expected)
    _assert_plain()


@pytest.mark.inductor
def test_without_gradients_the_code_is_plain_inductors() -> None:
    model = Stack(layers=2).eval()
    inner = {"inner": "inductor", "inductor": {"fx_graph_cache": False}}
    with torch.no_grad():
        actual = compiled(model, **inner)(batch())
        torch.compiler.reset()
        expected = torch.compile(model)(batch())
    assert torch.equal(actual, expected)
    _assert_plain()


def test_frozen_model_in_training_mode_is_left_alone() -> None:
    model = Stack().requires_grad_(False)
    torch.testing.assert_close(compiled(model)(batch()), model(batch()))
    _assert_plain()


@pytest.mark.slow
def test_eval_with_gradients_trains_like_any_other_mode() -> None:
    model = Stack(dropout=0.5).eval()
    module = compiled(model)
    flip = check_flip(train_step(model, lambda: (module(batch()) ** 2).sum()))
    assert_close(flip.observed, train_step(model, lambda: (model(batch()) ** 2).sum())())


@pytest.mark.slow
def test_training_after_a_forward_without_gradients() -> None:
    """The validation loop in between changes nothing, on the same module."""
    model = Stack()
    module = compiled(model)

    def call() -> Tensor:
        with torch.no_grad():
            module(batch(1))
        return (module(batch()) ** 2).sum()

    check_flip(train_step(model, call))


LENGTHS = (8, 12, 24, 5, 16)


def _run_lengths(
    model: nn.Module, call: Callable[..., Tensor], *, mark: bool
) -> list[tuple[Observed, fxoffload.Stats]]:
    found = []
    for length in LENGTHS:
        x = batch(length=length)
        if mark:
            torch._dynamo.mark_dynamic(x, 1)
        fxoffload.reset_stats()
        found.append((train_step(model, lambda x=x: (call(x) ** 2).sum())(), fxoffload.stats()))
        assert_nothing_held()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("min_bytes", [slow(1), 1100])
@pytest.mark.parametrize("mark", [True, False], ids=["marked", "found out"])
def test_dynamic_shapes_compile_once_and_offload_at_every_length(mark: bool, min_bytes: int) -> None:
    model = Stack()
    eager = _run_lengths(model, model, mark=False)

    before = num_dynamo_graphs()
    _run_lengths(model, torch.compile(model, backend="aot_eager"), mark=mark)
    plain = num_dynamo_graphs() - before
    torch.compiler.reset()

    before = num_dynamo_graphs()
    module = compiled(model, min_bytes=min_bytes)
    offloaded = _run_lengths(model, module, mark=mark)
    assert num_dynamo_graphs() - before == plain == (1 if mark else 2)
    with fxoffload.override_policy("keep_all"):
        kept = _run_lengths(model, module, mark=mark)
    assert num_dynamo_graphs() - before == plain

    for (ours, stats), (theirs, none), (reference, _) in zip(offloaded, kept, eager, strict=True):
        assert_equal(ours, theirs)
        assert_close(ours, reference)
        assert_offloaded(stats)
        assert none.bytes_offloaded == 0
    if min_bytes == 1:
        # Everything that is saved grows with the length: nothing is left out at one of them.
        by_length = {length: stats.bytes_offloaded for length, (_, stats) in zip(LENGTHS, offloaded, strict=True)}
        assert by_length[24] == 2 * by_length[12] == 3 * by_length[8]


@pytest.mark.slow
def test_min_bytes_holds_for_the_size_of_the_call_not_of_the_compilation() -> None:
    model = Stack()
    # The saved values are of 2 x length x 16 (or x 32, or x 1) floats.
    module = compiled(model, min_bytes=2 * 10 * 16 * 4)

    def offloaded(length: int) -> int:
        x = batch(length=length)
        torch._dynamo.mark_dynamic(x, 1)
        fxoffload.reset_stats()
        (module(x) ** 2).sum().backward()
        return fxoffload.stats().bytes_offloaded

    before = num_dynamo_graphs()
    long, short = offloaded(12), offloaded(4)
    assert num_dynamo_graphs() - before == 1
    assert long > 0
    assert short == 0


@pytest.mark.slow
def test_dynamic_shapes_with_a_mask_whose_size_is_computed() -> None:
    """Sizes that are products of symbols cross the cuts."""

    class Folding(Block):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            mask = torch.ones(rows.shape[0], rows.shape[0], dtype=torch.bool).tril()
            scores = (rows @ rows.t()).masked_fill(~mask, float("-inf"))
            return super().forward((scores.softmax(-1) @ rows).reshape(x.shape))

    model = Stack(block=Folding)
    module = compiled(model)
    before = num_dynamo_graphs()
    offloaded = _run_lengths(model, module, mark=True)
    assert num_dynamo_graphs() - before == 1
    with fxoffload.override_policy("keep_all"):
        kept = _run_lengths(model, module, mark=True)
    for (ours, stats), (theirs, _) in zip(offloaded, kept, strict=True):
        assert_equal(ours, theirs)
        assert_offloaded(stats)


@pytest.mark.slow
def test_dynamic_shapes_from_inductor_s_cache() -> None:
    """A segment may be given a product of sizes without its factors, which a whole graph never is."""
    model = Tower(2)

    def run(batches: tuple[int, ...]) -> list[Observed]:
        module = compiled(model, dynamic=True, inner="inductor", recompute="default")
        return [train_step(model, lambda n=n: module(example_input(n)).square().mean())() for n in batches]

    with fresh_inductor_cache():
        found = run((12, 7))
        torch.compiler.reset()
        hits = counters["inductor"]["fxgraph_cache_hit"]
        again = run((9, 12, 7))
    assert counters["inductor"]["fxgraph_cache_hit"] > hits
    for one, other in zip(found, again[1:], strict=True):
        assert_equal(one, other)


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.inductor
def test_a_size_that_inductor_fixes_while_it_compiles_is_not_taken_for_others() -> None:
    """The backward of a convolution has one. Its segment's place in Inductor's cache is one for all sizes."""
    model = Convs()
    x = torch.randn(4, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    with fresh_inductor_cache():
        module = compiled(model, inner="inductor")
        for rows, height in ((2, 4), (3, 6), (4, 8)):
            part = x[:rows, :, :height]
            found, expected = (train_step(model, lambda c=call, p=part: c(p))() for call in (module, model))
            assert_close(found, expected)


@pytest.mark.slow
def test_autocast() -> None:
    model = Stack()
    module = compiled(model)

    def step(call: Callable[..., Tensor]) -> Callable[[], Observed]:
        def forward() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (call(batch()).float() ** 2).sum()

        return train_step(model, forward)

    flip = check_flip(step(module))
    assert_close(flip.observed, step(model)(), rtol=0.05, atol=0.05)
    (graph,) = flip.graphs
    dtypes = {n.meta["val"].dtype for c in graph.saved.candidates for n in c.nodes}
    assert torch.bfloat16 in dtypes
    # Casts of weights derive from parameters alone: they stay.
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    assert not [c.name for c in graph.saved.candidates for n in c.nodes if tuple(n.meta["val"].shape) in shapes]


@pytest.mark.slow
def test_grad_scaler_trains_to_the_same_weights() -> None:
    start = Stack()
    model = copy.deepcopy(start)
    module = compiled(model)

    def train(call: Callable[..., Tensor]) -> Observed:
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # So large that the first step overflows and is skipped.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
        scales = []
        for i in range(4):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (call(batch(i)).float() ** 2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**7] * 4
        weights = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
        return {"loss": loss.detach(), **weights, **effects(model)}

    flip = check_flip(lambda: train(module))
    assert_close(flip.observed, train(model), rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"policy": "offload_all"}, {"policy": "auto", "recompute": "default", "max_slowdown": 99.0}]
)
def test_dropout_is_that_of_eager(options: dict[str, Any]) -> None:
    model = Stack(dropout=0.5)
    module = compiled(model, **options)
    flip = check_flip(train_step(model, lambda: (module(batch()) ** 2).sum()))
    assert_close(flip.observed, train_step(model, lambda: (model(batch()) ** 2).sum())())


def test_dropout_is_that_of_eager_where_a_plan_recomputes() -> None:
    model = Stack(dropout=0.5)
    before = {p.graph for p in fxoffload.plans()}
    module = compiled(model, policy="auto", recompute="cheap", max_slowdown=99.0)
    found = train_step(model, lambda: (module(batch()) ** 2).sum())()
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    assert any(d.action == "recompute" for d in plan.decisions)
    assert_close(found, train_step(model, lambda: (model(batch()) ** 2).sum())())


@pytest.mark.slow
@pytest.mark.inductor
def test_dropout_under_inductor_is_that_of_eager_with_fallback_random() -> None:
    model = Stack(layers=3, dropout=0.5)
    module = compiled(model, inner="inductor", inductor={"fallback_random": True})
    flip = check_flip(train_step(model, lambda: (module(batch()) ** 2).sum()))
    assert_close(flip.observed, train_step(model, lambda: (model(batch()) ** 2).sum())())


@pytest.mark.slow
def test_dropout_inside_a_checkpoint_is_that_of_a_run_that_recomputes_nothing() -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    reference = Stack(dropout=0.5)
    model = Stack(dropout=0.5, block=Checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    module = compiled(model)
    flip = check_flip(train_step(model, lambda: (module(batch()) ** 2).sum()))
    expected = train_step(reference, lambda: (reference(batch()) ** 2).sum())()
    assert_close(flip.observed, expected)
    torch.compiler.reset()
    plain = torch.compile(reference, backend="fxoffload", options=rehearsal(disable=("offload",)))
    assert_equal(flip.observed, train_step(reference, lambda: (plain(batch()) ** 2).sum())())
