"""Replans a graph, or a step over several, when its first steps were measured; then measures whether that came true.

Nothing waits for it: the clock is asked whether it is done, the new schedule is worked out on a thread of its own, and
the next step follows it. Only keep, offload and windows change; nothing is compiled, and nothing is exchanged between
ranks.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable

from fxoffload.compiler.recalibration import Recalibration
from fxoffload.errors import in_brief
from fxoffload.plan_report.registry import PlanBox
from fxoffload.planner.measured import measured_step_of
from fxoffload.runtime import background
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.readings import Readings
from fxoffload.step.segment_names import lies_between

log = logging.getLogger(__name__)

TrackedGraphs = tuple[weakref.ref[TrackedGraph], ...]


class Replan:
    """Follows one plan through its first steps.

    The partitionings of the plan, whose graphs are as large as the compiled ones, are held until the calibration has
    ended, or one of the graphs of a chain is gone.

    Args:
        calibration: makes the new plan.
        box: where the plan is shown.
        tracked_graphs: of a chain.
        make_clock: makes the clock of the next measurement.
        in_background: whether to plan on a thread of its own.
    """

    def __init__(
        self,
        calibration: Recalibration,
        box: PlanBox,
        tracked_graphs: TrackedGraphs = (),
        *,
        make_clock: Callable[[], StepClock],
        in_background: bool = True,
    ) -> None:
        self._calibration: Recalibration | None = calibration
        self._box = box
        self._make_clock = make_clock
        self._in_background = in_background
        self._lock = threading.Lock()
        self._is_calibrating = False
        self._is_stopped = False
        self.clock: StepClock | None = make_clock()
        me = calibration.observer = weakref.ref(self)

        def gone(_: object) -> None:
            if (found := me()) is not None:
                found.stop()

        self._tracked_graphs = tuple(
            weakref.ref(tracked, gone) for ref in tracked_graphs if (tracked := ref()) is not None
        )

    @property
    def calibration(self) -> Recalibration | None:
        """The calibration to come; None once it is done."""
        return self._calibration

    @property
    def has_ended(self) -> bool:
        """Whether no further planning will come."""
        with self._lock:
            return self._calibration is None and not self._is_calibrating

    @property
    def is_settled(self) -> bool:
        """Whether no measurement and no planning is left to do."""
        with self._lock:
            return self.clock is None and self._calibration is None and not self._is_calibrating

    def stop(self) -> None:
        """Nothing is measured or planned any more. Takes no lock: a finalizer may call it."""
        self._is_stopped = True
        self._calibration, self.clock = None, None

    def step_begins(self, *, follows: bool = True, signature: Hashable = ()) -> StepRecording | None:
        """A step that follows the plan begins: its recording, or None if it is not measured. Never raises. ``follows``,
        ``signature``: see ``StepClock.begin_step``."""
        now = self.clock
        if now is None:
            return None
        try:
            clock = self.poll()
            recording = None if clock is None else clock.begin_step(follows=follows, signature=signature)
        except Exception as error:
            now.fail(error)
            self.stop()
            return None
        if clock is not None and clock.gave_up():
            self.stop()
        return recording

    def poll(self) -> StepClock | None:
        """Called when a step begins. Returns the clock that measures now, None when there is nothing left to do."""
        clock = self.clock
        if clock is None or not clock.ready():
            return clock
        with self._lock:
            if self.clock is not clock:
                return self.clock
            self.clock = None
            calibration, self._calibration = self._calibration, None
            self._is_calibrating = calibration is not None
        if calibration is None:
            try:
                self._check(clock)
            except Exception as error:
                background.warn(f"fxoffload could not show measured times: {in_brief(error)}")
        elif self._in_background:
            background.start_planning(self._calibrate, calibration, clock, name="fxoffload-replan")
        else:
            self._calibrate(calibration, clock)
        return self.clock

    def _calibrate(self, calibration: Recalibration, clock: StepClock) -> None:
        try:
            if self._is_stopped:  # while this waited for another plan
                return
            readings = clock.readings()
            log_times("before the calibration", readings)
            self._show_between(readings)
            calibration.recalibrate(readings)
        except Exception as error:
            if background.is_ending():
                return
            background.warn(
                "fxoffload could not plan again with measured times and goes on with its plan as it is: "
                f"{in_brief(error)}"
            )
        finally:
            with self._lock:
                self._is_calibrating = False
                self.clock = None if self._is_stopped else self._make_clock()

    def _show_between(self, readings: Readings) -> None:
        if (ms := readings.between_steps_ms()) is not None:
            self._box.update(between_steps_ms=ms)

    def _check(self, clock: StepClock) -> None:
        """Show the times of the steps after the calibration."""
        readings = clock.readings()
        segments = readings.segment_ms()
        total = sum(readings.step_ms().values())
        log_times("after the calibration", readings)
        self._show_between(readings)
        self._box.update(
            measured_step_ms=total,
            measured_peak_bytes=readings.peak_bytes(),
            measured_exposed_ms=max(0.0, total - sum(sum(s.values()) for s in segments.values())),
            measured_step=measured_step_of(
                readings, {(b.phase, b.segment): b.layer for b in self._box.plan.boundaries}
            ),
        )


def log_times(when: str, readings: Readings) -> None:
    """Where the time of the steps that were measured went."""
    segments = readings.segment_ms()
    for phase, total in readings.step_ms().items():
        ms = segments.get(phase, {})
        between = sum(t for name, t in ms.items() if lies_between(name))
        inside = sum(ms.values()) - between
        log.info(
            "%s, the %s took %.1f ms: %.1f in segments, %.1f between calls, %.1f waiting",
            when,
            phase,
            total,
            inside,
            between,
            total - inside - between,
        )
