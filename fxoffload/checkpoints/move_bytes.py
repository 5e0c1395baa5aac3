"""Do: one step of a plan, from file to file. Bytes that keep their order never enter this process."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fxoffload.checkpoints.errors import BrokenCheckpointError
from fxoffload.checkpoints.plan_conversion import Reorder
from fxoffload.checkpoints.slices import Slice

# Bytes between two looks at whether to stop, and between two reports of progress.
CHUNK_BYTES = 32 << 20
BUFFER_BYTES = 4 << 20
# A strided copy of 64 rows at a time stays in the cache: 1.3 GB/s against 0.4 for a whole matrix (2880^2, 16 bits).
TILE_ROWS = 64
# The kernel's way of saying that these two files cannot be copied by it.
_NOT_BY_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class StoppedError(Exception):
    """Another worker failed or the user interrupted; raised in workers only."""


class OpenFiles:
    """Files that are read, by path, for several threads."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


@dataclass
class ByteMover:
    """One worker's hands: ``report`` is called with bytes written, ``stopped`` says when to give up."""

    report: Callable[[int], None]
    stopped: Callable[[], bool]
    use_kernel: bool = True
    _buffer: memoryview | None = field(default=None, repr=False)

    def copy(self, source: int, offset: int, target: int, position: int, num_bytes: int) -> None:
        """``num_bytes`` from ``offset`` of one open file to ``position`` of another."""
        end = offset + num_bytes
        while offset < end:
            self._check_stopped()
            wanted = min(CHUNK_BYTES, end - offset)
            # The next chunk is read from the disk while this one is written.
            if ahead := min(CHUNK_BYTES, end - offset - wanted):  # a length of 0 would mean the rest of the file
                os.posix_fadvise(source, offset + wanted, ahead, os.POSIX_FADV_WILLNEED)
            done = self._copy_some(source, offset, target, position, wanted)
            offset, position = offset + done, position + done
            self.report(done)

    def reorder(self, step: Reorder, sources: OpenFiles, target: int) -> None:
        """Fill the step's bytes of ``target`` with its pieces, elements put in their new places."""
        self._check_stopped()
        unit = np.dtype(f"V{step.itemsize}") if step.itemsize not in (1, 2, 4, 8) else np.dtype(f"u{step.itemsize}")
        output = np.empty(step.num_bytes // step.itemsize, dtype=unit)
        for piece in step.pieces:
            given = np.empty(piece.num_bytes // step.itemsize, dtype=unit)
            read_fully(sources.open(piece.path), _bytes_of(given), piece.offset)
            _scatter(_view(given, piece.taken), _view(output, piece.put))
        write_fully(target, _bytes_of(output), step.target)
        self.report(step.num_bytes)

    def _copy_some(self, source: int, offset: int, target: int, position: int, wanted: int) -> int:
        if self.use_kernel:
            try:
                done = os.copy_file_range(source, target, wanted, offset, position)
            except OSError as error:
                if error.errno not in _NOT_BY_KERNEL:
                    raise
                self.use_kernel = False
            else:
                if done:
                    return done
        # Also where the kernel copied nothing: the read says whether the file has ended.
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        view = self._buffer[: min(wanted, BUFFER_BYTES)]
        read_fully(source, view, offset)
        write_fully(target, view, position)
        return len(view)

    def _check_stopped(self) -> None:
        if self.stopped():
            raise StoppedError


def read_fully(file: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``. Raises BrokenCheckpointError where the file ends before."""
    while len(view):
        done = os.preadv(file, [view], offset)
        if not done:
            raise BrokenCheckpointError(
                f"expected {len(view)} more bytes at {offset} of {os.readlink(f'/proc/self/fd/{file}')}, found its "
                "end; it was cut short while being read: fetch it again, or convert when nothing writes to it"
            )
        view, offset = view[done:], offset + done


def write_fully(file: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``."""
    while len(view):
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8).data)


def _view(flat: np.ndarray, where: Slice) -> np.ndarray:
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[where.offset :], (where.rows, where.columns), (where.row_stride * item, where.column_stride * item)
    )


def _scatter(taken: np.ndarray, put: np.ndarray) -> None:
    for row in range(0, len(taken), TILE_ROWS):
        tile = slice(row, row + TILE_ROWS)
        # In the order in which it is written, so that one of the two passes over memory is in order.
        order = "F" if put.strides[0] < put.strides[1] else "C"
        put[tile] = taken[tile].copy(order=order)
