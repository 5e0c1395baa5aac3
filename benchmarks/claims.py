"""What a scenario promises, answered from the rows: held or not, with the figures.

Every claim is {case, claim, held, figures}; ``held`` is None where rows that it needs are missing, and the figures say
which. Thresholds are those of the issue. Times within ``NOISE`` of each other are not told apart.
"""

from __future__ import annotations

from typing import Any

from benchmarks.changing_lengths.claims import check_lengths_claims
from benchmarks.claims_curve import NOISE, Point, below, monotone
from benchmarks.collective_times import usual_sum
from benchmarks.derived import case_label
from benchmarks.gradients_agree import claim_gradients_agree
from benchmarks.scenarios import FSDP, FSDP_LENGTHS, STOCK_SCENARIOS
from benchmarks.schema import Case, Record, Report
from benchmarks.stock.claims import check_stock_claims
from benchmarks.truth import plan_row

GIB = 1 << 30
Claim = dict[str, Any]

PEAK_OF_CHECKPOINT = 1.02
SLOWDOWN_AT_CHECKPOINT, SLOWDOWN_STRETCH = 0.045, 0.03
DEFAULT_PEAK_BYTES, DEFAULT_SLOWDOWN = 13 * GIB, 0.025
PREDICTED_ERROR, CALIBRATED_PEAK_ERROR, CALIBRATED_STEP_ERROR = 0.10, 0.03, 0.05
RESERVED_VS_ALLOCATED = 1.1
NUM_BUDGETS = 8
LONG_PEAK_OF_INDUCTOR, LONG_SLOWDOWN = 0.25, 0.015
LONG_SEQ = 65_536
COLLECTIVES, BESIDE_COPIES = 0.03, 0.9
_WITHOUT = "_vs_without_copies"
_ALL_THERE, _IDLE = "_all_there" + _WITHOUT, "_idle_copies_"
_WAYS_OF_COPYING, _KINDS_OF_COLLECTIVES = 3, 2


def check_claims(report: Report) -> list[Claim]:
    """All claims of all cases of the report: those of its scenario, or none."""
    claims: list[Claim] = []
    for case in dict.fromkeys(record.case for record in report.records):
        rows = [record for record in report.records if record.case == case]
        derived = [row for row in report.derived if row["case"] == case_label(case)]
        found: list[Claim] = []
        if report.scenario == "plan":
            found = _Claims(case, rows).all()
        elif report.scenario == "budget-sweep":
            found = [*_Claims(case, rows).of_a_sweep(), claim_gradients_agree(derived)]
        elif report.scenario in STOCK_SCENARIOS:
            found = check_stock_claims(case, rows)
        elif report.scenario == "collectives":
            found = [_collectives_beside_copies(rows)]
        elif report.scenario in ("activations", FSDP, FSDP_LENGTHS):
            found = check_lengths_claims(rows) if report.scenario == FSDP_LENGTHS else [claim_gradients_agree(derived)]
            if report.scenario == FSDP:
                found.append(_collectives_as_without(rows, derived))
                if any(record.result.collectives_idle for record in rows):
                    found.append(_collectives_beside_idle_copies(rows, derived))
            if budgets := _Claims(case, rows).budgets:
                found += [_Claims(case, rows).budgets_met(len(budgets)), _Claims(case, rows).first_steps_meet_budgets()]
        claims += [{"case": case_label(case), **claim} for claim in found]
    return claims


class _Claims:
    """The claims of one case."""

    def __init__(self, case: Case, records: list[Record]) -> None:
        self.case = case
        self.points = [point for record in records if (point := _point(record)) is not None]
        self.by_label = {point.label: point for point in self.points}
        self.plans = [point for point in self.points if point.kind == "auto"]
        self.records = {record.variant.label: record for record in records}
        self.budgets = [r for r in records if r.variant.options.get("activation_budget") is not None]

    def all(self) -> list[Claim]:
        claims: list[Claim] = []
        if self.case.name == "stack" and self.case.seq >= LONG_SEQ:
            claims.append(self.long_sequence())
        elif self.case.name == "stack":
            claims += [self.at_checkpoints_peak(), self.by_default()]
        return claims + [
            self.budgets_met(),
            self.first_steps_meet_budgets(),
            self.reserved(),
            self.limited(),
            self.truth("calibrated", CALIBRATED_PEAK_ERROR, CALIBRATED_STEP_ERROR),
            self.truth("predicted", PREDICTED_ERROR, PREDICTED_ERROR),
            self.curve_is_monotone(),
            self.below_torch(),
            self.below_policies(),
        ]

    def of_a_sweep(self) -> list[Claim]:
        """Of a few budgets: as many as were asked for must be met."""
        return [
            self.budgets_met(len(self.budgets)),
            self.first_steps_meet_budgets(),
            self.curve_is_monotone(),
            self.below_torch(),
        ]

    # -- points --------------------------------------------------------------------------------------------------------

    def at_checkpoints_peak(self) -> Claim:
        name = f"at most {PEAK_OF_CHECKPOINT}x checkpointing's peak, at most {SLOWDOWN_AT_CHECKPOINT:+.1%} time"
        checkpoint, inductor = self.by_label.get("checkpoint"), self.by_label.get("inductor")
        if checkpoint is None or inductor is None:
            return _missing(name, "checkpoint and inductor")
        limit = PEAK_OF_CHECKPOINT * checkpoint.peak_bytes
        best = min((p for p in self.plans if p.peak_bytes <= limit), key=lambda p: p.step_ms, default=None)
        figures: dict[str, Any] = {
            "peak_limit_gib": limit / GIB,
            "checkpoint_slowdown": checkpoint.step_ms / inductor.step_ms - 1,
        }
        if best is None:
            return _claim(name, False, {**figures, "why": "no plan has a peak that small"})
        slowdown = best.step_ms / inductor.step_ms - 1
        figures |= {"variant": best.label, "peak_gib": best.peak_bytes / GIB, "slowdown": slowdown}
        figures["stretch_held"] = slowdown <= SLOWDOWN_STRETCH
        return _claim(name, slowdown <= SLOWDOWN_AT_CHECKPOINT, figures)

    def by_default(self) -> Claim:
        name = f"by default at most {DEFAULT_PEAK_BYTES // GIB} GiB and {DEFAULT_SLOWDOWN:+.1%} time"
        default = self.by_label.get("auto") or self.by_label.get("auto@max_slowdown=0.02")
        inductor = self.by_label.get("inductor")
        if default is None or inductor is None:
            return _missing(name, "auto and inductor")
        slowdown = default.step_ms / inductor.step_ms - 1
        held = default.peak_bytes <= DEFAULT_PEAK_BYTES and slowdown <= DEFAULT_SLOWDOWN
        return _claim(name, held, {"peak_gib": default.peak_bytes / GIB, "slowdown": slowdown})

    def long_sequence(self) -> Claim:
        name = f"at most {LONG_PEAK_OF_INDUCTOR:.0%} of Inductor's peak at {LONG_SLOWDOWN:+.1%} time"
        inductor = self.by_label.get("inductor")
        if inductor is None or not self.plans:
            return _missing(name, "inductor and auto")
        limit = LONG_PEAK_OF_INDUCTOR * inductor.peak_bytes
        small = [p for p in self.plans if p.peak_bytes <= limit]
        best = min(small, key=lambda p: p.step_ms) if small else min(self.plans, key=lambda p: p.peak_bytes)
        slowdown, part = best.step_ms / inductor.step_ms - 1, best.peak_bytes / inductor.peak_bytes
        figures = {"variant": best.label, "peak_vs_inductor": part, "slowdown": slowdown}
        return _claim(name, bool(small) and slowdown <= LONG_SLOWDOWN, figures)

    # -- budgets -------------------------------------------------------------------------------------------------------

    def budgets_met(self, least: int = NUM_BUDGETS) -> Claim:
        name = f"{least} budgets: every measured peak within its budget"
        ratios = {
            r.variant.label: _ratio(memory.peak_bytes, r.result.budget_bytes) if (memory := r.result.memory) else None
            for r in self.budgets
        }
        claim = _all_within(name, ratios, 1.0, "peak_vs_budget")
        if claim["held"] and len(ratios) < least:
            claim["held"] = None
            claim["figures"]["missing"] = f"only {len(ratios)} budgets"
        return claim

    def first_steps_meet_budgets(self) -> Claim:
        ratios = {
            r.variant.label: _ratio(first.peak_bytes, r.result.budget_bytes)
            if (first := r.result.first_step_memory)
            else None
            for r in self.budgets
        }
        return _all_within("the first step meets the budget too", ratios, 1.0, "first_step_peak_vs_budget")

    def reserved(self) -> Claim:
        runs = {r.variant.label: r.result.long_run for r in self.budgets if r.result.long_run is not None}
        steps = min((run.num_steps for run in runs.values()), default=0)
        name = f"reserved at most {RESERVED_VS_ALLOCATED}x allocated over {steps} steps"
        ratios = {label: run.reserved_vs_allocated for label, run in runs.items()}
        return _all_within(name, ratios, RESERVED_VS_ALLOCATED, "reserved_vs_allocated")

    def limited(self) -> Claim:
        runs = {r.variant.label: r.result.limited_run for r in self.budgets if r.result.limited_run is not None}
        name = "runs under set_per_process_memory_fraction at budget + 10 % complete"
        if not runs:
            return _missing(name, "--set memory_fraction=steps or whole")
        failed = {label: run.reason for label, run in runs.items() if not run.completed}
        retries = {label: run.num_alloc_retries for label, run in runs.items()}
        return _claim(name, not failed, {"failed": failed, "num_alloc_retries": retries})

    def truth(self, which: str, peak_error: float, step_error: float) -> Claim:
        name = f"{which}: peak within {peak_error:.0%}, time within {step_error:.0%}"
        errors: dict[str, Any] = {}
        without: list[str] = []
        held, measured = True, False
        for record in self.records.values():
            if record.variant.kind != "auto" or record.result.step_ms is None:
                continue
            row = plan_row(record.result)
            peak, step = row.get(f"{which}_peak_error"), row.get(f"{which}_step_error")
            errors[record.variant.label] = {"peak": peak, "step": step}
            if peak is None or step is None:
                # A plan that does nothing is not calibrated.
                without.append(record.variant.label)
                continue
            measured = True
            held = held and abs(peak) <= peak_error and abs(step) <= step_error
        if not measured:
            return _missing(name, f"a plan that is {which}, with a measured peak", {"errors": errors})
        return _claim(name, held, {"errors": errors, "without": ", ".join(without) or "none"})

    # -- the curve -----------------------------------------------------------------------------------------------------

    def curve_is_monotone(self) -> Claim:
        name = "more memory is never slower"
        points = [self.by_label[r.variant.label] for r in self.budgets if r.variant.label in self.by_label]
        if len(points) < 2:
            return _missing(name, "two budgets")
        order = {r.variant.label: r.result.budget_bytes or 0 for r in self.budgets}
        return _claim(name, *monotone(sorted(points, key=lambda p: order[p.label])))

    def below_torch(self) -> Claim:
        name = "below torch's activation_memory_budget at every point"
        peers = [p for p in self.points if p.kind == "torch_budget"]
        if not peers or not self.plans:
            return _missing(name, "torch_budget and auto")
        # Its curve ends where nothing is recomputed: plain Inductor.
        ends = [p for p in self.points if p.label == "inductor"]
        return _claim(name, *below(self.plans, peers + ends, all_peers=False))

    def below_policies(self) -> Claim:
        name = "below everything that offload_all, keep_all and checkpointing reach"
        peers = [p for p in self.points if p.kind in ("offload_all", "keep_all", "checkpoint")]
        if not peers or not self.plans:
            return _missing(name, "a policy and auto")
        return _claim(name, *below(self.plans, peers, all_peers=True))


def _collectives_as_without(rows: list[Record], derived: list[dict[str, Any]]) -> Claim:
    """Copies to and from the host do not make collectives take longer, once all ranks have come to them.

    Compared with steps of the same process that compute the same: with another compiler, or another recomputation,
    other kernels run during them. Open where the halves of these steps differ by more than the claimed difference; the
    scenario ``collectives`` knows it better then.
    """
    name = f"collectives take at most {COLLECTIVES:+.0%} longer beside copies than without"
    moving = {r.variant.label for r in rows if (r.result.stats_per_step or {}).get("bytes_offloaded")}
    ratios = {
        f"{kind} of {row['variant']}": value
        for row in derived
        if row["variant"] in moving
        for kind, value in ((key.removesuffix(_ALL_THERE), v) for key, v in row.items() if key.endswith(_ALL_THERE))
    }
    if not ratios:
        return _missing(name, "a variant that offloads, traced on all ranks with and without copies")
    spread = _spread_of_references([r for r in rows if r.variant.label in moving])
    most = 1 + COLLECTIVES
    held = None
    if any(ratio > most + spread.get(what, 0.0) for what, ratio in ratios.items()):
        held = False
    elif max(ratios.values()) <= most and len(spread) == len(ratios) and max(spread.values()) <= COLLECTIVES:
        held = True
    return _claim(name, held, {"ratios": ratios, "halves of the steps without differ by": spread})


def _collectives_beside_idle_copies(rows: list[Record], derived: list[dict[str, Any]]) -> Claim:
    """The same of steps that keep everything, while copies that nothing waits for go on: the cost of the link itself. A
    plan's copies also shift the kernels that run during a collective. Where copies did not go on nearly all the while,
    it does not count; open where nothing does."""
    name = f"copies that nothing waits for make a step's collectives take at most {COLLECTIVES:+.0%} longer"
    covered = {
        (record.variant.label, kind, way): one.beside_copies
        for record in rows
        for way, kinds in record.result.collectives_idle.items()
        for kind, one in kinds.items()
    }
    ratios: dict[str, float] = {}
    apart: dict[str, float] = {}
    for row in derived:
        for key, value in row.items():
            if _IDLE in key and key.endswith(_WITHOUT):
                kind, way = key.removesuffix(_WITHOUT).split(_IDLE)
                part = covered.get((row["variant"], kind, way), 0.0)
                what = f"{kind} beside copies {way} of {row['variant']}"
                if part >= BESIDE_COPIES:
                    ratios[what] = value
                else:
                    apart[what] = part
    held = max(ratios.values()) <= 1 + COLLECTIVES if ratios else None
    figures: dict[str, Any] = {"ratios": ratios}
    if apart:
        figures["does not count, beside copies for this part of the time"] = apart
    return _claim(name, held, figures)


def _spread_of_references(rows: list[Record]) -> dict[str, float]:
    """By what part collectives of the first and of the second half of a process's steps without copies differ."""
    found: dict[str, float] = {}
    for record in rows:
        for kind, alone in record.result.collectives_without.items():
            half = len(alone.each_all_there_ms) // 2
            sums = [
                usual_sum(part, alone.count)
                for part in (alone.each_all_there_ms[:half], alone.each_all_there_ms[half:])
            ]
            known = [ms for ms in sums if ms]
            if len(known) == len(sums):
                found[f"{kind} of {record.variant.label}"] = max(known) / min(known) - 1
    return found


def _collectives_beside_copies(rows: list[Record]) -> Claim:
    """The same of collectives without a model, by medians. Open where a variant or a way of copying is missing."""
    name = f"collectives take at most {COLLECTIVES:+.0%} longer beside copies than without"
    ratios: dict[str, float] = {}
    for record in rows:
        found = {
            f"{row.kind} beside {record.variant.label}, copies {row.copies}": row.vs_none.median
            for row in record.result.collectives_beside
            if row.vs_none is not None
        }
        if record.status != "ok" or len(found) < _WAYS_OF_COPYING * _KINDS_OF_COLLECTIVES:
            return _missing(name, f"collectives beside copies down, up and both ways, for {record.variant.label}")
        ratios |= found
    return _claim(name, max(ratios.values()) <= 1 + COLLECTIVES, {"ratios": ratios})


def _point(record: Record) -> Point | None:
    memory, step = record.result.memory, record.result.step_ms
    if memory is None or step is None:
        return None
    return Point(record.variant.label, record.variant.kind, memory.peak_bytes, step.median)


def _ratio(value: int, of: int | None) -> float | None:
    return value / of if of else None


def _all_within(name: str, ratios: dict[str, float | None], limit: float, what: str) -> Claim:
    known = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    figures: dict[str, Any] = {what: known}
    unknown = sorted(set(ratios) - set(known))
    if unknown or not known:
        figures["missing"] = ", ".join(unknown) or "a variant with a budget"
    if any(ratio > limit for ratio in known.values()):
        return _claim(name, False, figures)
    return _claim(name, None if unknown or not known else True, figures)


def _claim(name: str, held: bool | None, figures: dict[str, Any]) -> Claim:
    return {"claim": name, "held": held, "figures": {**figures, "noise": NOISE}}


def _missing(name: str, what: str, figures: dict[str, Any] | None = None) -> Claim:
    return {"claim": name, "held": None, "figures": {**(figures or {}), "missing": what}}
