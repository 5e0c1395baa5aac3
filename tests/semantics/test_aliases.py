"""Values that share memory: with each other, with what the caller sees, with what the caller writes to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from tests.support import (
    Block,
    Flip,
    Observed,
    Stack,
    assert_close,
    assert_equal,
    assert_nothing_held,
    batch,
    check_flip,
    compiled,
    effects,
    rehearsal,
    train_step,
)

WIDTH = 16


def flip_against_eager(
    model: nn.Module, loss: Callable[[Callable[..., object]], Tensor], module: Callable[..., object] | None = None
) -> Flip:
    """``loss`` takes the model to call: the compiled one, then the eager one."""
    module = compiled(model) if module is None else module
    flip = check_flip(train_step(model, lambda: loss(module)))
    assert_close(flip.observed, train_step(model, lambda: loss(model))())
    return flip


class WithHidden(Stack):
    """Returns a layer's output too, as views that share memory with what the backward needs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                hidden = torch.relu(x)
                x = hidden
        return self.head(x), hidden.transpose(1, 2), hidden[:, 0]


@pytest.mark.slow_except("(0, 1)")
@pytest.mark.parametrize("used", [(0,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_outputs_that_alias_an_intermediate(used: tuple[int, ...]) -> None:
    model = WithHidden()
    flip = flip_against_eager(model, lambda call: sum((call(batch())[i] ** 2).sum() for i in used))
    # What the caller sees stays on the device.
    (graph,) = flip.graphs
    assert any(s.reason == "the caller sees it" and s.nbytes == 2 * 6 * WIDTH * 4 for s in graph.saved.skipped)


def test_output_that_aliases_an_intermediate_is_the_callers_to_write_to() -> None:
    """Eager's own check notices; offloading does not switch it off for values that it left on the device."""
    model = WithHidden()
    module = compiled(model)
    out, alias, _ = module(batch())
    with torch.no_grad():
        alias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    del out, alias, _
    assert_nothing_held()


class Squares(Block):
    """Saves one tensor for several reasons: the op itself twice, a view, and another view."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.mix = nn.Parameter(torch.randn(6, 6) / 3)
        self.other = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        h = torch.tanh(x)
        # sin, cos: pointwise on h; mix: on its transpose; other: on another shape of the same memory.
        mixed = (self.mix @ h) * h * h / 8
        folded = self.other(h.reshape(-1, 3 * h.shape[-1])).sum()
        return x + mixed + folded


def test_one_tensor_saved_twice_and_as_views_moves_once() -> None:
    model = Stack(block=Squares)
    flip = flip_against_eager(model, lambda call: call(batch()).mean())
    (graph,) = flip.graphs
    _assert_each_storage_moves_once(flip)
    names = [n.name for c in graph.saved.candidates for n in c.nodes]
    assert len(names) == len(set(names))


class FusedAttention(nn.Module):
    """One projection for query, key and value; what attention saves are three slices of one storage."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, w))


@pytest.mark.slow
def test_slices_of_a_fused_projection_move_once() -> None:
    model = Stack(block=FusedAttention, layers=3)
    flip = flip_against_eager(model, lambda call: (call(batch()) ** 2).sum())
    (graph,) = flip.graphs
    fused = [c for c in graph.saved.candidates if c.nbytes == 2 * 6 * 3 * WIDTH * 4]
    assert len(fused) == 3
    assert all(len(c.nodes) == 3 for c in fused), "the partitioner saves the base now: the test tests nothing"
    _assert_each_storage_moves_once(flip)


def _assert_each_storage_moves_once(flip: Flip) -> None:
    (graph,) = flip.graphs
    moved = [c.nbytes for c in graph.saved.candidates]
    # One copy there, one back.
    assert flip.stats.num_copies == 2 * len(moved)
    assert flip.stats.bytes_offloaded == sum(size for size in moved if size is not None)


def test_inputs_that_share_memory_move_once() -> None:
    """Two views of one tensor enter a graph: together they are one storage."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return ((a.sin() * b.transpose(0, 1)) ** 2).sum()

    module = compiled(product)
    leaf = torch.randn(8, 8, requires_grad=True)

    def run() -> Observed:
        leaf.grad = None
        h = leaf * 2
        module(h, h.view(8, 8)).backward()
        assert leaf.grad is not None
        return {"grad": leaf.grad.clone()}

    # A function without layers is one segment.
    flip = check_flip(run, min_segments=1)
    expected = torch.autograd.grad(product(leaf * 2, leaf * 2), leaf)[0]
    torch.testing.assert_close(flip.observed["grad"], expected)
    _assert_each_storage_moves_once(flip)


@pytest.mark.slow
def test_same_tensor_as_two_arguments() -> None:
    model = Bilinear()
    flip_against_eager(model, lambda call: (lambda h: (call(h, h) ** 2).sum())(batch()))


class Bilinear(Stack):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x, y = torch.tanh(layer(x) * y), torch.tanh(layer(y) + x)
        return self.head(x * y)


class Attention(nn.Module):
    """Attention on (batch, heads, tokens, width): its saved output is dense but not contiguous."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_saved_tensors_that_are_not_contiguous() -> None:
    model = Stack(block=Attention, layers=3)
    flip = flip_against_eager(model, lambda call: (call(batch()) ** 2).sum())
    (graph,) = flip.graphs
    moved = [n.meta["val"] for c in graph.saved.candidates for n in c.nodes]
    assert any(v.dim() == 4 and not v.is_contiguous() for v in moved)


@pytest.mark.slow
def test_saved_tensors_with_gaps_and_offsets() -> None:
    """A slice of a wider graph input: strided, at an offset, in a storage that is larger than the view."""

    class Sliced(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = x[:, 1:, ::2]
            return super().forward(y * y.sin())

    model = Sliced()
    wide = torch.randn(2, 7, 2 * WIDTH + 3)[:, :, 3:]
    before = wide.clone()
    flip_against_eager(model, lambda call: (call(wide) ** 2).sum())
    assert torch.equal(wide, before)


@pytest.mark.slow
def test_tuple_outputs() -> None:
    class Several(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, object]]:  # type: ignore[override]
            hidden = []
            for layer in self.layers:
                x = layer(x)
                hidden.append(x)
            return self.head(x), {"hidden": tuple(hidden), "none": None, "number": 3, "first": hidden[0].mean()}

    def loss(call: Callable[..., tuple[Tensor, dict[str, object]]]) -> Tensor:
        out, more = call(batch())
        assert more["none"] is None and more["number"] == 3
        hidden = more["hidden"]
        assert isinstance(hidden, tuple) and isinstance(more["first"], Tensor)
        return (out**2).sum() + hidden[1].sum() + more["first"] * 3

    flip_against_eager(Several(), loss)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(23, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 23, bias=False)
            self.head.weight = self.embed.weight
            self.layers[2].up.weight = self.layers[0].up.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    model = Tied()
    tokens = torch.randint(23, (2, 6), generator=torch.Generator().manual_seed(1))
    flip = flip_against_eager(model, lambda call: call(tokens))
    shapes = {tuple(p.shape) for p in model.parameters()}
    (graph,) = flip.graphs
    assert not [n for c in graph.saved.candidates for n in c.nodes if tuple(n.meta["val"].shape) in shapes]


# -- the caller writes to its inputs -----------------------------------------------------------------------------------


def _writes(kind: str) -> Callable[[Tensor], None]:
    def write(x: Tensor) -> None:
        if kind == "behind autograd's back":
            x.data.fill_(float("nan"))
        else:
            with torch.no_grad():
                x.fill_(float("nan"))

    return write


@pytest.mark.slow_except("behind autograd's back-1", "in sight of autograd-1GiB")
@pytest.mark.parametrize("in_flight_budget", [1, "1GiB"])
@pytest.mark.parametrize("kind", ["behind autograd's back", "in sight of autograd"])
def test_the_caller_may_write_to_a_graph_input_after_the_forward(kind: str, in_flight_budget: int | str) -> None:
    """The copy of a saved graph input holds what the forward read, also where its source is still on the device."""
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(in_flight_budget=in_flight_budget))

    def gradients(write: Callable[[Tensor], None] | None) -> Observed:
        model.zero_grad(set_to_none=True)
        x = batch()
        hidden = model.layers[0](x)
        later = model.layers[1](hidden)
        if write is not None:
            write(hidden)
            write(x)
        (later**2).sum().backward()
        return effects(model)

    expected = gradients(None)
    fxoffload.reset_stats()
    assert_equal(gradients(_writes(kind)), expected)
    assert fxoffload.stats().bytes_offloaded > 0
    assert_nothing_held()


def test_a_kept_graph_input_that_the_caller_writes_to_is_noticed_as_in_eager() -> None:
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal())
    with fxoffload.override_policy("keep_all"):
        hidden = model.layers[0](batch())
        later = model.layers[1](hidden)
        with torch.no_grad():
            hidden.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.sum().backward()


def test_what_the_graph_writes_in_place_stays() -> None:
    """A function of it is saved. (Left to itself, the partition recomputes that from the new value.)"""

    class InPlace(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x * x)
            x.mul_(2)
            return y

    model = InPlace()
    module = compiled(model)
    check_flip(train_step(model, lambda: (module(batch()) ** 2).sum()))
    expected = train_step(model, lambda: (model(batch()) ** 2).sum())()
    assert_close(train_step(model, lambda: (module(batch()) ** 2).sum())(), expected, rtol=1e-4, atol=1e-5)


def test_the_graph_itself_writes_to_an_input() -> None:
    """Not one that the backward reads: there Inductor itself is wrong, it recomputes from the new value."""

    class Counting(Stack):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            seen.add_(y.detach().abs().mean())
            return y

    model = Counting()
    module = compiled(model)

    def step(call: Callable[..., Tensor]) -> Callable[[], Observed]:
        def run() -> Observed:
            model.zero_grad(set_to_none=True)
            seen = torch.ones(3)
            loss = sum((call(batch(i), seen) ** 2).sum() for i in range(2))
            loss.backward()
            return {"seen": seen, "loss": loss.detach(), **effects(model)}

        return run

    flip = check_flip(step(module))
    assert_close(flip.observed, step(model)())
    assert flip.observed["seen"].min() > 1
