"""Recompute that the user asked for, together with offloading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.runtime.executor import KEPT_FOR_HOOKS, KEPT_IN_BACKWARD
from tests.marks import slow
from tests.support import (
    Block,
    Flip,
    Stack,
    assert_close,
    assert_equal,
    assert_nothing_held,
    batch,
    check_flip,
    compiled,
    num_dynamo_graphs,
    rehearsal,
    train_step,
)

WIDTH, TOKENS = 16, 6
LAYER_INPUT_BYTES = 2 * TOKENS * WIDTH * 4


def squared(call: Callable[..., Tensor]) -> Callable[[], Tensor]:
    return lambda: (call(batch()) ** 2).sum()


def plain_bits(model: torch.nn.Module, call: Callable[[Callable[..., Any]], Tensor]) -> dict[str, Tensor]:
    """The model through the same inner compiler, nothing offloaded and nothing segmented."""
    torch.compiler.reset()
    module = torch.compile(model, backend="fxoffload", options=rehearsal(disable=("offload",)))
    return train_step(model, lambda: call(module))()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", slow("gpt2")])
def test_hf_gradient_checkpointing_inside_one_graph(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import BATCH, HIDDEN, SEQUENCE, build

    # Recompute must draw the dropout masks of the forward again.
    reference, built = (build(name, layers=2, dropout=0.25) for _ in range(2))
    built.model.gradient_checkpointing_enable()  # type: ignore[operator]
    module = compiled(built.model)
    flip = check_flip(train_step(built.model, lambda: built.loss(module)))
    assert_equal(flip.observed, plain_bits(reference.model, reference.loss))

    # What a layer saves is its input.
    graph = max(flip.graphs, key=lambda g: len(g.layer_names))
    assert len(graph.layer_names) == 2
    hidden = [n for c in graph.saved.candidates for n in c.nodes if n.meta["val"].shape == (BATCH, SEQUENCE, HIDDEN)]
    assert len(hidden) >= 2
    torch.compiler.reset()
    fxoffload.reset_stats()
    reference.loss(compiled(reference.model)).backward()
    assert flip.stats.bytes_offloaded < fxoffload.stats().bytes_offloaded / 2


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Block):
    def forward(self, x: Tensor) -> Tensor:
        context_fn = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=context_fn)


class Everything(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _offloaded_bytes(block: type[Block]) -> Flip:
    model = Stack(block=block)
    module = compiled(model)
    flip = check_flip(train_step(model, squared(module)))
    reference = Stack()
    assert_close(flip.observed, train_step(reference, squared(reference))())
    assert_equal(flip.observed, plain_bits(reference, lambda call: squared(call)()))
    return flip


@pytest.mark.slow
def test_selective_checkpointing_offloads_what_its_policy_saves() -> None:
    everything = _offloaded_bytes(Everything)
    selective = _offloaded_bytes(Selective)
    nothing = _offloaded_bytes(Block)
    assert everything.stats.bytes_offloaded < selective.stats.bytes_offloaded < nothing.stats.bytes_offloaded
    (graph,) = selective.graphs
    saved = [c for c in graph.saved.candidates if "mm" in c.producer]
    # The result of `up` of each of four layers; that of `down` is an input of nothing that needs it.
    assert len([c for c in saved if c.nbytes == 2 * LAYER_INPUT_BYTES]) == 4


class Attention(Block):
    """Checkpointed, with what may be random: its recomputation is handed the state of the generator."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)

    def attend(self, x: Tensor) -> Tensor:
        heads = self.norm(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(x + mixed.transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_checkpointed_attention_compiled_layer_by_layer_is_planned() -> None:
    before = {p.graph for p in fxoffload.plans()}
    found = {}
    for policy, changes in {"auto": {"activation_budget": "1GiB"}, "keep_all": {}}.items():
        model = Stack(3, block=Attention)
        for layer in model.layers:
            layer.compile(backend="fxoffload", options=rehearsal(policy=policy, **changes))
        run = train_step(model, squared(model))
        found[policy] = [run() for _ in range(4)][-1]
        assert_nothing_held()
        if policy == "auto":  # a plan goes with its graphs
            assert len([p for p in fxoffload.plans() if p.graph not in before]) == 1
        torch.compiler.reset()
    assert_equal(found["auto"], found["keep_all"])


@pytest.mark.slow_except("0.0-reentrant")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_eager_checkpoint_around_layers_compiled_on_their_own(reentrant: bool, dropout: float) -> None:
    """Checkpoint's own forward saves nothing that could be copied, its recompute must not: the backward reads the
    result at once. The layers outside are offloaded as ever."""
    wrapped = (1, 2)

    class Wrapped(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=reentrant) if i in wrapped else layer(x)
            return self.head(x)

    model, reference = Wrapped(dropout=dropout), Stack(dropout=dropout)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal())
    run = train_step(model, squared(model))
    first = run()
    assert_nothing_held()
    assert_close(first, train_step(reference, squared(reference))())

    graphs = num_dynamo_graphs()
    fxoffload.reset_stats()
    again = run()
    stats = fxoffload.stats()
    assert_nothing_held()
    assert_equal(again, first)
    if reentrant:
        # The first forward runs without gradients: plain code.
        assert dict(stats.calls_kept) == {KEPT_IN_BACKWARD: len(wrapped)}
    else:
        assert dict(stats.calls_kept) == {KEPT_FOR_HOOKS: len(wrapped), KEPT_IN_BACKWARD: len(wrapped)}
    both = stats.bytes_offloaded
    assert both > 0
    assert stats.bytes_reloaded == both

    with fxoffload.override_policy("keep_all"):
        assert_equal(run(), first)
    assert num_dynamo_graphs() == graphs

    # Exactly what the two layers outside the checkpoints save without any checkpoint.
    torch.compiler.reset()
    fxoffload.reset_stats()
    for layer in reference.layers:
        layer.compile(backend="fxoffload", options=rehearsal())
    squared(reference)().backward()
    assert both == fxoffload.stats().bytes_offloaded / 2


@pytest.mark.slow_except("inside-selective", "around-all")
@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_checkpoint_wrapper_and_layers_compiled_on_their_own(inside: bool, selective: bool) -> None:
    """torch's wrapper, as torchtitan and FSDP set it. Around a compiled layer its hooks see saved tensors, so the layer
    keeps everything. Inside of it, values that are still saved are offloaded."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    options = {"context_fn": contexts} if selective else {}
    model, reference = Stack(), Stack()
    for i, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        (wrapped if inside else layer).compile(backend="fxoffload", options=rehearsal())
        model.layers[i] = wrapped
    run = train_step(model, squared(model))
    first = run()
    fxoffload.reset_stats()
    assert_equal(run(), first)
    assert_nothing_held()
    stats = fxoffload.stats()
    with fxoffload.override_policy("keep_all"):
        assert_equal(run(), first)
    expected = train_step(reference, squared(reference))()
    assert_close({n.replace("_checkpoint_wrapped_module.", ""): v for n, v in first.items()}, expected)
    if not inside:
        assert dict(stats.calls_kept) == {KEPT_FOR_HOOKS: 4, KEPT_IN_BACKWARD: 4}
        assert stats.bytes_offloaded == 0
        return
    assert not stats.calls_kept
    # Each layer's input; and under the policy the results of its two products but the last, which nothing reads.
    assert stats.bytes_offloaded == stats.bytes_reloaded == 4 * LAYER_INPUT_BYTES * (3 if selective else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_hf_gradient_checkpointing_of_layers_compiled_on_their_own(name: str) -> None:
    """Transformers' own layers hold their checkpoint: only each one's input is left to offload."""
    pytest.importorskip("transformers")
    from tests.models.zoo import build

    moved = {}
    for checkpointing in (False, True):
        torch.compiler.reset()
        built = build(name, layers=2)
        model = built.model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
            layer.compile(backend="fxoffload", options=rehearsal())
        run = train_step(model, built.loss)
        first = run()
        fxoffload.reset_stats()
        assert_equal(run(), first)
        assert_nothing_held()
        assert not fxoffload.stats().calls_kept
        moved[checkpointing] = fxoffload.stats().bytes_offloaded
        with fxoffload.override_policy("keep_all"):
            assert_equal(run(), first)
    assert 0 < 4 * moved[True] < moved[False]


def test_nothing_is_held_in_the_middle_of_a_backward_that_recomputes() -> None:
    held: list[tuple[int, int]] = []

    def look(grad: Tensor) -> None:
        stats = fxoffload.stats()
        held.append((stats.num_groups_on_tape, stats.host_bytes_in_use))

    class Wrapped(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
                x.register_hook(look)
            return self.head(x)

    model = Wrapped()
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal())
    squared(model)().backward()
    squared(model)().backward()
    assert held == [(0, 0)] * 8


class Accumulates(nn.Module):
    """Checkpointed layers read a buffer that is written after them."""

    is_checkpointed = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def block(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return layer(x * self.mean.sin() + self.mean)

            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        self.mean.add_(x.detach().mean((0, 1)))
        return x


@pytest.mark.slow_except("options0")
@pytest.mark.parametrize(
    "options", [{"policy": "keep_all"}, {"checkpoints": "obey"}, {}, {"activation_budget": "40KB"}]
)
def test_what_is_made_of_a_buffer_that_is_written_later_is_not_recomputed(options: dict[str, Any]) -> None:
    """As torch's own checkpointing would, from what the buffer holds by then."""
    observed = []
    for is_checkpointed in (False, True):
        torch.compiler.reset()
        model = Accumulates()
        model.is_checkpointed = is_checkpointed
        chosen = {"inner": "aot_eager", "device_types": ("cpu",), "min_bytes": 1, "profile": "h200"}
        chosen.update(options if is_checkpointed else {"policy": "keep_all"})
        torch.manual_seed(4)
        torch.compile(model, backend="fxoffload", options=chosen)(torch.randn(2, 24, 16)).square().mean().backward()
        observed.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*observed)
