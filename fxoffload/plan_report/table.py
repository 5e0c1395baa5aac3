"""A plan as text: its objective, its prediction, the action on every saved value, and memory that no plan can
change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fxoffload.machine.estimate_error import describe_error
from fxoffload.plan_report.blocks import Block, Lines, Points, Table, as_text
from fxoffload.step.segment_names import in_words

if TYPE_CHECKING:
    from fxoffload.planner.plan import Decision, PlanData, Prediction

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
_MOST_RANGES = 5
_ACTIONS = ("keep", "offload", "recompute", "stay")


def render(plan: PlanData) -> str:
    """The whole plan as text."""
    return as_text(blocks_of(plan))


def blocks_of(plan: PlanData) -> list[Block]:
    """The whole plan."""
    parts: list[Block] = [
        Lines((_title(plan), *_knobs(plan), plan.summary, basis(plan), *_not_predicted(plan))),
        costs(plan),
        Lines(tuple(_limits(plan))),
    ]
    if len(plan.frontier) > 1:
        parts.append(frontier(plan))
    if any(d.action != "mask" for d in plan.decisions):
        parts += [decisions(plan, plan.decisions), Lines((totals(plan, plan.decisions),))]
    else:
        parts.append(Lines(("the forward saves nothing",)))
    if plan.breaks:
        parts.append(Points("graph breaks (what runs between the graphs is not in the plan):", plan.breaks))
    if masks := [d for d in plan.decisions if d.action == "mask"]:
        parts.append(Points("attention masks:", tuple(describe_mask(plan, d) for d in masks)))
    if plan.floors:
        parts.append(Points("what sets the peak, whatever is planned:", plan.floors))
    return parts


def describe(plan: PlanData) -> str:
    """The plan in one line."""
    unit = RowUnit.of(plan)
    found = [("plain Inductor", plan.baseline.peak_bytes, plan.baseline.step_ms)]
    found.append(("predicted", plan.predicted.peak_bytes, plan.predicted.step_ms))
    if plan.measured_peak_bytes is not None and plan.measured_step_ms is not None:
        found.append(("measured", plan.measured_peak_bytes, plan.measured_step_ms))
    return f"{_title(plan)}: " + ", ".join(
        f"{name} {unit.show(peak)} {unit.name} in {ms:.1f} ms" for name, peak, ms in found
    )


def gib(nbytes: int) -> str:
    """GiB with two decimals."""
    return RowUnit("GiB", 2**30).show(nbytes)


class RowUnit(NamedTuple):
    """A unit of bytes that suits all of a plan."""

    name: str
    size: int

    @staticmethod
    def of(plan: PlanData) -> RowUnit:
        """The largest of GiB, MiB and KiB that plain Inductor's peak fills."""
        for name, size in (("GiB", 2**30), ("MiB", 2**20)):
            if plan.baseline.peak_bytes >= size:
                return RowUnit(name, size)
        return RowUnit("KiB", 2**10)

    def show(self, nbytes: int) -> str:
        """Two decimals, without the unit."""
        amount = nbytes / self.size
        return "<0.01" if 0 < amount < 0.005 else f"{amount:.2f}"

    def with_name(self, nbytes: int) -> str:
        """The same, followed by the unit."""
        return f"{self.show(nbytes)} {self.name}"


def counted(number: int, what: str) -> str:
    """ "1 call", "2 calls"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, with runs as one: "0-3, 7"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(shown if len(shown) <= _MOST_RANGES else [*shown[: _MOST_RANGES - 1], "..."])


def layer_ranges(layers: Sequence[str]) -> str:
    """Labels of layers, with consecutive numbers as ranges, and how many there are: "layers.0-14 (15)"."""
    if not layers:
        return "outside"
    return label_ranges(layers) + (f" ({len(layers)})" if len(layers) > 1 else "")


def label_ranges(labels: Iterable[str]) -> str:
    """Labels with consecutive numbers as ranges: "layers.0-14; norm"."""
    return _few([text for family in _families(labels) for text in _family(family)])


def _few(shown: list[str]) -> str:
    return "; ".join(shown if len(shown) <= _MOST_RANGES else [*shown[: _MOST_RANGES - 1], "..."])


def value_ranges(decision: Decision) -> str:
    """The values of a decision by module path, shape and dtype: inside of their layers, or, where they are not, with
    consecutive numbers as ranges. The name of the first where nothing more is known."""
    values = decision.values or ((decision.value,) if decision.value else ())
    if not values:
        return decision.name
    if len(values) == len(decision.layers):
        pairs = list(zip(values, decision.layers, strict=True))
        if all(value.startswith((f"{layer}.", f"{layer} ")) for value, layer in pairs):
            values = tuple(value.removeprefix(layer).lstrip(". ") for value, layer in pairs)
    paths: dict[str, list[str]] = {}  # shape and dtype -> module paths
    for value in dict.fromkeys(values):
        path, bracket, rest = value.partition(" [")
        paths.setdefault(bracket + rest, []).append(path)
    return _few([t + shape for shape, found in paths.items() for f in _families(found) for t in _family(f)])


def _families(labels: Iterable[str]) -> Iterable[list[list[str]]]:
    """Labels, split at their numbers, by the text between the numbers."""
    families: dict[tuple[str, ...], list[list[str]]] = {}
    for label in dict.fromkeys(labels):
        parts = _NUMBER.split(label)
        families.setdefault(tuple(parts[::2]), []).append(parts)
    return families.values()


def _family(labels: Sequence[list[str]]) -> list[str]:
    """Labels that differ in their numbers only: a text for each run of the last number that differs."""
    varying = [i for i in range(1, len(labels[0]), 2) if len({parts[i] for parts in labels}) > 1]
    if not varying:
        return ["".join(parts) for parts in labels]
    at = varying[-1]
    found: dict[tuple[str, str], list[int]] = {}
    for parts in labels:
        found.setdefault(("".join(parts[:at]), "".join(parts[at + 1 :])), []).append(int(parts[at]))
    return [f"{before}{number_ranges(numbers)}{behind}" for (before, behind), numbers in found.items()]


def _title(plan: PlanData) -> str:
    name = "plan ahead" if plan.graph < 0 else f"plan of graph {plan.graph}"
    name += f" ({plan.label})" if plan.label else ""
    return ", ".join(text for text in (name, plan.shape, plan.device) if text)


def _knobs(plan: PlanData) -> list[str]:
    unit = RowUnit.of(plan)
    asked = []
    if plan.activation_budget is not None:
        asked.append(f"activation_budget {unit.show(plan.activation_budget)} {unit.name}")
    if plan.max_slowdown is not None:
        asked.append(f"max_slowdown {100 * plan.max_slowdown:.1f} %")
    lines = [f"asked for: {', '.join(asked) or 'nothing'} ({plan.source})"]
    newest = plan.calibrated or plan.predicted
    for what, peak in (("predicted", newest.peak_bytes), ("measured", plan.measured_peak_bytes)):
        if plan.activation_budget is not None and peak is not None and peak > plan.activation_budget:
            lines.append(f"the {what} peak exceeds the budget by {unit.with_name(peak - plan.activation_budget)}")
    return lines


def basis(plan: PlanData) -> str:
    """What the predictions rest on."""
    if plan.basis == "steps":
        return "predicted from steps that were measured before it was made"
    if plan.basis == "segments":
        return "predicted from its segments, which ran on this device before the first step"
    known = describe_error(plan.estimate_error)
    if plan.basis == "operators":
        return f"predicted from operators that were timed on this device, the rest estimated from its profile; {known}"
    return f"predicted from the device's profile: an estimate; {known}"


def _not_predicted(plan: PlanData) -> Iterable[str]:
    if plan.loss == "outside" and plan.calibrated is None:
        yield (
            "no output of this graph is a loss: the memory and time of code between its forward and its backward are "
            "in no prediction; on a GPU the first steps tell them"
        )


def costs(plan: PlanData) -> Table:
    """Time and memory: of plain Inductor, as predicted, calibrated, measured."""
    unit = RowUnit.of(plan)
    columns = [
        ("plain Inductor", _cost(unit, plan.baseline, None)),
        ("predicted", _cost(unit, plan.predicted, plan.baseline)),
    ]
    if plan.checkpointing is not None:
        columns.insert(1, ("checkpointed", _cost(unit, plan.checkpointing, plan.baseline)))
    if plan.calibrated_baseline is not None:
        columns.append(("plain, calibrated", _cost(unit, plan.calibrated_baseline, None)))
    if plan.calibrated is not None:
        columns.append(("calibrated", _cost(unit, plan.calibrated, plan.calibrated_baseline)))
    if plan.measured_peak_bytes is not None or plan.measured_step_ms is not None:
        columns.append(("measured", _measured(unit, plan)))
    quantities = dict.fromkeys(name for _, column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for _, column in columns)] for name in quantities]
    return Table(("", *(title for title, _ in columns)), rows, ("left", *["right"] * len(columns)))


def frontier(plan: PlanData) -> Table:
    """The budgets that can be asked for, with their times."""
    unit = RowUnit.of(plan)
    rows = [
        [unit.show(p.budget_bytes), unit.show(p.peak_bytes), f"{p.step_ms:.1f}", _slowdown(p.step_ms, plan.baseline)]
        for p in plan.frontier
    ]
    return Table((f"activation_budget {unit.name}", f"peak {unit.name}", "step ms", "slowdown"), rows, ("right",) * 4)


def _cost(unit: RowUnit, found: Prediction, base: Prediction | None) -> dict[str, str]:
    outside = {}
    if found.outside_bytes or found.outside_ms:
        outside = {"outside compiled graphs": f"{unit.with_name(found.outside_bytes)}, {found.outside_ms:.1f} ms"}
    return {
        f"peak {unit.name}": unit.show(found.peak_bytes),
        "of plain Inductor's": _share(found.peak_bytes, base),
        f"peak without gradients {unit.name}": unit.show(found.peak_without_gradients_bytes),
        "step ms": f"{found.step_ms:.1f}",
        "slowdown": _slowdown(found.step_ms, base),
        "forward ms": f"{found.forward_ms:.1f}",
        "backward ms": f"{found.backward_ms:.1f}",
        **outside,
        "exposed copy ms": f"{found.exposed_ms:.1f}",
        f"offloaded {unit.name}": unit.show(found.bytes_offloaded),
    }


def _measured(unit: RowUnit, plan: PlanData) -> dict[str, str]:
    # A measured time is not compared with an estimated one: the quotient would be the estimate's error.
    base, found = plan.calibrated_baseline, {}
    if plan.measured_peak_bytes is not None:
        found[f"peak {unit.name}"] = unit.show(plan.measured_peak_bytes)
        found["of plain Inductor's"] = _share(plan.measured_peak_bytes, base or plan.baseline)
    if plan.measured_step_ms is not None:
        found["step ms"] = f"{plan.measured_step_ms:.1f}"
        found["slowdown"] = _slowdown(plan.measured_step_ms, base)
    if plan.measured_exposed_ms is not None:
        found["exposed copy ms"] = f"{plan.measured_exposed_ms:.1f}"
    return found


def _share(nbytes: int, base: Prediction | None) -> str:
    return f"{100 * nbytes / base.peak_bytes:.1f} %" if base is not None and base.peak_bytes else "-"


def _slowdown(step_ms: float, base: Prediction | None) -> str:
    return f"{100 * (step_ms / base.step_ms - 1):+.1f} %" if base is not None and base.step_ms else "-"


def _limits(plan: PlanData) -> list[str]:
    newest, unit = plan.calibrated or plan.predicted, RowUnit.of(plan)
    at = [f"the peak is in {in_words(plan.boundaries, newest.peak_phase, newest.peak_segment)}"]
    between = plan.between_steps_ms
    outside = "the optimizer, where it runs there, and what runs before the first compiled graph and after the last"
    return [
        *(at if newest.peak_segment else []),
        *([] if between is None else [f"from one backward to the next forward: {between:.1f} ms, {outside}"]),
        f"the smallest budget is about {unit.show(plan.smallest_budget_bytes)} {unit.name}",
    ]


def decisions(plan: PlanData, some: Iterable[Decision]) -> Table:
    """What happens to some of the plan's values, without its masks."""
    unit = RowUnit.of(plan)
    headers = ("layers", "value", "producer", f"{unit.name} each", unit.name, "decision", "reason")
    rows = [
        [
            layer_ranges(d.layers),
            value_ranges(d),
            d.producer,
            unit.show(d.nbytes),
            unit.show(d.total_bytes),
            d.action,
            d.reason,
        ]
        for d in some
        if d.action != "mask"
    ]
    return Table(headers, rows, ("left", "left", "left", "right", "right", "left", "left"))


def describe_mask(plan: PlanData, mask: Decision) -> str:
    """A mask, its bytes, and what to change."""
    where = f" in each of {layer_ranges(mask.layers)}" if len(mask.layers) > 1 else ""
    return f"{mask.value or mask.name}, {RowUnit.of(plan).with_name(mask.nbytes)}{where}: {mask.reason}"


def totals(plan: PlanData, some: Sequence[Decision]) -> str:
    """Bytes of some of the plan's values, by action."""
    found = {action: sum(d.total_bytes for d in some if d.action == action) for action in _ACTIONS}
    unit = RowUnit.of(plan)
    return "saved by the forward: " + ", ".join(
        f"{action} {unit.show(total)} {unit.name}" for action, total in found.items()
    )
