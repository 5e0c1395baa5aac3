"""What a process has in host memory, by kind: to tell what grew when it grew."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from tabulate import tabulate

MIB = 1 << 20
_ROLLUP = Path("/proc/self/smaps_rollup")


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")
        + ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@dataclass(frozen=True)
class ProcessMemory:
    """One reading. Bytes, but for the last two.

    Attributes:
        resident: all pages of the process that are in memory.
        anonymous: those that no file backs: heaps, stacks, the arena, drivers' memory.
        file: those of mapped files, each divided by the processes that share it: libraries, kernels on disk.
        shared: those of shared memory, divided in the same way.
        arena: fxoffload's host memory; part of ``anonymous``.
        malloc_used: bytes that glibc's malloc has handed out, in all threads: native code's objects, large Python ones.
        malloc_free: bytes that it holds back for later.
        device_reserved: GPU memory of torch's caching allocator.
        objects: that Python's garbage collector tracks.
        python_blocks: small blocks of Python's allocator: all objects, tracked or not.
    """

    resident: int
    anonymous: int
    file: int
    shared: int
    arena: int
    malloc_used: int
    malloc_free: int
    device_reserved: int
    objects: int
    python_blocks: int

    @staticmethod
    def read() -> ProcessMemory:
        """Now, with unused memory given back to the system. Kinds that the system does not tell are 0; the arena is 0
        where fxoffload was not imported."""
        import torch

        fxoffload = sys.modules.get("fxoffload")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        info = _MallInfo()
        if hasattr(libc, "mallinfo2"):
            libc.mallinfo2.restype = _MallInfo
            info = libc.mallinfo2()
        kinds = _rollup()
        return ProcessMemory(
            resident=psutil.Process().memory_info().rss,
            anonymous=kinds.get("Anonymous", 0),
            file=kinds.get("Pss_File", 0),
            shared=kinds.get("Pss_Shmem", 0),
            arena=fxoffload.stats().host_bytes_reserved if fxoffload is not None else 0,
            malloc_used=info.uordblks + info.hblkhd,
            malloc_free=info.fordblks,
            device_reserved=torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
            objects=len(gc.get_objects()),
            python_blocks=sys.getallocatedblocks(),
        )

    def since(self, earlier: ProcessMemory) -> ProcessMemory:
        """By how much each kind grew."""
        mine, theirs = asdict(self), asdict(earlier)
        return ProcessMemory(**{name: mine[name] - theirs[name] for name in mine})


def _rollup() -> dict[str, int]:
    """Kind -> bytes, as the kernel says."""
    if not _ROLLUP.exists():
        return {}
    fields = (line.split() for line in _ROLLUP.read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) << 10 for f in fields if len(f) == 3 and f[2] == "kB"}


def table(readings: dict[str, ProcessMemory]) -> str:
    """One column per reading: MiB, and counts for the last two kinds."""
    rows = []
    for kind in asdict(next(iter(readings.values()))):
        values = [getattr(r, kind) for r in readings.values()]
        is_count = kind in ("objects", "python_blocks")
        rows.append([kind, *(str(v) if is_count else f"{v / MIB:.1f} MiB" for v in values)])
    return tabulate(rows, headers=["", *readings], disable_numparse=True)
