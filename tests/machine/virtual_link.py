"""A GPU's streams and events in virtual time, so that measurements with them have a known answer.

Every stream has a clock of its own, moved on by the work put on it: a copy by latency and bytes, anything else by a
fixed time. Host time does not count, as on a device whose queue is full. Copies are put on the stream that is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOLD_MS = 0.25  # of one matmul


class VirtualLink:
    """A link of known latency and rates (bytes per millisecond), alone and while the other direction copies.

    It stands for the pinner as well: memory registered with it is host memory, everything else device memory.
    """

    pinned = True

    def __init__(self, latency_ms: float, down: float, up: float, duplex_down: float, duplex_up: float) -> None:
        self.latency_ms = latency_ms
        self.rates = {("d2h", False): down, ("h2d", False): up, ("d2h", True): duplex_down, ("h2d", True): duplex_up}
        self.main = Stream()
        self.current = self.main
        self.streams: list[Stream] = []
        self.registered: dict[int, int] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        direction = "d2h" if self._is_host(target) else "h2d"
        assert self._is_host(target) != self._is_host(source), "a copy that does not cross the link"
        stream = self.current
        assert stream is not self.main, "a copy on the compute stream"
        busy = any(other is not stream and other.now_ms > stream.now_ms for other in self.streams)
        stream.now_ms += self.latency_ms + target.numel() / self.rates[direction, busy]

    def synchronize(self, device: object = None) -> None:
        latest = max(stream.now_ms for stream in (self.main, *self.streams))
        for stream in (self.main, *self.streams):
            stream.now_ms = latest

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def _is_host(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return any(at <= start and start + tensor.numel() <= at + size for at, size in self.registered.items())


class Stream:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def wait_event(self, event: Event) -> None:
        self.now_ms = max(self.now_ms, event.at_ms)


class Event:
    def __init__(self, link: VirtualLink) -> None:
        self.at_ms = -1.0
        self._link = link

    def record(self, stream: Stream | None = None) -> None:
        self.at_ms = (stream or self._link.current).now_ms

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms >= 0 <= end.at_ms, "an event that was not recorded"
        return end.at_ms - self.at_ms


class _Intercept(TorchDispatchMode):
    def __init__(self, link: VirtualLink) -> None:
        super().__init__()
        self._link = link

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._link.copy(args[0], args[1])
            return args[0]
        if func is torch.ops.aten.mm.out:
            self._link.current.now_ms += HOLD_MS
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@contextmanager
def installed(link: VirtualLink) -> Iterator[None]:
    """Replace torch.cuda's streams and events, and see every copy and matmul of this thread."""

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, link.current = link.current, stream
        yield
        link.current = before

    def make_stream(device: object = None) -> Stream:
        link.streams.append(Stream())
        return link.streams[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", make_stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(link))
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "synchronize", link.synchronize)
        with _Intercept(link):
            yield
