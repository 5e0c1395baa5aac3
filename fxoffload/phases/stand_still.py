"""For how long copies let their consumer stand still."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch


class StandStill:
    """A sum of waits: of the consumer's stream on a GPU, of the calling thread anywhere. Holds no tensors.

    Args:
        device: that a weight stream delivers to.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._is_gpu = device is not None and device.type == "cuda"
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0
        self._inside = False

    @property
    def seconds(self) -> float:
        """Of the waits that are over; asked after ``torch.cuda.synchronize()``, of all."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around code in which the consumer waits: its stream, where it has one, else the thread."""
        return self.on_stream(torch.cuda.current_stream(self._device)) if self._is_gpu else self.on_host()

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Around code that lets a stream wait."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        try:
            yield
        finally:
            after.record(stream)
            self._waits.append((before, after))

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Around code that starts copies. Without a GPU it makes them, while the thread waits."""
        return contextlib.nullcontext() if self._is_gpu else self.on_host()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Around code during which the calling thread does nothing else. Blocks within a block count once."""
        if self._inside:
            yield
            return
        self._inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self._seconds += time.perf_counter() - began
