"""Scenario ``collectives``: two processes on a CPU; which records of a profiler count, from records made by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.claims import check_claims
from benchmarks.cli import app
from benchmarks.collectives.blocks import (
    KINDS,
    PER_BLOCK,
    Block,
    Round,
    split_blocks,
    summarize_rounds,
)
from benchmarks.collectives.measure import layer_elements
from benchmarks.idle_copies import PIECE_BYTES
from benchmarks.launch import run_variant
from benchmarks.published_columns import COLUMNS, Measured
from benchmarks.quartiles import summarize
from benchmarks.schema import (
    Case,
    CollectiveBeside,
    Protocol,
    Record,
    Report,
    Request,
    Result,
    Variant,
    from_json,
    to_json,
)
from benchmarks.tables import render

TINY = Case(hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, dtype="float32", device="cpu")
IDLE = Variant("idle", "idle")
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
NAMES = {"AllGather": "ncclDevKernel_AllGather_RING_LL(a)", "ReduceScatter": "ncclDevKernel_ReduceScatter_Sum_bf16(a)"}


@dataclass
class TimeRange:
    start: float
    end: float


@dataclass
class Event:
    name: str
    time_range: TimeRange


def block(at: float, ms: float, *, copies: tuple[str, ...] = (), until: float = 1e9, products: bool = False) -> list:
    """A block's records from ``at`` (us) on: collectives of ``ms`` back to back, and copies from before them until
    ``until`` us after the block began."""
    events = [Event("ncclDevKernel_AllReduce_Sum", TimeRange(at - 2, at - 1)), Event(SPIN, TimeRange(at, at + 10))]
    begin = at + 20
    for _ in range(1 + PER_BLOCK):
        for kind in KINDS:
            events.append(Event(NAMES[kind], TimeRange(begin, begin + 1e3 * ms)))
            begin += 1e3 * ms
    for name in copies:
        end = min(at + until, begin + 500.0)
        half = (at + 11 + end) / 2
        events += [Event(f"Memcpy {name} (x)", TimeRange(at + 11, half)), Event(f"Memcpy {name}", TimeRange(half, end))]
    if products:
        events.append(Event("nvjet_sm90_tst", TimeRange(at + 11, begin + 500.0)))
    return events


def test_a_collective_counts_where_copies_ran_all_the_while() -> None:
    late = block(200_000.0, 2.0, copies=("DtoH",), until=19_500.0)
    blocks = split_blocks(
        [*late, *block(1000.0, 1.0), *block(100_000.0, 1.5, copies=("DtoH", "HtoD"))], 3, products=False
    )
    alone, both, cut = blocks
    assert alone.took_ms == pytest.approx(2 * PER_BLOCK * 1.0)
    assert alone.judge(False, False).each_ms == {kind: [pytest.approx(1.0)] * PER_BLOCK for kind in KINDS}
    assert alone.judge(False, False).gb_per_s == {}
    found = both.judge(True, True)
    assert found.each_ms["AllGather"] == [pytest.approx(1.5)] * PER_BLOCK
    assert found.gb_per_s == {}, "no copy began and ended while the collectives ran"
    # Copies end after 19.5 ms: in the fifth pair of 4 ms each. The first pair never counts.
    judged = cut.judge(True, False).each_ms
    assert [ms is not None for ms in judged["AllGather"]] == [True] * 4 + [False] * 4
    assert [ms is not None for ms in judged["ReduceScatter"]] == [True] * 3 + [False] * 5
    # A block that was to have copies, and has none.
    assert alone.judge(True, False).each_ms["AllGather"] == [None] * PER_BLOCK


def test_copies_with_gaps_between_them_do_not_count() -> None:
    """Those of 2 ms each, of which every fourth is missing; and how fast they are, gaps and all."""
    events = block(0.0, 1.0)
    events += [Event("Memcpy DtoH", TimeRange(at, at + 2000.0)) for at in range(0, 20_000, 2000) if at % 8000]
    (found,) = split_blocks(events, 1, products=False)
    judged = found.judge(True, False)
    counted = [i for i in range(PER_BLOCK) if judged.each_ms["AllGather"][i] is not None]
    gaps = [(0, 2), (8, 10), (16, 18)]
    begins = [0.02 + 2 * (i + 1) for i in range(PER_BLOCK)]
    assert counted == [
        i for i, at in enumerate(begins) if not any(a < at + 1 - 0.05 and at + 0.05 < b for a, b in gaps)
    ]
    # Within 2.02 to 18.02 ms: from 4 to 8 and from 10 to 16.
    assert judged.gb_per_s == {"down": pytest.approx(5 * PIECE_BYTES / 1e6 / 12.0)}


def test_products_have_to_run_all_the_while_too() -> None:
    with_them, without = split_blocks([*block(0.0, 1.0, products=True), *block(90_000.0, 1.0)], 2, products=True)
    assert None not in with_them.judge(False, False).each_ms["AllGather"]
    assert set(without.judge(False, False).each_ms["AllGather"]) == {None}


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(RuntimeError, match="expected 2 blocks, each behind a spin_kernel, found 1 among"):
        split_blocks(block(0.0, 1.0), 2, products=False)
    (lost,) = split_blocks(block(0.0, 1.0)[:-1], 1, products=False)
    with pytest.raises(RuntimeError, match="expected 9 kernels ReduceScatter in a block, the profiler has 8"):
        lost.judge(False, False)


def rounds_of(none: list[float | None], down: list[float | None]) -> list[Round]:
    return [{"none": Block({k: none for k in KINDS}), "down": Block({k: down for k in KINDS}, {"down": 50.0})}] * 5


def test_each_counts_where_it_was_shortest_and_against_its_own_round() -> None:
    first = rounds_of([1.0, 5.0, 1.0], [1.2, None, 7.0])
    second = rounds_of([3.0, 1.0, 9.0], [4.0, 1.1, 1.0])
    rows = {(row.kind, row.copies): row for row in summarize_rounds([first, second], 1000)}
    assert rows["AllGather", "none"].ms.values == [1.0] * 15 and rows["AllGather", "none"].vs_none is None
    down = rows["ReduceScatter", "down"]
    assert down.ms.values == [1.2, 1.0] * 5, "the one that had no copies on one rank counts on neither"
    assert down.vs_none is not None and down.vs_none.values == [pytest.approx(1.1)] * 5
    assert (down.d2h_gb_per_s, down.h2d_gb_per_s, down.nbytes) == (50.0, None, 1000)
    with pytest.raises(RuntimeError, match="copies down: expected some collective with copies beside it"):
        summarize_rounds([rounds_of([1.0], [None]), rounds_of([1.0], [1.0])], 1000)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_on_a_cpu() -> None:
    """A rehearsal: collectives are timed, and nothing runs with them."""
    record = run_variant(Request("collectives", TINY, IDLE, Protocol(ranks=2, steps=5, warmup=1)), 200.0)
    assert record.status == "ok", record.log_tail
    assert layer_elements(TINY) == 64 * 16 * 2 * (4 + 2) + 3 * 64 * 128
    for kind, row in zip(KINDS, record.result.collectives_beside, strict=True):
        assert (row.kind, row.copies, row.vs_none) == (kind, "none", None)
        assert row.nbytes == 4 * layer_elements(TINY)
        assert len(row.ms.values) == 5 * PER_BLOCK and row.ms.low > 0


def test_its_variants_are_its_own() -> None:
    done = CliRunner().invoke(app, ["run", "collectives", "--out", "/tmp/none", "--variants", "idle,inductor"])
    assert done.exit_code == 2
    assert "unknown variant 'inductor'" in done.output


@pytest.mark.parametrize(
    ("ratio", "status", "held"), [(1.01, "ok", True), (1.04, "ok", False), (1.01, "failed", None), (None, "ok", None)]
)
def test_the_claim_the_table_and_the_published_columns(ratio: float | None, status: Any, held: bool | None) -> None:
    rows = [CollectiveBeside(kind, "none", 1 << 20, summarize([0.5])) for kind in KINDS]
    if ratio is not None:
        beside = [(kind, way) for kind in KINDS for way in ("down", "up", "both")]
        rows += [CollectiveBeside(k, w, 1 << 20, summarize([0.5]), summarize([ratio]), None, 51.0) for k, w in beside]
    record = Record("collectives", TINY, IDLE, "ok", "", 1.0, Result(collectives_beside=rows))
    other = dataclasses.replace(record, variant=Variant("matmul", "matmul"), status=status)
    assert record.result.was_measured
    report = Report("collectives", {}, Protocol(steps=12), None, [record, other])
    (claim,) = report.claims = check_claims(report)
    assert claim["held"] is held
    again = from_json(Report, to_json(report))
    assert dataclasses.asdict(again) == dataclasses.asdict(report)
    text = render(again)
    assert "12 rounds" in text and "0.500 [0.500, 0.500]" in text
    assert ("51.0" in text) is (ratio is not None)
    measured = Measured(record, {})
    assert COLUMNS["all-gather, ms"](measured) == "0.500"
    assert COLUMNS["all-gather, copies up"](measured) == ("" if ratio is None else f"+{100 * ratio - 100:.1f} %")
    assert COLUMNS["reduce-scatter, copies both"](Measured(Record("x", TINY, IDLE, "ok", "", 1.0, Result()), {})) == ""


def test_a_way_that_is_missing_leaves_the_claim_open() -> None:
    rows = [CollectiveBeside("AllGather", "up", 1 << 20, summarize([0.5]), summarize([1.0]))]
    record = Record("collectives", TINY, IDLE, "ok", "", 1.0, Result(collectives_beside=rows))
    (claim,) = check_claims(Report("collectives", {}, Protocol(), None, [record]))
    assert claim["held"] is None


def test_one_rank_has_no_collectives() -> None:
    done = CliRunner().invoke(app, ["run", "collectives", "--out", "/tmp/none", "--set", "ranks=1"])
    assert done.exit_code == 2
    assert "at least 2 ranks" in done.output
