"""Small models and their inputs, and the machine that they are planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxoffload.machine import CopyCurve, MachineProfile
from tests.support import Block, Halves, Stack, batch

LENGTH = 48


@dataclass(frozen=True)
class Step:
    """A model in training mode, and the arguments of one call."""

    model: nn.Module
    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)


class Gate(nn.Module):
    """A layer of another kind than ``Block``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sigmoid() * x


class Wide(Block):
    """A ``Block`` that saves several times as much."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(6 * width, width)


class Skips(nn.Module):
    """The first layers' outputs are read by the last ones."""

    def __init__(self, half: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
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
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(self.up(x).sigmoid()).exp()


class Gated(nn.Module):
    """A layer that reads a slice of a storage that others read too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.up(x * gate.sin())


class SharedGates(nn.Module):
    """Several slices of one storage are saved, and each layer's backward is the first to read one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.Linear(16, 128)
        self.layers = nn.ModuleList(Gated() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates(x).chunk(8, -1)[::2], strict=True):
            x = layer(x, gate)
        return self.head(x)


class Checkpointed(Stack):
    """A stack under activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(x)


class TwoKinds(nn.Module):
    """Layers of two kinds, in turns, with a graph break after each if ``breaks``."""

    def __init__(self, breaks: bool = True, pairs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.layers = nn.ModuleList(m for _ in range(pairs) for m in (Block(), Gate()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def broken_stack(layers: int, block: Callable[..., nn.Module] = Block) -> Stack:
    """A stack with a graph break after each layer: a graph for each, as if they were compiled one by one."""

    def between(_: int, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    return Stack(layers, between=between, block=block)


def on_batch(model: nn.Module) -> Step:
    return Step(model.train(), (batch(length=LENGTH),))


def stock(name: str, layers: int = 2) -> Step:
    """A Hugging Face model with a tiny configuration."""
    from tests.models.zoo import build

    built = build(name, layers=layers)
    return Step(built.model, kwargs=built.batch)


STEPS: dict[str, Callable[[], Step]] = {
    "stack": lambda: on_batch(Stack(4)),
    "wide": lambda: on_batch(Stack(3, dropout=0.1, block=Wide)),
    "skips": lambda: on_batch(Skips()),
    "heavy head": lambda: on_batch(HeavyHead()),
    "shared gates": lambda: on_batch(SharedGates()),
    "checkpointed": lambda: on_batch(Checkpointed(4)),
    "chain": lambda: on_batch(broken_stack(5)),
    "wide chain": lambda: on_batch(broken_stack(4, Wide)),
    "chain of two kinds": lambda: on_batch(TwoKinds()),
    "halves": lambda: on_batch(Halves(half=2)),
    **{name: (lambda name=name: stock(name)) for name in ("qwen3", "gpt2")},
}


def machine() -> MachineProfile:
    """A GPU so slow that the tiny models above take as long on it, by proportion, as large ones do on a real one."""

    def curve(gb_per_s: float) -> CopyCurve:
        sizes = (256, 4096, 65536)
        return CopyCurve(latency_ms=1e-4, sizes_bytes=sizes, times_ms=tuple(1e-4 + n / (gb_per_s * 1e6) for n in sizes))

    return MachineProfile(
        device_name="Oracle GPU",
        device_type="cuda",
        driver="1",
        torch_version="2.13.0",
        device_memory_bytes=80 << 30,
        d2h=curve(0.20),
        h2d=curve(0.22),
        duplex_d2h=curve(0.17),
        duplex_h2d=curve(0.18),
        matmul_tflop_per_s={"bfloat16": 6e-3, "float32": 3e-3},
        attention_forward_tflop_per_s={"bfloat16": 4e-3, "float32": 2e-3},
        attention_backward_tflop_per_s={"bfloat16": 3e-3, "float32": 1.5e-3},
        memory_gb_per_s=8.0,
        launch_overhead_us=0.01,
        kernel_floor_us=0.1,
        notes="made up",
    )
