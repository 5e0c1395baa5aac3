"""Do: write the shards of a plan with several workers, in bounded memory.

Each worker takes the next step of the plan, so that one reads while another writes. RAM holds, per worker, a buffer of
BUFFER_BYTES where the kernel cannot copy by itself, or the input and output of one expert where elements change places.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from fxoffload.checkpoints.interrupts import held_back
from fxoffload.checkpoints.move_bytes import CHUNK_BYTES, ByteMover, OpenFiles, StoppedError, write_fully
from fxoffload.checkpoints.plan_conversion import Copy, Reorder, Step
from fxoffload.checkpoints.plan_shards import Shard

Progress = Callable[[int, int], None]

# Most bytes of experts in RAM at once, over all workers; one expert's are taken however large.
IN_FLIGHT_BYTES = 512 << 20
POLL_S = 0.1


@dataclass
class _OpenShard:
    file: int
    steps_left: int


@dataclass
class _StreamJob:
    """The state that the workers share; ``lock`` guards all of it."""

    folder: Path
    mode: int
    fsync: bool
    tasks: Iterator[tuple[Shard, Step]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    shards: dict[str, _OpenShard] = field(default_factory=dict)
    sources: OpenFiles = field(default_factory=OpenFiles)
    num_bytes: int = 0
    failure: BaseException | None = None
    stop: bool = False


def write_shards(
    shards: Sequence[Shard], folder: Path, workers: int, *, mode: int, fsync: bool, progress: Progress
) -> None:
    """Write every shard into ``folder``, with the permissions ``mode`` less the umask.

    With ``fsync`` they are on the disk on return.

    ``progress(done, total)`` is called in bytes from this thread. The first failure of a worker is raised here, after
    all of them have ended; so is KeyboardInterrupt, however often Ctrl-C is pressed. Files are left as they are then.
    """
    total = sum(shard.num_bytes - len(shard.header) for shard in shards)
    job = _StreamJob(folder, mode, fsync, ((shard, step) for shard in shards for step in _cut(shard)))
    count = _num_workers(shards, workers)
    # Not Thread.join: interrupted by Ctrl-C, it takes a running thread for ended (bpo-45274), and the caller would
    # remove the folder under its hands.
    pool = ThreadPoolExecutor(count, thread_name_prefix="fxoffload-convert")
    running: list[Future[None]] = []
    with held_back() as held:
        try:
            running += [pool.submit(_work, job) for _ in range(count)]
            while wait(running, timeout=POLL_S).not_done:
                held.deliver()
                progress(job.num_bytes, total)
            progress(job.num_bytes, total)
        finally:
            job.stop = True
            wait(running)
            pool.shutdown()
            job.sources.close()
            for shard in job.shards.values():
                os.close(shard.file)
    if job.failure is not None:
        raise job.failure


def _num_workers(shards: Sequence[Shard], workers: int) -> int:
    largest = max((s.buffer_bytes for shard in shards for s in shard.steps if isinstance(s, Reorder)), default=1)
    return max(1, min(workers, IN_FLIGHT_BYTES // largest))


def _cut(shard: Shard) -> Iterator[Step]:
    """Steps in order, long copies cut so that workers share a shard with few large tensors."""
    if not shard.steps:
        yield Copy(Path(os.devnull), 0, 0, len(shard.header))  # a shard of empty tensors is still a file
    for step in shard.steps:
        if isinstance(step, Reorder) or step.num_bytes <= CHUNK_BYTES:
            yield step
            continue
        for start in range(0, step.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, step.num_bytes - start)
            yield Copy(step.path, step.offset + start, num_bytes, step.target + start)


def _work(job: _StreamJob) -> None:
    def report(num_bytes: int) -> None:
        with job.lock:
            job.num_bytes += num_bytes

    mover = ByteMover(report, lambda: job.stop)
    try:
        while (task := _take(job)) is not None:
            shard, step, target = task
            if isinstance(step, Copy):
                mover.copy(job.sources.open(step.path), step.offset, target, step.target, step.num_bytes)
            else:
                mover.reorder(step, job.sources, target)
            _finish(job, shard)
    except StoppedError:
        pass
    except BaseException as error:  # raised again by write_shards, in the caller's thread
        with job.lock:
            _fail(job, error)


def _fail(job: _StreamJob, error: BaseException) -> None:
    job.failure = job.failure or error
    job.stop = True


def _take(job: _StreamJob) -> tuple[Shard, Step, int] | None:
    with job.lock:
        task = None if job.stop else next(job.tasks, None)
        if task is None:
            return None
        shard, step = task
        if shard.name not in job.shards:
            try:
                file = _create(job.folder / shard.name, shard, job.mode)
            except BaseException as error:
                _fail(job, error)  # before another worker has the lock, and finds the file there
                raise
            job.shards[shard.name] = _OpenShard(file, sum(1 for _ in _cut(shard)))
        return shard, step, job.shards[shard.name].file


def _finish(job: _StreamJob, shard: Shard) -> None:
    """The worker that ends a shard's last step syncs it, while the others go on with the next one."""
    with job.lock:
        opened = job.shards[shard.name]
        opened.steps_left -= 1
        if opened.steps_left:
            return
    try:
        if job.fsync:
            os.fsync(opened.file)
    finally:
        with job.lock:
            os.close(job.shards.pop(shard.name).file)


def _create(path: Path, shard: Shard, mode: int) -> int:
    """The file with its whole length reserved: a full disk is known now, not hours later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.posix_fallocate(file, 0, shard.num_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(file, shard.num_bytes)
        write_fully(file, memoryview(shard.header), 0)
    except BaseException:
        os.close(file)
        raise
    return file
