"""How a thread of ours begins: on the device of the thread that made it, and not bound by other threads' captures.

[Note: Threads and devices]
A new thread's current device is 0. A call that makes it current (``cudaSetDevice``, to restore the one before) gives
the process a context there: 560 MiB on the first GPU for every other rank of a machine.
"""

from __future__ import annotations

import torch

from fxoffload.runtime.capture_mode import work_during_captures


def device_of_caller() -> int | None:
    """The current device of this thread; None before CUDA is used."""
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def begin_thread(device: int | None) -> None:
    """Called once by each thread of ours; see [Note: Threads and devices] and [Note: Captures and threads].

    Args:
        device: ``device_of_caller()`` of the thread that this one works for.
    """
    use_device(device)
    work_during_captures()


def use_device(device: int | None) -> None:
    """For the next work of this thread."""
    if device is not None:
        torch.cuda.set_device(device)
