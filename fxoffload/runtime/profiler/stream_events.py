"""Points on the compute stream, and the time between them: CUDA's timing events, or the host's time on a CPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch


class Event(Protocol):
    """A point on the compute stream. Can be recorded again."""

    def record(self) -> None: ...
    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""
        ...

    def elapsed_ms(self, later: Any) -> float:
        """Milliseconds between two events that the device has passed."""
        ...


class EventSource(Protocol):
    """Hands out recorded events, and takes back those that were read."""

    def record(self) -> Event: ...
    def give_back(self, events: Iterable[Any]) -> None: ...
    def usable(self) -> bool:
        """Whether events of this source can be recorded and read now."""
        ...


_E = TypeVar("_E", bound=Event)


class PooledEvents(Generic[_E]):
    """Events that are made once and recorded repeatedly.

    Args:
        usable: whether events can be recorded now.
    """

    def __init__(self, make: Callable[[], _E], usable: Callable[[], bool] = lambda: True) -> None:
        self._make = make
        self._free: deque[_E] = deque()
        self.usable = usable
        self.num_made = 0

    def record(self) -> _E:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._make()
            self.num_made += 1
        event.record()
        return event

    def give_back(self, events: Iterable[_E]) -> None:
        self._free.extend(events)


class _CudaEvent:
    """A timing event on the compute stream of one device, whichever device is current."""

    __slots__ = ("_event", "_index")

    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._index))

    def query(self) -> bool:
        return self._event.query()

    def elapsed_ms(self, later: _CudaEvent) -> float:
        return self._event.elapsed_time(later._event)


class _HostEvent:
    """A point in time on the host, where segments run while they are called."""

    __slots__ = ("_at_ms", "_now_ms")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._at_ms = 0.0

    def record(self) -> None:
        self._at_ms = self._now_ms()

    def query(self) -> bool:
        return True

    def elapsed_ms(self, later: _HostEvent) -> float:
        return later._at_ms - self._at_ms


def cuda_events(device: torch.device) -> PooledEvents[_CudaEvent]:
    """Timing events of one device. Not usable while a CUDA graph is captured: there they could not be read."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return PooledEvents(lambda: _CudaEvent(index), lambda: not torch.cuda.is_current_stream_capturing())


def host_events(now_ms: Callable[[], float] = lambda: 1e3 * time.perf_counter()) -> PooledEvents[_HostEvent]:
    """For a CPU: ``now_ms`` tells the time in milliseconds."""
    return PooledEvents(lambda: _HostEvent(now_ms))
