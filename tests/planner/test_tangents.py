"""Gradients of outputs: segments without them need no memory for them, plain Inductor does."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from fxoffload.compiler.recalibrate_graph import GraphRecalibration
from fxoffload.machine.shelf import load_profile
from fxoffload.planner.chain import concatenate
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Scheduler
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.tracker.outputs import Outputs
from fxoffload.step.edges import EdgeMemory, Moment
from tests.oracle.models import machine

MIB = 1 << 20
STEP = TrainingStep(
    (
        StorageInfo("saved", MIB),
        StorageInfo("logits", 64 * MIB, is_output=True),
        StorageInfo("tangent", 32 * MIB, is_tangent=True, is_left_out=True),
        StorageInfo("gradient", MIB, is_gradient=True),
    ),
    (SegmentStep("f", ms=1.0, writes=("saved", "logits")),),
    (
        SegmentStep("head", ms=1.0, reads=("logits", "tangent"), writes=("gradient",)),
        SegmentStep("layer", ms=1.0, reads=("saved",), temp_bytes=80 * MIB),
    ),
    holds_outputs=False,
)


def peaks(step: TrainingStep) -> list[int]:
    """Of the two backward segments, in MiB."""
    found = simulate(step, (False,) * len(step.candidates), copies=machine(), windows=no_windows(step))
    return [b.peak_bytes // MIB for b in found.boundaries if b.phase == "backward" and b.segment in ("head", "layer")]


def test_tangents_that_are_left_out_take_no_memory() -> None:
    assert peaks(STEP) == [65, 82]
    # Autograd holds them until the backward has ended.
    assert peaks(STEP.with_tangents()) == [97, 114]


def test_plain_inductor_has_them() -> None:
    scheduler = Scheduler(STEP, ProfileRates(load_profile("h200")))
    assert scheduler.keep_all().peak_bytes == 82 * MIB
    assert scheduler.as_inductor().peak_bytes == 114 * MIB


def test_outputs_that_are_held_do_not_die_in_their_last_reader() -> None:
    held = STEP.with_outputs_held()
    assert held.backward[0].temp_bytes == 64 * MIB, "its working set may have counted on that"
    assert peaks(held)[1] == 114 + 64
    assert replace(STEP, holds_outputs=True).with_outputs_held().backward == STEP.backward


def test_a_call_of_a_chain_leaves_them_out_too() -> None:
    step = concatenate([STEP]).step
    scheduler = Scheduler(step, ProfileRates(load_profile("h200")))
    assert scheduler.as_inductor().peak_bytes - scheduler.keep_all().peak_bytes == 32 * MIB
    # In a step that was watched it was there.
    seen = concatenate([STEP], [EdgeMemory(((0, "tangent"),), Moment("backward", 0))]).step
    more = Scheduler(seen, ProfileRates(load_profile("h200"))).keep_all().peak_bytes
    assert more - scheduler.keep_all().peak_bytes == 32 * MIB


@pytest.mark.parametrize("come", [False, True])
def test_a_calibrated_graph_has_the_gradients_that_come(come: bool) -> None:
    outputs = Outputs()
    outputs.have_gradients = come
    recalibration = Mock(_graph=Mock(outputs=outputs))
    found = GraphRecalibration._with_outputs(recalibration, STEP)
    assert [s.is_left_out for s in found.storages] == [s.is_left_out and not come for s in STEP.storages]


def test_where_a_graph_breaks_plain_inductor_has_those_of_the_layers() -> None:
    """Logits get their gradient from the graph with the loss, caches get zeros. Other calls need not break."""
    cache = StorageInfo("cache", 8 * MIB, is_tangent=True, is_left_out=True)
    head, layer, *others = STEP.backward
    whole = replace(
        STEP,
        storages=(*STEP.storages, cache),
        backward=(head, replace(layer, reads=(*layer.reads, "cache")), *others),
    )
    broken = replace(whole, no_zeros=frozenset({"tangent"}))

    def zeros(step: TrainingStep) -> int:
        scheduler = Scheduler(step, ProfileRates(load_profile("h200")))
        return (scheduler.as_inductor().peak_bytes - scheduler.keep_all().peak_bytes) // MIB

    assert [zeros(step) for step in (whole, broken)] == [40, 8]
    assert [zeros(concatenate([step]).step) for step in (whole, broken)] == [40, 8]
    pairs = [(broken, broken), (broken, whole), (whole, broken), (whole, whole)]
    assert [zeros(concatenate(pair).step) for pair in pairs] == [8, 40, 40, 40]
