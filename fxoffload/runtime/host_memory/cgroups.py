"""The control groups that limit this process' memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group with a limit. ``path``: below the hierarchy's root, "/" for the root itself. ``used_bytes``: without the
    file pages that the kernel gives back before it kills a process."""

    path: str
    limit_bytes: int
    used_bytes: int

    def holds(self, path: str) -> bool:
        """Whether a process whose own group is ``path`` counts against this group."""
        return path == self.path or path.startswith(self.path.rstrip("/") + "/")


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where one version of control groups keeps its files. ``controller``: as ``/proc/self/cgroup`` names it."""

    controller: str
    folder: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


_HIERARCHIES = (
    _Hierarchy("", "", "memory.max", "memory.current", ("inactive_file", "active_file")),  # version 2
    _Hierarchy(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def limited_groups() -> tuple[str, list[ControlGroup]]:
    """The path of this process' own group, and those of that group and its parents that have a limit.

    Inside a container the own path is often "/", or a path of the host that cannot be seen here. So the root, which is
    the container's group, is read in every case.
    """
    for hierarchy in _HIERARCHIES:
        own = _own_path(hierarchy)
        found = [group for path in _with_parents(own) if (group := _read(hierarchy, path)) is not None]
        if found:
            return own, found
    return "", []


def cgroup_limit_bytes() -> int | None:
    """The least memory limit of this process' control group and its parents in bytes; None where there is none."""
    return min((group.limit_bytes for group in limited_groups()[1]), default=None)


def _own_path(hierarchy: _Hierarchy) -> str:
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # A process outside of the namespace's root is shown with "..": its groups cannot be seen from here.
        if hierarchy.controller in controllers.split(",") and ".." not in path.split("/"):
            return path or "/"
    return "/"


def _with_parents(path: str) -> Iterator[str]:
    yield path
    yield from (str(parent) for parent in PurePosixPath(path).parents)


def _read(hierarchy: _Hierarchy, path: str) -> ControlGroup | None:
    folder = _ROOT / hierarchy.folder / path.lstrip("/")
    limit = _number(folder / hierarchy.limit)
    if limit is None or limit >= 1 << 60:  # version 1 says "no limit" with a huge number
        return None
    used = _number(folder / hierarchy.used) or 0
    given_back = sum(_statistic(folder / "memory.stat", name) for name in hierarchy.reclaimable)
    return ControlGroup(path, limit, max(used - given_back, 0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
