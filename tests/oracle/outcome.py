"""What the oracle keeps of a plan, and when a new result passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fxoffload import Plan
from tests.oracle import adapter

Numbers: TypeAlias = Mapping[str, float]

TOLERANCE = 1e-3  # as a part of the golden number
# Less is better.
AIMS = ("step_ms", "peak_bytes", "host_bytes", "smallest_budget_bytes")
# No choice is in them: any change is one of the cost model, the passes or the simulator.
FIXED = ("plain_step_ms", "plain_peak_bytes")
# For people.
INFORMATION = ("segments", "recomputed", "exposed_ms")


@dataclass
class Comparison:
    """Golden numbers against new ones. Each entry is a line for people."""

    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.worse or self.better)


def numbers_of(plan: Plan) -> dict[str, float]:
    """Of the last prediction, so with measured times where there are some."""
    now, plain = plan.calibrated or plan.predicted, plan.calibrated_baseline or plan.baseline
    return {
        "step_ms": round(now.step_ms, 7),
        "peak_bytes": now.peak_bytes,
        "host_bytes": adapter.host_bytes(plan),
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "plain_step_ms": round(plain.step_ms, 7),
        "plain_peak_bytes": plain.peak_bytes,
        "segments": len(plan.boundaries),
        "recomputed": sum(max(len(d.layers), 1) for d in plan.decisions if d.action == "recompute"),
        "exposed_ms": round(now.exposed_ms, 7),
    }


def compare(golden: Numbers, found: Numbers, budget: int | None = None) -> Comparison:
    """``budget``: that the result has to meet."""
    result = Comparison()
    for name in (*AIMS, *FIXED):
        if name not in golden:
            continue
        before, now = golden[name], found[name]
        if abs(now - before) <= TOLERANCE * abs(before):
            continue
        line = f"{name}: {before:g} in the golden result, {now:g} now"
        (result.better if name in AIMS and now < before else result.worse).append(line)
    if budget is not None and "peak_bytes" in found and found["peak_bytes"] > budget:
        result.worse.append(f"peak_bytes: {found['peak_bytes']:g}, above the budget of {budget}")
    return result


def changes(golden: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Every number that differs at all, information too."""
    names = [*golden, *(n for n in found if n not in golden)]
    return [f"{n}: {golden.get(n)} -> {found.get(n)}" for n in names if golden.get(n) != found.get(n)]
