"""Private torch APIs of CUDA: the caching allocator's record, and the GPUs in use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class AllocatorEvent(NamedTuple):
    """One allocation, or one free that was asked for. ``nbytes``: as asked for, not as rounded. ``has_frames``: it was
    recorded with a traceback. ``address``: 0 where it is not known. ``stream``: the handle of the one that owns it."""

    is_allocation: bool
    nbytes: int
    has_frames: bool
    address: int = 0
    stream: int = 0


def records_allocator_events() -> bool:
    """Whether the caching allocator records its events now. True where that cannot be known.

    Needed by torch 2.11 to 2.14: ``torch._C._cuda_isHistoryEnabled``, which ends the process where CUDA has not begun
    (H200, torch 2.11).
    """
    if not torch.cuda.is_initialized():
        return False
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_enabled is None or bool(is_enabled())


def record_allocator_events(most: int) -> None:
    """Have the caching allocator record its events on all devices, the last ``most`` of each, without tracebacks.

    Needed by torch 2.11 to 2.14: ``torch.cuda.memory._record_memory_history``.
    """
    # Regions in it are marked by a callback: a global one, since it may end on another thread (autograd's).
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=most, clear_history=True, global_record_annotations=True
    )


def stop_recording_allocator_events() -> None:
    """Have the caching allocator record nothing. Earlier records are gone.

    Needed by torch 2.11 to 2.14: ``torch.cuda.memory._record_memory_history``.
    """
    torch.cuda.memory._record_memory_history(None)


def allocator_events() -> list[list[AllocatorEvent]]:
    """The record of each device, in its order. Takes milliseconds, tens of them where there is much memory.

    Needed by torch 2.11 to 2.14: ``torch.cuda.memory._snapshot``.
    """
    kinds = {"alloc": True, "free_requested": False}
    return [
        [
            AllocatorEvent(kinds[e["action"]], e["size"], bool(e.get("frames")), e.get("addr", 0), e.get("stream", 0))
            for e in trace
            if e["action"] in kinds
        ]
        for trace in torch.cuda.memory._snapshot().get("device_traces", [])
    ]


def gpus_in_use() -> list[int]:
    """The GPUs that this process has a context on; none where it has used none.

    Needed by torch 2.11 to 2.14: ``torch._C._cuda_hasPrimaryContext``.
    """
    if not torch.cuda.is_initialized():
        return []
    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]
