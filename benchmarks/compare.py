"""Two runs side by side: rows of the same case and variant, measure by measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.load import AnyReport
from benchmarks.measures import Measure, Row, rows
from benchmarks.schema import Scalar

# What may explain a difference, if it differs.
EXPLAINING = ("date", "git_commit", "git_dirty", "source_sha256", "gpu_name", "gpu_driver_version", "torch")


@dataclass(frozen=True)
class Pair:
    """A measure in both runs."""

    row: Row
    before: Measure
    after: Measure

    @property
    def ratio(self) -> float:
        """After over before; infinite where there was nothing before."""
        if self.before.value == self.after.value:
            return 1.0
        return self.after.value / self.before.value if self.before.value > 0 else math.inf

    @property
    def worse_by(self) -> float:
        """By which fraction it got worse: 0.03 is 3 % more time, or 3 % less of what should be large."""
        if self.before.more_is_better:
            return 1.0 - self.ratio
        return self.ratio - 1.0

    @property
    def outside_quartiles(self) -> bool | None:
        """Whether the runs' quartiles leave a gap between them; None where one was measured only once."""
        one, two = self.before.quartiles, self.after.quartiles
        return None if one is None or two is None else one[1] < two[0] or two[1] < one[0]


@dataclass(frozen=True)
class Comparison:
    """``lost``: rows that ended well before and do not now. ``alone``: rows of one run only, with the run's letter."""

    pairs: list[Pair]
    lost: list[tuple[Row, Row]]
    alone: list[tuple[str, Row]]
    notes: list[str]

    def worse(self, limit: float) -> list[str]:
        """What got worse by more than ``limit`` (a fraction), in words; a row that is lost did."""
        found = [
            f"{_name(pair.row)}: {pair.before.name} worse by {pair.worse_by:.1%}"
            for pair in self.pairs
            if pair.worse_by > limit
        ]
        return found + [f"{_name(before)}: {before.status} became {after.status}" for before, after in self.lost]


def compare(before: AnyReport, after: AnyReport) -> Comparison:
    """Rows are matched by their whole case and their variant's label.

    Raises:
        ValueError: the two have no row in common; the message says what each has.
    """
    old, new = {row.key: row for row in rows(before)}, {row.key: row for row in rows(after)}
    common = [key for key in old if key in new]
    if not common:
        raise ValueError(
            "expected rows of the same case and variant in both, found "
            f"{', '.join(_name(row) for row in old.values())} in A and "
            f"{', '.join(_name(row) for row in new.values())} in B"
        )
    pairs = [
        Pair(old[key], measure, new[key].measures[name])
        for key in common
        for name, measure in old[key].measures.items()
        if name in new[key].measures
    ]
    lost = [(old[key], new[key]) for key in common if old[key].status == "ok" != new[key].status]
    alone = [("A", row) for key, row in old.items() if key not in new]
    alone += [("B", row) for key, row in new.items() if key not in old]
    notes = _notes(before.environment, after.environment)
    if before.scenario != after.scenario:
        notes.insert(0, f"scenario: {before.scenario}, {after.scenario}")
    return Comparison(pairs, lost, alone, notes)


def render(found: Comparison) -> str:
    """A Markdown table of the pairs, then the rows of one run only, and how the runs differ."""
    lines = [
        {
            "case": pair.row.case_name,
            "variant": pair.row.variant,
            "measure": pair.before.name,
            "A": _value(pair.before),
            "B": _value(pair.after),
            "B / A": f"{pair.ratio:.3f}",
            "": _verdict(pair),
        }
        for pair in found.pairs
    ]
    parts = [tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)]
    details = [f"- {_name(before)}: {before.status} in A, {after.status} in B" for before, after in found.lost]
    details += [f"- only in {letter}: {_name(row)} ({row.status})" for letter, row in found.alone]
    parts += ["\n".join(details), "\n".join(f"- {note}" for note in found.notes)]
    return "\n\n".join(part for part in parts if part)


def parse_percent(text: str) -> float:
    """``"3%"`` as 0.03. Raises ValueError for anything else and for negative numbers."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = -1.0
    if not text.strip().endswith("%") or not 0 <= value < math.inf:
        raise ValueError(f"expected a percentage such as 3%, found {text!r}")
    return value


def _name(row: Row) -> str:
    return f"{row.case_name} {row.variant}".strip()


def _value(measure: Measure) -> str:
    if measure.quartiles is None:
        return f"{measure.value:.4g}" if measure.value < 1e4 else f"{measure.value:,.0f}"
    return f"{measure.value:.4g} [{measure.quartiles[0]:.4g}, {measure.quartiles[1]:.4g}]"


def _verdict(pair: Pair) -> str:
    if pair.before.value == pair.after.value:
        return "equal"
    word = "worse" if pair.worse_by > 0 else "better"
    return {True: f"{word}, outside the quartiles", False: "within the quartiles", None: f"{word}, measured once"}[
        pair.outside_quartiles
    ]


def _notes(before: dict[str, Scalar], after: dict[str, Scalar]) -> list[str]:
    return [
        f"{name}: {before.get(name)} in A, {after.get(name)} in B"
        for name in EXPLAINING
        if before.get(name) != after.get(name)
    ]
