"""What fxoffload's executor costs the host: steps of many tiny segments, on the host's clock (scenario ``overhead``).

The case is so small that a step takes as long as the host needs to issue it. A timed step begins with an idle device
and ends when ``backward`` has returned on the host; the wait for the device after that is ``tail_us``, which is not
part of it. Where the tail is not small the device was the slower one, and the case is too large to say anything.

On a GPU the host's time is Python, autograd, Inductor's wrappers, kernel launches, and for fxoffload the outer graph,
tokens, events and copies. On a CPU it contains the kernels too. Every variant's own time is in its record, with nothing
subtracted. The rows that say ``over`` are differences of two variants of the same run, named in the field:

- ``host_us_over_inductor_per_segment``: (keep_all - inductor) / segment calls in a step. The two compile different
  kernels, so it includes less fusion, and Inductor's own wrappers, one per segment instead of two in all.
- ``host_us_over_keep_all_per_copy``: (offload_all - keep_all) / copies in a step, both directions.

``cpu_us`` is the processor time of all threads of the process: more than ``host_us`` where a thread works beside it,
less where the host slept.
"""

from __future__ import annotations

import gc
from functools import partial

from benchmarks.measure import Measurement
from benchmarks.offload import count_segment_calls, read_stats, reset_stats, uses_fxoffload
from benchmarks.phases import Phases
from benchmarks.quartiles import summarize
from benchmarks.schema import Overhead
from benchmarks.steps import HostTime, measure_warmup


class OverheadMeasurement(Measurement):
    """Phases in this order: build, first step, warm-up, timed steps (as everywhere), host times, gradients."""

    def run(self, phases: Phases) -> None:
        protocol = self.request.protocol
        phases.required("build", self.build)
        phases.required("first step", self.first_step)
        phases.required("warm-up", lambda: measure_warmup(self.stepper, self.result, protocol))
        phases.required("timed steps", self.timed_steps)
        phases.required("host times", partial(self.host_times, protocol.steps))
        if protocol.gradients:
            phases.optional("gradients", self.gradients)
        phases.optional("graph count", self.count_graphs)

    def host_times(self, steps: int) -> None:
        variant = self.request.variant
        gc.collect()
        self.stepper.host_step()
        reset_stats(variant)
        times = [self.stepper.host_step() for _ in range(steps)]
        stats = read_stats(variant) or {}
        self.result.overhead = summarize_host_times(
            times,
            num_segment_calls=count_segment_calls() if uses_fxoffload(variant) else 0,
            num_copies=stats.get("num_copies", 0.0) / steps,
        )


def summarize_host_times(times: list[HostTime], num_segment_calls: int, num_copies: float) -> Overhead:
    """Medians and quartiles in microseconds of the steps' times in seconds."""
    return Overhead(
        host_us=summarize([t.host_s * 1e6 for t in times]),
        forward_us=summarize([t.forward_s * 1e6 for t in times]),
        cpu_us=summarize([t.cpu_s * 1e6 for t in times]),
        tail_us=summarize([t.tail_s * 1e6 for t in times]),
        num_segment_calls=num_segment_calls,
        num_copies=num_copies,
    )
