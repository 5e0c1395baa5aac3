"""Copies that happen late, so that a test on a CPU sees who did not wait for them.

``DelayedCopies`` delays what goes to the device. ``LateStreams`` is a device with streams: both directions are late, as
are the kernels that a test queues; each wait can be taken out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxoffload.runtime.copies.streams import Wait

GARBAGE = 255


class Event:
    """Of one copy to the "device": making it happen makes every copy before it happen, as on a stream."""

    def __init__(self, copies: DelayedCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def query(self) -> bool:
        return self._copies.num_made >= self._number

    def synchronize(self) -> None:
        # What the manager's background thread waits for may take for ever: only who reads makes copies happen.
        self._copies.wait(self._number)


class DelayedCopies:
    """To the host at once; to the device when the compute stream waits, or when ``run_all`` lets them.

    Until then the target holds garbage.
    """

    def __init__(self) -> None:
        self._queue: list[list[tuple[Tensor, Tensor]]] = []
        self._changed = threading.Condition()
        self.num_made = 0
        self.num_waits = 0

    def compute_stream(self) -> None:
        return None

    def offload_waits_for_compute(self) -> None:
        pass

    def offload_waits_for(self, event: Any, wait: Any) -> None:
        self._run(event._number)

    def reload_waits_for_compute(self) -> None:
        pass

    def compute_waits_for(self, event: Any, wait: Any, stream: Any = None) -> None:
        self.num_waits += 1
        self._run(event._number)

    def offloading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    reloading = offloading

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> None:
        for target, source in pieces:
            target.copy_(source)

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> Event:
        copies = list(pieces)
        for target, _ in copies:
            target.fill_(GARBAGE)
        with self._changed:
            self._queue.append(copies)
            return Event(self, len(self._queue))

    def go_back(self) -> None:
        pass

    def exposed_ms(self) -> float:
        return 0.0

    def reset_exposed(self) -> None:
        pass

    def synchronize(self) -> None:
        self.run_all()

    wait_for_copies = synchronize

    @property
    def is_busy(self) -> bool:
        return self.num_made < len(self._queue)

    def run_all(self) -> None:
        """The link catches up."""
        self._run(len(self._queue))

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_made >= number)

    def _run(self, number: int) -> None:
        with self._changed:
            for copies in self._queue[self.num_made : number]:
                for target, source in copies:
                    target.copy_(source)
                copies.clear()
                self.num_made += 1
            self._changed.notify_all()


class Work:
    """One thing in a stream: runs after earlier entries, and after those that it waits for. Is the event of a copy."""

    def __init__(self, device: LateStreams, stream: object, run: Callable[[], None], after: Iterable[Work]) -> None:
        self._device, self._run, self._after = device, run, list(after)
        self.stream, self.done = stream, False

    def query(self) -> bool:
        return self.done or (self.stream == "offload" and self._device.left_out is Wait.SOURCE_DONE)

    def synchronize(self) -> None:
        if self.stream == "offload":
            if not self.query():
                self._device.run_until(self)
        elif self._device.held_back and threading.current_thread() is not threading.main_thread():
            self._device.wait(self)
        else:
            self._device.run_until(self)

    def run(self) -> None:
        """With everything that it needs, and nothing else."""
        if self.done:
            return
        for work in self._device.before(self):
            for needed in work._after:
                needed.run()
            if not work.done:
                work.done = True
                work._run()
                work._run, work._after = _nothing, []


def _nothing() -> None:
    pass


class LateStreams:
    """Everything that is queued runs as late as its order allows: when its result is needed.

    Memory is that of the CPU: a copy that runs when its storage was emptied already brings garbage to the host, and
    nothing to the device.

    ``left_out``: a wait that tests take out. Without SOURCE_DONE, copies to the host look finished when they begin.
    ``catches_up``: whether a compute stream that waits runs so far: tests read its results with the CPU. ``held_back``:
    whether a copy to the device is not made because the manager's background thread waits for it. ``waits``: (number of
    the compute stream, wait) of all that compute streams waited for.
    """

    def __init__(self, left_out: Wait | None = None) -> None:
        self.left_out = left_out
        self.catches_up = True
        self.held_back = False
        self.waits: list[tuple[int, Wait]] = []
        self.num_lost = 0
        self._streams: dict[object, list[Work]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._current = threading.local()

    # -- what tests do -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        """This thread's compute stream in the block; 0 elsewhere."""
        before, self._current.number = self._number, number
        try:
            yield
        finally:
            self._current.number = before

    def kernel(self, storage: torch.UntypedStorage, run: Callable[[], object]) -> None:
        """Queues work of the current compute stream on a storage. It is lost where that is empty then."""

        def work() -> None:
            if storage.nbytes():
                run()
            else:
                self.num_lost += 1

        self._queue(self._number, work)

    def run_stream(self, stream: object) -> None:
        """One stream ("offload", "reload", a number) catches up; the others only as far as it waits for them."""
        with self._changed:
            for work in list(self._streams.get(stream, ())):
                work.run()
            self._changed.notify_all()

    def run_all(self) -> None:
        for stream in list(self._streams):
            self.run_stream(stream)

    # -- what the manager does -----------------------------------------------------------------------------------------

    def compute_stream(self) -> int | None:
        # Where there are GPUs, torch.cuda.stream() would take the number for a stream of one.
        return None if torch.cuda.is_available() else self._number

    def offload_waits_for_compute(self) -> None:
        self._order("offload", self._last(self._number), Wait.SOURCE_READY)

    def offload_waits_for(self, event: Any, wait: Wait) -> None:
        self._order("offload", [event], wait)

    def reload_waits_for_compute(self) -> None:
        self._order("reload", self._last(self._number), Wait.TARGET_FREE)

    def compute_waits_for(self, event: Any, wait: Wait, stream: Any = None) -> None:
        number = self._number if stream is None else stream
        self.waits.append((number, wait))
        self._order(number, [event], wait)
        if self.catches_up:
            self.run_stream(number)

    def offloading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    reloading = offloading

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> Work:
        copies = list(pieces)

        def work() -> None:
            for target, source in copies:
                if source.untyped_storage().nbytes():
                    target.copy_(source)
                else:
                    target.fill_(GARBAGE)
                    self.num_lost += 1

        return self._queue("offload", work)

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> Work:
        copies = list(pieces)
        for target, _ in copies:
            target.fill_(GARBAGE)

        def work() -> None:
            for target, source in copies:
                if target.untyped_storage().nbytes():
                    target.copy_(source)
                else:
                    self.num_lost += 1

        return self._queue("reload", work)

    def go_back(self) -> None:
        pass

    def exposed_ms(self) -> float:
        return 0.0

    def reset_exposed(self) -> None:
        pass

    def synchronize(self) -> None:
        self.run_stream("offload")
        self.run_stream("reload")

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        return getattr(self._current, "number", 0)

    def _last(self, stream: object) -> list[Work]:
        with self._changed:
            return self._streams.get(stream, [])[-1:]

    def _order(self, stream: object, after: list[Work], wait: Wait) -> None:
        if self.left_out is not wait and after:
            self._queue(stream, _nothing, after)

    def _queue(self, stream: object, run: Callable[[], None], after: Iterable[Work] = ()) -> Work:
        with self._changed:
            work = Work(self, stream, run, after)
            self._streams[stream] = [*(one for one in self._streams.get(stream, ()) if not one.done), work]
            return work

    def before(self, work: Work) -> list[Work]:
        """The entries before it in its stream, and itself."""
        queue = self._streams[work.stream]
        return queue[: queue.index(work) + 1]

    def run_until(self, work: Work) -> None:
        with self._changed:
            work.run()
            self._changed.notify_all()

    def wait(self, work: Work) -> None:
        with self._changed:
            self._changed.wait_for(lambda: work.done)
