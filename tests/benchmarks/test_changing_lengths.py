"""Scenario ``fsdp-lengths`` on a CPU: lengths that change from step to step, growth of memory, and the report on it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.changing_lengths.measure import draw_lengths, spread_lengths
from benchmarks.changing_lengths.records import LengthsRun
from benchmarks.claims import check_claims
from benchmarks.cli import app
from benchmarks.launch import run_variant
from benchmarks.process_memory import ProcessMemory
from benchmarks.quartiles import summarize
from benchmarks.schema import Case, Memory, Protocol, Record, Report, Request, Result, Variant, from_json, to_json
from benchmarks.tables import render

MIB = 1 << 20
TINY = Case(
    layers=2, seq=64, hidden=32, ffn=96, heads=4, kv_heads=2, head_dim=8, dtype="float32", device="cpu", vocab=64
)
OFFLOAD_ALL = {"policy": "offload_all", "inner": "aot_eager", "device_types": ["cpu"], "min_bytes": "1KiB"}
NOTHING = ProcessMemory(*(0 for _ in dataclasses.fields(ProcessMemory)))


def test_lengths_are_within_their_bounds_and_mostly_short() -> None:
    found = draw_lengths(random.Random(0), 2_000, 1_024, 16_384)
    assert (min(found), max(found)) == (pytest.approx(1_024, rel=0.02), pytest.approx(16_384, rel=0.02))
    # As many from 1,024 to 4,096 as from there to 16,384.
    assert sum(n < 4_096 for n in found) == pytest.approx(1_000, abs=80)
    assert draw_lengths(random.Random(0), 3, 7, 7) == [7, 7, 7]
    for shortest, draw in ((0, draw_lengths), (65, draw_lengths), (65, spread_lengths)):
        with pytest.raises(ValueError, match=f"expected shortest to be from 1 to seq=64, found {shortest}"):
            draw(random.Random(0), 1, shortest, 64)


def test_a_warm_up_has_lengths_all_over_the_range() -> None:
    found = spread_lengths(random.Random(0), 5, 1_024, 16_384)
    assert found != sorted(found) == [1_024, 2_048, 4_096, 8_192, 16_384]
    assert spread_lengths(random.Random(1), 5, 1_024, 16_384) != found
    assert spread_lengths(random.Random(0), 0, 8, 64) == [] and spread_lengths(random.Random(0), 1, 8, 64) == [8]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_with_lengths_of_their_own() -> None:
    protocol = Protocol(ranks=2, warmup=3, steps=30, shortest=8, gradients=False, copy_trace=False)
    record = run_variant(
        Request("fsdp-lengths", TINY, Variant("offload_all", "offload_all", OFFLOAD_ALL), protocol), 250
    )
    assert record.status == "ok", record.log_tail
    result, run = record.result, record.result.changing_lengths
    assert run is not None and result.step_ms is not None
    assert len(run.lengths) == len(result.step_ms.values) == result.num_timed_steps == 30
    assert {"timed steps to 25", "timed steps to 30"} <= set(result.finished)
    assert max(run.lengths) == run.lengths[15] == 64 and min(run.lengths) >= 8
    # A step moves what its length needs, and nothing else.
    moved = dict(zip(run.lengths, run.offloaded_bytes, strict=True))
    assert [moved[n] for n in run.lengths] == run.offloaded_bytes
    assert [moved[n] for n in sorted(moved)] == sorted(set(run.offloaded_bytes)) and min(moved.values()) > 0
    assert len(set(moved)) > 5
    assert run.graphs_by_rank == [1, 1], "a length compiled another graph"
    assert run.warmup_s > 0 and len(run.grown) == 2 and run.peak_so_far_bytes == [0] * 30  # no peaks on a CPU
    assert len(run.grown_by_rank) == 2 and run.most_grown("arena") == 0
    assert len(run.grown_again_by_rank) == 2 and run.most_grown_again("arena") == 0
    assert "lengths again" in result.finished and len(run.lengths) == 30, "they are not timed"
    assert run.after_warmup.resident > 0 and len(result.step_ms_by_rank) == 2


def record_of(
    kind: str,
    *,
    grown: tuple[ProcessMemory, ...] | None = (NOTHING,),
    graphs: int = 1,
    again: tuple[ProcessMemory, ...] = (NOTHING,),
) -> Record:
    variant = Variant(kind, kind, {"activation_budget": 200} if kind == "auto" else {})
    result = Result(budget_bytes=200 if kind == "auto" else None)
    if grown is not None:
        result.step_ms, result.num_timed_steps = summarize([1.0, 2.0, 3.0]), 3
        result.memory = result.first_step_memory = Memory(0, 150, 300, 0, 0)
        moved = [0, 10, 20] if kind == "auto" else [0] * 3
        result.changing_lengths = LengthsRun(
            2, NOTHING, [8, 16, 64], moved, [1] * 3, [1] * 3, [1] * 3, [], list(grown), [graphs], 1.5, list(again)
        )
    return Record("fsdp-lengths", TINY, variant, "ok" if grown else "failed", "", 1.0, result)


def report_of(*records: Record) -> Report:
    report = Report("fsdp-lengths", {}, Protocol(steps=3, warmup=2), None, list(records))
    report.claims = check_claims(report)
    return report


def held(report: Report) -> list[bool | None]:
    return [claim["held"] for claim in report.claims]


def grew(**kinds: int) -> ProcessMemory:
    return dataclasses.replace(NOTHING, **kinds)


@pytest.mark.parametrize(
    ("grown", "plain", "graphs", "expected"),
    [
        ((NOTHING,), NOTHING, 4, [True, True, True, True]),
        ((NOTHING, grew(device_reserved=2 * MIB)), NOTHING, 1, [True, False, True, True]),
        ((NOTHING, grew(device_reserved=2 * MIB)), grew(device_reserved=2 * MIB), 1, [True, True, True, True]),
        ((grew(device_reserved=1),), grew(device_reserved=-1), 1, [True, False, True, True]),
        ((grew(arena=4096),), grew(arena=4096), 1, [False, True, True, True]),
        ((grew(arena=-4096, device_reserved=-1),), grew(device_reserved=-2), 1, [True, True, True, True]),
        ((grew(resident=40 * MIB),), NOTHING, 1, [True, True, False, True]),
        ((grew(resident=40 * MIB), grew(malloc_used=30 * MIB)), grew(resident=20 * MIB), 1, [True, True, True, True]),
        ((grew(anonymous=40 * MIB),), grew(resident=20 * MIB), 1, [True, True, False, True]),
        ((grew(resident=40 * MIB),), grew(resident=-20 * MIB), 5, [True, True, False, False]),
    ],
)
def test_what_is_promised(grown: Any, plain: ProcessMemory, graphs: int, expected: list[bool]) -> None:
    """Of the rank where it grew most; device and process next to plain Inductor's, in the same run."""
    report = report_of(record_of("inductor", grown=(plain,)), record_of("auto", grown=grown, graphs=graphs))
    assert held(report) == [*expected[:3], True, expected[3], True, True]  # and the budget
    assert "3 steps of random lengths" in report.claims[0]["claim"]


@pytest.mark.parametrize(
    ("again", "plain", "expected"),
    [
        ((NOTHING, grew(resident=4 * MIB, malloc_used=4 * MIB)), NOTHING, True),
        ((NOTHING, grew(malloc_used=4 * MIB + 1)), NOTHING, False),
        ((grew(malloc_used=4 * MIB + 1),), grew(malloc_used=1), True),
        ((grew(malloc_used=4 * MIB + 1),), grew(malloc_used=-1), False),
        ((grew(device_reserved=1),), NOTHING, False),
        ((grew(device_reserved=1),), grew(device_reserved=1), True),
        ((grew(device_reserved=-1),), grew(device_reserved=-2), True),
    ],
)
def test_what_grows_with_steps_not_with_lengths(again: Any, plain: ProcessMemory, expected: bool) -> None:
    report = report_of(record_of("inductor", again=(plain,)), record_of("auto", again=again))
    (claim,) = [c for c in report.claims if "lengths seen before" in c["claim"]]
    assert claim["held"] is expected and claim["figures"]["grown_bytes"]["inductor"]["malloc_used"] == plain.malloc_used
    assert "again, MiB" in render(report)


def test_reports_from_before_lengths_came_again_are_open_there() -> None:
    report = report_of(record_of("inductor", again=()), record_of("auto", again=()))
    assert held(report) == [True, True, True, None, True, True, True]
    assert "| -" in render(report)


def test_without_inductor_or_without_a_run_of_ours_it_is_open() -> None:
    assert held(report_of(record_of("auto")))[:5] == [True, None, None, None, True]
    assert held(report_of(record_of("inductor")))[:5] == [None] * 5
    assert held(report_of(record_of("inductor"), record_of("auto", grown=None)))[:5] == [None] * 5


def test_the_table_and_its_way_through_json() -> None:
    report = report_of(record_of("inductor"), record_of("auto", grown=(grew(arena=3 * MIB),)))
    again = from_json(Report, to_json(report))
    assert dataclasses.asdict(again) == dataclasses.asdict(report)
    text = render(again)
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert "3 timed steps behind 2 others of changing length" in text and "NOT held" in text
    assert [row["warm-up, s"] for row in table] == ["2", "2"]
    assert [row["steps that move nothing"] for row in table] == ["3", "1"]
    assert [row["arena grew, MiB"] for row in table] == ["0.0", "3.0"]
    assert table[1]["tokens"] == "8 to 64" and table[1]["vs inductor"] == "1.000"


def test_other_process_groups_are_for_sharded_scenarios(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "plan", "--set", "process_group=fake", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "process_group is for scenarios fsdp and fsdp-lengths" in " ".join(done.output.replace("│", " ").split())
