"""Milliseconds of one call of some work, on a CUDA device or on the CPU.

[Note: Held queue]
A kernel of a few microseconds takes longer to launch than to run, so events around launches would time the host. Each
round is therefore queued behind matmuls that keep the device busy for longer than the queueing takes; the device then
finds all of the round's work waiting. ``torch.cuda._sleep`` would do the same, but is private to torch.

[Note: Sustained rates]
A GPU at its power limit lowers its clocks within a tenth of a second of hard work. A training step is long, and gets
the lower ones, so such work is repeated for ``SUSTAIN_MS`` before it is timed. On an H200, matrix products in bfloat16
run at 785 TFLOP/s in the first 100 ms and at 675 from then on. Attention runs at 645 and 561 forward, 550 and 510
backward. The segments of a step of 0.7 s become 9 % slower in its first 150 ms (2026-11-21).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5
CPU_ROUNDS = 7
HOLD_MS = 3.0
SUSTAIN_MS = 400.0
_HOLD_SIZE = 4096
# Queueing this many calls takes less than HOLD_MS at 40 us each.
_MAX_QUEUED = 64
_MAX_SUSTAINED = 4000


class CpuClock:
    """Wall time, of the fastest of a few rounds: other work on the processor only adds time.

    ``round_ms``: how long a round should last.
    """

    def __init__(self, round_ms: float = 3.0) -> None:
        self._round_ms = round_ms

    def ms(self, work: Callable[[], object], *, sustained: bool = False) -> float:
        """Device milliseconds of one call of ``work``, after a warm-up; ``sustained``: a long one, see [Note: Sustained
        rates]."""
        once = min(_wall_ms(work, 1) for _ in range(3))
        calls = _clamp(self._round_ms / max(once, 1e-6), 1, 1000)
        return min(_wall_ms(work, calls) / calls for _ in range(CPU_ROUNDS))

    def once_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds of this one call of ``work``, without a warm-up."""
        return _wall_ms(work, 1)

    def host_ms(self, work: Callable[[], object], calls: int) -> float:
        """Milliseconds after which one call of ``work`` returns, from rounds of ``calls`` calls."""
        _wall_ms(work, calls)
        return min(_wall_ms(work, calls) / calls for _ in range(CPU_ROUNDS))


class CudaClock:
    """CUDA events on the current stream of ``device``, which must be the current device; medians of a few rounds.

    ``round_ms``: how long a round should last. ``wait``: returns when the work has ended; by default that of all
    streams of the device.
    """

    def __init__(self, device: torch.device, round_ms: float = 10.0, wait: Callable[[], object] | None = None) -> None:
        self._device = device
        self._round_ms = round_ms
        self._wait = wait or functools.partial(torch.cuda.synchronize, device)
        generator = torch.Generator(device).manual_seed(0)
        shape = (_HOLD_SIZE, _HOLD_SIZE)
        self._factors = [torch.randn(shape, dtype=torch.float16, device=device, generator=generator) for _ in range(2)]
        self._product = torch.empty(shape, dtype=torch.float16, device=device)
        self._holds = 32
        self.hold()  # an idle device raises its clocks first, and would be taken for a slow one
        self._holds = _clamp(HOLD_MS / (self._queued_ms(self.hold, 1, held=False) / self._holds), 1, 500)

    def hold(self) -> None:
        """Keep the current stream busy for HOLD_MS or more; see [Note: Held queue]."""
        for _ in range(self._holds):
            torch.mm(*self._factors, out=self._product)

    def ms(self, work: Callable[[], object], *, sustained: bool = False) -> float:
        for _ in range(2):
            work()
        once = self._queued_ms(work, 1)
        if sustained:
            for _ in range(_clamp(SUSTAIN_MS / max(once, 1e-6), 1, _MAX_SUSTAINED)):
                work()
        calls = _clamp(self._round_ms / max(once, 1e-6), 1, _MAX_QUEUED)
        return statistics.median(self._queued_ms(work, calls) / calls for _ in range(ROUNDS))

    def once_ms(self, work: Callable[[], object]) -> float:
        return self._queued_ms(work, 1)

    def each_ms(self, works: Sequence[Callable[[], object]]) -> list[float]:
        """Device milliseconds of each of ``works``, queued one after another."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        self._wait()
        self.hold()
        events[0].record()
        for work, end in zip(works, events[1:], strict=True):
            work()
            end.record()
        self._wait()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def sustain(self) -> None:
        """Keep the device busy for SUSTAIN_MS; see [Note: Sustained rates]."""
        for _ in range(math.ceil(SUSTAIN_MS / HOLD_MS)):
            self.hold()

    def host_ms(self, work: Callable[[], object], calls: int) -> float:
        rounds = []
        for _ in range(ROUNDS + 1):  # the first one is the warm-up
            torch.cuda.synchronize(self._device)
            rounds.append(_wall_ms(work, calls) / calls)
        torch.cuda.synchronize(self._device)
        return statistics.median(rounds[1:])

    def _queued_ms(self, work: Callable[[], object], calls: int, *, held: bool = True) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._wait()
        if held:
            self.hold()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        self._wait()
        return start.elapsed_time(end)


Clock = CpuClock | CudaClock  # times work on one device


def _wall_ms(work: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return 1e3 * (time.perf_counter() - began)


def _clamp(value: float, least: int, most: int) -> int:
    return max(least, min(most, math.ceil(value)))
