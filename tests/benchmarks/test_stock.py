"""The scenarios stock and stock-fsdp: every case trains as it says, and claims follow from the rows."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from benchmarks.arguments import check_stock_cases, expand_set, parse_cases, split_settings
from benchmarks.budgets import peaks_of
from benchmarks.cli import app
from benchmarks.derived import derive
from benchmarks.launch import run_variant
from benchmarks.quartiles import summarize
from benchmarks.schema import Memory, PlanFacts, Protocol, Record, Report, Request, Result, Summary, Variant, from_json
from benchmarks.single import apply
from benchmarks.stock import apply as apply_module
from benchmarks.stock import measure
from benchmarks.stock.apply import StockStepper, set_checkpointing
from benchmarks.stock.claims import check_stock_claims
from benchmarks.stock.estimates import segment_estimates
from benchmarks.stock.models import SHARDED, STOCK_CASES, WHOLE_CASES
from benchmarks.stock.records import SegmentEstimate, StepFact, StockRun
from benchmarks.stock.table import render_stock
from benchmarks.truth import idle_before_steps_ms, slowest_step_ms
from benchmarks.workloads import build_job

CPU = torch.device("cpu")
SIZES = ["layers=2", "seq=32", "hidden=64", "ffn=64", "heads=4", "kv_heads=2", "head_dim=16", "vocab=64", "device=cpu"]
GIB = 1 << 30
DROPPING = ("gpt2", "t5")  # stock models with dropout


def tiny(name: str) -> Any:
    experts = ["experts=4", "experts_per_token=2"] if STOCK_CASES[name].experts else []
    (case,) = parse_cases(split_settings([*SIZES, *experts, f"case={name}"]), {})
    return case


def slow_but(*names: str) -> list[Any]:
    return [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in WHOLE_CASES]


@pytest.mark.parametrize("name", slow_but("qwen3", "qwen3-rl", "t5-padded"))
def test_every_case_trains_with_adamw(name: str) -> None:
    case = tiny(name)
    if case.form == "lora":
        pytest.importorskip("peft")
    job = build_job(case, CPU)
    job.allocate_gradients()
    variant = Variant("checkpoint" if case.form == "checkpointing" else "eager", "eager")
    stepper = apply(Request("stock", case, variant, Protocol()), variant, job, CPU)
    assert isinstance(stepper, StockStepper)
    before = {n: p.detach().clone() for n, p in job.module.named_parameters()}
    losses = [stepper.step().loss for _ in range(2)]
    assert losses[0] == losses[1] or case.name in DROPPING
    same = (torch.equal(p, before[n]) for n, p in job.module.named_parameters())
    assert all(same), "AdamW's learning rate is 0"
    gradients = [p.grad for p in job.module.parameters() if p.requires_grad]
    # An adapter's second factor begins as zeros, and so does the projection of images.
    assert sum(g is not None and bool(g.any()) for g in gradients) > len(gradients) // 5
    in_a_row = stepper.steps(2)
    assert all(t.loss == losses[0] for t in in_a_row) or case.name in DROPPING
    assert [t.forward_ms > 0 and t.backward_ms > 0 for t in in_a_row] == [True] * 2
    assert all(f.optimizer_ms > 0 and f.wall_ms > 0 and f.peak_bytes is None for f in stepper.facts)
    assert [f.idle_ms is None for f in stepper.facts] == [True, False, False, False]


def test_forms_are_what_they_say() -> None:
    cases = {form: tiny(f"qwen3-{form}") for form in ("padded", "packed", "lora")}
    padded, packed = (build_job(cases[form], CPU) for form in ("padded", "packed"))
    ids, labels, mask = padded.inputs
    assert padded.module.names == ("input_ids", "labels", "attention_mask")  # type: ignore[union-attr]
    assert mask.sum(-1).tolist() == [32, 24] and (labels[mask == 0] == -100).all() and (ids[mask == 0] == 0).all()
    positions = packed.inputs[2][0]
    assert (positions == 0).sum() == 4 and packed.module.settings == {"use_cache": False}  # type: ignore[union-attr]
    trained = [n for n, p in build_job(cases["lora"], CPU).module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_cases_belong_to_one_scenario() -> None:
    check_stock_cases("stock", [STOCK_CASES["gemma-3-lora"]])
    check_stock_cases("stock-fsdp", [STOCK_CASES["qwen3-fsdp"]])
    with pytest.raises(ValueError, match=r"stock expects one of the cases qwen3, .* found stack"):
        check_stock_cases("stock", parse_cases({}, {}))
    with pytest.raises(ValueError, match=r"plan expects one of the cases stack, .* found qwen3-lora"):
        check_stock_cases("plan", [STOCK_CASES["qwen3-lora"]])
    with pytest.raises(ValueError, match="stock-fsdp expects one of the cases qwen3-fsdp; found t5"):
        check_stock_cases("stock-fsdp", [STOCK_CASES["t5"]])
    with pytest.raises(ValueError, match="unknown setting form"):
        split_settings(["form=lora"])


REHEARSED = "eager,auto,auto@activation_budget=0.5*inductor,auto@activation_budget=1*smallest"


@pytest.mark.slow
def test_a_rehearsal_writes_every_row(tmp_path: Path) -> None:
    words = [*SIZES, "case=qwen3", "warmup=0", "link_mib=4", "link_copies=2", "device_types=cpu", "min_bytes=1KiB"]
    words += ["inner=aot_eager", "calibration_steps=1"]
    arguments = ["run", "stock", "--set", *words, "--variants", REHEARSED, "--out", str(tmp_path)]
    done = CliRunner().invoke(app, expand_set(arguments))
    assert done.exit_code == 0, done.output
    report = from_json(Report, (tmp_path / "stock.json").read_text())
    assert [r.status for r in report.records] == ["ok", "ok", "failed", "ok"], done.output
    refused = next(r for r in report.derived if "0.5*inductor" in r["variant"])
    assert refused["refused"] and refused["refused_rightly"] is None and refused["least_budget_named_bytes"] > 0
    stock = report.records[1].result.stock
    assert stock is not None and stock.plan_after_steps == 1 and stock.num_timed == 10
    assert len(stock.steps) == 15
    assert all(claim["held"] is None for claim in report.claims), "claims are of GPUs"


# -- claims, from made-up rows -----------------------------------------------------------------------------------------


def row(
    label: str,
    step_ms: float,
    peak_gib: float,
    *,
    says: tuple[float, float] | None = None,
    budget_gib: float | None = None,
    steps_gib: tuple[float, ...] = (),
    refused_gib: float | None = None,
    form: str = "",
) -> Record:
    """``says``: milliseconds and GiB of the plan; plain Inductor's are 100 and 10."""
    kind, _, options = label.partition("@")
    variant = Variant(label, kind, {"activation_budget": 1} if "activation_budget" in options else {})
    case = dataclasses.replace(STOCK_CASES["qwen3"], form=form)
    result = Result(budget_bytes=int(budget_gib * GIB) if budget_gib else None, num_graphs_first_step=1)
    if refused_gib is not None:
        least = int(refused_gib * GIB)
        reason = f"first step: BudgetError: expected an activation_budget of at least 9 GiB ({least} bytes), which x"
        return Record("stock", case, variant, "failed", reason, 1.0, result)
    peaks = [int(p * GIB) for p in (steps_gib or (peak_gib,) * 6)]
    result.step_ms = Summary(step_ms, step_ms, step_ms, step_ms, step_ms, [step_ms])
    result.memory = Memory(0, int(peak_gib * GIB), 0, 0, 0)
    result.stock = StockRun([StepFact(1, 2, 3, 10.0 + i, p) for i, p in enumerate(peaks)], 5, 1)
    if says is not None:
        said = {"step_ms": says[0], "peak_bytes": int(says[1] * GIB), "peak_segment": "a", "peak_phase": "forward"}
        base = {**said, "step_ms": 100.0, "peak_bytes": 10 * GIB}
        result.plan = PlanFacts(1, 1, "", said, base, 6 * GIB, calibrated=said, calibrated_baseline=base)
    return Record("stock", case, variant, "ok", "", 1.0, result)


AT_CHECKPOINT, HALF = "auto@activation_budget=1.05*checkpoint", "auto@activation_budget=0.5*inductor"
SMALLEST = "auto@activation_budget=1*smallest"
TRUE_ROWS = [
    row("inductor", 100.0, 10.0),
    row("checkpoint", 130.0, 7.0),
    row("auto", 101.0, 8.0, says=(101.5, 8.1)),
    row(AT_CHECKPOINT, 104.0, 7.2, says=(104.0, 7.2), budget_gib=7.35),
    row(HALF, 0.0, 0.0, budget_gib=5.0, refused_gib=6.1),
    row(SMALLEST, 120.0, 6.0, says=(119.0, 6.0), budget_gib=6.0),
]


def held(rows: list[Record]) -> dict[str, bool | None]:
    """By the claim's first words."""
    claims = check_stock_claims(rows[0].case, rows)
    return {claim["claim"].split(":")[0].split(",")[0]: claim["held"] for claim in claims}


def test_claims_hold_where_rows_are_true() -> None:
    found = held(TRUE_ROWS)
    assert len(found) == 7 and all(value is True for value in found.values()), found


@pytest.mark.parametrize(
    "changed, claim",
    [
        (row("auto", 101.0, 8.0, says=(93.0, 8.1)), "predicted"),
        (row("auto", 101.0, 8.0, says=(98.0, 8.1)), "calibrated"),
        (row("auto", 103.0, 8.0, says=(103.0, 8.1)), "default"),
        (row("auto", 101.0, 8.0, says=(101.0, 7.6)), "default"),
        (
            row(AT_CHECKPOINT, 106.0, 7.2, says=(106.0, 7.2), budget_gib=7.35),
            "within 1.05x checkpointing's peak at most +5% time",
        ),
        (row(AT_CHECKPOINT, 104.0, 7.2, says=(104.0, 7.2), budget_gib=7.35, steps_gib=(7.4, 7.2)), "budgets are met"),
        (row(HALF, 0.0, 0.0, budget_gib=6.0, refused_gib=6.1), "no budget is refused that a plan meets"),
        (row(SMALLEST, 0.0, 0.0, budget_gib=6.0, refused_gib=6.1), "the smallest budget named is met"),
    ],
)
def test_a_claim_fails_where_a_row_is_false(changed: Record, claim: str) -> None:
    rows = [changed if r.variant.label == changed.variant.label else r for r in TRUE_ROWS]
    assert held(rows)[claim] is False


def test_a_prediction_is_compared_with_the_steps_that_followed_it() -> None:
    """Measured times may change the plan, and its peak with it."""
    changed = row("auto", 101.0, 8.0, says=(101.5, 7.5))
    assert changed.result.plan is not None and changed.result.stock is not None
    changed.result.plan.calibrated = {**changed.result.plan.predicted, "peak_bytes": 8 * GIB}
    rows = [changed if r.variant.label == "auto" else r for r in TRUE_ROWS]
    assert held(rows)["predicted"] is False
    changed.result.stock.uncalibrated_peak_bytes = int(7.5 * GIB)
    assert held(rows)["predicted"] is True and held(rows)["calibrated"] is True


@pytest.mark.parametrize("form", ["", "rl"])
def test_a_budget_with_the_loss_outside_is_met_from_the_third_step(form: str) -> None:
    """Nothing is known of it before. Then the plan is of the step, with its loss."""
    late = row(AT_CHECKPOINT, 104.0, 7.2, says=(104.0, 7.2), budget_gib=7.35, steps_gib=(7.4, 7.4, 7.2, 7.2), form=form)
    rows = [late if r.variant.label == AT_CHECKPOINT else r for r in TRUE_ROWS]
    rows[0] = row("inductor", 100.0, 10.0, form=form)
    assert held(rows)["budgets are met"] is (form == "rl")


def test_what_a_plan_says_without_its_loss_is_no_claim() -> None:
    without = row("auto", 101.0, 8.0, says=(101.5, 6.0))
    assert without.result.plan is not None
    rows = [without if r.variant.label == "auto" else r for r in TRUE_ROWS[:3]]
    assert held(rows)["predicted"] is False
    without.result.plan.loss = "outside"
    assert held(rows)["predicted"] is None and held(rows)["calibrated"] is False


def test_claims_of_checkpointing_and_of_ranks() -> None:
    rows = [dataclasses.replace(r, case=dataclasses.replace(r.case, form="checkpointing")) for r in TRUE_ROWS]
    assert held(rows)["gradient_checkpointing=True"] is False, "120 ms at checkpointing's peak or less"
    rows[3] = dataclasses.replace(rows[3], result=row(AT_CHECKPOINT, 109.0, 6.9, says=(109.0, 6.9)).result)
    assert held(rows)["gradient_checkpointing=True"] is True
    sharded = [dataclasses.replace(r, case=dataclasses.replace(r.case, form=SHARDED)) for r in TRUE_ROWS]
    assert held(sharded)["within 1.1x checkpointing's peak at most +8% time"] is True


def test_without_peaks_claims_are_open() -> None:
    rows = [dataclasses.replace(r, result=dataclasses.replace(r.result, memory=None)) for r in TRUE_ROWS]
    assert all(value is None for value in held(rows).values())


def test_the_table_has_what_was_promised_and_what_was_found() -> None:
    rows = [dataclasses.replace(r) for r in TRUE_ROWS]
    stock = rows[2].result.stock
    assert stock is not None
    stock.segments = [SegmentEstimate("backward", "layers_1", 2.0, 3.0, "4 mm")]
    report = Report("stock", {}, Protocol(), None, rows, derive(rows, None), [])
    text = render_stock(report)
    assert "rightly: at least 6.10" in text
    assert "estimates farthest off: layers_1 (backward) 2.00 ms for 3.00: 4 mm" in text
    default = next(r for r in report.derived if r["variant"] == "auto")
    assert default["gain_stated"] == pytest.approx(0.19, abs=1e-6) and default["gain_measured"] == pytest.approx(0.2)
    assert default["slowest_step_before_plan_ms"] == 11.0


def test_segments_are_compared_by_phase_and_name() -> None:
    def text(*times: float) -> str:
        names = ("a", "b")
        parts = [
            {"phase": "forward", "segment": n, "begin_ms": 0.0, "end_ms": t} for n, t in zip(names, times, strict=True)
        ]
        return json.dumps({"boundaries": parts})

    found = segment_estimates({"frozen": text(1.0, 2.0), "calibrated": text(1.1, 4.0)})
    assert [(s.segment, s.estimated_ms, s.measured_ms) for s in found] == [("b", 2.0, 4.0), ("a", 1.0, 1.1)]
    assert segment_estimates({"frozen": text(1.0, 2.0)}) == []


def test_budgets_may_be_relative_to_what_the_default_names() -> None:
    default = TRUE_ROWS[2].result
    assert peaks_of("auto", default) == {"auto": 8 * GIB, "smallest": 6 * GIB}
    without = dataclasses.replace(default, memory=None)
    assert peaks_of("auto", without)["inductor"] == 10 * GIB
    assert measure.PATIENCE > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_layers_of_their_own() -> None:
    pytest.importorskip("torch.distributed.fsdp")
    case = dataclasses.replace(tiny("qwen3-fsdp"), dtype="float32")
    protocol = Protocol(ranks=2, warmup=0, steps=5, allocator_trace=False, copy_trace=False, calibration_steps=4)
    options = {"policy": "auto", "inner": "aot_eager", "device_types": ["cpu"], "min_bytes": "1KiB"}
    for variant in (Variant("eager", "eager"), Variant("auto", "auto", options)):
        record = run_variant(Request("stock-fsdp", case, variant, protocol), 250.0)
        assert record.status == "ok", record.log_tail
        stock = record.result.stock
        assert stock is not None and len(record.result.step_ms_by_rank) == 2
        if variant.kind == "auto":
            assert stock.plan_after_steps is not None and len(stock.steps) >= 11


class ScriptedClock:
    """Every mark of all clocks is one millisecond further from the mark before than that one was. Writes down which
    step is waited for: each has four marks in a clock of its own, and two between it and the next."""

    num_marks, now_ms = 0, 0.0
    events: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._first = ScriptedClock.num_marks if not self._times else self._first
        ScriptedClock.num_marks += 1
        ScriptedClock.now_ms += ScriptedClock.num_marks
        self._times.append(ScriptedClock.now_ms)

    def gaps_ms(self) -> list[float]:
        if len(self._times) == 4:
            self.events.append(f"wait for {self._first // 6}")
        return [after - before for before, after in pairwise(self._times)]


def scripted(monkeypatch: pytest.MonkeyPatch) -> StockStepper:
    monkeypatch.setattr(ScriptedClock, "num_marks", 0)
    monkeypatch.setattr(ScriptedClock, "events", [])
    monkeypatch.setattr(apply_module, "new_clock", lambda device: ScriptedClock())
    return StockStepper(mock.MagicMock(), mock.MagicMock(), CPU)


def test_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per step: between it and the one before, forward, backward, AdamW. The first ones do not count."""
    monkeypatch.setattr(apply_module, "_UNCOUNTED", 2)
    stepper = scripted(monkeypatch)
    found = stepper.steps(2)
    assert [(t.forward_ms, t.backward_ms, t.optimizer_ms) for t in found] == [(14.0, 15.0, 16.0), (20.0, 21.0, 22.0)]
    assert [f.idle_ms for f in stepper.facts] == [12.0, 18.0]
    result = Result(num_timed_steps=2, memory=Memory(0, 64, 0, 0, 0))
    measure._keep_timed(result, stepper)
    assert result.stock is not None and result.stock.row_ms == ((12 + 14 + 15) + (18 + 20 + 21)) / 2
    assert [f.peak_bytes for f in stepper.facts] == [64, 64]
    result.step_ms = summarize([t.step_ms for t in found])
    assert slowest_step_ms(result) == result.stock.row_ms


def test_the_host_launches_a_step_while_the_device_runs_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that idled between steps would be faster in them than in a training loop."""
    stepper = scripted(monkeypatch)

    def begins(index: int) -> bool:
        ScriptedClock.events.append(f"step {index}")
        return index == 3

    assert len(stepper.row(9, begins)) == 3 == len(stepper.facts)
    assert ScriptedClock.events == [
        "step 0",
        *("step 1", "wait for 0"),
        *("step 2", "wait for 1"),
        *("step 3", "wait for 2"),
    ]
    assert [f.wall_ms for f in stepper.facts[1:]] == [6 + 8 + 9 + 10, 12 + 14 + 15 + 16]


def test_steps_before_one_that_fails_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = scripted(monkeypatch)

    def begins(index: int) -> None:
        if index == 2:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        stepper.row(9, begins)
    assert stepper.facts[0].forward_ms == 2.0


def test_a_calibrated_plan_is_compared_with_steps_that_followed_it() -> None:
    """Before, variants compile, and the host is late."""
    steps = [StepFact(1.0, 1.0, 1.0, 3.0, idle_ms=idle) for idle in (None, 3.0, 2.0, *[50.0] * 20, *[7.0] * 8, 90.0)]
    plan = PlanFacts(1, 3, "", {}, {}, 0, calibrated_after_steps=len(steps) - 1)
    result = Result(plan=plan, stock=StockRun(steps))
    assert idle_before_steps_ms(result, "predicted") == 2.0
    assert idle_before_steps_ms(result, "calibrated") == 7.0


def test_a_plan_is_written_down_once() -> None:
    """That takes the host as long as a fifth of a step, in which the device would idle."""
    result = Result(finished=[])
    watch = mock.Mock()
    watch.newest.return_value = None
    measure.take_over(result, watch, 1)
    for graph, num_steps in ((2, 2), (2, 3), (5, 4), (5, 5)):
        watch.newest.return_value = graph
        watch.freeze.return_value = PlanFacts(1, num_steps, "", {}, {}, 0, graph=graph)
        measure.take_over(result, watch, num_steps)
    assert [call.args for call in watch.freeze.mock_calls] == [(2,), (4,)]
    assert result.plan is not None and result.plan.graph == 5
    assert result.stock is not None and result.stock.plan_after_steps == 4


def test_checkpointing_leaves_no_hook_when_it_is_switched_off() -> None:
    """The rows after it are of the model as it was."""
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "vocab_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes))
    set_checkpointing(model, True)
    assert model.get_input_embeddings()._forward_hooks
    set_checkpointing(model, False)
    assert not model.get_input_embeddings()._forward_hooks
    assert not model.is_gradient_checkpointing
