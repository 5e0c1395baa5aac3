"""The processes that train together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def in_process_group() -> bool:
    """Whether torch.distributed has a process group, be it of one process."""
    return dist.is_available() and dist.is_initialized()


def processes_on_this_machine() -> int:
    """Ranks on this machine, which share its memory: the number from torchrun (or a launcher with its conventions),
    else as many of the process group as there are GPUs to see."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    if count.isdigit() and int(count) > 0:
        return int(count)
    if not in_process_group():
        return 1
    return max(min(dist.get_world_size(), torch.cuda.device_count()), 1)
