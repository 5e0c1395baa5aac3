"""``fxoffload bench``: the sizes that it chooses, measurements at toy size on the CPU, messages about failures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fxoffload.bench import processes, run, sizing, worker
from fxoffload.bench.decoder import build
from fxoffload.bench.records import BenchRow, BenchWork, Machine, Report, Request, Spread, Steps, Switches
from fxoffload.bench.show import render
from fxoffload.cli.app import app

GIB = 1 << 30
TINY = BenchWork("cpu", "float32", 3, 32, 32, 64, 4, 2, 8, inner="aot_eager", warmup=1, steps=2, cycles=2)


@pytest.fixture(scope="module")
def whole_run() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "run", worker.run_here)  # the probe too, without the seconds of a process
        return run.bench(60.0, work=TINY)


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_variant_is_measured_and_computes_the_same(whole_run: Report) -> None:
    rows = {row.name: row for row in whole_run.rows}
    assert list(rows) == [
        "aot_eager",
        "aot_eager + checkpointing",
        "fxoffload, default",
        "fxoffload, with a budget",
        "phases",
    ]
    assert {row.status for row in whole_run.rows} == {"ok"}
    plain = rows["aot_eager"].steps
    assert plain is not None
    for row in whole_run.rows[:4]:
        assert row.steps is not None
        assert row.steps.loss == pytest.approx(plain.loss, rel=1e-5)
        assert row.steps.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-4)
        assert row.steps.peak_bytes is None, "a CPU has no peaks"
        assert row.steps.first_step_s > 0 < row.steps.step_ms.median
    # 11 tensors in each of 3 layers, the last norm, the input.
    assert len(plain.gradient_norms) == 3 * 11 + 2


@pytest.mark.slow
def test_the_budget_is_a_budget(whole_run: Report) -> None:
    default, budgeted = whole_run.rows[2], whole_run.rows[3]
    assert default.activation_budget is None and default.steps is not None and budgeted.steps is not None
    budget = budgeted.activation_budget
    assert budget is not None and budgeted.steps.planned_peak_bytes is not None
    assert budgeted.steps.planned_peak_bytes <= budget
    assert default.steps.planned_baseline_peak_bytes is not None
    assert budget < default.steps.planned_baseline_peak_bytes


@pytest.mark.slow
def test_everything_leaves_and_every_bit_returns(whole_run: Report) -> None:
    found = whole_run.rows[-1].switches
    assert found is not None and found.equal
    decoder, _ = build(TINY)
    parameters = sum(p.numel() * p.element_size() for p in decoder.parameters())
    buffers = sum(b.numel() * b.element_size() for b in decoder.buffers())
    assert found.moved_bytes == 3 * parameters + buffers, "AdamW keeps two numbers for each"
    assert found.link_down_gb_per_s is None
    assert found.first_offload_gb_per_s > 0 < found.offload_gb_per_s.median


@pytest.mark.slow
def test_a_rehearsal_says_that_it_is_one(whole_run: Report) -> None:
    text = render(whole_run)
    assert "A REHEARSAL without a GPU" in text and "| fxoffload, default" in text
    assert "every bit is as it was" in text
    assert "DIFFER" not in text and text.count("agree") == 3


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_of_its_own_answers_or_says_why_not() -> None:
    ended = processes.run(Request("probe"), 120.0)
    assert ended.status == "ok", ended.reason
    assert isinstance(ended.answer, Machine) and ended.answer.torch == torch.__version__
    ended = processes.run(Request("plain", dataclasses.replace(TINY, heads=3)), 120.0)
    assert ended.status == "failed" and ended.answer is None
    assert ended.reason.startswith("torch._dynamo.exc.") and "\n" not in ended.reason


@pytest.mark.parametrize(
    ("code", "log", "reason"),
    [
        (1, "Traceback:\n  File x\na.BudgetError: too small\n\nSet TORCH\n", "a.BudgetError: too small"),
        (1, "what it wrote\n\n", "what it wrote"),
        (1, "", "no output"),
        (-9, "half a line", "ended by SIGKILL; half a line"),
    ],
)
def test_reasons_are_one_line(code: int, log: str, reason: str) -> None:
    assert processes._reason(code, log) == reason


def test_a_process_that_takes_too_long_is_ended() -> None:
    ended = processes.run(Request("probe"), 0.2)
    assert (ended.status, ended.reason, ended.answer) == ("timeout", "not finished after 0 s", None)
    assert ended.wall_s < 60


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_gib", "hidden", "tokens"),
    [(139, 4096, 16384), (44, 4096, 16384), (23, 4096, 7168), (15, 2048, 13312), (7, 2048, 5120), (3, 1024, 5120)],
)
def test_the_model_fits_the_gpu(free_gib: float, hidden: int, tokens: int) -> None:
    work = sizing.choose(int(free_gib * GIB))
    assert (work.hidden, work.tokens) == (hidden, tokens)
    assert sizing._needed(hidden, tokens) <= sizing.PART_OF_FREE * free_gib * GIB
    assert work.heads * work.head_dim == hidden and work.heads % work.kv_heads == 0


def test_a_gpu_without_room_is_refused() -> None:
    with pytest.raises(sizing.BenchError, match=r"at least \d+\.\d .iB of free GPU memory, found 100\.0 MiB"):
        sizing.choose(100 << 20)


def test_parameters_are_counted_as_the_decoder_has_them() -> None:
    work = dataclasses.replace(sizing._work(1024, 1024), device="meta", dtype="float32")
    decoder, _ = build(work)
    counted = sum(p.numel() for p in decoder.parameters())
    assert counted == pytest.approx(sizing.PARAMETERS_OF_HIDDEN_SQUARED * 1024**2 * work.layers, rel=0.01)


# -- output ------------------------------------------------------------------------------------------------------------


def on_a_gpu(*rows: BenchRow) -> Report:
    work = sizing._work(4096, 16384)
    return Report(
        "2026-11-22", "1", Machine("A GPU", "2.11", 100 * GIB, 140 * GIB), work, rehearsal=False, rows=[*rows]
    )


def steps(ms: float, peak_gib: float, norm: float = 1.0) -> Steps:
    return Steps(20.0, Spread(ms, ms - 1, ms + 1), int(peak_gib * GIB), 0.5, [norm, 2.0])


def test_the_table_compares_with_the_first_row() -> None:
    rows = [
        BenchRow("Inductor", "ok", "", 1.0, steps=steps(400.0, 20.0)),
        BenchRow("fxoffload, default", "ok", "", 1.0, steps=steps(408.0, 5.0, norm=1.5)),
        BenchRow("fxoffload, at checkpointing's peak", "failed", "BudgetError: too small", 1.0),
    ]
    lines = {line.split("|")[1].strip(): line for line in render(on_a_gpu(*rows)).splitlines() if line.startswith("| ")}
    assert [cell.strip() for cell in lines["fxoffload, default"].split("|")[2:8]] == [
        "408.0 [407.0, 409.0]",
        "+2.0 %",
        "5.00",
        "25 %",
        "20.0",
        "DIFFER by 5.0e-01",
    ]
    text = render(on_a_gpu(*rows))
    assert "REHEARSAL" not in text and "A GPU, 100.0 GiB free" in text
    assert "- fxoffload, at checkpointing's peak: failed: BudgetError: too small" in text


def test_bits_that_differ_are_said() -> None:
    rate = Spread(50.0, 49.0, 51.0)
    row = BenchRow("phases", "ok", "", 1.0, switches=Switches(10**10, 15.0, rate, rate, 55.4, 55.5, equal=False))
    text = render(on_a_gpu(row))
    assert "10.00 GB of parameters" in text and "BITS DIFFER" in text
    assert "50.0 [49.0, 51.0]" in text and "55.4" in text


def test_the_second_plan_takes_checkpointings_peak() -> None:
    checkpoint = BenchRow("c", "ok", "", 1.0, steps=steps(500.0, 10.0))
    failed = BenchRow("c", "failed", "out of memory", 1.0)
    assert run._budget(checkpoint, failed) == int(1.02 * 10 * GIB)
    assert run._budget(failed, failed) is None


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError(f"no {request.kind} today")

    probe = processes.Ended("ok", "", 0.1, Machine(None, "2"))
    monkeypatch.setattr(processes, "run", lambda request, limit_s: probe)
    monkeypatch.setattr(worker, "measure", fail)
    report = run.bench(60.0, work=TINY)
    assert [row.status for row in report.rows] == ["failed", "failed", "failed", "skipped", "failed"]
    assert "RuntimeError: no plain today" in render(report)
    assert "skipped: needs checkpointing's peak, which was not measured" in render(report)


def test_a_machine_whose_torch_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run", lambda *_: processes.Ended("failed", "ImportError: libcuda", 0.1, None))
    with pytest.raises(sizing.BenchError, match=r"expected torch to start .* ImportError: libcuda"):
        run.bench(60.0)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_and_writes(whole_run: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(limit_s: float, tell: Any) -> Report:
        tell("a variant")
        return whole_run

    monkeypatch.setattr("fxoffload.bench.run.bench", measure)
    done = CliRunner().invoke(app, ["bench", "--json", str(tmp_path / "b.json")])
    assert done.exit_code == 0 and "A REHEARSAL" in done.output
    assert json.loads((tmp_path / "b.json").read_text()) == json.loads(json.dumps(dataclasses.asdict(whole_run)))
    empty = dataclasses.replace(whole_run, rows=[BenchRow("Inductor", "failed", "why", 1.0)])
    monkeypatch.setattr("fxoffload.bench.run.bench", lambda *_: empty)
    assert CliRunner().invoke(app, ["bench"]).exit_code == 1


def test_a_folder_that_is_not_there_is_found_before_anything_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--json", str(tmp_path / "none" / "b.json")])
    assert done.exit_code == 2 and "existing folder" in done.output
