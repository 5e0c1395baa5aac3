"""What fxoffload did and holds: counters, compiled graphs, host memory."""

from __future__ import annotations

import warnings

import torch

from fxoffload.compiled_graph import graphs as graphs
from fxoffload.compiled_graph import override_policy as override_policy
from fxoffload.counters import Stats, counters
from fxoffload.runtime.engine import Budgets, engine_for, engines
from fxoffload.runtime.host_memory.limits import host_memory_in_words, locked_memory_in_words
from fxoffload.sizes import format_bytes, parse_bytes


def stats() -> Stats:
    """A snapshot of all counters. Waits for the copies that are still running (it reads their timers)."""
    found = engines()
    return counters.snapshot(
        host_bytes_in_use=sum(e.host_bytes_in_use() for e in found),
        host_bytes_reserved=sum(e.arena.reserved_bytes for e in found),
        host_wait_ms=sum(e.arena.wait_ms for e in found),
        num_host_growths=sum(e.arena.num_growths for e in found),
        exposed_copy_ms=sum(e.streams.exposed_ms() for e in found),
        num_groups_on_tape=sum(len(e.tape) for e in found),
    )


def reset_stats() -> None:
    """Set every counter to zero. What is held now (host memory, groups on the tape) is not a counter and stays."""
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
    microbatches), reserve for the step. What is reserved so stays until ``release_host_memory()``, even where steps
    need less.

    Args:
        size: bytes, or a string such as "34GiB". More than this process may pin is told, and not reserved.
        device: the device whose values will use it; default: the current CUDA device, else the CPU rehearsal.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    nbytes, engine, budgets = parse_bytes(size, "size"), engine_for(torch.device(device)), Budgets(None, None, None)
    if nbytes > (most := engine.host_budget_bytes(budgets)):
        warnings.warn(
            f"expected at most {format_bytes(most)}, which is what this process may pin (host memory: "
            f"{host_memory_in_words()}; ulimit -l: {locked_memory_in_words()}), found {format_bytes(nbytes)}: "
            f"{format_bytes(most)} are reserved. Ask for less, or give the machine or its container more memory",
            stacklevel=2,
        )
    engine.reserve(nbytes, budgets, stays=True)
