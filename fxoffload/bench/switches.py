"""Parameters and optimizer state of the decoder leave for the host and return, by ``PhaseManager``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fxoffload.bench.decoder import build
from fxoffload.bench.records import BenchWork, Switches
from fxoffload.bench.steps import spread, synchronize
from fxoffload.phases import PhaseManager

LINK_BYTES, LINK_ROUNDS = 256 << 20, 5


def measure(work: BenchWork) -> Switches:
    """The first offload pins host memory; ``work.cycles`` more do not."""
    device = torch.device(work.device)
    decoder, _ = build(work)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # its state exists from here on
    optimizer.zero_grad(set_to_none=True)
    tensors = _on_device(decoder, optimizer, device)
    sums = [_checksum(tensor) for tensor in tensors]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with PhaseManager(decoder, optimizer, device_types=(work.device,), pin=device.type == "cuda") as manager:
        first = _seconds(manager.offload, device)
        manager.onload()
        downs, ups = [], []
        for _ in range(work.cycles):
            downs.append(moved / 1e9 / _seconds(manager.offload, device))
            ups.append(moved / 1e9 / _seconds(manager.onload, device))
        equal = sums == [_checksum(tensor) for tensor in tensors]
    down, up = _link(device) if device.type == "cuda" else (None, None)
    return Switches(moved, moved / 1e9 / first, spread(downs), spread(ups), down, up, equal)


def _on_device(module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor]:
    """The tensors that leave the device: parameters, buffers, the optimizer's state but for its step counts."""
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    moving = [tensor for tensor in state if tensor.ndim and tensor.device.type == device.type]
    return [*module.parameters(), *module.buffers(), *moving]


def _checksum(tensor: Tensor) -> int:
    """Of the bits, as integers, so that nothing is rounded."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return int(tensor.detach().view(kind).sum(dtype=torch.int64).item())


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _link(device: torch.device) -> tuple[float, float]:
    """GB/s of one pinned copy down and up, the best of a few."""
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    downs = [_seconds(lambda: here.copy_(there, non_blocking=True), device) for _ in range(LINK_ROUNDS)]
    ups = [_seconds(lambda: there.copy_(here, non_blocking=True), device) for _ in range(LINK_ROUNDS)]
    return LINK_BYTES / 1e9 / min(downs), LINK_BYTES / 1e9 / min(ups)
