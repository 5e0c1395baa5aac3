"""Writes down what ``fxoffload.plans()`` says, before the steps that it predicts and again when it knows better."""

import contextlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.schema import PlanFacts

PLANNING_LOGGER = "fxoffload.compiler.planning"
_PLANNED = re.compile(r"planned in ([\d.]+) s: (\d+) partitionings")


def join_planning() -> None:
    """Wait for the threads on which fxoffload plans during steps."""
    from fxoffload.runtime import background

    for thread in threading.enumerate():
        if thread.name in ("fxoffload-chain-plan", "fxoffload-replan"):
            background.join_planning(thread)


class PlanWatch:
    """The plans of one variant: those that were not there when the watch began, or not among ``seen``."""

    def __init__(self, seen: Iterable[str] | None = None) -> None:
        self._seen = {plan.graph for plan in _plans()} if seen is None else set(seen)
        self._log = _PlanningLog()
        self._frozen = ""

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around the step that compiles: how long planning took is in the log only."""
        logger = logging.getLogger(PLANNING_LOGGER)
        level = logger.level
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self._log)
            logger.setLevel(level)

    def newest(self) -> int | None:
        """Which plan ``freeze`` would write down; None where nothing was planned. Costs next to nothing."""
        plan, _ = self._plan()
        return None if plan is None else plan.graph

    def freeze(self, after_steps: int) -> PlanFacts | None:
        """The plan as it is now; None where nothing was planned. Of several plans, the one with the largest peak."""
        plan, count = self._plan()
        if plan is None:
            return None
        self._frozen = plan.to_json()
        said = json.loads(self._frozen)
        return PlanFacts(
            num_plans=count,
            frozen_after_steps=after_steps,
            summary=said["summary"],
            predicted=said["predicted"],
            baseline=said["baseline"],
            smallest_budget_bytes=said["smallest_budget_bytes"],
            graph=said["graph"],
            floors=said["floors"],
            frontier=said["frontier"],
            planning_s=getattr(plan, "planning_s", None) or (sum(self._log.seconds) if self._log.seconds else None),
            num_drafts=sum(self._log.drafts) if self._log.drafts else None,
            between_steps_ms=plan.between_steps_ms,
            loss=plan.loss,
            texts={"frozen": self._frozen},
        )

    def is_calibrated(self) -> bool:
        plan, _ = self._plan()
        return plan is not None and plan.calibrated is not None

    def is_measured(self) -> bool:
        plan, _ = self._plan()
        return plan is None or plan.calibrated is None or plan.measured_step_ms is not None

    def is_settled(self) -> bool:
        """Whether nothing more is to be learnt: calibrated, and measured where it is of several graphs."""
        _, count = self._plan()
        return self.is_calibrated() and (count == 1 or self.is_measured())

    def freeze_calibrated(self, facts: PlanFacts, after_steps: int) -> None:
        """What measured segment times make of the prediction, where there is such a thing yet."""
        plan, _ = self._plan()
        if plan is None or plan.calibrated is None:
            return
        text = plan.to_json()
        said = json.loads(text)
        facts.calibrated_after_steps = after_steps
        facts.calibrated, facts.calibrated_baseline = said["calibrated"], said["calibrated_baseline"]
        facts.calibrated_between_steps_ms = plan.between_steps_ms
        facts.texts["calibrated"] = text

    def finish(self, facts: PlanFacts) -> None:
        """The plan's measured numbers, and whether its first prediction is still the same."""
        plan, _ = self._plan()
        if plan is None:
            return
        facts.prediction_changed_later = json.loads(plan.to_json())["predicted"] != facts.predicted
        facts.smallest_budget_at_end_bytes = plan.smallest_budget_bytes
        facts.measured_peak_bytes = plan.measured_peak_bytes
        facts.measured_step_ms = plan.measured_step_ms
        facts.measured_exposed_ms = plan.measured_exposed_ms

    def _plan(self) -> tuple[Any, int]:
        new = [plan for plan in _plans() if plan.graph not in self._seen]
        return max(_latest(new), key=lambda plan: plan.predicted.peak_bytes, default=None), len(new)


def _latest(plans: list[Any]) -> list[Any]:
    """Without the plans of single graphs that a plan of the whole step has replaced."""
    from fxoffload.compiler.call_choice import JOINED

    return [plan for plan in plans if JOINED not in plan.summary] or plans


class _PlanningLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: list[float] = []
        self.drafts: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := _PLANNED.search(record.getMessage()):
            self.seconds.append(float(found[1]))
            self.drafts.append(int(found[2]))


def _plans() -> list[Any]:
    from fxoffload.plan_report import registry as plan_registry

    return plan_registry.plans()
