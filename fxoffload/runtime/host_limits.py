"""How much host memory this process may pin."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

# Pinned memory cannot be swapped or reclaimed, so some of the machine is left to everything else.
DEFAULT_SHARE = 0.8

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # cgroup v2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # cgroup v1
)


def cgroup_limit_bytes() -> int | None:
    """The memory limit of this process' control group in bytes; None where there is none."""
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def processes_on_this_machine() -> int:
    """Ranks on this machine, which share its memory: what torchrun (or a launcher with its conventions) says, else as
    many of the process group as there are GPUs to see."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    if count.isdigit() and int(count) > 0:
        return int(count)
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return max(min(dist.get_world_size(), torch.cuda.device_count()), 1)


def default_host_budget_bytes() -> int:
    """This process' part of ``DEFAULT_SHARE`` of the machine's memory, or of its control group's limit if lower.

    Read again at every growth: some virtual machines report more memory once it is used.
    """
    total = psutil.virtual_memory().total
    limit = cgroup_limit_bytes()
    return int(DEFAULT_SHARE * min(total, limit if limit is not None else total)) // processes_on_this_machine()
