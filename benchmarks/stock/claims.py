"""Promises about stock models, answered from a case's rows. Without a GPU nothing is: peaks are not measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.schema import Case, Record
from benchmarks.stock.models import CHECKPOINTING, RL, SHARDED
from benchmarks.stock.rows import measured, met_from_step, peak_of, refusal, stated, stock_row
from benchmarks.truth import plan_row

Claim = dict[str, Any]

# (peak, time)
PREDICTED, CALIBRATED = (0.03, 0.07), (0.02, 0.02)
MET_FROM_STEP = 3
SMALLEST = 0.03
DEFAULT_SLOWDOWN, GAIN = 0.025, 0.03
AT_CHECKPOINT, SLOWDOWN_AT_CHECKPOINT = 1.05, 0.05
PART_OF_CHECKPOINTING = 1 / 3
SHARDED_AT_CHECKPOINT, SHARDED_SLOWDOWN = 1.1, 0.08


def check_stock_claims(case: Case, rows: list[Record]) -> list[Claim]:
    """All claims of one case; ``held`` is None where rows that one needs are missing."""
    check = _Case(case, rows)
    claims = [
        check.truth("predicted", *PREDICTED),
        check.truth("calibrated", *CALIBRATED),
        check.budgets_met(),
        check.refusals(),
        check.by_default(),
    ]
    if case.form == SHARDED:
        return [*claims, check.at_checkpoint(SHARDED_AT_CHECKPOINT, SHARDED_SLOWDOWN)]
    claims += [check.smallest(), check.at_checkpoint(AT_CHECKPOINT, SLOWDOWN_AT_CHECKPOINT)]
    return [*claims, check.instead_of_checkpointing()] if case.form == CHECKPOINTING else claims


class _Case:
    def __init__(self, case: Case, rows: list[Record]) -> None:
        self.case = case
        self.rows = rows
        self.by_label = {r.variant.label: r for r in rows}
        self.plans = [r for r in rows if r.variant.kind == "auto" and peak_of(r.result) is not None]
        self.budgets = [r for r in rows if r.variant.options.get("activation_budget") is not None]

    def truth(self, which: str, peak_error: float, step_error: float) -> Claim:
        """Where nothing is calibrated (a plan that does nothing), its row does not count. Nor does what a plan says
        before a step, where it says that the loss is not in it."""
        name = f"{which}: peak within {peak_error:.0%}, time within {step_error:.0%}"
        errors: dict[str, Any] = {}
        for record in self.plans:
            if which == "predicted" and _loss_is_outside(record):
                continue
            row = plan_row(record.result)
            found = row.get(f"{which}_peak_error"), row.get(f"{which}_step_error")
            if None not in found:
                errors[record.variant.label] = found
        if not errors:
            return _open(name, f"a plan that is {which}, with its loss and a measured peak")
        held = all(abs(peak) <= peak_error and abs(step) <= step_error for peak, step in errors.values())
        return _claim(name, held, {"peak and time": errors})

    def budgets_met(self) -> Claim:
        """In the first step where the model is one graph that returns its loss, else from the third on."""
        name = f"budgets are met: from the first step on with one graph and its loss, else from step {MET_FROM_STEP} on"
        asked = [r for r in self.budgets if r in self.plans]
        if not asked:
            return _open(name, "a plan with a budget, with measured peaks")
        found = {r.variant.label: met_from_step(r.result) for r in asked}
        is_outside = self.case.form == RL
        whole = [r.result.num_graphs_first_step == 1 and not is_outside for r in asked]
        most = {r.variant.label: 1 if w else MET_FROM_STEP for r, w in zip(asked, whole, strict=True)}
        held = all(step is not None and step <= most[label] for label, step in found.items())
        return _claim(name, held, {"met from step": found, "at most": most})

    def refusals(self) -> Claim:
        name = "no budget is refused that a plan meets"
        refused = {r.variant.label: stock_row(r, self.rows) for r in self.budgets if refusal(r) is not None}
        if not self.plans:
            return _open(name, "a plan with a measured peak")
        wrong = [label for label, row in refused.items() if row["refused_rightly"] is False]
        return _claim(name, not wrong, {"refused": ", ".join(refused) or "none", "wrongly": ", ".join(wrong) or "none"})

    def smallest(self) -> Claim:
        """A smallest budget that is refused when it is asked for is false, too."""
        name = f"the smallest budget named is met, and within {SMALLEST:.0%} of the least peak measured"
        default, asked = self.by_label.get("auto"), self.by_label.get("auto@activation_budget=1*smallest")
        is_asked = asked is not None and (asked in self.plans or refusal(asked) is not None)
        if default is None or default.result.plan is None or asked is None or not is_asked or not self.plans:
            return _open(name, "auto and auto@activation_budget=1*smallest, with a measured peak")
        plan = default.result.plan
        named = plan.smallest_budget_at_end_bytes or plan.smallest_budget_bytes
        least = min(peak for r in self.plans if (peak := peak_of(r.result)) is not None)
        met = asked in self.plans and met_from_step(asked.result) is not None
        figures = {"named_bytes": named, "least_measured_bytes": least, "met": met}
        return _claim(name, met and abs(named / least - 1) <= SMALLEST, figures)

    def by_default(self) -> Claim:
        name = f"default: at most {DEFAULT_SLOWDOWN:+.1%}, gain within {GAIN:.0%} of the gain stated"
        record, inductor = self.by_label.get("auto"), self.by_label.get("inductor")
        if record is None or inductor is None or record not in self.plans:
            return _open(name, "inductor and auto, with measured peaks")
        gain, slowdown = measured(record, inductor)
        said, _ = stated(record.result)
        if gain is None or slowdown is None or said is None:
            return _open(name, "a plan, with Inductor's step and peak")
        figures = {"slowdown": slowdown, "gain_stated": said, "gain_measured": gain}
        return _claim(name, slowdown <= DEFAULT_SLOWDOWN and abs(gain - said) <= GAIN, figures)

    def at_checkpoint(self, factor: float, most: float) -> Claim:
        name = f"within {factor}x checkpointing's peak at most {most:+.0%} time"
        checkpoint, inductor = self.by_label.get("checkpoint"), self.by_label.get("inductor")
        limit = peak_of(checkpoint.result) if checkpoint is not None else None
        if limit is None or inductor is None or not self.plans:
            return _open(name, "inductor, checkpoint and a plan, with measured peaks")
        return self._best_within(name, int(factor * limit), most, inductor)

    def instead_of_checkpointing(self) -> Claim:
        """The rows of fxoffload have checkpointing switched on by the user."""
        name = "gradient_checkpointing=True: at most a third of checkpointing's extra time, at its peak or less"
        checkpoint, inductor = self.by_label.get("checkpoint"), self.by_label.get("inductor")
        limit = peak_of(checkpoint.result) if checkpoint is not None else None
        if checkpoint is None or limit is None or inductor is None or not self.plans:
            return _open(name, "inductor, checkpoint and a plan, with measured peaks")
        extra = measured(checkpoint, inductor)[1]
        if extra is None:
            return _open(name, "timed steps of checkpoint")
        return self._best_within(name, limit, extra * PART_OF_CHECKPOINTING, inductor)

    def _best_within(self, name: str, limit: int, most: float, inductor: Record) -> Claim:
        within = _slowdowns((r for r in self.plans if (peak_of(r.result) or 0) <= limit), inductor)
        if not within:
            return _claim(name, False, {"why": "no plan has a peak that small", "peak_limit_bytes": limit})
        label = min(within, key=lambda label: within[label])
        figures = {"variant": label, "slowdown": within[label], "at_most": most, "peak_limit_bytes": limit}
        return _claim(name, within[label] <= most, figures)


def _loss_is_outside(record: Record) -> bool:
    """Whether the plan says so. A plan for the step has the loss in it."""
    return record.result.plan is not None and record.result.plan.loss == "outside"


def _slowdowns(records: Iterable[Record], inductor: Record) -> dict[str, float]:
    found = {r.variant.label: measured(r, inductor)[1] for r in records}
    return {label: slowdown for label, slowdown in found.items() if slowdown is not None}


def _claim(name: str, held: bool, figures: dict[str, Any]) -> Claim:
    return {"claim": name, "held": held, "figures": figures}


def _open(name: str, missing: str) -> Claim:
    return {"claim": name, "held": None, "figures": {"missing": missing}}
