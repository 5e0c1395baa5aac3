"""What users see of a plan: its table, its JSON, its trace and its picture; and the comparison of ranks."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import expecttest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.machine.estimate_error import EstimateError
from fxoffload.plan_report.compare import compare_plans
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.table import gib, layer_ranges, number_ranges
from fxoffload.plan_report.timeline import to_chrome_trace
from fxoffload.planner import Boundary, ConstantRates, SegmentStep, Simulation, StorageInfo, TrainingStep, simulate
from fxoffload.planner.measured import MeasuredSegment, MeasuredStep
from fxoffload.planner.plan import BASES, NO_GRAPH, Decision, FrontierPoint, Prediction, why_not_measured
from tests.marks import examples
from tests.planner.chains import everywhere

GIB = 1 << 30
MIB = 1 << 20


def step() -> TrainingStep:
    """Four layers, each of which saves 64 MiB; the last one's stays."""
    count = 4
    storages = [StorageInfo(f"saved_{k}", 64 * MIB, moved_bytes=64 * MIB) for k in range(count)]
    storages += [StorageInfo(f"gradient_{k}", 16 * MIB, is_gradient=True) for k in range(count)]
    return TrainingStep(
        tuple(storages),
        tuple(SegmentStep(f"layers_{k}", f"layers.{k}", 10.0, writes=(f"saved_{k}",)) for k in range(count)),
        tuple(
            SegmentStep(f"layers_{k}", f"layers.{k}", 20.0, (f"saved_{k}",), (f"gradient_{k}",), 32 * MIB)
            for k in reversed(range(count))
        ),
    )


def simulation(decisions: tuple[bool, ...] = (True, True, True, False), down: float = 4, up: float = 5) -> Simulation:
    windows = everywhere(step(), 64 * MIB, 192 * MIB)
    return simulate(step(), decisions, copies=ConstantRates(down, up), windows=windows)


def prediction(peak_gib: float, step_ms: float, exposed_ms: float = 0.0, offloaded_gib: float = 0.0) -> Prediction:
    return Prediction(
        peak_bytes=int(peak_gib * GIB),
        peak_without_gradients_bytes=int(peak_gib * GIB) - 2 * GIB,
        step_ms=step_ms,
        forward_ms=step_ms / 4,
        backward_ms=step_ms * 3 / 4,
        exposed_ms=exposed_ms,
        bytes_offloaded=int(offloaded_gib * GIB),
        peak_phase="backward",
        peak_segment="layers_3",
    )


def labels(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}" for i in range(first, last + 1))


DECISIONS = (
    Decision(
        labels(0, 14),
        "mm_2",
        "aten.mm.default",
        384 * MIB,
        "offload",
        "its copy hides",
        value="model.layers.0.up [8] bf16",
        values=tuple(f"{label}.up [8] bf16" for label in labels(0, 14)),
    ),
    Decision(labels(15, 15), "mm_107", "aten.mm.default", 384 * MIB, "keep", "the backward begins with it"),
    Decision(labels(0, 15), "silu", "aten.silu.default", 384 * MIB, "recompute", "0.4 ms per GiB"),
    Decision(labels(0, 15), "rsqrt", "aten.rsqrt.default", 65536, "stay", "smaller than min_bytes"),
    Decision((), "embedding", "aten.embedding.default", 128 * MIB, "stay", "the caller sees it"),
)


def measured() -> MeasuredStep:
    """The step of ``step()``, as a clock saw it: compute stood still before layers.2's backward, and one peak is not
    known."""
    segments = [
        MeasuredSegment(
            "forward",
            f"layers_{k}",
            f"layers.{k}",
            10.0 * k,
            10.0 * k + 10,
            64 * MIB * k,
            None,
            64 * MIB * k + 64 * MIB,
        )
        for k in range(4)
    ]
    at = 40.0
    for k in reversed(range(4)):
        at += 5.0 * (k == 2)
        segments.append(
            MeasuredSegment("backward", f"layers_{k}", f"layers.{k}", at, at + 20, 128 * MIB, 160 * MIB, 96 * MIB)
        )
        at += 20
    return MeasuredStep(tuple(segments), 40.0, at)


def plan() -> Plan:
    """A plan after its calibration and measurement, with every field set."""
    return Plan(
        graph=0,
        label="Qwen3Model",
        device="NVIDIA H200",
        shape="1 x 16384 tokens",
        activation_budget=int(9.5 * GIB),
        max_slowdown=0.02,
        source="options",
        summary="offload and recompute meet the budget; the slowdown exceeds max_slowdown",
        predicted=prediction(9.25, 742.5, 12.34, 5.625),
        calibrated=prediction(9.5, 752.0, 14.0, 5.625),
        baseline=prediction(34.95, 720.0),
        calibrated_baseline=prediction(34.95, 723.5),
        checkpointing=prediction(9.0, 914.5),
        smallest_budget_bytes=8 * GIB,
        measured_peak_bytes=int(9.75 * GIB),
        measured_step_ms=750.26,
        measured_exposed_ms=13.0,
        measured_step=measured(),
        decisions=DECISIONS,
        floors=("2.00 GiB of gradients that the backward returns; per-layer compile returns them earlier",),
        frontier=(
            FrontierPoint(9 * GIB, 9 * GIB, 745.0),
            FrontierPoint(20 * GIB, 19 * GIB, 722.0),
            FrontierPoint(34 * GIB, 34 * GIB, 720.0),
        ),
        simulation=simulation(),
    )


def bare_plan() -> Plan:
    """A plan with its required fields, and nothing else."""
    nothing = prediction(34.95, 720.0)
    return Plan(
        graph=1,
        device="NVIDIA H200",
        summary="plain Inductor meets the budget: nothing is done",
        predicted=nothing,
        baseline=nothing,
        smallest_budget_bytes=8 * GIB,
    )


# -- the object --------------------------------------------------------------------------------------------------------


def test_the_names_that_the_documentation_promises() -> None:
    found = plan()
    assert found.predicted_peak_bytes == int(9.25 * GIB)
    assert (found.predicted_step_ms, found.predicted_exposed_ms) == (742.5, 12.34)
    assert (found.baseline_peak_bytes, found.baseline_step_ms) == (int(34.95 * GIB), 720.0)
    assert found.smallest_budget_bytes == 8 * GIB
    assert (found.measured_peak_bytes, found.measured_step_ms) == (int(9.75 * GIB), 750.26)
    assert repr(found) == (
        "<plan of graph 0 (Qwen3Model), 1 x 16384 tokens, NVIDIA H200: "
        "plain Inductor 34.95 GiB in 720.0 ms, predicted 9.25 GiB in 742.5 ms, measured 9.75 GiB in 750.3 ms>"
    )


def test_a_plan_made_ahead_has_no_number() -> None:
    for found in (replace(plan(), graph=NO_GRAPH), Plan.from_json(replace(plan(), graph=NO_GRAPH).to_json())):
        assert str(found).splitlines()[0] == "plan ahead (Qwen3Model), 1 x 16384 tokens, NVIDIA H200"
        assert repr(found).startswith("<plan ahead (Qwen3Model), 1 x 16384 tokens, NVIDIA H200: plain Inductor ")
    assert repr(replace(bare_plan(), graph=NO_GRAPH)).startswith("<plan ahead, NVIDIA H200: ")


def test_a_prediction_is_read_from_a_simulation() -> None:
    simulated = simulation()
    found = Prediction.of(simulated)
    assert found.step_ms == simulated.step_ms == found.forward_ms + found.backward_ms
    assert (found.peak_bytes, found.peak_phase) == (simulated.peak_bytes, simulated.peak_phase)


def test_another_simulation_brings_its_own_boundaries() -> None:
    other = simulation((False,) * 4)
    found = replace(plan(), simulation=other)
    assert found.boundaries == other.boundaries != plan().boundaries


# -- the table ---------------------------------------------------------------------------------------------------------


class TestTable(expecttest.TestCase):
    """EXPECTTEST_ACCEPT=1 writes the new text."""

    maxDiff = None

    def test_everything(self) -> None:
        self.assertExpectedInline(
            str(plan()),
            """\
plan of graph 0 (Qwen3Model), 1 x 16384 tokens, NVIDIA H200
asked for: activation_budget 9.50 GiB, max_slowdown 2.0 % (options)
the measured peak exceeds the budget by 0.25 GiB
offload and recompute meet the budget; the slowdown exceeds max_slowdown
predicted from the device's profile: an estimate; how far such estimates are off on stock models is not known yet

                              plain Inductor    checkpointed    predicted    plain, calibrated    calibrated    measured
--------------------------  ----------------  --------------  -----------  -------------------  ------------  ----------
peak GiB                               34.95            9.00         9.25                34.95          9.50        9.75
of plain Inductor's                        -          25.8 %       26.5 %                    -        27.2 %      27.9 %
peak without gradients GiB             32.95            7.00         7.25                32.95          7.50           -
step ms                                720.0           914.5        742.5                723.5         752.0       750.3
slowdown                                   -         +27.0 %       +3.1 %                    -        +3.9 %      +3.7 %
forward ms                             180.0           228.6        185.6                180.9         188.0           -
backward ms                            540.0           685.9        556.9                542.6         564.0           -
exposed copy ms                          0.0             0.0         12.3                  0.0          14.0        13.0
offloaded GiB                           0.00            0.00         5.62                 0.00          5.62           -

the peak is in the backward of layers.3
the smallest budget is about 8.00 GiB

  activation_budget GiB    peak GiB    step ms    slowdown
-----------------------  ----------  ---------  ----------
                   9.00        9.00      745.0      +3.5 %
                  20.00       19.00      722.0      +0.3 %
                  34.00       34.00      720.0      +0.0 %

layers                  value        producer                  GiB each    GiB  decision    reason
----------------------  -----------  ----------------------  ----------  -----  ----------  ---------------------------
model.layers.0-14 (15)  up [8] bf16  aten.mm.default               0.38   5.62  offload     its copy hides
model.layers.15         mm_107       aten.mm.default               0.38   0.38  keep        the backward begins with it
model.layers.0-15 (16)  silu         aten.silu.default             0.38   6.00  recompute   0.4 ms per GiB
model.layers.0-15 (16)  rsqrt        aten.rsqrt.default           <0.01  <0.01  stay        smaller than min_bytes
outside                 embedding    aten.embedding.default        0.12   0.12  stay        the caller sees it

saved by the forward: keep 0.38 GiB, offload 5.62 GiB, recompute 6.00 GiB, stay 0.13 GiB

what sets the peak, whatever is planned:
- 2.00 GiB of gradients that the backward returns; per-layer compile returns them earlier""",
        )

    def test_nothing(self) -> None:
        self.assertExpectedInline(
            str(bare_plan()),
            """\
plan of graph 1, NVIDIA H200
asked for: nothing (default)
plain Inductor meets the budget: nothing is done
predicted from the device's profile: an estimate; how far such estimates are off on stock models is not known yet

                              plain Inductor    predicted
--------------------------  ----------------  -----------
peak GiB                               34.95        34.95
of plain Inductor's                        -      100.0 %
peak without gradients GiB             32.95        32.95
step ms                                720.0        720.0
slowdown                                   -       +0.0 %
forward ms                             180.0        180.0
backward ms                            540.0        540.0
exposed copy ms                          0.0          0.0
offloaded GiB                           0.00         0.00

the peak is in the backward of layers_3
the smallest budget is about 8.00 GiB

the forward saves nothing""",
        )


def test_numbers_keep_their_decimals() -> None:
    assert [gib(n) for n in (0, 1, MIB * 5, GIB, GIB * 123 // 10, 100 * GIB)] == [
        "0.00",
        "<0.01",
        "<0.01",
        "1.00",
        "12.30",
        "100.00",
    ]


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ((), "outside"),
        (("model.norm",), "model.norm"),
        (("layers.3",), "layers.3"),
        (tuple(f"layers.{i}" for i in range(15)), "layers.0-14 (15)"),
        (("h.0", "h.1", "h.4"), "h.0-1, 4 (3)"),
        (("encoder.0.mlp", "encoder.1.mlp", "decoder.0.mlp"), "encoder.0-1.mlp; decoder.0.mlp (3)"),
        (("layer1.0", "layer1.1", "layer2.0", "layer2.1"), "layer1.0-1; layer2.0-1 (4)"),
        (("h.01", "h.02"), "h.01; h.02 (2)"),
        (tuple(f"h.{i}" for i in range(0, 40, 2)), "h.0, 2, 4, 6, ... (20)"),
        (tuple("abcdefg"), "a; b; c; d; ... (7)"),
        (("h.1", "h.1"), "h.1 (2)"),
    ],
)
def test_layers_are_shown_as_ranges(layers: tuple[str, ...], shown: str) -> None:
    assert layer_ranges(layers) == shown


def test_numbers_are_shown_as_ranges() -> None:
    assert number_ranges([7, 0, 1, 2, 2]) == "0-2, 7"
    assert number_ranges([]) == ""


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plan, bare_plan])
def test_json_gives_an_equal_plan(make: Any) -> None:
    text = make().to_json()
    again = Plan.from_json(text)
    assert again == make()
    assert again.simulation is None
    assert again.to_json() == text
    assert str(again) == str(make())


_texts = st.text(max_size=5)
_ints = st.integers(0, 1 << 63)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_predictions = st.builds(Prediction, _ints, _ints, _floats, _floats, _floats, _floats, _ints, _texts, _texts)
_names = st.lists(_texts, max_size=3).map(tuple)
_actions = st.sampled_from(["keep", "offload", "recompute", "stay", "mask"])
_boundaries = st.builds(
    Boundary, st.sampled_from(["forward", "backward"]), _texts, _floats, _floats, *[_ints] * 7
)  # fmt: skip
_plans = st.builds(
    Plan,
    graph=_ints,
    label=_texts,
    device=_texts,
    shape=_texts,
    activation_budget=st.none() | _ints,
    max_slowdown=st.none() | _floats,
    source=_texts,
    summary=_texts,
    basis=st.sampled_from(BASES),
    estimate_error=st.none() | st.just(EstimateError(0.28, 0.2, 24)),
    predicted=_predictions,
    calibrated=st.none() | _predictions,
    baseline=_predictions,
    calibrated_baseline=st.none() | _predictions,
    smallest_budget_bytes=_ints,
    measured_peak_bytes=st.none() | _ints,
    measured_step_ms=st.none() | _floats,
    measured_exposed_ms=st.none() | _floats,
    measured_step=st.none() | st.just(measured()),
    decisions=st.lists(
        st.builds(Decision, _names, _texts, _texts, _ints, _actions, _texts, _names, _texts, _names), max_size=3
    ).map(tuple),
    floors=_names,
    frontier=st.lists(st.builds(FrontierPoint, _ints, _ints, _floats), max_size=3).map(tuple),
    boundaries=st.lists(_boundaries, max_size=2).map(tuple),
)


@settings(max_examples=examples(50))
@given(_plans)
def test_json_gives_every_plan_back(made: Plan) -> None:
    assert Plan.from_json(made.to_json()) == made


def test_numbers_of_a_solver_become_json() -> None:
    numpy = pytest.importorskip("numpy")
    found = replace(
        bare_plan(),
        smallest_budget_bytes=numpy.int64(5),
        max_slowdown=numpy.float64(0.02),
        frontier=(FrontierPoint(numpy.int32(8), numpy.int32(7), numpy.float32(0.5)),),
    )
    assert Plan.from_json(found.to_json()) == found


def test_text_of_the_first_version() -> None:
    """Fields that it lacks have their defaults; its frontiers were bounds that no plan met."""
    found = json.loads(plan().to_json())
    for name in ("basis", "estimate_error", "breaks"):
        del found[name]
    for name in ("predicted", "calibrated", "baseline", "calibrated_baseline"):
        for one in ("outside_bytes", "outside_ms"):
            del found[name][one]
    found.update(schema=1, frontier=[{"peak_bytes": 1, "step_ms": 2.0}])
    expected = replace(plan(), frontier=())
    assert Plan.from_json(json.dumps(found)) == expected


@pytest.mark.parametrize(
    ("basis", "error", "line"),
    [
        ("estimated", None, "an estimate; how far such estimates are off on stock models is not known yet"),
        (
            "estimated",
            EstimateError(0.28, 0.2, 24),
            "an estimate; on 24 stock models such estimates were off by up to 28 % in time and 20 % in peak",
        ),
        ("operators", None, "predicted from operators that were timed on this device, the rest estimated"),
        ("segments", EstimateError(0.28, 0.2, 24), "predicted from its segments, which ran on this device before the"),
    ],
)
def test_what_the_predictions_rest_on(basis: Any, error: EstimateError | None, line: str) -> None:
    assert line in str(replace(plan(), basis=basis, estimate_error=error))


def test_a_loss_outside_the_graph_is_in_no_prediction_until_it_was_measured() -> None:
    said = "no output of this graph is a loss"
    outside = replace(plan(), loss="outside")
    assert outside.calibrated is not None and said not in str(outside)
    assert said in str(replace(outside, calibrated=None)) and said not in str(replace(plan(), calibrated=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_slowdown": float("nan")}, "expected Plan: max_slowdown to be a finite number, found nan"),
        ({"smallest_budget_bytes": 1.5}, "expected Plan: smallest_budget_bytes to be an integer, found 1.5"),
        ({"graph": True}, "graph"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(plan(), **change).to_json()


def test_integers_of_times_become_numbers() -> None:
    made = replace(bare_plan(), measured_step_ms=3)
    assert '"measured_step_ms": 3.0' in made.to_json()


def test_json_has_a_line_for_each_decision_and_boundary() -> None:
    lines = plan().to_json().splitlines()
    assert lines[:3] == ["{", '"schema": 4,', '"graph": 0,']
    assert sum(line.startswith(' {"layers"') for line in lines) == len(DECISIONS)
    assert sum(line.startswith(' {"phase"') for line in lines) == 8


def _damaged(**changes: Any) -> str:
    return json.dumps({**json.loads(plan().to_json()), **changes})


def _without(name: str) -> str:
    return json.dumps({k: v for k, v in json.loads(plan().to_json()).items() if k != name})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the JSON text of a plan"),
        ("plans/case1.json", "of a file, not its path.*found 'plans/case1.json'"),
        (plan().to_json()[:-40], "expected the JSON text of a plan"),
        ("[" * 100_000, "expected the JSON text of a plan"),
        ("[]", "an object, found a list"),
        ("{}", "expected a plan of schema 4, found schema None; read it with the fxoffload that wrote it"),
        (_damaged(schema=5), "expected a plan of schema 4, found schema 5"),
        (_damaged(schema=True), "expected a plan of schema 4, found schema True"),
        (_damaged(colour="red"), "found colour besides them, and missed none"),
        (_without("floors"), "found none besides them, and missed floors"),
        (_damaged(graph="0"), "expected a plan: graph to be an integer, found '0'"),
        (_damaged(graph=True), "expected a plan: graph to be an integer, found True"),
        (_damaged(label=None), "expected a plan: label to be a string, found None"),
        (_damaged(measured_step_ms=float("inf")), "Infinity is no JSON number"),
        (_damaged(measured_step_ms=10**400), "expected a plan: measured_step_ms to be a finite number"),
        (_damaged(predicted=3), "expected a plan: predicted to be a JSON object, found 3"),
        (_damaged(floors="none"), "expected a plan: floors to be a list, found 'none'"),
        (
            _damaged(frontier=[{"budget_bytes": 1, "peak_bytes": 1, "step_ms": "2"}]),
            r"frontier\[0\]: step_ms to be a finite number",
        ),
        (
            _damaged(decisions=[{**json.loads(plan().to_json())["decisions"][0], "action": "drop"}]),
            r"decisions\[0\]: action to be one of keep, offload, recompute, stay, mask, found 'drop'",
        ),
        (
            _damaged(boundaries=[{**json.loads(plan().to_json())["boundaries"][0], "phase": [1]}]),
            r"boundaries\[0\]: phase to be one of forward, backward, found \[1\]",
        ),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


# -- the trace ---------------------------------------------------------------------------------------------------------


def test_the_trace_has_the_tracks_and_the_times_of_the_simulation(tmp_path: Path) -> None:
    made = plan()
    assert made.simulation is not None
    made.save_trace(tmp_path / "trace.json")
    made.save_trace(str(tmp_path / "trace.json"))  # replaces it
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["summary"] == made.summary
    events = trace["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and not e["pid"]}
    bars = {
        title: [e for e in events if e["ph"] == "X" and not e["pid"] and tracks[e["tid"]] == title]
        for title in tracks.values()
    }
    assert list(bars) == ["compute", "D2H", "H2D"]
    assert [len(found) for found in bars.values()][1:] == [3, 2]
    # Compute has no gaps: time outside segments is a wait.
    total = sum(e["dur"] for e in bars["compute"])
    assert total == pytest.approx(1e3 * made.simulation.step_ms)
    waits = sum(e["dur"] for e in bars["compute"] if e["name"].startswith("wait for "))
    assert 0 < waits == pytest.approx(1e3 * made.simulation.exposed_ms)
    assert sum(e["args"]["bytes"] for e in bars["D2H"]) == made.simulation.bytes_offloaded == 3 * 64 * MIB
    counter = [e["args"]["bytes"] for e in events if e["ph"] == "C" and not e["pid"]]
    assert max(counter) == made.simulation.peak_bytes


def test_every_bar_of_the_trace_says_direction_and_layer_and_arrows_lead_from_offload_to_reload(tmp_path: Path) -> None:
    made = plan()
    made.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["name"] for e in events if e["ph"] == "X" and not e["pid"]]
    ways = ("forward layers.", "backward layers.", "D2H layers.", "H2D layers.", "wait for D2H ", "wait for H2D ")
    assert all(name.startswith(ways) and "layers." in name for name in names)
    assert "D2H layers.0: saved_0" in names and "H2D layers.0: saved_0" in names
    assert any(name.startswith("wait for D2H behind forward layers.") for name in names)
    bars = {(e["tid"], e["ts"]): e["args"].get("value") for e in events if e["ph"] == "X" and not e["pid"]}
    arrows: dict[int, list[Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    assert [[e["ph"] for e in found] for found in arrows.values()] == [["s", "f"]] * 2
    for begin, end in arrows.values():
        assert bars[begin["tid"], begin["ts"]] == bars[end["tid"], end["ts"]] and begin["ts"] < end["ts"]


def test_a_wait_for_a_reload_is_told_with_the_layer_that_waits() -> None:
    names = [e["name"] for e in to_chrome_trace(simulation(down=40, up=1))["traceEvents"] if e["ph"] == "X"]
    assert [n for n in names if n.startswith("wait")] == [
        f"wait for H2D before backward layers.{k}" for k in (2, 1, 0) if f"H2D layers.{k}: saved_{k}" in names
    ]
    assert "wait for H2D before backward layers.0" in names


def test_the_measured_step_is_a_process_of_its_own_in_the_trace(tmp_path: Path) -> None:
    plan().save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert "measured step" not in trace["otherData"]
    mine = [e for e in trace["traceEvents"] if e["pid"] == 1]
    assert mine[0]["args"] == {"name": "measured step"}
    bars = {e["name"]: e["dur"] for e in mine if e["ph"] == "X"}
    assert len(bars) == 9
    assert bars["forward layers.3"] == 10e3 and bars["wait before backward layers.2"] == pytest.approx(5e3)
    counts = [e["args"]["bytes"] for e in mine if e["ph"] == "C"]
    assert len(counts) == 2 * 4 + 3 * 4 and max(counts) == 256 * MIB, "an unknown peak is left out"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "no step was measured yet: the plan was calibrated, and the next steps that follow it are measured"),
        ({"calibrated": None}, "no step was measured: steps are timed on a GPU, once the first ones that follow"),
        ({"graph": NO_GRAPH}, "no step was measured: the plan was made ahead, and nothing ran"),
        ({"measured_step_ms": 3.0}, "of the steps that were measured this plan, of an earlier version, has the time"),
    ],
)
def test_without_a_measured_step_trace_and_picture_say_why(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = replace(plan(), **{"measured_step": None, "measured_step_ms": None, **changes})
    assert why_not_measured(made).startswith(reason)
    made.save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["measured step"].startswith(reason)


def test_a_plan_without_a_simulation_has_no_trace(tmp_path: Path) -> None:
    again = Plan.from_json(plan().to_json())
    with pytest.raises(RuntimeError, match=r"found one without.*fxoffload\.plans\(\)"):
        again.save_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"create .*nowhere"):
        plan().save_trace(tmp_path / "nowhere" / "trace.json")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")

    def fail(temporary: Path, to: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plan().save_trace(path)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "before"


# -- the picture -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_is_a_png_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    had_pyplot = "matplotlib.pyplot" in sys.modules
    for made in (plan(), Plan.from_json(plan().to_json()), replace(bare_plan(), simulation=simulation())):
        made.plot(tmp_path / "plan.png", size_inches=(8, 4))
        content = (tmp_path / "plan.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert struct.unpack(">II", content[16:24]) == (1200, 600)
    plan().plot(str(tmp_path / "plan"))
    assert (tmp_path / "plan").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) is had_pyplot


def test_the_ending_is_the_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan().plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawn and "measured, between segments" in drawn and "no step was measured" not in drawn
    replace(plan(), measured_step=None, measured_step_ms=None, calibrated=None).plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "no step was measured: steps are timed on a GPU" in drawn and "between segments" not in drawn
    with pytest.raises(ValueError, match=r"ends in one of .*png.*found '.*plan\.docx'"):
        plan().plot(tmp_path / "plan.docx")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.svg"]


def test_without_boundaries_there_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RuntimeError, match=r"boundaries of one, found neither; plot a plan of fxoffload\.plans"):
        bare_plan().plot(tmp_path / "plan.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install fxoffload\[plot\]"):
        plan().plot(tmp_path / "plan.png")


# -- ranks -------------------------------------------------------------------------------------------------------------


def rank(*decisions: Decision) -> Plan:
    return replace(bare_plan(), decisions=decisions)


def of_layers(first: int, last: int, action: Any, stem: str = "mm", named: bool = True) -> Decision:
    names = tuple(f"{stem}_{i}" for i in range(first, last + 1))
    return Decision(
        labels(first, last), names[0], "aten.mm.default", 384 * MIB, action, "", names if named else ()
    )  # fmt: skip


def test_equal_plans_fit_together() -> None:
    found = compare_plans([plan(), plan().to_json(), plan()])
    assert found.agrees
    assert (found.conflicts, found.residencies) == ((), ())
    assert str(found) == "3 ranks fit together"
    assert compare_plans([]).agrees


@pytest.mark.parametrize("named", [True, False])
def test_keep_and_offload_may_differ(named: bool) -> None:
    one = rank(of_layers(0, 10, "offload", named=named), of_layers(11, 15, "keep", named=named))
    two = rank(of_layers(0, 7, "offload", named=named), of_layers(8, 15, "keep", named=named))
    found = compare_plans([one, one, two])
    assert found.agrees
    assert found.conflicts == ()
    (difference,) = found.residencies
    assert difference.layers == labels(8, 10)
    assert difference.actions == ("offload", "offload", "keep")
    assert str(found).splitlines() == [
        "3 ranks fit together",
        "differs, as it may:",
        f"- plan 0, model.layers.8-10 (3): {'mm_8' if named else 'mm_0'} of aten.mm.default, 0.38 GiB: "
        "offload on rank 0-1; keep on rank 2",
    ]


def test_the_order_of_rows_does_not_matter_where_names_are_known() -> None:
    rows = (of_layers(0, 3, "recompute", "gate"), of_layers(0, 3, "keep", "up"))
    assert compare_plans([rank(*rows), rank(*reversed(rows))]) == compare_plans([rank(*rows), rank(*rows)])


def test_a_step_over_several_graphs_may_differ_in_what_is_recomputed() -> None:
    """Only graphs without collectives have variants."""
    one, two = rank(of_layers(0, 3, "recompute", "gate")), rank(of_layers(0, 3, "keep", "gate"))
    assert not compare_plans([one, two]).agrees
    found = compare_plans([replace(p, label="a step over 4 calls of 1 graph") for p in (one, two)])
    assert found.agrees
    assert [d.actions for d in found.residencies] == [("recompute", "keep")]


def test_what_is_recomputed_has_to_be_the_same() -> None:
    one = rank(of_layers(0, 3, "recompute", "gate"), of_layers(0, 3, "keep", "up"))
    two = rank(of_layers(0, 3, "keep", "gate"), of_layers(0, 3, "offload", "up"))
    found = compare_plans([one, two.to_json()])
    assert not found.agrees
    assert [d.name for d in found.conflicts] == ["gate_0"]
    assert [d.name for d in found.residencies] == ["up_0"]
    assert str(found).startswith("2 ranks do NOT fit together\nhas to be the same, and is not")
    assert "recompute on rank 0; keep on rank 1" in str(found)


def test_names_of_what_stays_need_not_be_the_same() -> None:
    found = compare_plans([rank(of_layers(0, 3, "stay", name)) for name in ("getitem", "getitem_50")])
    assert found.agrees
    assert not found.residencies


def test_a_candidate_that_a_rank_lacks_is_a_conflict() -> None:
    found = compare_plans([rank(of_layers(0, 3, "keep")), rank(of_layers(0, 2, "keep"))])
    assert not found.agrees
    (difference,) = found.conflicts
    assert (difference.layers, difference.actions) == (labels(3, 3), ("keep", "absent"))


def test_all_plans_of_a_rank_are_compared_in_order() -> None:
    first, second = rank(of_layers(0, 3, "keep")), rank(of_layers(0, 3, "offload"))
    found = compare_plans([[first, second], [first.to_json(), first.to_json()]])
    assert [d.position for d in found.residencies] == [1]
    found = compare_plans([[first, second], [first]])
    assert not found.agrees
    assert "different numbers of plans: 2 on rank 0, 1 on rank 1" in str(found)


def test_a_damaged_text_names_its_rank() -> None:
    with pytest.raises(ValueError, match="rank 1: expected the JSON text of a plan"):
        compare_plans([plan(), "{"])
