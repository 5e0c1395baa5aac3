"""The copy streams of one device, and the null object that stands for them on a CPU.

[Note: Copies and fences]
Five orderings make copies safe without ``record_stream``. Each is a ``Wait`` below. The GPU tests take them out one at
a time to see the numbers go wrong.

SOURCE_READY        The offload stream waits for the compute stream before it reads a source.
SOURCE_DONE         The compute stream waits for the copy before the reference to its source is dropped. The caching
                    allocator may then hand the block to the next op of the compute stream.
TARGET_FREE         The reload stream waits for the compute stream before it writes a target that was allocated there.
TARGET_READY        The compute stream waits for the reload before it reads the target.
HOST_READ           The offload stream waits for the last reload out of a host block before it overwrites the block.
                    Two compute streams may use the same blocks one after the other.

A reload reads its host block only after the copy that wrote it. That needs no wait of its own. If the source of that
copy is still held, it is taken back and nothing is reloaded. Else the compute stream has waited for the copy
(SOURCE_DONE): at its release, or for a graph input before the forward returned. And the reload stream waits for the
compute stream (TARGET_FREE). Groups of another compute stream are never prefetched.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from fxoffload.gc_pause import leave_garbage_to_parent
from fxoffload.runtime.capture_mode import outside_captures
from fxoffload.runtime.copies.giving_way import GivingWay
from fxoffload.runtime.copies.host_lead import HostLead
from fxoffload.runtime.copies.host_pace import HostPace
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.transactions import transaction


class Wait(enum.Enum):
    """The orderings of [Note: Copies and fences]."""

    SOURCE_READY = enum.auto()
    SOURCE_DONE = enum.auto()
    TARGET_FREE = enum.auto()
    TARGET_READY = enum.auto()
    HOST_READ = enum.auto()


class CopyStreams(Protocol):
    """Starts copies and orders them. Events are opaque to the caller."""

    def compute_stream(self) -> Any:
        """The stream that the caller's kernels run on now."""
        ...

    def offload_waits_for_compute(self) -> None: ...
    def offload_waits_for(self, event: object, wait: Wait) -> None: ...
    def reload_waits_for_compute(self) -> None: ...
    def compute_waits_for(self, event: object, wait: Wait, stream: Any = None) -> None: ...
    def offloading(self) -> contextlib.AbstractContextManager[None]:
        """Around one or more ``offload`` calls."""
        ...

    def reloading(self) -> contextlib.AbstractContextManager[None]:
        """Around one or more ``reload`` calls."""
        ...

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        """Starts copies to the host, (target, source), and returns the event after them. ``gives_way``: to small
        copies of others."""
        ...

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        """The same to the device."""
        ...

    def host_waits(self) -> bool:
        """Whether the host reads from the device between offloads, and so waits for all copies queued before that."""
        ...

    def pace(self) -> None:
        """A paced forward call begins on the compute stream: wait, though not for ever, until the device has begun the
        one before it ([Note: Streams that wait])."""
        ...

    def go_back(self) -> None:
        """After an exception broke off copies: put this thread on its own stream, and let later work on a copy stream
        run after them."""
        ...

    def exposed_ms(self) -> float: ...
    def reset_exposed(self) -> None: ...
    def synchronize(self) -> None: ...
    def wait_for_copies(self) -> None:
        """Wait, on any thread, until every copy that was started before is done. Others may be started meanwhile."""
        ...


class HostCopies:
    """The CPU rehearsal: every copy is made at once, so nothing needs to wait."""

    def compute_stream(self) -> None:
        return None

    def offload_waits_for_compute(self) -> None:
        """Nothing runs concurrently with the caller."""

    def offload_waits_for(self, event: object, wait: Wait) -> None:
        """Nothing runs concurrently with the caller."""

    def reload_waits_for_compute(self) -> None:
        """Nothing runs concurrently with the caller."""

    def compute_waits_for(self, event: object, wait: Wait, stream: Any = None) -> None:
        """Nothing runs concurrently with the caller."""

    def offloading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    reloading = offloading

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        for target, source in pieces:
            target.copy_(source)
        return None

    reload = offload

    def host_waits(self) -> bool:
        return False

    def pace(self) -> None:
        """The device is where the host is."""

    def go_back(self) -> None:
        """There are no streams."""

    def exposed_ms(self) -> float:
        return 0.0

    def reset_exposed(self) -> None:
        """There is nothing to forget."""

    def synchronize(self) -> None:
        """Every copy is finished."""

    wait_for_copies = synchronize


class _OnStream:
    """Makes a copy stream the current one, as torch.cuda.stream() does, with less host time: it runs for every segment.

    Args:
        left: by thread: the outermost such block that it is in.
    """

    def __init__(self, stream: torch.cuda.Stream, index: int, left: dict[int, _OnStream]) -> None:
        self._stream, self._index, self._all_left = stream, index, left

    def __enter__(self) -> None:
        self._device, self._before = torch.cuda.current_device(), torch.cuda.current_stream(self._index)
        self._all_left.setdefault(threading.get_ident(), self)
        torch.cuda.set_stream(self._stream)  # also switches the current device to the stream's

    def __exit__(self, *exception: object) -> None:
        self.go_back()

    def go_back(self) -> None:
        """Restore the stream and the device."""
        torch.cuda.set_stream(self._before)
        if self._device != self._index:
            torch.cuda.set_device(self._device)
        mine = threading.get_ident()
        if self._all_left.get(mine) is self:
            del self._all_left[mine]


@outside_captures
def _is_reached(event: torch.cuda.Event) -> bool:
    return event.query()


@outside_captures
def _wait_for(lead: HostLead, event: torch.cuda.Event, behind_step: bool) -> None:
    lead.wait_for(event, behind_step=behind_step)


class CudaCopies:
    """A stream for each direction of the link, so that both directions run at once; see [Note: Giving way].

    ``before_copy``: a hook for tests, called with the stream right before a copy is put on it (to delay it).
    ``left_out``: a wait that tests take out, to see that it is needed.
    """

    _MAX_PENDING = 4096

    def __init__(self, device: torch.device) -> None:
        leave_garbage_to_parent()  # events are in it
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # Device to host: overlaps the forward's kernels.
        self._down = GivingWay(device)
        # Host to device: overlaps the backward's kernels, and the offloads of another microbatch's forward.
        self._up = GivingWay(device)
        self.before_copy: Callable[[torch.cuda.Stream], None] | None = None
        self.left_out: Wait | None = None
        self._host_pace = HostPace()
        self._host_lead = HostLead()
        self._begun: torch.cuda.Event | None = None  # where the latest paced call begins
        self._num_paced = 0  # calls since the latest backward
        self._launched: torch.cuda.Event | None = None  # after the compute stream's work at the last offload
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._exposed_ms = 0.0
        self._lock = ForkSafeRLock()  # to count pending waits
        self._torn = False
        self._left: dict[int, _OnStream] = {}  # by thread: the block in which it is on a copy stream

    @property
    def offload_stream(self) -> torch.cuda.Stream:
        """Work put on it runs after everything that was offloaded so far."""
        return self._down.stream

    @property
    def reload_stream(self) -> torch.cuda.Stream:
        """Work put on it runs after everything that was reloaded so far."""
        return self._up.stream

    def compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._index)

    def offload_waits_for_compute(self) -> None:
        if self.left_out is Wait.SOURCE_READY:
            return
        launched = torch.cuda.Event()
        launched.record(self.compute_stream())
        self.offload_stream.wait_event(launched)
        self._look(launched)

    def _look(self, launched: torch.cuda.Event) -> None:
        before, self._launched = self._launched, launched
        if torch.cuda.current_device() != self._index or torch.cuda.is_current_stream_capturing():
            self._launched = None  # an event of a capture cannot be asked, and only that of this device is known of
        elif before is not None:
            self._host_pace.looked(idle=_is_reached(before))

    def offload_waits_for(self, event: object, wait: Wait) -> None:
        if self.left_out is not wait:
            self.offload_stream.wait_event(event)  # type: ignore[arg-type]

    def reload_waits_for_compute(self) -> None:
        self._launched = None  # whether it is done after a backward says nothing of forwards
        self._num_paced = 0
        if self.left_out is not Wait.TARGET_FREE:
            self.reload_stream.wait_stream(self.compute_stream())

    def compute_waits_for(self, event: object, wait: Wait, stream: torch.cuda.Stream | None = None) -> None:
        """Let the compute stream wait, and measure for how long it stood still."""
        if self.left_out is wait:
            return
        stream = stream or self.compute_stream()
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)  # type: ignore[arg-type]
        after.record(stream)
        self._pending.append((before, after))
        if len(self._pending) > self._MAX_PENDING:
            self._fold(wait_for_them=False)

    def offloading(self) -> contextlib.AbstractContextManager[None]:
        return _OnStream(self.offload_stream, self._index, self._left)

    def reloading(self) -> contextlib.AbstractContextManager[None]:
        return _OnStream(self.reload_stream, self._index, self._left)

    def go_back(self) -> None:
        left = self._left.get(threading.get_ident())
        if left is not None:
            left.go_back()
        for way in (self._down, self._up):
            way.join()

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        return self._copy(self._down, pieces, gives_way)

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        return self._copy(self._up, pieces, gives_way)

    def host_waits(self) -> bool:
        return self._host_pace.waits

    def pace(self) -> None:
        before, self._begun = self._begun if self._num_paced else None, None
        if torch.cuda.current_device() != self._index or torch.cuda.is_current_stream_capturing():
            return  # an event of a capture cannot be asked, and only that of this device is known of
        self._begun = torch.cuda.Event()
        self._begun.record(self.compute_stream())
        self._num_paced += 1
        if before is not None:
            _wait_for(self._host_lead, before, self._num_paced == 2)

    def exposed_ms(self) -> float:
        """Milliseconds that the compute stream stood still for copies. Waits for copies that still run."""
        self._fold(wait_for_them=True)
        return self._exposed_ms

    @transaction
    def reset_exposed(self) -> None:
        self._pending.clear()
        self._exposed_ms = 0.0

    def _mend(self) -> None:
        """A wait that was not counted is not missed."""

    def synchronize(self) -> None:
        for stream in (*self._down.both, *self._up.both):
            stream.synchronize()

    @outside_captures
    def wait_for_copies(self) -> None:
        # A blocking event takes no core while it waits; to wait for a stream would raise in the user's sync debug mode.
        events = []
        for stream in (*self._down.both, *self._up.both):
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            events.append(event)
        for event in events:
            event.synchronize()

    def _copy(self, way: GivingWay, pieces: Iterable[tuple[Tensor, Tensor]], gives_way: bool) -> torch.cuda.Event:
        if self.before_copy is not None:
            self.before_copy(way.stream)
        way.copy(pieces, gives_way=gives_way)
        event = torch.cuda.Event()
        event.record(way.stream)
        return event

    @transaction
    def _fold(self, *, wait_for_them: bool) -> None:
        while self._pending:
            before, after = self._pending[0]
            if wait_for_them:
                after.synchronize()
            elif not after.query():
                if len(self._pending) > 2 * self._MAX_PENDING:
                    self._pending.popleft()
                    continue
                return
            self._pending.popleft()
            self._exposed_ms += before.elapsed_time(after)
