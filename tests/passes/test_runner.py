from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx

from fxoffload.compiler.pipeline import BACKWARD, FIND, FORWARD, PROOFS
from fxoffload.errors import PassError, VerificationError
from fxoffload.passes import runner
from fxoffload.passes.runner import PassEntry, run_passes, without
from tests.capture import Sketch, Tower, capture, example_input

aten = torch.ops.aten


@dataclass
class State:
    gm: fx.GraphModule
    first: Any = None
    second: Any = None


def make_state() -> State:
    sketch = Sketch()
    return State(sketch.module([sketch.chain(sketch.input("x", 4), 3)]))


def test_steps_run_in_order_and_write_down_what_they_return() -> None:
    steps: tuple[PassEntry[State], ...] = (
        PassEntry("count", lambda s: lambda gm: len(gm.graph.nodes), "first"),
        PassEntry("double", lambda s: lambda gm: 2 * s.first, "second", ("first",)),
    )
    state = make_state()
    times = run_passes(steps, state, "forward")
    assert (state.first, state.second) == (5, 10)
    assert list(times) == ["count", "double"]


def test_a_step_works_on_the_graph_that_it_names() -> None:
    state = make_state()
    state.second = make_state().gm
    run_passes((PassEntry("same", lambda s: lambda gm: gm, "first", on="second"),), state, "forward")
    assert state.first is state.second


def test_times_are_milliseconds() -> None:
    steps: tuple[PassEntry[State], ...] = (PassEntry("sleep", lambda s: lambda gm: time.sleep(0.02), "first"),)
    assert 20 <= run_passes(steps, make_state(), "forward")["sleep"] < 2000


def test_a_failing_pass_is_named() -> None:
    def fail(gm: fx.GraphModule) -> None:
        raise KeyError("mm_7")

    steps: tuple[PassEntry[State], ...] = (
        PassEntry("fine", lambda s: lambda gm: 1, "first"),
        PassEntry("broken", lambda s: fail, "second"),
    )
    with pytest.raises(PassError, match=r"pass broken: failed on the backward graph: KeyError: 'mm_7'") as caught:
        run_passes(steps, make_state(), "backward")
    assert caught.value.pass_name == "broken"
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_pass_that_cannot_be_made_is_named_too() -> None:
    steps: tuple[PassEntry[State], ...] = (PassEntry("unmade", lambda s: s.nothing, "first"),)  # type: ignore[attr-defined]
    with pytest.raises(PassError, match="pass unmade: failed on the forward graph: AttributeError"):
        run_passes(steps, make_state(), "forward")


def test_errors_of_ours_keep_their_type() -> None:
    def refute(gm: fx.GraphModule) -> None:
        raise VerificationError("unpaired: x")

    with pytest.raises(VerificationError, match=r"^unpaired: x"):
        run_passes((PassEntry("verify", lambda s: refute, "first"),), make_state(), "forward")


def test_what_a_pass_leaves_is_linted() -> None:
    def break_order(gm: fx.GraphModule) -> None:
        nodes = list(gm.graph.nodes)
        nodes[1].append(nodes[0])  # a placeholder after its reader

    with pytest.raises(PassError, match="pass scramble"):
        run_passes((PassEntry("scramble", lambda s: break_order, "first"),), make_state(), "forward")


def test_a_graph_that_a_pass_makes_is_linted() -> None:
    def make_broken(gm: fx.GraphModule) -> fx.GraphModule:
        broken = make_state().gm
        nodes = list(broken.graph.nodes)
        nodes[1].append(nodes[0])
        return broken

    with pytest.raises(PassError, match="pass make"):
        run_passes((PassEntry("make", lambda s: make_broken, "first"),), make_state(), "forward")


def test_artifacts_show_the_graph_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def trace(kind: str, *, metadata_fn: Any, payload_fn: Any) -> None:
        assert kind == "artifact"
        assert metadata_fn()["encoding"] == "string"
        seen.append((metadata_fn()["name"], payload_fn()))

    def add_one(gm: fx.GraphModule) -> None:
        last = gm.graph.output_node().all_input_nodes[0]
        with gm.graph.inserting_after(last):
            new = gm.graph.call_function(aten.tanh.default, (last,))
        new.meta["val"] = last.meta["val"]
        gm.graph.output_node().args = ((new,),)
        gm.recompile()

    monkeypatch.setattr(runner, "trace_structured", trace)
    run_passes((PassEntry("add_one", lambda s: add_one, "first"),), make_state(), "forward")
    (before, text_before), (after, text_after) = seen
    assert (before, after) == ("fxoffload_forward_before_add_one", "fxoffload_forward_after_add_one")
    assert "tanh" not in text_before
    assert "tanh" in text_after
    assert "f32[4][1]cpu" in text_before  # shapes, strides and devices


def test_a_compile_emits_artifacts_for_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        runner, "trace_structured", lambda kind, *, metadata_fn, payload_fn: seen.append(metadata_fn()["name"])
    )
    capture(Tower(2), example_input())
    # As the run was configured: nothing is donated by segments that run uncompiled.
    backward = without(BACKWARD, "choose_donations")
    passes = [
        ("joint", name)
        for name in ("open_regions", "shrink_constants", "match_layouts", "annotate_layers", "tag_recompute")
    ]
    passes += [("forward", s.name) for s in (*FIND, *FORWARD)] + [("backward", s.name) for s in backward]
    assert seen == [f"fxoffload_{what}_{when}_{name}" for what, name in passes for when in ("before", "after")]


def test_without() -> None:
    assert [s.name for s in without(FORWARD, "verify_transfers", "cut_segments")] == [
        s.name for s in FORWARD if s.name not in ("verify_transfers", "cut_segments")
    ]
    assert without(FORWARD) == FORWARD


def test_without_an_unknown_pass_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no pass is called 'prefetch'") as caught:
        without(BACKWARD, "verify_transfers", "prefetch")
    for step in BACKWARD:
        assert step.name in str(caught.value)


def test_names_are_unique_and_those_of_the_passes() -> None:
    for steps in ((*FIND, *FORWARD), BACKWARD):
        names = [s.name for s in steps]
        assert len(set(names)) == len(names)
    assert {s.name for s in (*FIND, *FORWARD, *BACKWARD)} >= set(PROOFS)
    assert [s.name for s in FORWARD][-2:] == ["verify_wiring", "verify_transfers"]
    assert [s.name for s in BACKWARD][-3:] == list(PROOFS)


def test_a_pass_reads_what_its_entry_lists_and_nothing_else() -> None:
    entries: tuple[PassEntry[State], ...] = (PassEntry("peeks", lambda s: lambda gm: s.second, "first", ("first",)),)
    with pytest.raises(PassError, match="peeks reads 'second', which its entry in the pipeline does not list"):
        run_passes(entries, make_state(), "forward")
