"""Sweeps on a CPU: many variants in one process, what becomes of those that fail, and budgets relative to a peak."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import launch_lengths, launch_sweep, length_search
from benchmarks.arguments import CASES, expand_set, parse_cases, parse_protocol, parse_variants, split_settings
from benchmarks.bisection import bisect
from benchmarks.budgets import resolve_budget
from benchmarks.cli import app
from benchmarks.hf_models import HF_MODELS
from benchmarks.launch import start_process
from benchmarks.launch_lengths import merge, run_max_seq
from benchmarks.launch_sweep import run_sweep
from benchmarks.length_search import LengthSearch, _largest_blocks
from benchmarks.limits import Limit
from benchmarks.phases import Phases
from benchmarks.runner import _keep
from benchmarks.scenarios import find_scenario
from benchmarks.schema import (
    Case,
    LimitedRun,
    Memory,
    Probe,
    Protocol,
    Record,
    Report,
    Request,
    Result,
    Status,
    SweepRequest,
    Variant,
    from_json,
    to_json,
)
from benchmarks.sweep import Sweep
from benchmarks.tables import render
from benchmarks.workloads import build_job
from tests.benchmarks.peer_checkouts import write_verl

TINY_WORDS = ["layers=3", "seq=64", "hidden=32", "ffn=64", "heads=4", "kv_heads=2", "head_dim=8", "dtype=float32"]
TINY_WORDS += ["device=cpu", "link_mib=1", "link_copies=2", "inner=aot_eager", "device_types=cpu", "min_bytes=1KiB"]
TINY = Case(layers=2, seq=32, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, dtype="float32", device="cpu")


def run(tmp_path: Path, scenario: str, words: list[str], variants: str, *more: str) -> tuple[Report, str]:
    arguments = ["run", scenario, "--set", *TINY_WORDS, *words, "--variants", variants, "--out", str(tmp_path), *more]
    done = CliRunner().invoke(app, expand_set(arguments))
    assert done.exit_code == 0, done.output
    return from_json(Report, (tmp_path / f"{scenario}.json").read_text()), done.output


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str, Path]:
    """A reference, a plan, two that cannot work, and one after them."""
    out = tmp_path_factory.mktemp("sweep")
    budgets = ("1KiB", "0.5*inductor", "64MiB")
    variants = ",".join(["eager", "auto", *(f"auto@activation_budget={b}" for b in budgets), "keep_all"])
    return *run(out, "plan", ["long_steps=2"], variants), out


@pytest.mark.slow
def test_a_sweep_survives_the_variants_that_fail(sweep: tuple[Report, str, Path]) -> None:
    report, table, _ = sweep
    found = {record.variant.label: record for record in report.records}
    assert [record.status for record in report.records] == ["ok", "ok", "failed", "failed", "ok", "ok"], table
    assert "activation_budget of at least" in found["auto@activation_budget=1KiB"].reason
    assert "'inductor' to be measured before" in found["auto@activation_budget=0.5*inductor"].reason
    assert found["auto@activation_budget=1KiB"].result.budget_bytes == 1024
    long = found["auto@activation_budget=64MiB"].result.long_run
    assert long is not None and long.num_steps == 2
    run = found["keep_all"].result
    assert run.long_run is None
    assert run.num_graphs_at_end == 1, "counters start anew with each variant"
    assert run.losses[0] == pytest.approx(found["eager"].result.losses[0], rel=1e-5)


@pytest.mark.slow
def test_a_plan_is_written_down_before_the_steps_it_predicts(sweep: tuple[Report, str, Path]) -> None:
    report, table, out = sweep
    result = next(r.result for r in report.records if r.variant.label == "auto")
    plan = result.plan
    assert plan is not None and plan.num_plans == plan.frozen_after_steps == 1
    assert plan.prediction_changed_later is False
    assert plan.predicted["peak_bytes"] > 0 and plan.planning_s is not None
    assert plan.texts == {}, "whole plans are in a file of their own"
    texts = json.loads((out / "plan-plans.json").read_text())
    assert set(texts) == {"stack 3x64 auto", "stack 3x64 auto@activation_budget=64MiB"}
    assert json.loads(texts["stack 3x64 auto"]["frozen"])["predicted"] == plan.predicted
    derived = next(row for row in report.derived if row["variant"] == "auto")
    assert derived["predicted_step_error"] == plan.predicted["step_ms"] / result.step_ms.median - 1  # type: ignore[union-attr]
    assert plan.summary in table


@pytest.mark.slow
def test_gradients_of_a_sweep_are_comparable(sweep: tuple[Report, str, Path]) -> None:
    report, _, _ = sweep
    digests = {r.variant.label: r.result.gradients for r in report.records if r.status == "ok"}
    for label in ("auto", "keep_all"):
        for name, theirs in digests["eager"].items():
            assert digests[label][name].norm == pytest.approx(theirs.norm, rel=1e-4, abs=1e-6), (label, name)


@pytest.mark.slow
def test_resuming_measures_only_what_is_missing(sweep: tuple[Report, str, Path], tmp_path: Path) -> None:
    earlier, _, out = sweep
    report, _ = run(tmp_path, "plan", ["long_steps=2"], "eager,keep_all", "--resume", str(out / "plan.json"))
    assert [to_json(r) for r in report.records] == [to_json(r) for r in earlier.records if r.variant.kind != "auto"]
    assert report.environment["resumed_date"] == earlier.environment["date"]


@pytest.mark.slow
def test_rows_of_another_protocol_source_or_options_are_not_taken_over(sweep: tuple[Report, str, Path]) -> None:
    earlier, _, _ = sweep
    report = Report("plan", dict(earlier.environment), earlier.protocol, None, [])
    asked = [(r.case, r.variant) for r in earlier.records if r.variant.kind in ("eager", "keep_all")]
    assert len(_keep(earlier, report, asked)) == 2
    assert len(_keep(earlier, replace(report, protocol=replace(earlier.protocol, timeout_s=1.0)), asked)) == 2
    others = [(case, replace(variant, options={**variant.options, "min_bytes": 1})) for case, variant in asked]
    assert _keep(earlier, report, others) == {}
    assert _keep(earlier, replace(report, protocol=replace(earlier.protocol, steps=9)), asked) == {}
    assert _keep(earlier, replace(report, environment={**report.environment, "source_sha256": "x"}), asked) == {}


@pytest.mark.slow
def test_the_longest_length_is_searched(tmp_path: Path) -> None:
    variants = "eager@lengths=16+32,auto@activation_budget=10KiB"
    report, table = run(tmp_path, "max-seq", ["case=causal_lm", "vocab=64", "lengths=16,32,64", "probes=2"], variants)
    eager, auto = report.records
    assert [(p.seq, p.ran) for p in eager.result.probes] == [(16, True), (32, True)]
    assert eager.result.probes[0].step_ms
    assert [(p.seq, p.ran, p.failed_in) for p in auto.result.probes] == [(32, False, "forward"), (16, False, "forward")]
    assert auto.status == "failed"
    assert "longest that ran: 32" in table and "BudgetError" in table


@pytest.fixture(scope="module")
def peers_of_lengths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """One peer that wraps the model for good, between others; and one that is not there."""
    folder = tmp_path_factory.mktemp("lengths")
    words = ["case=causal_lm", "vocab=64", "lengths=16,32,64", "probes=2", f"verl={write_verl(folder / 'verl')}"]
    variants = f"eager@lengths=16,verl,trl@path={folder / 'nothing'},eager_checkpoint@lengths=32"
    return run(folder, "max-seq", words, variants)


@pytest.mark.slow
def test_peers_are_searched_for_their_longest_length(peers_of_lengths: tuple[Report, str]) -> None:
    """``verl`` wraps the model for good, and each of its lengths runs in a fresh process."""
    report, table = peers_of_lengths
    eager, verl, trl, checkpoint = report.records
    assert [record.variant.kind for record in report.records] == ["eager", "verl", "trl", "eager_checkpoint"]
    assert [(p.seq, p.ran, p.num_steps) for p in verl.result.probes] == [(32, True, 2), (64, True, 2)], verl.log_tail
    assert verl.status == "ok" and verl.variant.lengths == []
    assert [(p.seq, p.ran, p.num_steps) for p in eager.result.probes] == [(16, True, 2)]
    assert [(p.seq, p.ran) for p in checkpoint.result.probes] == [(32, True)]
    assert (trl.status, trl.result.probes) == ("skipped", []) and "expected a checkout of trl" in trl.reason
    assert "longest that ran: 64" in table
    first = {record.variant.kind: record.result.probes[0].loss for record in (verl, checkpoint)}
    assert first["verl"] == pytest.approx(first["eager_checkpoint"], rel=1e-5), "the same work at 32 tokens"


def test_what_changes_the_model_has_a_process_for_each_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes: list[list[tuple[str, list[int]]]] = []

    def sweep_of(request: SweepRequest, caches: Path) -> Iterator[Record]:
        processes.append([(v.label, v.lengths) for v in request.variants])
        for variant in request.variants:
            probes = [Probe(seq, ran=True) for seq in variant.lengths]
            yield Record("max-seq", TINY, variant, "ok", "", 1.0, Result(probes=probes))

    monkeypatch.setattr(launch_lengths, "run_sweep", sweep_of)
    variants = [Variant(kind, kind, lengths=[8, 16]) for kind in ("eager", "inductor", "trl", "verl", "checkpoint")]
    request = SweepRequest("max-seq", TINY, variants, Protocol(), 60.0)
    records = list(run_max_seq(request, tmp_path))
    assert [record.variant for record in records] == variants
    assert processes == [
        [("eager", [8, 16]), ("inductor", [8, 16])],
        *([("trl", [8])], [("trl", [16])], [("verl", [8])], [("verl", [16])]),
        [("checkpoint", [8, 16])],
    ]


def test_a_length_that_fails_in_its_second_step_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cpu")
    variant = Variant("eager", "eager", lengths=[16])
    calls: list[int] = []

    def failing(module: torch.nn.Module, _: Variant) -> object:
        def call(*inputs: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("fragmented")
            return module(*inputs)

        return call

    monkeypatch.setattr(length_search, "compile_module", failing)
    result = Result()
    request = Request("max-seq", TINY, variant, Protocol())
    LengthSearch(request, result, device, build_job(TINY, device)).run(Phases(result, tmp_path / "answer"))
    (probe,) = result.probes
    assert (probe.ran, probe.num_steps, probe.failed_in) == (False, 1, "forward")
    assert "fragmented" in probe.reason and result.failures
    record = Record("max-seq", TINY, variant, "failed", "", 1.0, result)
    assert "16 ended in the forward of step 2: RuntimeError" in render(
        Report("max-seq", {}, Protocol(), None, [record])
    )


def _of_length(seq: int, probe: Probe | None, status: Status = "ok", reason: str = "") -> Record:
    result = Result(probes=[probe] if probe else [])
    return Record("max-seq", TINY, Variant("trl", "trl", lengths=[seq]), status, reason, 2.0, result, f"log of {seq}")


def test_records_of_single_lengths_become_one() -> None:
    variant = Variant("trl", "trl", lengths=[8, 16, 32])
    ran, full = Probe(16, ran=True), Probe(32, reason="OutOfMemoryError: x", failed_in="backward")
    answered = {16: _of_length(16, ran), 32: _of_length(32, full, "failed", "search: none of the lengths")}
    one = merge(variant, answered)
    assert (one.status, one.reason, one.result.probes, one.wall_s) == ("ok", "", [ran, full], 4.0)
    assert one.variant is variant
    died = {16: _of_length(16, ran), 32: _of_length(32, None, "failed", "exit status -9")}
    one = merge(variant, died)
    assert (one.status, one.reason) == ("partial", "32 tokens: exit status -9")
    assert one.result.probes[1] == Probe(32, reason="exit status -9")
    hung = merge(variant, {32: _of_length(32, Probe(32, failed_in="forward"), "timeout", "not finished after 9 s")})
    assert (hung.status, hung.reason) == ("failed", "32 tokens: not finished after 9 s")
    none = merge(variant, {32: answered[32]})
    assert (none.status, none.reason) == ("failed", "search: none of the lengths that were tried runs")
    late = merge(variant, {16: _of_length(16, ran), 32: _of_length(32, None, "skipped", "too little time")})
    assert (late.status, late.reason, late.result.probes) == ("partial", "too little time", [ran])
    absent = merge(variant, {16: _of_length(16, None, "skipped", "no checkout")})
    assert (absent.status, absent.reason, absent.result.probes) == ("skipped", "no checkout", [])


# -- processes that are lost ----------------------------------------------------------------------------------------


FAKE = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
for i, variant in enumerate(json.loads((folder / "request.json").read_text())["variants"]):
    kind = variant["label"]
    if kind == "no build":
        sys.exit(5)
    if kind == "late":
        sys.exit(0)
    (folder / f"started{i}").touch()
    (folder / f"result{i}.json").write_text(Path(sys.argv[2]).read_text())
    if kind == "dies":
        os.abort()
    if kind == "hangs":
        time.sleep(60)
    (folder / f"ended{i}").write_text("1.5")
"""


def fake_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, labels: list[str], timeout_s: float = 30.0
) -> list[tuple[str, str, str]]:
    result = tmp_path / "result.json"
    result.write_text(to_json(Result(finished=["first step"], memory=Memory(0, 100, 0, 0, 0))))
    (tmp_path / "fake.py").write_text(FAKE)

    def start(words: list[str], log_path: Path, caches: Path) -> object:
        import subprocess

        with log_path.open("wb") as log:
            command = [sys.executable, str(tmp_path / "fake.py"), words[2], str(result)]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    assert start_process is not start
    monkeypatch.setattr(launch_sweep, "start_process", start)
    variants = [Variant(label, "eager") for label in labels]
    request = SweepRequest("plan", TINY, variants, Protocol(timeout_s=timeout_s), 60.0)
    return [(r.variant.label, r.status, r.reason) for r in run_sweep(request, tmp_path)]


def test_a_lost_process_costs_one_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = fake_records(monkeypatch, tmp_path, ["a", "dies", "b", "hangs", "c"], timeout_s=1.0)
    assert [(label, status) for label, status, _ in records] == [
        *(("a", "ok"), ("dies", "failed"), ("b", "ok"), ("hangs", "timeout"), ("c", "ok"))
    ]
    assert "SIGABRT" in records[1][2]
    assert "finished phases: first step" in records[3][2]


def test_a_model_that_cannot_be_built_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = fake_records(monkeypatch, tmp_path, ["no build", "a"])
    assert [status for _, status, _ in records] == ["failed", "failed"]
    assert "could not be built: exit status 5" in records[1][2]


def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = fake_records(monkeypatch, tmp_path, ["a", "late", "b"])
    assert [status for _, status, _ in records] == ["ok", "skipped", "skipped"]


# -- words ----------------------------------------------------------------------------------------------------------


def test_budgets_relative_to_peaks() -> None:
    peaks = {"checkpoint": 100, "inductor": 300, "free": 1000}
    found = [resolve_budget(text, peaks) for text in ("1.02*checkpoint", "0.25*inductor", "15%", "0.9*free", "9GiB")]
    assert found == [102, 75, 130, 900, "9GiB"]
    with pytest.raises(LookupError, match="'checkpoint'"):
        resolve_budget("15%", {"inductor": 3})


def test_words_of_sweeps() -> None:
    variants = parse_variants("torch_budget@0.5,inductor@lengths=8+16,auto@activation_budget=15%@lengths=32", {})
    assert [(v.kind, v.options, v.lengths) for v in variants] == [
        ("torch_budget", {"activation_memory_budget": 0.5}, []),
        ("inductor", {}, [8, 16]),
        ("auto", {"policy": "auto", "activation_budget": "15%"}, [32]),
    ]
    values = split_settings(["lengths=8,16", "memory_fraction=steps", "case=stack65k,moe"])
    assert parse_protocol(values, {}).lengths == [8, 16]
    assert [(c.layers, c.seq, c.experts) for c in parse_cases(values, {})] == [(10, 65536, 0), (24, 8192, 128)]


@pytest.mark.parametrize(
    ("variants", "settings", "message"),
    [
        ("torch_budget", [], "one number after @"),
        ("torch_budget@2", [], "at most 1"),
        ("auto@activation_budget=2x*inductor", [], "such as 1.02"),
        ("inductor@lengths=16+8", [], "ascending"),
        ("inductor", ["memory_fraction=yes"], "no, steps, whole"),
    ],
)
def test_mistakes_are_told_before_anything_runs(variants: str, settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variants(variants, {})
        parse_protocol(split_settings(settings), {})


@pytest.mark.parametrize(("longest", "tried"), [(0, [4, 2, 1]), (3, [4, 2, 3]), (7, [4, 6, 7]), (5, [4, 6, 5])])
def test_three_probes_settle_seven_lengths(longest: int, tried: list[int]) -> None:
    assert list(bisect(list(range(1, 8)), 3, lambda length: length <= longest)) == tried


def test_bisection_of_nothing_and_of_one() -> None:
    assert list(bisect([], 3, lambda _: True)) == []
    assert list(bisect([8], 3, lambda _: True)) == [8]


@pytest.mark.slow
def test_experts_compile_in_one_graph() -> None:
    case = Case("moe", 2, 32, 1, 32, 16, 4, 2, 8, dtype="bfloat16", device="cpu", experts=4, experts_per_token=2)
    job = build_job(case, torch.device("cpu"))
    torch.compile(job.module, backend="eager", fullgraph=True)(*job.inputs).backward()
    assert all(leaf.grad is not None for leaf in job.leaves().values())
    torch._dynamo.reset()


def test_a_limit_is_what_is_allocated_and_the_budget_with_ten_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    for name, value in {
        "memory_allocated": 30,
        "get_device_properties": SimpleNamespace(total_memory=1000),
        "memory_stats": {"num_alloc_retries": 2},
        "max_memory_reserved": 130,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: fractions.append(part))
    limit = Limit("steps", 100, torch.device("cuda", 0))
    limit.lift(True, "")
    assert fractions == [0.14, 1.0]
    assert limit.run == LimitedRun("steps", 0.14, 140, 0, True, "", None, 130, 0)


def test_what_was_on_the_device_when_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [("active_allocated", 5), ("active_allocated", 5), ("inactive", 90), ("active_allocated", 8)]
    blocks = [{"state": state, "size": size} for state, size in sizes]
    snapshot = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": blocks}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    assert _largest_blocks(0) == [[5, 2], [8, 1]]


def test_every_case_names_a_workload() -> None:
    assert {case.name for case in CASES.values()} == {"stack", "causal_lm", "moe", *HF_MODELS}


def test_a_report_of_probes_shows_again(tmp_path: Path) -> None:
    """Also one of before the scenario was renamed."""
    for name in ("max-seq", "longest"):
        report = Report(name, {"gpu_name": None}, Protocol(), None, [])
        assert name in render(from_json(Report, to_json(report)))
    assert find_scenario("longest").name == "max-seq"


@pytest.mark.slow
def test_a_sweep_of_budgets_compares_gradients_and_claims_budgets(tmp_path: Path) -> None:
    variants = "eager,save_on_cpu,auto@activation_budget=64MiB"
    report, table = run(tmp_path, "budget-sweep", ["layers=2"], variants)
    assert [record.status for record in report.records] == ["ok"] * 3, table
    rows = {row["variant"]: row for row in report.derived}
    assert rows["save_on_cpu"]["gradient_difference"] == 0.0 and rows["save_on_cpu"]["gradients_agree"]
    claims = {claim["claim"]: claim["held"] for claim in report.claims}
    assert claims["gradients agree within 3x the noise"] is True
    assert "1 budgets: every measured peak within its budget" in claims


@pytest.mark.parametrize(("timeout_s", "left_s", "after_s"), [(30.0, 60.0, 22.0), (300.0, 60.0, 52.0)])
def test_stacks_are_written_before_a_variant_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timeout_s: float, left_s: float, after_s: float
) -> None:
    """For its own time as for all that is left."""
    (variant,) = parse_variants("inductor", {})
    later: list[float] = []
    monkeypatch.setattr("benchmarks.sweep.faulthandler.dump_traceback_later", lambda s, file: later.append(s))
    monkeypatch.setattr(Sweep, "_measure_steps", lambda self, request, result, phases: None)
    monkeypatch.setattr("benchmarks.sweep.build_job", mock.Mock())
    monkeypatch.setattr("benchmarks.sweep.warm_up_device", lambda device: None)
    sweep = Sweep(SweepRequest("plan", TINY, [variant], Protocol(timeout_s=timeout_s), left_s), tmp_path)
    sweep._measure(0, variant)
    assert later == [pytest.approx(after_s, abs=1.0)]
