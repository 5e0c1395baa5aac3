"""Budgets that are relative to peaks measured earlier in the same run, so that a sweep fits every case and machine.

``0.25*inductor``   a quarter of that variant's peak
``1.02*checkpoint`` as above
``1*smallest``      the smallest budget that the default's plan names (scenarios ``stock``)
``0.95*free``       of the device's free memory when the step began
``15%``             of the way from ``checkpoint``'s peak to ``inductor``'s
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.schema import Result, Variant

_OF = re.compile(r"(\d+(?:\.\d+)?)\*([a-z_]+)")
_BETWEEN = re.compile(r"(\d+(?:\.\d+)?)%")
_ENDS = ("checkpoint", "inductor")


def check_budget(budget: Any) -> None:
    """Raises ValueError for a text that looks relative and is not; sizes are the backend's to check."""
    looks_relative = isinstance(budget, str) and ("*" in budget or "%" in budget)
    if looks_relative and not (_OF.fullmatch(budget) or _BETWEEN.fullmatch(budget)):
        raise ValueError(f"expected a budget such as 1.02*checkpoint or 15%, found {budget!r}")


def resolve_budget(budget: Any, peaks: Mapping[str, int]) -> Any:
    """``budget`` in bytes where it is relative, else as it is.

    Args:
        peaks: bytes by the label of a variant that was measured, and ``free``.

    Raises:
        LookupError: nothing of that name was measured.
    """
    if not isinstance(budget, str):
        return budget
    if found := _OF.fullmatch(budget):
        return int(float(found[1]) * _peak(found[2], peaks))
    if found := _BETWEEN.fullmatch(budget):
        low, high = (_peak(name, peaks) for name in _ENDS)
        return int(low + float(found[1]) / 100 * (high - low))
    return budget


def with_budget_in_bytes(variant: Variant, peaks: Mapping[str, int]) -> Variant:
    """The variant with a relative ``activation_budget`` in bytes; unchanged where a peak is missing or nothing is
    relative (the measuring process then reports its value)."""
    try:
        budget = resolve_budget(variant.options.get("activation_budget"), peaks)
    except LookupError:
        return variant
    return variant if budget is None else replace(variant, options={**variant.options, "activation_budget": budget})


def peaks_of(label: str, result: Result) -> dict[str, int]:
    """What later budgets may be relative to, of one measured variant.

    On a CPU, where nothing counts memory, a rehearsal of ``stock`` takes what the default's plan says: plain Inductor's
    peak, and its own in place of checkpointing's.
    """
    found = {label: result.memory.peak_bytes} if result.memory is not None else {}
    plan = result.plan
    if result.stock is None or label != "auto" or plan is None:
        return found
    found["smallest"] = plan.smallest_budget_at_end_bytes or plan.smallest_budget_bytes
    if result.memory is None:
        found |= {"inductor": plan.baseline["peak_bytes"], "checkpoint": plan.predicted["peak_bytes"]}
    return found


def _peak(name: str, peaks: Mapping[str, int]) -> int:
    if name not in peaks:
        raise LookupError(f"expected {name!r} to be measured before, found {', '.join(sorted(peaks)) or 'nothing'}")
    return peaks[name]
