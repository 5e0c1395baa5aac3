"""The optimizer's state leaves for log-prob forwards and is back for the optimizer's step: what that takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.rl.job import RlJob
from benchmarks.rl.process import spread
from benchmarks.rl.records import Exposed
from benchmarks.rl.strategy import Strategy
from benchmarks.schema import Protocol

OPTIMIZER = "optimizer"
Work = Callable[[], None]


class BesideLogprobs:
    """The same forwards and training step with nothing moving (``alone``), and with the state going and coming."""

    def __init__(self, job: RlJob, strategy: Strategy, protocol: Protocol) -> None:
        self._job, self._strategy, self._protocol = job, strategy, protocol
        self._forwards = 1

    def measure(self, timed: Callable[[Work], float], repeats: int, trace: Callable[[str, Work], None]) -> Exposed:
        """
        Args:
            timed: seconds of some work, from an idle device to an idle device, on all ranks at once.
            repeats: of each.
            trace: takes a name and work to run once under the profiler; called where the protocol asks for it.
        """
        job, strategy, protocol = self._job, self._strategy, self._protocol
        down: list[float] = []
        up: list[float] = []
        for _ in range(repeats):
            down.append(timed(lambda: strategy.offload(OPTIMIZER)))
            up.append(timed(lambda: strategy.onload(OPTIMIZER)))
        job.train_step()
        self._forwards = job.forwards_for(protocol.logprob_s)
        job.train_step()
        logprob = timed(lambda: job.logprobs(self._forwards))
        if protocol.trace_overlap:
            trace("alone", self._alone)
            trace("around", lambda: self._around([], []))
        offload_calls: list[float] = []
        onload_calls: list[float] = []
        alone: list[float] = []
        around: list[float] = []
        ablations = strategy.ablations() if protocol.ablate_overlap else {}
        without: dict[str, list[float]] = {name: [] for name in ablations}
        for _ in range(repeats):  # in turn, so that whatever else changes on the machine falls on all
            alone.append(timed(self._alone))
            around.append(timed(lambda: self._around(offload_calls, onload_calls)))
            for name, ablation in ablations.items():
                with ablation():
                    without[name].append(timed(lambda: self._around([], [])))
        times_alone, times_around = spread(alone), spread(around)
        offload_s, onload_s = statistics.median(down), statistics.median(up)
        serial, exposed = offload_s + onload_s, times_around.median - times_alone.median
        return Exposed(
            forwards=self._forwards,
            logprob_s=logprob,
            alone=times_alone,
            around=times_around,
            offload_s=offload_s,
            onload_s=onload_s,
            serial_s=serial,
            exposed_s=exposed,
            exposed_vs_serial=exposed / serial if serial else None,
            begin_offload_s=statistics.median(offload_calls),
            begin_onload_s=statistics.median(onload_calls),
            without={name: spread(seconds) for name, seconds in without.items()},
        )

    def _alone(self) -> None:
        self._job.logprobs(self._forwards)
        self._job.train_step()

    def _around(self, offload_calls: list[float], onload_calls: list[float]) -> None:
        """The host's seconds in the two calls go to the end of the lists."""
        offload_calls.append(_host_seconds(lambda: self._strategy.begin_offload(OPTIMIZER)))
        self._job.logprobs(self._forwards)
        onload_calls.append(_host_seconds(lambda: self._strategy.begin_onload(OPTIMIZER)))
        self._job.train_step()
        self._strategy.finish()


def _host_seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
