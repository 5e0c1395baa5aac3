"""Reports fxoffload's work and memory: counters, compiled graphs, host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxoffload.compiled_graph import graphs as graphs
from fxoffload.compiled_graph import override_policy as override_policy
from fxoffload.counters import Stats, counters
from fxoffload.plan_report.registry import plans
from fxoffload.runtime.engine import Budgets, engine_for, engines
from fxoffload.runtime.host_memory.limits import describe_host_memory, describe_locked_memory
from fxoffload.sizes import format_bytes, parse_bytes
from fxoffload.tell import warn


def stats() -> Stats:
    """A snapshot of all counters. Waits for the copies that are still running (it reads their timers)."""
    found = engines()
    return counters.snapshot(
        host_bytes_in_use=sum(e.host_bytes_in_use() for e in found),
        host_bytes_reserved=sum(e.arena.reserved_bytes for e in found),
        host_wait_ms=sum(e.arena.wait_ms for e in found),
        num_host_growths=sum(e.arena.num_growths for e in found),
        exposed_copy_ms=sum(e.streams.exposed_ms() for e in found),
        num_groups_on_tape=sum(len(e.save_order) for e in found),
    )


def metrics() -> dict[str, float]:
    """What a training loop may log: ``stats()`` and the last plan in one flat dict, names to numbers.

    Names begin with ``fxoffload/``. Counters count from the start of the process or the last ``reset_stats()``; those
    by reason are summed. Of the last plan there are ``planned_step_ms``, ``planned_exposed_ms`` and
    ``planned_peak_bytes``, and ``measured_...`` of the same once its steps were measured; ``between_steps_ms`` as
    ``Plan`` has it. ``device_peak_bytes``, where CUDA is used, is torch's own peak of this process. Waits for copies
    that are still running, as ``stats()`` does.
    """
    found: dict[str, float] = {}
    for name, value in vars(stats()).items():
        found[name] = float(sum(value.values()) if isinstance(value, Mapping) else value)
    for plan in plans()[-1:]:
        paper = plan.calibrated or plan.predicted
        numbers = {
            "planned_step_ms": paper.step_ms,
            "planned_exposed_ms": paper.exposed_ms,
            "planned_peak_bytes": paper.peak_bytes,
            "measured_step_ms": plan.measured_step_ms,
            "measured_exposed_ms": plan.measured_exposed_ms,
            "measured_peak_bytes": plan.measured_peak_bytes,
            "between_steps_ms": plan.between_steps_ms,
        }
        found |= {name: float(number) for name, number in numbers.items() if number is not None}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return {f"fxoffload/{name}": number for name, number in found.items()}


def reset_stats() -> None:
    """Set every counter to zero. Numbers of the present (host memory, groups on the save order) are no counters and
    stay."""
    counters.reset()
    for engine in engines():
        engine.streams.reset_exposed()
        engine.arena.wait_ms = 0.0
        engine.arena.num_growths = 0


def release_host_memory() -> int:
    """Give all host memory back to the operating system; the next step pins it anew. Returns bytes.

    Raises:
        RuntimeError: offloaded values are waiting for their backward.
    """
    return sum(engine.release_host_memory() for engine in engines())


def reserve_host_memory(size: int | str, device: torch.device | str | None = None) -> None:
    """Pin host memory in the background, so that no step waits for it.

    Compiling a graph reserves for one call of that graph. Where a step runs many graphs (a layer compiled on its own,
    microbatches), reserve for the step. That memory stays until ``release_host_memory()``, even where steps
    need less.

    Args:
        size: bytes, or a string such as "34GiB". More than this process may pin is told, and not reserved.
        device: the device whose values will use it; default: the current CUDA device, else the CPU rehearsal.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    nbytes, engine, budgets = parse_bytes(size, "size"), engine_for(torch.device(device)), Budgets(None, None, None)
    if nbytes > (most := engine.host_budget_bytes(budgets)):
        warn(
            f"expected at most {format_bytes(most)}, which is what this process may pin (host memory: "
            f"{describe_host_memory()}; ulimit -l: {describe_locked_memory()}), found {format_bytes(nbytes)}: "
            f"{format_bytes(most)} are reserved. Ask for less, or give the machine or its container more memory"
        )
    engine.reserve(nbytes, budgets, stays=True)
