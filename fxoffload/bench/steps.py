"""Forward and backward of the decoder, compiled in one of three ways: first step, warm-up, timed steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fxoffload
from fxoffload.bench.decoder import build
from fxoffload.bench.records import BenchWork, Kind, Spread, Steps


def measure(work: BenchWork, kind: Kind, activation_budget: int | None) -> Steps:
    """Every step accumulates into gradients that exist and were zeroed, and begins and ends with an idle device."""
    decoder, x = build(work, checkpointing=kind == "checkpoint")
    leaves = [*decoder.parameters(), x]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    how: dict[str, Any] = {"backend": work.inner}
    if kind == "fxoffload":
        how = {"backend": "fxoffload", "options": _options(work, activation_budget)}
    compiled: Callable[[Tensor], Tensor] = torch.compile(decoder, **how)  # type: ignore[assignment]
    device = torch.device(work.device)
    _warm_up_libraries(device)
    first_ms, _ = _step(compiled, x, leaves, device)
    for _ in range(work.warmup):  # the plan is measured and made again in these
        _step(compiled, x, leaves, device)
    before = _start_peak(device)
    times, losses = zip(*(_step(compiled, x, leaves, device) for _ in range(work.steps)), strict=True)
    measured = Steps(
        first_step_s=first_ms / 1e3,
        step_ms=spread(times),
        peak_bytes=_peak(device, before),
        loss=losses[-1],
        gradient_norms=[leaf.grad.double().norm().item() for leaf in leaves if leaf.grad is not None],
    )
    if kind == "fxoffload" and (plans := fxoffload.plans()):
        plan = plans[-1]
        measured.planned_peak_bytes = plan.predicted_peak_bytes
        measured.planned_baseline_peak_bytes = plan.baseline_peak_bytes
        measured.smallest_budget_bytes = plan.smallest_budget_bytes
    return measured


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive) of at least two values."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


def _options(work: BenchWork, activation_budget: int | None) -> dict[str, Any]:
    """Of the fxoffload backend. A rehearsal offloads between two places of host memory, everything there is."""
    found: dict[str, Any] = {"inner": work.inner}
    if activation_budget is not None:
        found["activation_budget"] = activation_budget
    if work.device == "cpu":
        found |= {"device_types": ("cpu",), "min_bytes": 1, "profile": "h200"}
    return found


def _step(
    compiled: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor], device: torch.device
) -> tuple[float, float]:
    """Milliseconds on the host's clock, from an idle device to an idle device, and the loss."""
    for leaf in leaves:
        assert leaf.grad is not None
        leaf.grad.zero_()
    synchronize(device)
    start = time.perf_counter()
    loss = compiled(x)
    loss.backward()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, loss.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_up_libraries(device: torch.device) -> None:
    """cuBLAS and its workspaces, of autograd's thread too, exist before anything is counted."""
    if device.type == "cuda":
        square = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
        (square @ square).sum().backward()
        torch.cuda.synchronize(device)


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int) -> int | None:
    """None on a CPU, whose allocator counts nothing."""
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
