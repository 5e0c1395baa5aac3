"""``fxoffload.explain()``: every message on data, and one small model on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload.compiled_graph import Returned
from fxoffload.counters import Stats
from fxoffload.plan_report.advice import advice_on
from fxoffload.plan_report.explain import explained
from fxoffload.plan_report.exposed import Exposed
from fxoffload.plan_report.facts import GraphFacts, StepFacts
from fxoffload.plan_report.plan import Plan
from fxoffload.planner import ConstantRates, SegmentStep, Simulation, StorageInfo, TrainingStep, simulate
from fxoffload.planner.measured import MeasuredSegment, MeasuredStep
from fxoffload.planner.plan import Decision, FrontierPoint, Prediction
from fxoffload.step.segment_names import place_of
from tests.planner.chains import everywhere
from tests.support import Stack, batch

MIB = 1 << 20
GIB = 1 << 30
LAYERS = tuple(f"layers.{k}" for k in range(4))


def step() -> TrainingStep:
    """Four layers of 10 ms forward and 20 backward; each saves 64 MiB."""
    return TrainingStep(
        tuple(StorageInfo(f"saved_{k}", 64 * MIB, moved_bytes=64 * MIB) for k in range(4)),
        tuple(SegmentStep(f"layers_{k}", LAYERS[k], 10.0, writes=(f"saved_{k}",)) for k in range(4)),
        tuple(SegmentStep(f"layers_{k}", LAYERS[k], 20.0, (f"saved_{k}",)) for k in reversed(range(4))),
    )


def simulated(down: float = 40.0, up: float = 40.0) -> Simulation:
    windows = everywhere(step(), 64 * MIB, 192 * MIB)
    return simulate(step(), (True, True, True, False), copies=ConstantRates(down, up), windows=windows)


def measured(still_ms: float = 5.0) -> MeasuredStep:
    """Compute stands still before the backward of layers.1 and layers.0."""
    segments = [MeasuredSegment("forward", f"layers_{k}", LAYERS[k], 10.0 * k, 10.0 * k + 10) for k in range(4)]
    at = 40.0
    for k in reversed(range(4)):
        at += still_ms * (k < 2)
        segments.append(MeasuredSegment("backward", f"layers_{k}", LAYERS[k], at, at + 20))
        at += 20
    return MeasuredStep(tuple(segments), 40.0, at)


def value(place: str, action: Any, reason: str, layers: tuple[str, ...] = LAYERS) -> Decision:
    values = tuple(f"{layer}.{place} [8] f32" for layer in layers)
    return Decision(layers, "mm_1", "aten.mm.default", 64 * MIB, action, reason, ("mm_1",) * 4, values[0], values)


DECISIONS = (value("mlp.gate_proj", "offload", "hides"), value("mlp.up_proj", "keep", "fits"))


def plan(**changes: Any) -> Plan:
    """A plan that hides all copies and was measured; nothing stands out."""
    simulation = changes.pop("simulation", simulated())
    found = Prediction.of(simulation)
    made = Plan(
        graph=0,
        device="NVIDIA H200",
        activation_budget=GIB,
        source="options",
        summary="the fastest within the budget",
        basis="segments",
        predicted=found,
        calibrated=found,
        baseline=replace(found, step_ms=120.0),
        smallest_budget_bytes=GIB // 2,
        measured_step_ms=found.step_ms,
        measured_peak_bytes=found.peak_bytes,
        decisions=DECISIONS,
        simulation=simulation,
    )
    return replace(made, **changes)


def advice(**changes: Any) -> list[str]:
    return advice_on(StepFacts((plan(**changes),)))


# -- exposed copies ----------------------------------------------------------------------------------------------------


def test_exposed_copies_by_layer_are_the_measured_ones_where_there_are_any() -> None:
    found = Exposed.of(plan(measured_step=measured()))
    assert (found.source, found.ms, found.step_ms) == ("measured", 10.0, 130.0)
    assert found.in_words() == ["backward: 10.0 ms, in layers.0-1"]


def test_and_the_simulated_ones_otherwise() -> None:
    slow = simulated(up=2.0)
    for calibrated, source in ((Prediction.of(slow), "calibrated"), (None, "predicted")):
        found = Exposed.of(plan(simulation=slow, calibrated=calibrated))
        assert found.source == source and found.ms == pytest.approx(slow.exposed_ms)
        assert found.in_words() == ["backward, H2D: 7.1 ms, in layers.0"]
    assert not Exposed.of(replace(plan(simulation=slow), simulation=None)).source


# -- advice ------------------------------------------------------------------------------------------------------------


def test_nothing_stands_out() -> None:
    assert advice() == []
    text = str(explained(StepFacts((plan(),))))
    assert text.endswith("advice: none, nothing stands out")
    assert "no copy is exposed (calibrated): all of them run behind compute" in text


def test_a_full_link_names_its_layers_and_the_budget_or_slowdown_that_helps() -> None:
    slow = simulated(down=4.0)
    faster = FrontierPoint(14 * GIB, 13 * GIB, 120.0)
    same = FrontierPoint(3 * GIB, 3 * GIB, slow.step_ms)
    (line,) = advice(simulation=slow, frontier=(faster, same), max_slowdown=0.01)
    assert re.fullmatch(
        r"the link is full \(D2H\) in layers\.\d(-\d)?: \d+\.\d ms of the step \(\d+\.\d %, calibrated\): "
        rf"raise the budget to 14\.0 GiB \(activation_budget={14 * GIB}\): 120\.0 ms a step instead of "
        rf"{slow.step_ms:.1f}, by the plan's frontier; or "
        rf"allow {100 * (slow.step_ms / 120 - 1):.1f} % \(max_slowdown=0\.\d+\), which this budget takes",
        line,
    )
    (line,) = advice(simulation=slow)
    assert line.endswith("the plan has no frontier that would name a faster budget")
    (line,) = advice(simulation=slow, frontier=(same,))
    assert line.endswith("none of the 1 budgets of the plan's frontier is faster; fxoffload.plan() plans for seven")
    (line,) = advice(measured_step=measured())
    assert line.startswith(
        "compute stands still for copies, or for the host, in layers.0-1: 10.0 ms of the step (7.7 %, m"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"measured_peak_bytes": GIB + 64 * MIB},
            f"steps exceed the activation_budget of 1.0 GiB by 64.0 MiB: activation_budget={GIB + 64 * MIB} is what "
            "they take; the smallest budget that was found is 512.0 MiB",
        ),
        (
            {"measured_step_ms": 150.0},
            "steps take 150.0 ms, 25 % more than the plan's 120.0: the host launches too late, or something else uses "
            "the GPU; plan.save_trace shows where",
        ),
        (
            {"activation_budget": None, "frontier": (FrontierPoint(128 * MIB, 100 * MIB, 126.0),)},
            f"less memory: activation_budget={128 * MIB} (128.0 MiB instead of 256.0 MiB) takes 126.0 ms, +5.0 % over "
            "plain Inductor",
        ),
        (
            {
                "activation_budget": None,
                "frontier": (FrontierPoint(256 * MIB, 256 * MIB, 120.0),),
                "smallest_budget_bytes": 64 * MIB,
            },
            f"less memory: budgets down to 64.0 MiB are met (activation_budget={64 * MIB}); fxoffload.plan() says what "
            "each costs",
        ),
        (
            {
                "decisions": (
                    Decision((), "where", "aten.where", 128 * MIB, "mask", "a mask of 8 x 8", value="m [8] f32"),
                )
            },
            "attention is given a mask for every pair of tokens: m [8] f32, 128.00 MiB: a mask of 8 x 8",
        ),
        (
            {"basis": "estimated", "calibrated": None, "measured_step_ms": None},
            "the plan is an estimate from the profile of NVIDIA H200: its 120.0 ms and 256.0 MiB were not measured. On "
            "a GPU the first steps are; without one, trust them to rank budgets",
        ),
    ],
)
def test_what_a_plan_says(changes: dict[str, Any], line: str) -> None:
    assert advice(**changes) == [line]


def test_budgets_are_advised_once_the_loss_outside_was_measured() -> None:
    changes: dict[str, Any] = {"activation_budget": None, "frontier": (FrontierPoint(128 * MIB, 100 * MIB, 126.0),)}
    less = "less memory"
    assert [less in line for line in advice(**changes, loss="inside", calibrated=None)] == [True]
    assert not any(less in line for line in advice(**changes, loss="outside", calibrated=None))
    now = replace(plan().predicted, peak_bytes=512 * MIB)
    (line,) = advice(**changes, loss="outside", calibrated=now, smallest_budget_bytes=300 * MIB)
    assert "budgets down to 300.0 MiB are met" in line, "the frontier is of the graph alone"


def test_no_advice_whose_two_numbers_print_the_same() -> None:
    tiny = FrontierPoint(128 * MIB + 1, 100 * MIB, 119.99)
    slow = simulated(down=4.0)
    (line,) = advice(simulation=slow, frontier=(replace(tiny, budget_bytes=14 * GIB, step_ms=slow.step_ms - 0.01),))
    assert "instead of" not in line
    peak = plan().predicted.peak_bytes
    assert advice(activation_budget=None, frontier=(replace(tiny, budget_bytes=peak - 1),)) == []
    fast = replace(plan().predicted, step_ms=0.1)
    assert advice(predicted=fast, calibrated=None, measured_step_ms=0.14) == []


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (
            Stats(calls_uncompiled={"recompile_limit": 3}),
            "3 calls ran uncompiled and offloaded nothing: recompile_limit. TORCH_LOGS=recompiles says why",
        ),
        (Stats(calls_kept={"saved-tensor hooks": 1}), "1 call kept everything: saved-tensor hooks"),
        (
            Stats(bytes_kept_host_full=GIB, host_bytes_reserved=2 * GIB),
            "1.0 GiB stayed on the device because host memory was full: 2.0 GiB are pinned. Raise host_budget, or the "
            "container's limit",
        ),
        (Stats(num_prefetch_misses=7), "7 reloads began only when they were needed; 0 once steps are alike"),
    ],
)
def test_what_counters_say(stats: Stats, line: str) -> None:
    assert advice_on(StepFacts((plan(),), stats=stats)) == [line]


def test_graphs_that_keep_everything_say_why() -> None:
    kept = GraphFacts("layers.0-3", 0, keeps="its policy is keep_all")
    facts = StepFacts((plan(),), (kept, replace(kept, plan=None, count=2)), {"too small": 2})
    text = str(explained(facts))
    assert "\nit keeps everything: its policy is keep_all\n" in text
    assert "- layers.0-3 (2 alike): keeps everything: its policy is keep_all" in text
    assert "2 graphs are plain Inductor's and keep everything: too small" in text
    nothing = replace(
        plan(), decisions=DECISIONS[1:], summary="plain Inductor needs 1.0 GiB, which is within the budget"
    )
    text = str(explained(StepFacts((nothing,))))
    assert "which is within the budget\n" in text and "\nit keeps everything, as plain Inductor does\n" in text


def test_whether_logits_are_returned() -> None:
    loss = Returned("loss [] f32", 4, True)
    logits = Returned("lm_head [8, 4] bf16", GIB, False)
    alone = GraphFacts("layers.0-3", 0, returns=(loss,))
    facts = StepFacts((plan(),), (alone,))
    assert "it returns its loss alone, no logits" in str(explained(facts)) and not advice_on(facts)
    facts = StepFacts((plan(),), (replace(alone, returns=(loss, logits), holds_outputs=True),))
    assert "it returns 1.0 GiB beside its loss, the largest lm_head [8, 4] bf16" in str(explained(facts))
    assert advice_on(facts) == [
        "the forward returns 1.0 GiB beside its loss, the largest lm_head [8, 4] bf16: it is on the device until the "
        "backward has ended. Return the loss alone, or take it by model(...).loss and keep nothing else"
    ]
    caching = replace(alone, returns=(loss, *[replace(logits, label=f"k_proj {i}") for i in range(4)]))
    assert "call the model with use_cache=False in training" in advice_on(replace(facts, graphs=(caching,)))[0]
    hidden = GraphFacts("layers.0", None, returns=(logits,))
    assert not advice_on(StepFacts((plan(),), (hidden,))), "without a loss it is what the next graph is given"


def test_advice_is_on_the_plan_of_the_step_where_there_is_one() -> None:
    own = plan(measured_step_ms=150.0)
    assert advice_on(StepFacts((own, replace(plan(), graph=1, label="a step over 2 calls")))) == []
    first, second = advice_on(StepFacts((own, replace(own, graph=1))))
    assert first.startswith("plan of graph 0: steps take") and second.startswith("plan of graph 1: steps take")


def test_a_call_of_a_step_over_several_graphs_is_a_place() -> None:
    assert place_of("call 3/segment", "") == "call 3" and place_of("call 3/layers_1", "layers.1") == "call 3 layers.1"
    assert place_of("layers_1", "layers.1") == "layers.1" and place_of("segment", "") == "segment"


# -- one module --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["mlp.gate_proj", "gate_proj", "layers.*.mlp.gate_proj", "gate*"])
def test_one_module(module: str) -> None:
    text = str(explained(StepFacts((plan(measured_step=measured()),)), module))
    assert text.startswith(f"{module} in plan of graph 0, NVIDIA H200: ")
    assert "layers.0-3 (4)  mlp.gate_proj [8] f32" in text and "up_proj" not in text
    assert "saved by the forward: keep 0.00 MiB, offload 256.00 MiB, recompute" in text
    assert "in its layers compute waits 10 of 130.0 ms for copies (measured)" in text


def test_one_layer_and_what_does_not_move() -> None:
    text = str(explained(StepFacts((plan(measured_step=measured()),)), "layers.1"))
    assert "gate_proj" in text and "up_proj" in text and "0-3" not in text
    assert "in its layers compute waits 5 of 130.0 ms for copies (measured)" in text
    text = str(explained(StepFacts((plan(),)), "up_proj"))
    assert text.endswith("nothing of it moves or is recomputed")


def test_an_unknown_module_lists_near_names() -> None:
    with pytest.raises(
        ValueError, match=r"expected a module whose activations are saved, found 'mlp\.gate'; did you mean mlp"
    ):
        explained(StepFacts((plan(),)), "mlp.gate")
    with pytest.raises(ValueError, match=r"found 'zzz'; there are mlp, mlp\.gate_proj, gate_proj$"):
        explained(StepFacts((plan(),)), "zzz")
    with pytest.raises(ValueError, match="found 'mlp'; no plan knows module paths"):
        explained(StepFacts((plan(decisions=()),)), "mlp")
    with pytest.raises(ValueError, match=r"found 'mm_1'; did you mean layers\.3\.mlp\.up_proj\?"):
        explained(StepFacts((plan(),)), "mm_1")
    with pytest.raises(ValueError, match=r"did you mean (layers\.\d\.mlp\.gate_proj(, |\?)){3}$"):
        explained(StepFacts((plan(),)), "layers.2.mlp.gate_prj")


# -- nothing to explain ------------------------------------------------------------------------------------------------


def test_without_a_step_an_error_in_words() -> None:
    with pytest.raises(fxoffload.NoPlanError, match="found none to explain: nothing that was compiled and called"):
        explained(StepFacts(()))
    facts = StepFacts((), plain={"too small": 2}, stats=Stats(calls_uncompiled={"recompile_limit": 1}))
    with pytest.raises(fxoffload.NoPlanError, match="2 compiled as plain Inductor does: too small; 1 call"):
        explained(facts)
    with pytest.raises(fxoffload.NoPlanError, match=r"no backward of it has ended\. Call loss"):
        explained(StepFacts((plan(),), (GraphFacts("layers.0", 0, has_backward=False),)))


# -- in a notebook -----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_tables_and_escapes_text() -> None:
    found = explained(StepFacts((plan(summary="<b>bold</b>", measured_step_ms=150.0),)))
    text = found._repr_html_()
    assert "&lt;b&gt;bold&lt;/b&gt;" in text and "<b>" not in text
    assert text.count("<table>") == 1 and "<li>steps take 150.0 ms" in text
    assert repr(found) == "<explanation with 1 pieces of advice; print shows it>"
    shown = plan(summary="<b>bold</b>", floors=("a & b",))._repr_html_()
    assert shown.count("<table>") == 2 and "<li>a &amp; b</li>" in shown and "<b>" not in shown
    assert "mlp.gate_proj [8] f32" in shown


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    fxoffload.reset_stats()
    yield
    torch.compiler.reset()


def test_a_model_on_the_cpu(fresh: None) -> None:
    options: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "max_slowdown": 9.0}
    options["recompute"] = "default"  # quicker to plan
    model = fxoffload.compile(Stack(2), profile="h200", **options)
    loss = model(batch()).sum()
    with pytest.raises(fxoffload.NoPlanError, match="no backward of it has ended"):
        fxoffload.explain()
    loss.backward()
    names = [name for d in fxoffload.last_plan().decisions for name in d.values]
    assert "layers.0.up [12, 32] f32" in names and "layers.1.down [12, 16] f32" not in names
    assert fxoffload.last_plan().loss == "outside"
    text = str(fxoffload.explain())
    assert "1 plan, 1 graph compiled to offload" in text and "plan of graph" in text
    assert "no step was measured: steps are timed on a GPU" in text
    assert "exposed copies by layer (predicted" in text or "no copy is exposed (predicted)" in text
    up = fxoffload.explain("up")
    assert "up [12, 32] f32" in str(up) and "norm" not in str(up).partition("\n\n")[2]


def test_a_model_on_the_cpu_without_the_rehearsal(fresh: None) -> None:
    model = fxoffload.compile(torch.nn.Linear(4, 4), inner="aot_eager")
    before = fxoffload.stats().num_plain_graphs
    model(torch.ones(2, 4)).sum().backward()
    assert fxoffload.stats().num_plain_graphs == before + 1
    with pytest.raises(
        fxoffload.NoPlanError, match="1 compiled as plain Inductor does: its tensors are on cpu, not on cu"
    ):
        fxoffload.explain()


def test_a_module_is_asked_for_by_name() -> None:
    with pytest.raises(TypeError, match=r"expected the name of a module, .* found int 3"):
        fxoffload.explain(3)  # type: ignore[arg-type]
