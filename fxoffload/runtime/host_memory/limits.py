"""How much host memory this process may pin."""

from __future__ import annotations

import resource

import psutil

from fxoffload.processes import processes_on_this_machine
from fxoffload.runtime.host_memory.cgroups import ControlGroup, limited_groups
from fxoffload.runtime.host_memory.cgroups import cgroup_limit_bytes as cgroup_limit_bytes
from fxoffload.sizes import format_bytes

# Pinned memory cannot be swapped or reclaimed, so some of the machine is left to everything else.
DEFAULT_SHARE = 0.8
# Pageable memory can be, where the machine has swap; but a control group that is full kills the process.
PAGEABLE_SHARE = 0.95


def default_host_budget_bytes() -> int:
    """This process' part of ``DEFAULT_SHARE`` of the machine's memory, or of its control group's limit if lower.

    Read again at every growth: some virtual machines report more memory once it is used.
    """
    total = psutil.virtual_memory().total
    limit = cgroup_limit_bytes()
    return int(DEFAULT_SHARE * min(total, limit if limit is not None else total)) // processes_on_this_machine()


def describe_host_memory() -> str:
    """What there is, and what bounds it: "62.8 GiB, control group 30.0 GiB, shared by 2 processes"."""
    limit, ranks = cgroup_limit_bytes(), processes_on_this_machine()
    found = [format_bytes(psutil.virtual_memory().total)]
    found += [] if limit is None else [f"control group {format_bytes(limit)}"]
    found += [f"shared by {ranks} processes"] if ranks > 1 else []
    return ", ".join(found)


def describe_locked_memory() -> str:
    """``ulimit -l``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def memory_limits() -> tuple[str, list[ControlGroup]]:
    """The path of this process' control group, and all limits of its memory: its groups, then the machine itself
    (with an empty path, under which every process counts)."""
    path, groups = limited_groups()
    memory = psutil.virtual_memory()
    return path, [*groups, ControlGroup("", memory.total, memory.total - memory.available)]
