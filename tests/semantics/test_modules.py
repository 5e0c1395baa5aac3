"""Kinds of modules, and ways to cut a model into graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.runtime.engine import CopyEngine
from fxoffload.runtime.transfer import Group
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
    segment_calls,
    train_step,
)


def squared(call: Callable[..., Tensor], x: Tensor | None = None) -> Callable[[], Tensor]:
    return lambda: (call(batch() if x is None else x) ** 2).sum()


def flip_against_eager(model: nn.Module, x: Tensor) -> Flip:
    module = compiled(model)
    # Both begin with the buffers as they are now.
    eager, offloaded = (train_step(model, squared(call, x)) for call in (model, module))
    flip = check_flip(offloaded)
    assert_close(flip.observed, eager(), rtol=1e-4, atol=1e-4)
    return flip


@pytest.mark.slow
def test_layer_norm() -> None:
    """Its op has three results: no cut separates them from it."""
    flip = flip_against_eager(Stack(), batch())
    assert "grad layers.3.norm.weight" in flip.observed


class Convolution(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Images(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.head = nn.Linear(8, 5) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


IMAGES = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(5))


def test_batch_norm_writes_its_running_statistics() -> None:
    model = Images(head=True)
    flip = flip_against_eager(model, IMAGES)  # compares the buffers too
    assert flip.observed["buffer layers.2.norm.num_batches_tracked"] == 1
    assert not torch.equal(flip.observed["buffer layers.1.norm.running_mean"], torch.zeros(8))
    # Buffers are never offloaded, nor what the graph writes in place.
    (graph,) = flip.graphs
    assert not [n for c in graph.saved.candidates for n in c.nodes if tuple(n.meta["val"].shape) == (8,) and c.is_input]


def test_batch_norm_in_several_steps() -> None:
    model = Images(head=True)
    module = compiled(model)
    reference = Images(head=True)
    for i in range(3):
        images = IMAGES + i
        for m, call in ((model, module), (reference, reference)):
            m.zero_grad(set_to_none=True)
            call(images).sum().backward()
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert_nothing_held()


def test_batch_norm_in_eval_with_gradients() -> None:
    model = Images(head=True).eval()
    before = [b.clone() for b in model.buffers()]
    flip_against_eager(model, IMAGES)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


class Epilogue(Stack):
    """After the last layer there are only writes to buffers: the segment has no outputs."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.head = nn.Identity()  # type: ignore[assignment]
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("total", torch.zeros(2, 6, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.add_(torch.ones(3))
        self.total.copy_(y.detach())
        return y


def test_segments_without_outputs() -> None:
    model = Epilogue()
    flip = flip_against_eager(model, batch())
    assert torch.equal(flip.observed["buffer seen"], torch.ones(3))
    (graph,) = flip.graphs
    calls = graph.forward.graph.find_nodes(op="call_module")
    assert any(not n.users for n in calls), "every segment has outputs now: the test tests nothing"


class Broken(Stack):
    """Six layers in three graphs of two."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.layers[2:4]:
            x = layer(x)
        print(end="")
        for layer in self.layers[4:]:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
def test_graph_breaks_in_the_middle() -> None:
    model = Broken(layers=6)
    module = compiled(model)
    before = num_dynamo_graphs()
    flip = check_flip(train_step(model, squared(module)))
    assert_close(flip.observed, train_step(model, squared(model))())
    assert num_dynamo_graphs() - before == len(flip.graphs) == 3
    names = [f"layers.{i}" for i in range(6)]
    assert [[c.layer for c in segment_calls(g.forward) if c.layer] for g in flip.graphs] == [
        names[:2],
        names[2:4],
        names[4:],
    ]
    # Between two graphs the residual stream is an output of one and an input of the next: the next one moves it.
    assert all(any(c.is_input for c in g.saved.candidates) for g in flip.graphs)


def test_graph_break_behind_every_layer() -> None:
    """A break inside a loop: Dynamo leaves the loop to Python and compiles its calls, each layer on its own."""

    def between(i: int, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    model = Stack(layers=6, between=between)
    module = compiled(model)
    # One layer has no layers inside: its graph is one segment.
    flip = check_flip(train_step(model, squared(module)), min_segments=1)
    assert_close(flip.observed, train_step(model, squared(model))())


def test_graph_break_inside_a_layer() -> None:
    class BrokenBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            torch._dynamo.graph_break()
            return x + self.down(torch.relu(self.up(h)))

    model = Stack(block=BrokenBlock)
    module = compiled(model)
    # Fragments of one layer have no layers inside: each is one segment.
    flip = check_flip(train_step(model, squared(module)), min_segments=1)
    assert_close(flip.observed, train_step(model, squared(model))())


# -- every layer compiled on its own -----------------------------------------------------------------------------------


def _per_layer(model: Stack, backend: str = "fxoffload", **options: object) -> Stack:
    for layer in model.layers:
        layer.compile(backend=backend, **({"options": rehearsal(**options)} if backend == "fxoffload" else {}))
    return model


def _graphs_compiled(model: Stack) -> int:
    before = num_dynamo_graphs()
    squared(model)().backward()
    squared(model)().backward()
    return num_dynamo_graphs() - before


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_layer_compiled_on_its_own(dropout: float) -> None:
    model = _per_layer(Stack(layers=6, dropout=dropout))
    reference = Stack(layers=6, dropout=dropout)
    # A layer alone has no layers inside: its graph is one segment.
    flip = check_flip(train_step(model, squared(model)), min_segments=1)
    assert_close(flip.observed, train_step(reference, squared(reference))())
    # The residual stream, a graph input, is what a layer's backward needs of its surroundings.
    assert all(any(c.is_input for c in g.saved.candidates) for g in flip.graphs)


@pytest.mark.slow
def test_number_of_compilations_of_layers_compiled_on_their_own() -> None:
    plain = _graphs_compiled(_per_layer(Stack(layers=6), "aot_eager"))
    torch.compiler.reset()
    model = _per_layer(Stack(layers=6))
    assert _graphs_compiled(model) == plain
    # One for an input that needs no gradient (the first layer's), one for all others.
    assert plain == 2
    torch.compiler.reset()
    assert _graphs_compiled(_per_layer(Stack(layers=12))) == 2


class _Watch:
    """Records, when the backward of a group begins, how much of it is on the device already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[tuple[int, int]] = []  # transfers reloaded ahead, of how many
        original = CopyEngine.request

        def request(engine: CopyEngine, group: Group, **kwargs: bool) -> None:
            transfers = group.in_need_order()
            self.ahead.append((sum(t.there is not None for t in transfers), len(transfers)))
            original(engine, group, **kwargs)

        monkeypatch.setattr(CopyEngine, "request", request)


def test_prefetch_goes_across_graphs_in_reverse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _per_layer(Stack(layers=6), prefetch_budget="1MiB")
    squared(model)().backward()
    watch = _Watch(monkeypatch)
    fxoffload.reset_stats()
    squared(model)().backward()
    assert len(watch.ahead) == 6
    ready, total = watch.ahead[0]
    assert ready == 0 and total > 0  # nothing runs before the first backward
    assert all(ready == total > 0 for ready, total in watch.ahead[1:])
    stats = fxoffload.stats()
    assert stats.num_prefetch_misses <= total
    assert stats.bytes_reloaded == stats.bytes_offloaded
    assert_nothing_held()


def test_prefetch_across_graphs_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for about one layer, the next group is ready or on its way, never the one after it."""
    model = _per_layer(Stack(layers=6), prefetch_budget="1MiB")
    squared(model)().backward()
    per_layer = fxoffload.stats().bytes_offloaded // 6
    torch.compiler.reset()

    peak = 0
    original = CopyEngine.prefetch

    def prefetch(engine: CopyEngine, budget_bytes: int, *, reclaimed_share: int, at_least_one: bool) -> None:
        nonlocal peak
        assert at_least_one
        assert reclaimed_share == 0, "a budget that the user set does not grow"
        original(engine, budget_bytes)
        peak = max(peak, engine._ahead_bytes)

    monkeypatch.setattr(CopyEngine, "prefetch", prefetch)
    model = _per_layer(Stack(layers=6), prefetch_budget=per_layer)
    flip = check_flip(train_step(model, squared(model)), min_segments=1)
    assert 0 < peak <= per_layer
    # The budget goes to the values needed next: a part of every group is there when its backward begins.
    watch = _Watch(monkeypatch)
    squared(model)().backward()
    assert [ready > 0 for ready, _ in watch.ahead] == [False] + [True] * 5
    assert flip.stats.bytes_reloaded == flip.stats.bytes_offloaded


@pytest.mark.parametrize("piece", ["cross_graph_prefetch", "prefetch"])
def test_prefetch_across_graphs_can_be_switched_off(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _per_layer(Stack(layers=4), prefetch_budget="1MiB", disable=(piece,))
    run = train_step(model, squared(model))
    first = run()
    watch = _Watch(monkeypatch)
    fxoffload.reset_stats()
    assert_equal(run(), first)
    assert [ready for ready, _ in watch.ahead] == [0] * 4
    misses = fxoffload.stats().num_prefetch_misses
    assert misses == (sum(total for _, total in watch.ahead) if piece == "prefetch" else 0)
    assert_nothing_held()


@pytest.mark.slow
def test_layers_compiled_on_their_own_under_changing_lengths() -> None:
    model = _per_layer(Stack(layers=4))

    def run() -> dict[str, Tensor]:
        found = {}
        for length in (8, 12, 5):
            x = batch(length=length)
            for name, value in train_step(model, squared(model, x))().items():
                found[f"{length} {name}"] = value
        return found

    run()  # finds out that the length changes
    flip_graphs = num_dynamo_graphs()
    fxoffload.reset_stats()
    offloaded = run()
    assert fxoffload.stats().bytes_offloaded == fxoffload.stats().bytes_reloaded > 0
    with fxoffload.override_policy("keep_all"):
        assert_equal(run(), offloaded)
    assert num_dynamo_graphs() == flip_graphs
    assert_nothing_held()


def test_two_models_in_one_step() -> None:
    """A policy and a frozen reference, or an actor and a critic: one save order, two sets of graphs."""
    a, b = Stack(layers=3), Stack(layers=4)
    call_a, call_b = compiled(a), compiled(b)
    both = nn.ModuleList([a, b])

    def call() -> Tensor:
        first = call_a(batch())
        second = call_b(batch(1))
        return (first**2).sum() + (second**2).sum() + (first * second).sum()

    flip = check_flip(train_step(both, call))
    assert len(flip.graphs) == 2
    assert_close(
        flip.observed,
        train_step(both, lambda: ((x := a(batch())) ** 2).sum() + ((y := b(batch(1))) ** 2).sum() + (x * y).sum())(),
    )
    assert all(len(segment_calls(g.forward)) >= 3 for g in flip.graphs)
