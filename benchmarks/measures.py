"""What a record says that can be compared with another run: named numbers, with quartiles where there are some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.derived import case_label
from benchmarks.load import AnyReport
from benchmarks.moe_convert import MoeReport
from benchmarks.moe_convert import Row as Conversion
from benchmarks.rl.records import RlResult, Spread, Streamed, Switching, Way
from benchmarks.scenarios import SCENARIOS
from benchmarks.schema import Case, Memory, Record, Summary

GIB, MIB = 1 << 30, 1 << 20
# What tells the rows of ``pinning`` apart; the rest of a row is measured.
PINNING_KEYS = (
    *("gib", "huge", "threads", "chunk_mib", "touch", "staged", "resize_mib", "room_mib", "give_back", "n"),
    *("small_copies", "down"),
)
PINNING_COUNTS = ("bad", "samples")


@dataclass(frozen=True)
class Measure:
    """``quartiles``: None for a single measurement, such as a peak or a first step."""

    name: str
    value: float
    quartiles: tuple[float, float] | None = None
    more_is_better: bool = False


@dataclass(frozen=True)
class Row:
    """One variant of one case. ``case`` is None where a scenario has no cases."""

    case: Case | None
    variant: str
    status: str
    measures: dict[str, Measure]

    @property
    def key(self) -> tuple[Case | None, str]:
        return self.case, self.variant

    @property
    def case_name(self) -> str:
        return "" if self.case is None else case_label(self.case)


def rows(report: AnyReport) -> list[Row]:
    """All rows of a report, measured or not, in its order."""
    if isinstance(report, MoeReport):
        return [_row(None, row.variant, "ok" if row.seconds else "skipped", _conversion(row)) for row in report.rows]
    derived = {(row["case"], row["variant"]): row for row in report.derived}
    return [
        _row(r.case, _label(r), r.status, _measures(r, derived.get((case_label(r.case), r.variant.label), {})))
        for r in report.records
    ]


def _row(case: Case | None, variant: str, status: str, found: Iterator[Measure]) -> Row:
    return Row(case, variant, status, {measure.name: measure for measure in found})


def _label(record: Record) -> str:
    """Which lengths were tried does not make it another variant."""
    return record.variant.label.partition("@lengths")[0]


def _measures(record: Record, derived: dict[str, Any]) -> Iterator[Measure]:
    result = record.result
    yield from _summary("step ms", result.step_ms)
    yield from _summary("forward ms", result.forward_ms)
    yield from _summary("backward ms", result.backward_ms)
    yield from _peak("peak GiB", result.memory)
    yield from _peak("first step's peak GiB", result.first_step_memory)
    scenario = SCENARIOS.get(record.scenario)
    if scenario is None or not scenario.sweeps:  # in a sweep it depends on the variants before
        yield from _once("compile s", result.compile_s)
    if result.long_run is not None:
        yield from _once("reserved / allocated", result.long_run.reserved_vs_allocated)
    lengths = [probe.seq for probe in result.probes if probe.ran]
    yield from _once("longest that trained", max(lengths, default=None), more_is_better=True)
    yield from _once("warm compile s", derived.get("warm_compile_s"))
    yield from _once("host us", derived.get("host_us"))
    for row in result.collectives_beside:
        yield from _summary(f"{row.kind} ms, copies {row.copies}", row.ms)
    if result.rl is not None:
        yield from _phases(result.rl)


def _phases(rl: RlResult) -> Iterator[Measure]:
    yield from _switching(rl.switching or Switching())
    yield from _streamed(rl.stream)
    if rl.step is not None:
        yield from _spread("step s", rl.step.step)
        yield from _spread("the same work alone s", rl.step.alone)
    for row in rl.pinning:
        name = ", ".join(f"{key} {row[key]}" for key in PINNING_KEYS if key in row)
        for key, value in row.items():
            if key not in (*PINNING_KEYS, *PINNING_COUNTS):
                yield from _once(f"{name}: {key}", value, more_is_better=key.endswith("gbs"))


def _switching(found: Switching) -> Iterator[Measure]:
    yield from _once("first offload s", found.first_offload_s)
    yield from _once("first onload s", found.first_onload_s)
    yield from _way("steady offload s", found.offload)
    yield from _way("steady onload s", found.onload)
    if found.exposed is not None:
        yield from _spread("log-probs with the optimizer leaving and coming s", found.exposed.around)
    if found.first_forward is not None:
        yield from _spread("first matmul after onload s", found.first_forward.first_matmul)
    for name, size in (("rollout", found.residue_bytes), ("rollout, at the end", found.residue_later_bytes)):
        yield from _once(f"not free in the {name} MiB", None if size is None else size / MIB)
    yield from _once("host bytes / device bytes", found.host_vs_device)
    yield from _streamed(found.stream)


def _streamed(found: Streamed | None) -> Iterator[Measure]:
    if found is not None:
        yield from _spread("weights streamed s", found.seconds)
        yield from _once("stream's peak MiB", None if found.peak_bytes is None else found.peak_bytes / MIB)


def _conversion(row: Conversion) -> Iterator[Measure]:
    yield from _summary("seconds", row.seconds)
    if not row.variant.startswith("cp"):  # of cp the memory is that of its parent
        yield from _once("peak RSS GiB", None if row.peak_rss_bytes is None else row.peak_rss_bytes / GIB)


def _summary(name: str, found: Summary | None) -> Iterator[Measure]:
    if found is not None:
        yield Measure(name, found.median, (found.q1, found.q3))


def _spread(name: str, found: Spread | None) -> Iterator[Measure]:
    if found is not None:
        yield Measure(name, found.median, (found.q1, found.q3))


def _way(name: str, way: Way | None) -> Iterator[Measure]:
    yield from _spread(name, way.seconds if way is not None else None)


def _peak(name: str, memory: Memory | None) -> Iterator[Measure]:
    yield from _once(name, memory.peak_bytes / GIB if memory is not None and memory.peak_bytes else None)


def _once(name: str, value: Any, *, more_is_better: bool = False) -> Iterator[Measure]:
    if value is not None:
        yield Measure(name, float(value), None, more_is_better)
