"""When a module has run, as the device sees it."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.clock import synchronize


class Mark:
    """From now until a module's next forward is over, on the device's own clock."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        self._device = device
        self._hook = module.register_forward_hook(lambda *_: self._reached())
        self._end: torch.cuda.Event | float | None = None
        self._begin = self._now()

    def seconds(self) -> float:
        self._hook.remove()
        if self._end is None:
            raise AssertionError("expected the marked module to have run")
        synchronize(self._device)
        if isinstance(self._begin, torch.cuda.Event):
            assert isinstance(self._end, torch.cuda.Event)
            return self._begin.elapsed_time(self._end) / 1e3
        assert isinstance(self._end, float)
        return self._end - self._begin

    def _reached(self) -> None:
        if self._end is None:
            self._end = self._now()

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
