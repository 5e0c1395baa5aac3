"""How much host memory this process may pin."""

from __future__ import annotations

from pathlib import Path

import psutil

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


def default_host_budget_bytes() -> int:
    """``DEFAULT_SHARE`` of the machine's memory, or of the control group's limit where there is one.

    Read again at every growth: some virtual machines report more memory once it is used.
    """
    total = psutil.virtual_memory().total
    limit = cgroup_limit_bytes()
    return int(DEFAULT_SHARE * (limit if limit is not None else total))
