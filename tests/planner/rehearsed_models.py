"""The rehearsed models, and the decisions for them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.capture import Block, Tower, example_input
from tests.planner.rehearsal import Decisions, Rehearsal
from tests.support import Stack, batch


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.up(x * gate.sin())


class SharedGates(nn.Module):
    """Several slices of one storage are saved, and each layer's backward is the first to read one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(16, 160)
        self.layers = nn.ModuleList(Gated() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates(x).chunk(10, -1)[::2], strict=False):
            x = layer(x, gate)
        return self.head(x)


class Skips(nn.Module):
    """The first layers' outputs are read by the last ones."""

    def __init__(self, half: int = 3) -> None:
        super().__init__()
        self.depth = half
        self.layers = nn.ModuleList(Block() for _ in range(2 * half))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        waiting: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x) if i < self.depth else layer(x * waiting.pop())
            if i < self.depth:
                waiting.append(x)
        return self.head(x)


class HeavyHead(nn.Module):
    """The code after the layers saves more than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.up = nn.Linear(16, 256)
        self.down = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(self.up(x).sigmoid()).exp()


Make = Callable[[], Rehearsal]


def on_example(model: Callable[[], nn.Module]) -> Make:
    def make() -> Rehearsal:
        torch.manual_seed(0)
        return Rehearsal(model(), lambda call: call(example_input()), lambda out: out.square().sum())

    return make


def on_batch() -> Rehearsal:
    return Rehearsal(Stack(4, dropout=0.1), lambda call: call(batch()), lambda out: out.square().sum())


def qwen3() -> Rehearsal:
    pytest.importorskip("transformers")
    from tests.models.zoo import build

    built = build("qwen3")
    return Rehearsal(built.model, lambda call: call(**built.batch), lambda out: out.loss)


MODELS: dict[str, Make] = {
    "tower": on_example(lambda: Tower(5)),
    "bare tower": on_example(lambda: Tower(3, embed=False)),
    "one layer": on_example(Block),
    "stack": on_batch,
    "shared gates": on_example(SharedGates),
    "skips": on_example(Skips),
    "heavy head": on_example(HeavyHead),
    "qwen3": qwen3,
}


def vectors(rehearsal: Rehearsal, count: int) -> list[Decisions]:
    """The policies, and random decisions."""
    generator = random.Random(0)
    names = [c.name for c in rehearsal.graph.saved.candidates]
    return ["keep_all", "offload_all", "auto"] + [
        {name: generator.random() < share for name in names} for share in [0.2, 0.5, 0.8] for _ in range(count)
    ]
