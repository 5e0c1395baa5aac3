"""Times one step: CUDA events on the compute stream, ``perf_counter`` elsewhere."""

import time
from dataclasses import dataclass
from typing import Protocol as Interface

import torch


class Clock(Interface):
    """Marks are cheap and do not wait. ``gaps_ms`` waits until the device has passed the last one, and gives the time
    between marks."""

    def mark(self) -> None: ...

    def gaps_ms(self) -> list[float]: ...


class EventClock:
    """Time as the compute stream saw it, launch gaps included."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def gaps_ms(self) -> list[float]:
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [first.elapsed_time(second) for first, second in pairs]


class WallClock:
    """For the CPU rehearsal, where work is done when the call returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self._times, self._times[1:], strict=False)]


def new_clock(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else WallClock()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class StepTime:
    forward_ms: float
    backward_ms: float
    host_wall_ms: float
    loss: float
    optimizer_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms
