"""Random models and random orders of calls, each made from a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
LENGTH = 6

Piece = Callable[["Layer", Tensor], Tensor]


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    return layer.down(F.gelu(layer.up(x)))


def _gated(layer: Layer, x: Tensor) -> Tensor:
    gate, value = layer.up(x).chunk(2, dim=-1)
    return F.silu(gate) * value


def _attention(layer: Layer, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (x, layer.mix(x), x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _norm(layer: Layer, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), layer.scale, layer.shift)


def _batch_norm(layer: Layer, x: Tensor) -> Tensor:
    return layer.batch_norm(x.transpose(1, 2)).transpose(1, 2)


def _convolution(layer: Layer, x: Tensor) -> Tensor:
    return layer.convolution(x.transpose(1, 2)).transpose(1, 2)


def _dropout(layer: Layer, x: Tensor) -> Tensor:
    return F.dropout(layer.mix(x), 0.3, training=layer.training)


def _sorted(layer: Layer, x: Tensor) -> Tensor:
    values, indices = x.sort(dim=1)
    return values.cumsum(1) + x.gather(1, indices.flip(1))


def _experts(layer: Layer, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    weight, chosen = layer.mix(flat).softmax(-1).topk(2, dim=-1)
    source = torch.arange(flat.shape[0], device=x.device).repeat_interleave(2)
    moved = flat[source] * weight.reshape(-1, 1)
    out = torch.zeros_like(flat).index_add(0, (source + chosen.reshape(-1)) % flat.shape[0], moved)
    return out.view_as(x)


def _in_place(layer: Layer, x: Tensor) -> Tensor:
    out = layer.mix(x)
    out[..., ::2].mul_(2).add_(x[..., 1::2])
    return out


def _views(layer: Layer, x: Tensor) -> Tensor:
    turned = layer.mix(x).permute(2, 0, 1)
    return torch.stack([turned[::2], turned.flip(0)[::2]], dim=1).flatten(0, 1).permute(1, 2, 0).exp()


def _cast(layer: Layer, x: Tensor) -> Tensor:
    return F.linear(x.to(torch.bfloat16), layer.mix.weight.to(torch.bfloat16)).float()


def _written_buffer(layer: Layer, x: Tensor) -> Tensor:
    layer.seen.mul_(0.5).add_(x.detach().mean((0, 1)))
    return x * layer.seen.clone()


def _masked(layer: Layer, x: Tensor) -> Tensor:
    return torch.where(x > 0, layer.mix(x), x.sigmoid().expand_as(x))


PIECES: tuple[Piece, ...] = (
    _mlp,
    _gated,
    _attention,
    _norm,
    _batch_norm,
    _convolution,
    _dropout,
    _sorted,
    _experts,
    _in_place,
    _views,
    _cast,
    _written_buffer,
    _masked,
)


class Layer(nn.Module):
    """A residual layer of some pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("seen", torch.ones(WIDTH))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = x + piece(self, x)
        return x / x.detach().abs().mean().clamp(min=1)


class Program(nn.Module):
    """Layers of random pieces; sometimes two share weights, some weights are frozen, and inner values are returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.layers = nn.ModuleList(Layer(rng.sample(PIECES, rng.randint(1, 3))) for _ in range(rng.randint(2, 4)))
        self.head = nn.Linear(WIDTH, 1)
        self.returns_inner = rng.random() < 0.3
        if rng.random() < 0.3:
            self.layers[-1].mix.weight = self.layers[0].mix.weight
        if rng.random() < 0.3:
            self.layers[0].requires_grad_(False)
        self.is_random = any(_dropout in layer.pieces for layer in self.layers)

    def forward(self, x: Tensor) -> Any:
        """A loss for each sequence, and maybe what came out of the first layer."""
        inner = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        loss = self.head(x).square().mean((1, 2))
        return (loss, inner) if self.returns_inner else loss


@dataclass(frozen=True)
class Order:
    """Calls of one model, in the words of ``run``."""

    moves: tuple[tuple[str, int], ...]

    @staticmethod
    def random(seed: int, length: int = 10) -> Order:
        rng = random.Random(seed)
        words = ["forward"] * 5 + ["backward"] * 5 + ["again", "inner", "drop", "no_grad", "eval", "interrupt", "clear"]
        return Order(tuple((rng.choice(words), rng.randrange(100)) for _ in range(length)))

    def run(self, model: Program, call: Callable[[Tensor], Any]) -> None:
        """Gradients add up in ``model``. A move that fits nothing is passed over."""
        open_: list[tuple[Tensor, Tensor | None]] = []
        for number, (word, n) in enumerate(self.moves):
            torch.manual_seed(number)
            x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(n), requires_grad=n % 2 == 0)
            if word in ("forward", "interrupt"):
                out = call(x)
                open_.append(out if isinstance(out, tuple) else (out, None))
                if word == "interrupt":
                    _interrupted(open_.pop()[0])
            elif word == "no_grad":
                with torch.no_grad():
                    call(x)
            elif word == "eval":
                model.eval()
                call(x)
                model.train()
            elif word == "clear":
                model.zero_grad(set_to_none=n % 2 == 0)
            elif open_:
                place = n % len(open_)
                loss, inner = open_[place]
                if word == "again":
                    loss.sum().backward(retain_graph=True)
                    continue
                del open_[place]
                if word == "backward":
                    (loss.sum() + (0 if inner is None else inner.mean())).backward()
                elif word == "inner" and inner is not None and inner.requires_grad:
                    inner.square().mean().backward()
        for loss, _ in open_:
            loss[:1].sum().backward()


def _interrupted(loss: Tensor) -> None:
    """A backward that an exception of the caller's ends."""

    def stop(grad: Tensor) -> None:
        raise InterruptedError

    loss.register_hook(stop)
    with contextlib.suppress(InterruptedError):
        loss.sum().backward()
