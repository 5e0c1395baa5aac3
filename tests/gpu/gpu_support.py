"""A model and helpers for the GPU tests. Everything runs under deterministic algorithms."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoffload.runtime.copies.streams import CudaCopies, Wait
from fxoffload.runtime.engine import CopyEngine, engine_for

MIB = 1 << 20
WIDTH, TOKENS = 512, 2048
CYCLES_PER_MS = 1_900_000


class Block(nn.Module):
    """A pre-norm attention and MLP block; saves about 30 MiB in bf16 at 2048 tokens."""

    def __init__(self, width: int = WIDTH, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """``depth`` blocks, then a scalar."""

    def __init__(self, depth: int = 4, width: int = WIDTH, heads: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def build(depth: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(depth).to("cuda", torch.bfloat16)


def fresh_input(seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, TOKENS // 2, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    """Loss and all gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = step()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def differing(a: list[Tensor], b: list[Tensor]) -> int:
    """How many of two lists of tensors are not bit-equal."""
    assert len(a) == len(b)
    return sum(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def engine() -> CopyEngine:
    return engine_for(torch.device("cuda", torch.cuda.current_device()))


def streams() -> CudaCopies:
    found = engine().streams
    assert isinstance(found, CudaCopies)
    return found


def join(*names: str) -> None:
    """Wait for the threads of these names: of plans, "fxoffload-chain-plan" and "fxoffload-replan"."""
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join()


def sleep(ms: float) -> None:
    """Let the current stream stand still."""
    torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def allocated_above(run: Callable[[], object], counter: str = "allocated_bytes") -> int:
    """Most bytes that were allocated on the device while ``run`` went, above those before it. A block may be up to 1
    MiB larger than its request; ``"requested_bytes"`` counts requests."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[f"{counter}.all.current"]
    run()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"{counter}.all.peak"] - before


def kept_peak(module: nn.Module, step: Callable[[], Tensor]) -> int:
    """Of the second of two steps, as ``allocated_above``. ``step``: makes a loss."""
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        peak = allocated_above(lambda: step().backward())
    return peak


def is_last_reference(tensor: Tensor) -> bool:
    """Whether nothing else holds its memory: not the caller (token ids), nor a later layer (rotary tables)."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # type: ignore[attr-defined]  # the tensor's and this one's


@contextlib.contextmanager
def disturbed(seed: int, *, left_out: Wait | None = None, longest_ms: float = 3.0) -> Iterator[None]:
    """Delay every copy by a random time and poison the memory that is given up; optionally take one wait out."""
    chance = random.Random(seed)

    def delay(stream: Any) -> None:
        if chance.random() < 0.7:
            sleep(chance.uniform(0.2, longest_ms))

    def poison(source: Tensor) -> None:
        if is_last_reference(source):
            source.fill_(0xFF)  # NaN in every float type; on the current stream, which these tests forward on

    copies, moves = streams(), engine()
    copies.before_copy, copies.left_out, moves.on_drop = delay, left_out, poison
    try:
        yield
    finally:
        torch.cuda.synchronize()
        copies.before_copy = copies.left_out = moves.on_drop = None


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would hide a read of memory that nothing wrote.
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
