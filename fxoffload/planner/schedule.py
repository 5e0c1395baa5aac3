"""Keep or offload, and windows, for a step whose recompute choice is made: proposed by the solver, settled by the
simulator.

The solver sees segments and rates; the simulator sees what the executor will do. So every answer here is one that was
simulated, and its peak is the simulation's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fxoffload.planner.formulate import problem_of
from fxoffload.planner.problem import Problem
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.solve import least_peak, least_time, smallest_peak
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import least_peak_bytes, no_windows, windows_for
from fxoffload.step.choice import Windows

# How often the solver's budget is lowered by the excess that the simulator found.
_MAX_REPAIRS = 4
# The search for the least peak ends where it is known within this part, or after this many schedules.
_PEAK_STEP = 0.01
_MAX_PEAK_STEPS = 12
# Steps that differ by less take the same time.
_SAME_TIME = 0.003
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Schedule:
    """An action for each candidate of a step, and the predicted step.

    Attributes:
        windows: bytes that may be under way.
        simulation: of the step, so done.
    """

    offload: tuple[bool, ...]
    windows: Windows
    simulation: Simulation

    @property
    def key(self) -> tuple[float, int]:
        """The order of schedules within the same budget: time, then bytes moved."""
        return (round(self.simulation.step_ms, 3), self.simulation.bytes_offloaded)


def as_inductor(step: TrainingStep, rates: ProfileRates) -> Simulation:
    """The step as plain Inductor runs it: everything is on the device, and autograd makes the zeros that segments are
    compiled without. The time of these, some 0.5 % of a step, is not in it.

    Where it breaks the graph, the loss is most often in another one. That gives the logits their gradient, or its
    backward, with zeros for them, has ended when those of the layers begin: ``TrainingStep.no_zeros``.
    """
    step = step.with_tangents(but=step.no_zeros)
    return simulate(step, (False,) * len(step.candidates), copies=rates, windows=no_windows(step))


class Scheduler:
    """Finds schedules for one step.

    Args:
        fixed: candidate -> True where it must be offloaded, False where it must stay.
        in_flight_budget, prefetch_budget: the user's bounds on the windows.
    """

    def __init__(
        self,
        step: TrainingStep,
        rates: ProfileRates,
        *,
        fixed: Mapping[str, bool] | None = None,
        host_bytes: int | None = None,
        in_flight_budget: int | None = None,
        prefetch_budget: int | None = None,
    ) -> None:
        self.step = step
        self.rates = rates
        self.host_bytes = host_bytes
        self.bounds = (in_flight_budget, prefetch_budget)
        fixed = dict(fixed or {})
        self.names = [c.name for c in step.candidates]
        self.fixed = {n: fixed[n] for n in self.names if n in fixed}
        self.problem: Problem = problem_of(step, rates, fixed=self.fixed, host_bytes=host_bytes)

    def with_step(self, step: TrainingStep, host_bytes: int | None, rates: ProfileRates | None = None) -> Scheduler:
        """The same for other times and working sets of the same step, another bound on the host, and other rates."""
        down, up = self.bounds
        return Scheduler(
            step,
            rates or self.rates,
            fixed=self.fixed,
            host_bytes=host_bytes,
            in_flight_budget=down,
            prefetch_budget=up,
        )

    def keep_all(self) -> Simulation:
        """The step with everything on the device."""
        return simulate(self.step, (False,) * len(self.names), copies=self.rates, windows=no_windows(self.step))

    def as_inductor(self) -> Simulation:
        """The step as plain Inductor runs it."""
        return as_inductor(self.step, self.rates)

    def least_time(self, limit_bytes: int) -> Schedule | None:
        """The fastest schedule within ``limit_bytes``; None where there is none."""
        found = [s for d in self._proposals(limit_bytes) if (s := self.settle(d, limit_bytes)) is not None]
        if not found and self._least[0] <= limit_bytes:
            found = [s for s in (self.settle(self._least[1], limit_bytes),) if s is not None]
        return min(found, key=lambda s: s.key, default=None)

    def least_peak(self, max_ms: float) -> Schedule | None:
        """The schedule with the least peak that takes at most ``max_ms``; None where there is none."""
        whole = self.keep_all().peak_bytes
        solution = least_peak(self.problem, max_ms)
        best: Schedule | None = None
        # The solver's copies are a flow: its promise may be far from the peak that segments of this size reach.
        too_low, limit, step = 0, whole if solution is None else min(solution.peak_bytes, whole), _PEAK_STEP
        for _ in range(_MAX_PEAK_STEPS):
            found = self.least_time(limit)
            if found is not None and found.simulation.step_ms <= max_ms:
                best = found
                limit = int(best.simulation.peak_bytes / (1 + _PEAK_STEP))
                if too_low:
                    limit = min((too_low + best.simulation.peak_bytes) // 2, limit)
            else:
                too_low = max(too_low, limit)
                if best is None and limit >= whole:
                    return None
                if best is None:
                    limit, step = min(max(int(limit * (1 + step)), limit + 1), whole), 2 * step
                else:
                    limit = (too_low + best.simulation.peak_bytes) // 2
            if best is not None and best.simulation.peak_bytes <= too_low * (1 + _PEAK_STEP):
                break
        if best is None:
            found = self.least_time(whole)
            best = found if found is not None and found.simulation.step_ms <= max_ms else None
        return best

    def least_peak_without_waits(self) -> Schedule | None:
        """The schedule with the least peak of those that take hardly longer than the fastest; None where the host lacks
        the room for what must move."""
        fastest = self.least_time(_UNLIMITED)
        return fastest and (self.least_peak((1 + _SAME_TIME) * fastest.simulation.step_ms) or fastest)

    def smallest(self) -> Schedule:
        """The schedule with the least peak, whatever its time."""
        found = self.settle(self._least[1], self._least[0])
        assert found is not None
        return self.least_time(found.simulation.peak_bytes) or found

    # -- proposals -----------------------------------------------------------------------------------------------------

    def _proposals(self, limit_bytes: int) -> Iterator[tuple[bool, ...]]:
        yield self._extreme(False)
        if self._within_host(self._extreme(True)):
            yield self._extreme(True)
        budget = limit_bytes
        for _ in range(_MAX_REPAIRS):
            solution = least_time(self.problem, budget)
            if solution is None:
                return
            offload = self._named(solution.offloaded)
            yield offload
            excess = least_peak_bytes(self.step, offload) - limit_bytes
            if excess <= 0:
                return
            budget -= excess

    @cached_property
    def _least(self) -> tuple[int, tuple[bool, ...]]:
        """The least peak that was found, with nothing under way, and its decisions."""
        proposals = [self._named(smallest_peak(self.problem).offloaded), self._extreme(True), self._extreme(False)]
        return min((least_peak_bytes(self.step, p), p) for p in proposals if self._within_host(p))

    def _extreme(self, offload: bool) -> tuple[bool, ...]:
        return tuple(self.fixed.get(n, offload) for n in self.names)

    def _named(self, offloaded: frozenset[str]) -> tuple[bool, ...]:
        return tuple(n in offloaded for n in self.names)

    def _within_host(self, offload: tuple[bool, ...]) -> bool:
        moved = (c.moved_bytes or 0 for c, go in zip(self.step.candidates, offload, strict=True) if go)
        return self.host_bytes is None or sum(moved) <= self.host_bytes

    # -- settling ------------------------------------------------------------------------------------------------------

    def settle(self, offload: tuple[bool, ...], limit_bytes: int) -> Schedule | None:
        """These decisions within ``limit_bytes``, with the widest windows; None where even the narrowest exceed it."""
        windows = windows_for(self.step, offload, limit_bytes)
        if windows is None:
            return None
        for bounded in (self._bounded(windows), no_windows(self.step)):
            simulation = simulate(self.step, offload, copies=self.rates, windows=bounded)
            if simulation.peak_bytes <= limit_bytes:
                return Schedule(offload, bounded, simulation)
        return None

    def _bounded(self, windows: Windows) -> Windows:
        down, up = self.bounds
        in_flight = windows.in_flight if down is None else tuple(min(w, down) for w in windows.in_flight)
        ahead = windows.ahead if up is None else tuple(min(w, up) for w in windows.ahead)
        return Windows(in_flight, ahead)
