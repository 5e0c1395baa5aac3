"""``torch.compile(model, backend="fxoffload")`` as its user sees it: bad input, switches, fallbacks, policies."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import fxoffload
from fxoffload import backend
from fxoffload.compiler import pacing, plain, plan_chain, plan_of_graph, segments, session
from fxoffload.compiler.kernels import PendingKernels
from fxoffload.environment import PIECES
from fxoffload.errors import OptionsError, PassError, SegmentCompileError, UnsupportedError
from fxoffload.passes.annotate_layers import AnnotateLayers
from fxoffload.passes.choose_donations import ChooseDonations
from fxoffload.passes.cut_segments import CutSegments
from fxoffload.passes.insert_transfers import InsertOffloads, InsertReloads
from fxoffload.runtime.engine import CopyEngine, engine_for
from fxoffload.runtime.host_memory.trim import STEADY_STEPS, HostTrim
from fxoffload.torch_private.graphs import boxed_eager
from tests.capture import Tower, example_input, rehearsal_options
from tests.marks import slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXOFFLOAD_DISABLE", raising=False)


def make_model(num_layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Tower(num_layers)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], batch: int = 4) -> list[Tensor]:
    """One step's loss and gradients."""
    model.zero_grad()
    loss = call(example_input(batch)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def eager(num_layers: int = 3) -> list[Tensor]:
    model = make_model(num_layers)
    return gradients(model, model)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def compile_model(num_layers: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model(num_layers)
    return model, torch.compile(model, backend="fxoffload", options=rehearsal_options(**options))


def kept(num_layers: int = 3, **options: Any) -> list[Tensor]:
    """What a run that keeps everything computes: the reference for equality."""
    torch.compiler.reset()
    found = gradients(*compile_model(num_layers, **options, policy="keep_all"))
    torch.compiler.reset()
    fxoffload.reset_stats()
    return found


@pytest.fixture
def quick_inductor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``inner="inductor"`` without Inductor: segments and plain graphs run op by op. Its requests, by call."""
    calls: list[dict[str, Any]] = []

    def compile_eagerly(where: str) -> Callable[..., Any]:
        def compile_one(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
            calls.append(
                {"where": where, "config": inductor_config.get_config_copy(), "num_ops": num_ops(gm), **kwargs}
            )
            return boxed_eager(gm)

        return compile_one

    monkeypatch.setattr(segments, "compile_fx_inner", compile_eagerly("segment"))
    monkeypatch.setattr(plain, "compile_fx_inner", compile_eagerly("plain"))
    return calls


def num_ops(gm: fx.GraphModule) -> int:
    return sum(n.op == "call_function" for n in gm.graph.nodes)


# -- bad input -------------------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"host_budget": 0}, "host_budget is 0"),
    ({"in_flight_budget": 0}, "in_flight_budget is 0"),
    ({"prefetch_budget": "0 GiB"}, "prefetch_budget is '0 GiB'"),
    ({"host_budget": -1}, "host_budget is -1"),
    ({"min_bytes": "-2MiB"}, "min_bytes is '-2MiB'"),
    ({"host_budget": "12 parsecs"}, "host_budget is '12 parsecs'.*'512 MiB'"),
    ({"polcy": "auto"}, "unknown option 'polcy'.*did you mean 'policy'.*host_budget"),
    ({"policy": "most"}, "policy is 'most'.*auto, offload_all, keep_all"),
    ({"device_types": ("tpu",)}, "device_types is .*tpu.*cuda, cpu"),
    ({"disable": ("prefech",)}, "did you mean 'prefetch'"),
    ({"inductor": {"max_autotun": True}}, "max_autotun"),
]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when AOTAutograd is asked for anything."""

    def trace(*args: Any, **kwargs: Any) -> None:
        pytest.fail("AOTAutograd began to trace")

    monkeypatch.setattr("fxoffload.torch_private.inductor_compiler.compile_fx", trace)
    monkeypatch.setattr("torch._functorch.aot_autograd.aot_module_simplified", trace)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_value_errors_of_the_first_call(options: dict[str, Any], message: str) -> None:
    model = torch.compile(make_model(), backend="fxoffload", options=options)  # nothing is checked yet
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)) as caught:
        model(example_input())
    assert type(caught.value) is OptionsError
    # Between the call and fxoffload there is Dynamo's wrapper alone.
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum("_dynamo" in file for file in files) <= 2 and len(files) < 20


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_by_mode_are_not_implemented(mode: str) -> None:
    model = torch.compile(make_model(), backend="fxoffload", mode=mode)
    with pytest.raises(NotImplementedError, match=f"mode '{mode}'.*max-autotune-no-cudagraphs") as caught:
        model(example_input())
    assert type(caught.value) is UnsupportedError


@pytest.mark.usefixtures("untraced")
def test_cuda_graphs_by_option_are_not_implemented() -> None:
    options = rehearsal_options(inner="inductor", inductor={"triton.cudagraphs": True})
    model = torch.compile(make_model(), backend="fxoffload", options=options)
    with pytest.raises(NotImplementedError, match=r"triton\.cudagraphs uses CUDA graphs.*remove it"):
        model(example_input())


@pytest.mark.usefixtures("untraced")
def test_a_bad_environment_is_a_value_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_DISABLE", "offload,prefech")
    with pytest.raises(ValueError, match="FXOFFLOAD_DISABLE names unknown pieces: prefech"):
        compile_model()[1](example_input())


def test_what_would_be_refused_is_what_would_have_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture ``untraced`` can fail."""
    asked: list[int] = []

    def trace(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        asked.append(1)
        return gm.forward

    monkeypatch.setattr("fxoffload.torch_private.inductor_compiler.compile_fx", trace)
    compile_model()[1](example_input())
    assert asked == [1]


# -- Inductor's options ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mode_reaches_inductor_for_every_segment(
    quick_inductor: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mode`` and ``options`` exclude each other in torch.compile: values have to be larger than 1 MiB to move."""
    monkeypatch.setattr(backend, "_device_to_offload", lambda inputs, types: CPU)
    model = make_model()
    compiled = torch.compile(model, backend="fxoffload", mode="max-autotune-no-cudagraphs")
    assert_close(gradients(model, compiled, batch=2048), gradients(model, model, batch=2048))
    assert fxoffload.stats().bytes_offloaded > 0
    assert {call["where"] for call in quick_inductor} == {"segment"}
    assert all(call["config"]["max_autotune"] is True for call in quick_inductor)
    assert not any(call["config"]["triton.cudagraphs"] for call in quick_inductor)
    assert inductor_config.max_autotune is False


def test_inductor_options_reach_every_segment(quick_inductor: list[dict[str, Any]]) -> None:
    model, compiled = compile_model(inner="inductor", inductor={"max_autotune": True, "epilogue_fusion": False})
    gradients(model, compiled)
    assert {call["where"] for call in quick_inductor} == {"segment"}
    for call in quick_inductor:
        assert (call["config"]["max_autotune"], call["config"]["epilogue_fusion"]) == (True, False)


@pytest.mark.slow
def test_without_them_inductor_is_as_it_is(quick_inductor: list[dict[str, Any]]) -> None:
    gradients(*compile_model(inner="inductor"))
    assert quick_inductor
    assert not any(call["config"]["max_autotune"] for call in quick_inductor)


@pytest.mark.slow
def test_a_partitioner_of_the_users_still_partitions(quick_inductor: list[dict[str, Any]]) -> None:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Theirs(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            asked.append(len(gm.graph.nodes))
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "theirs"

    asked: list[int] = []
    with inductor_config.patch(custom_partitioner_fn=Theirs()):
        found = gradients(*compile_model(inner="inductor"))
    assert len(asked) == 1
    assert fxoffload.stats().bytes_offloaded > 0
    assert_close(found, eager())


# -- switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true"])
def test_disabled_is_plain_inductor(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def plain(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        asked.append(kwargs)
        return gm.forward

    monkeypatch.setenv("FXOFFLOAD_DISABLE", value)
    monkeypatch.setattr("fxoffload.torch_private.inductor_compiler.compile_fx", plain)
    model, compiled = compile_model(inner="inductor", inductor={"epilogue_fusion": False})
    assert_equal(gradients(model, compiled), eager())
    assert asked == [{"config_patches": {"epilogue_fusion": False}}]
    assert fxoffload.stats() == fxoffload.Stats(host_bytes_reserved=fxoffload.stats().host_bytes_reserved)


@pytest.mark.slow
def test_disabled_with_the_debugging_inner_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = fxoffload.graphs()
    monkeypatch.setenv("FXOFFLOAD_DISABLE", "1")
    assert_close(gradients(*compile_model()), eager())
    assert fxoffload.stats().bytes_offloaded == 0
    assert fxoffload.graphs() == alive


def disabled_run(piece: str, by: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    if by == "environment":
        monkeypatch.setenv("FXOFFLOAD_DISABLE", piece)
        return gradients(*compile_model(**options))
    return gradients(*compile_model(disable=(piece,), **options))


def option_of(piece: str, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The option ``disable`` with which ``piece`` is off, if it is to be; the environment may say it instead."""
    pieces = (piece,) if disabled else ()
    if by == "option":
        return pieces
    monkeypatch.setenv("FXOFFLOAD_DISABLE", ",".join(pieces))
    return ()


@pytest.mark.parametrize("by", [slow("environment"), "option"])
class TestPieces:
    @pytest.mark.slow
    def test_segments(self, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = kept()
        found = disabled_run("segments", by, monkeypatch)
        assert fxoffload.stats().num_segments_compiled == 2  # forward and backward
        assert fxoffload.stats().bytes_offloaded > 0
        assert_equal(found, expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("disabled", [True, False])
    def test_planner(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        planned: list[Any] = []
        run = session.Planning.run
        monkeypatch.setattr(session.Planning, "run", lambda self, **how: planned.append(self) or run(self, **how))
        options = {"policy": "auto", "max_slowdown": 9.0}
        if disabled:
            found = disabled_run("planner", by, monkeypatch, **options)
        else:
            found = gradients(*compile_model(**options))
        assert bool(planned) == (not disabled)
        assert_close(found, eager())

    @pytest.mark.slow
    @pytest.mark.parametrize("disabled", [True, False])
    def test_measured_costs(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pieces = option_of("measured_costs", by, disabled, monkeypatch)
        monkeypatch.setenv("FXOFFLOAD_MEASURED_DEVICE_TYPES", "cpu")
        monkeypatch.setenv("FXOFFLOAD_CACHE_DIR", str(tmp_path))
        fxoffload.reset_stats()
        options = {"policy": "auto", "max_slowdown": 9.0, "recompute": "default"}
        found = gradients(*compile_model(disable=pieces, **options))
        assert (fxoffload.stats().num_segments_measured > 0) == (not disabled)
        assert (fxoffload.stats().measuring_ms > 0) == (not disabled)
        assert_close(found, eager())

    @pytest.mark.slow
    @pytest.mark.parametrize("disabled", [True, False])
    def test_calibration(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(plan_of_graph, "replan_for", lambda *args: asked.append(args))
        options = {"policy": "auto", "max_slowdown": 9.0}
        if disabled:
            found = disabled_run("calibration", by, monkeypatch, **options)
        else:
            found = gradients(*compile_model(**options))
        assert bool(asked) == (not disabled)
        assert_close(found, eager())

    @pytest.mark.parametrize("disabled", [True, False])
    def test_tape_plan(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer compiled on its own: the third step is planned, and everything fits."""
        pieces = option_of("tape_plan", by, disabled, monkeypatch)
        model = make_model(3)
        for layer in model.layers:  # type: ignore[union-attr]
            options = {"policy": "auto", "activation_budget": "1GiB", "disable": pieces}
            layer.compile(backend="fxoffload", options=rehearsal_options(**options))
        for _ in range(3):
            fxoffload.reset_stats()
            assert_close(gradients(model, model), eager())
            model.zero_grad()
        assert (fxoffload.stats().bytes_offloaded > 0) == disabled

    @pytest.mark.parametrize("disabled", [True, False])
    def test_tape_recompute(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whether what variants are made from is kept."""
        pieces = option_of("tape_recompute", by, disabled, monkeypatch)
        found: list[Any] = []
        describe = session.describe_graph

        def describe_graph(*args: Any) -> Any:
            found.append(args[-1])
            return describe(*args)

        monkeypatch.setattr(session, "describe_graph", describe_graph)
        model = make_model(2)
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend="fxoffload", options=rehearsal_options(policy="auto", disable=pieces))
        assert_close(gradients(model, model), eager(2))
        assert {variant_maker is None for variant_maker in found} == {disabled}

    @pytest.mark.parametrize("disabled", [True, False])
    def test_host_trim(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer compiled on its own: two steps offload, the others keep everything and need no host memory."""
        pieces = option_of("host_trim", by, disabled, monkeypatch)
        engine = engine_for(torch.device("cpu"))
        engine.calls._step = None
        gc.collect()
        monkeypatch.setattr(engine.calls, "_tracked_graphs", weakref.WeakSet())  # nothing of other tests
        monkeypatch.setattr(engine.calls, "_trim", HostTrim(engine))
        model = make_model(3)
        for layer in model.layers:  # type: ignore[union-attr]
            options = {"policy": "auto", "activation_budget": "1GiB", "disable": pieces}
            layer.compile(backend="fxoffload", options=rehearsal_options(**options))
        for _ in range(2):
            assert_close(gradients(model, model), eager())
            model.zero_grad()
        before = fxoffload.stats().host_bytes_reserved
        for _ in range(STEADY_STEPS + 2):
            assert_close(gradients(model, model), eager())
            model.zero_grad()
        stats = fxoffload.stats()
        assert stats.host_bytes_reserved == (before if disabled else 0)
        assert stats.bytes_host_trimmed == (0 if disabled else before)
        assert before > 0

    @pytest.mark.parametrize("disabled", [True, False])
    def test_allocator_record(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer compiled on its own: in the second step that is watched, and in those that are measured."""
        pieces = option_of("allocator_record", by, disabled, monkeypatch)
        engine, begun, told = engine_for(torch.device("cpu")), [], []
        engine.calls._step = None
        monkeypatch.setattr(engine.calls, "_history", lambda: begun.append("record"))

        def replan_for_chain(planning: Any, *_: object) -> None:
            told.append(planning.records)

        monkeypatch.setattr(plan_chain, "replan_for_chain", replan_for_chain)
        model = make_model(3)
        for layer in model.layers:  # type: ignore[union-attr]
            options = {"policy": "auto", "activation_budget": "1GiB", "disable": pieces}
            layer.compile(backend="fxoffload", options=rehearsal_options(**options))
        for _ in range(4):
            assert_close(gradients(model, model), eager())
            model.zero_grad()
        assert len(begun) == (not disabled)
        assert told == [not disabled]

    @pytest.mark.slow_except("False-option")
    @pytest.mark.parametrize("disabled", [True, False])
    def test_pacing(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer compiled on its own, as if FSDP2 had sharded it and it took long enough."""
        pieces = option_of("pacing", by, disabled, monkeypatch)
        monkeypatch.setattr(pacing, "_LEAST_MS", 0.0)
        monkeypatch.setattr(pacing, "_BUSY", 0.0)
        monkeypatch.setattr(pacing, "fsdp2_is_used", lambda: True)
        engine, paced = engine_for(torch.device("cpu")), []
        engine.calls._step = None
        monkeypatch.setattr(engine.streams, "pace", lambda: paced.append("pace"), raising=False)
        model = make_model(3)
        for layer in model.layers:  # type: ignore[union-attr]
            options = {"policy": "auto", "max_slowdown": 9.0, "disable": pieces}
            layer.compile(backend="fxoffload", options=rehearsal_options(**options))
        for _ in range(4):
            paced.clear()
            assert_close(gradients(model, model), eager())
            model.zero_grad()
        assert fxoffload.stats().bytes_offloaded > 0
        assert len(paced) == (0 if disabled else 3)

    def test_offload(self, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found = disabled_run("offload", by, monkeypatch)
        stats = fxoffload.stats()
        assert (stats.bytes_offloaded, stats.num_plain_graphs, stats.num_segments_compiled) == (0, 1, 0)
        assert_close(found, eager())

    @pytest.mark.slow
    @pytest.mark.parametrize("disabled", [True, False])
    def test_prefetch(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = kept()
        options = {"in_flight_budget": 1, "prefetch_budget": "1GiB"}
        if disabled:
            found = disabled_run("prefetch", by, monkeypatch, **options)
        else:
            found = gradients(*compile_model(**options))
        stats = fxoffload.stats()
        assert stats.bytes_reloaded == stats.bytes_offloaded > 0
        assert (stats.num_prefetch_misses > 0) == disabled
        assert_equal(found, expected)

    @pytest.mark.parametrize("disabled", [True, False])
    def test_cross_graph_prefetch(self, by: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer compiled on its own: only then is there another graph to prefetch from."""
        asked: list[bool] = []
        request = CopyEngine.request

        def record(self: CopyEngine, group: Any, **kwargs: Any) -> None:
            asked.append(kwargs["across_graphs"])
            request(self, group, **kwargs)
            waiting = {id(r()) for r in self._queue}
            mine = {id(t) for t in group.in_need_order()}
            others.append(len(waiting - mine))

        others: list[int] = []
        monkeypatch.setattr(CopyEngine, "request", record)
        pieces = ("cross_graph_prefetch",) if disabled else ()
        if by == "environment":
            monkeypatch.setenv("FXOFFLOAD_DISABLE", ",".join(pieces))
            pieces = ()
        model = make_model(3)
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend="fxoffload", options=rehearsal_options(in_flight_budget=1, disable=pieces))
        assert_close(gradients(model, model), eager())
        assert asked == [not disabled] * 3
        assert (max(others) > 0) == (not disabled)

    @pytest.mark.slow
    @pytest.mark.parametrize("disabled", [True, False])
    def test_donation(
        self, by: str, disabled: bool, quick_inductor: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        donated: list[tuple[int, ...]] = []
        choose = ChooseDonations.__call__

        def record(self: ChooseDonations, gm: fx.GraphModule) -> Any:
            found = choose(self, gm)
            donated.extend(found.values())
            return found

        monkeypatch.setattr(ChooseDonations, "__call__", record)
        if disabled:
            found = disabled_run("donation", by, monkeypatch, inner="inductor")
        else:
            found = gradients(*compile_model(inner="inductor"))
        assert any(donated) == (not disabled)
        assert_close(found, eager())

    @pytest.mark.slow
    def test_segment_reuse(self, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = kept()
        gradients(*compile_model())
        assert fxoffload.stats().num_segments_reused > 0
        torch.compiler.reset()
        fxoffload.reset_stats()
        found = disabled_run("segment_reuse", by, monkeypatch)
        stats = fxoffload.stats()
        assert (stats.num_segments_reused, stats.num_segments_compiled) == (0, 10)
        assert_equal(found, expected)

    @pytest.mark.slow
    def test_kernel_overlap(self, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def put_off(*args: Any) -> None:
            pytest.fail("was put off")

        monkeypatch.setattr(PendingKernels, "put_off", put_off)
        assert_close(disabled_run("kernel_overlap", by, monkeypatch, inner="inductor"), eager())
        assert fxoffload.stats().bytes_offloaded > 0

    @pytest.mark.slow
    def test_verify(self, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def refute(*args: Any) -> None:
            pytest.fail("was verified")

        for proof in ("VerifyWiring", "VerifyTransfers", "VerifyPairing"):
            monkeypatch.setattr(f"fxoffload.compiler.pipeline.{proof}.__call__", refute)
        disabled_run("verify", by, monkeypatch)
        assert fxoffload.stats().bytes_offloaded > 0


def test_every_piece_has_its_test() -> None:
    assert {f"test_{piece}" for piece in PIECES} <= set(vars(TestPieces))


@pytest.mark.slow
def test_all_pieces_off_is_not_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still goes through our code, and computes the same."""
    monkeypatch.setenv("FXOFFLOAD_DISABLE", ",".join(PIECES))
    assert_close(gradients(*compile_model()), eager())
    assert fxoffload.stats().num_plain_graphs == 1


# -- fallback --------------------------------------------------------------------------------------------------------


def fail(self: Any, gm: fx.GraphModule) -> None:
    raise KeyError("a bug of ours")


FAILING_PASSES = {
    "annotate_layers": AnnotateLayers,
    "cut_segments": CutSegments,
    "insert_offloads": InsertOffloads,
    "insert_reloads": InsertReloads,
}


def run_and_collect(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(w.message) for w in caught if "fxoffload" in str(w.message)]


@pytest.mark.slow_except("annotate_layers")
@pytest.mark.parametrize("failing", FAILING_PASSES)
def test_a_failing_pass_raises_by_default(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAILING_PASSES[failing], "__call__", fail)
    _, compiled = compile_model()
    with pytest.raises(PassError, match=f"pass {failing}: failed on the .* graph: KeyError: 'a bug of ours'"):
        compiled(example_input())
    assert fxoffload.stats().num_fallbacks == 0


@pytest.mark.slow_except("aot_eager-annotate_layers")
@pytest.mark.parametrize("failing", FAILING_PASSES)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_failing_pass_falls_back_where_that_was_asked_for(
    failing: str, inner: str, quick_inductor: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAILING_PASSES[failing], "__call__", fail)
    model, compiled = compile_model(inner=inner, on_error="fallback")
    found, messages = run_and_collect(lambda: gradients(model, compiled))
    assert_close(found, eager())
    stats = fxoffload.stats()
    only_backward = failing == "insert_reloads"
    assert (stats.num_fallbacks, stats.bytes_offloaded) == (1, 0)
    assert (stats.num_segments_compiled > 0) is only_backward
    assert len(messages) == 1
    assert f"pass {failing}" in messages[0]
    assert "compiles it as plain Inductor" in messages[0]
    if inner == "inductor":
        plain = [call for call in quick_inductor if call["where"] == "plain"]
        assert len(plain) == (1 if only_backward else 2)
    assert_close(gradients(model, compiled), eager())  # and goes on so
    assert fxoffload.stats().num_fallbacks == 1


@pytest.mark.slow
def test_a_pass_that_fails_on_the_backward_only_leaves_a_plain_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward has run by then: this graph keeps everything from its first call."""
    cut = CutSegments.__call__

    def fail_once(self: CutSegments, gm: fx.GraphModule) -> Any:
        if "tangents_1" in {n.name for n in gm.graph.nodes}:
            raise KeyError("a bug of ours")
        return cut(self, gm)

    expected = kept()
    monkeypatch.setattr(CutSegments, "__call__", fail_once)
    model, compiled = compile_model(on_error="fallback")
    found, messages = run_and_collect(lambda: gradients(model, compiled))
    assert_equal(found, expected)
    stats = fxoffload.stats()
    assert stats.num_fallbacks == len(messages) == 1
    assert stats.bytes_offloaded == 0
    with fxoffload.override_policy("offload_all"):
        assert_equal(gradients(model, compiled), expected)
    assert fxoffload.stats().bytes_offloaded == 0


def failing_compile(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Segments of one layer fail to compile; whole graphs do not."""

    def compile_one(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        is_layer = 15 < num_ops(gm) < 60
        if is_layer and bool(kwargs.get("is_backward")) == (direction == "backward"):
            raise RuntimeError("out of registers")
        return boxed_eager(gm)

    monkeypatch.setattr(segments, "compile_fx_inner", compile_one)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failing_segment_raises_by_default(
    direction: str, quick_inductor: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_compile(monkeypatch, direction)
    with pytest.raises(SegmentCompileError, match=rf"segment of layers\.\d: Inductor failed on the {direction}"):
        gradients(*compile_model(inner="inductor"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failing_segment_falls_back_where_that_was_asked_for(
    direction: str, quick_inductor: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_compile(monkeypatch, direction)
    model, compiled = compile_model(inner="inductor", on_error="fallback")
    found, messages = run_and_collect(lambda: gradients(model, compiled))
    assert_close(found, eager())
    stats = fxoffload.stats()
    assert stats.num_fallbacks == len(messages) == 1
    assert "segment of layers." in messages[0]
    # A forward that fell back is plain, and so is its backward; a backward that fell back is plain, and keeps.
    assert stats.bytes_offloaded == 0
    assert [call["where"] for call in quick_inductor] == ["plain"] * (2 if direction == "forward" else 1)
    for _ in range(2):
        assert_close(gradients(model, compiled), eager())
    assert fxoffload.stats().host_bytes_in_use == 0


@pytest.mark.slow
def test_a_fallback_of_one_graph_does_not_hold_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CutSegments, "__call__", fail)
        _, messages = run_and_collect(lambda: gradients(*compile_model(on_error="fallback")))
        assert len(messages) == 1
    torch.compiler.reset()
    _, messages = run_and_collect(lambda: gradients(*compile_model(on_error="fallback")))
    assert messages == []
    assert fxoffload.stats().bytes_offloaded > 0


# -- where nothing can be offloaded ----------------------------------------------------------------------------------


def test_a_model_on_the_cpu_says_once_that_nothing_is_offloaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def plain(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        asked.append(kwargs)
        return gm.forward

    monkeypatch.setattr("fxoffload.torch_private.inductor_compiler.compile_fx", plain)
    for num_layers in (2, 3):
        model = make_model(num_layers)
        assert_equal(gradients(model, torch.compile(model, backend="fxoffload")), eager(num_layers))
    assert asked == [{"config_patches": {}}] * 2
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("fxoffload")]
    assert len(messages) == 1
    assert "nothing is offloaded" in messages[0]
    assert '"device_types": ("cpu",)' in messages[0]
    assert fxoffload.stats().bytes_offloaded == 0


def test_inference_is_plain() -> None:
    model, compiled = compile_model()
    with torch.no_grad():
        found = compiled(example_input())
    torch.testing.assert_close(found, make_model()(example_input()), rtol=1e-5, atol=1e-6)
    stats = fxoffload.stats()
    assert (stats.bytes_offloaded, stats.num_segments_compiled, stats.num_plain_graphs) == (0, 0, 0)
    assert_close(gradients(model, compiled), eager())
    assert fxoffload.stats().bytes_offloaded > 0


def test_a_graph_with_nothing_worth_a_copy_is_left_to_inductor() -> None:
    alive = len(fxoffload.graphs())
    found = gradients(*compile_model(min_bytes="1GiB"))
    stats = fxoffload.stats()
    assert (stats.num_plain_graphs, stats.bytes_offloaded, stats.num_segments_compiled) == (1, 0, 0)
    assert stats.bytes_skipped["smaller than min_bytes"] > 0
    assert stats.bytes_skipped["parameter, buffer, or computed from them alone"] > 0
    assert len(fxoffload.graphs()) == alive
    assert_close(found, eager())


# -- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_host_budget_that_is_too_small_keeps_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    expected = kept()
    engine = engine_for(CPU)
    engine.release_host_memory()  # pinned memory is used under any budget
    engine._warned_full = False
    model, compiled = compile_model(host_budget="16KiB")
    for _ in range(3):
        assert_equal(gradients(model, compiled), expected)
    stats = fxoffload.stats()
    assert 0 < stats.bytes_offloaded <= 3 * 16 * 1024
    assert stats.bytes_kept_host_full > 0
    assert stats.bytes_kept_host_full % 3 == 0
    assert 0 < stats.host_bytes_reserved <= 16 * 1024
    assert stats.host_bytes_in_use == 0
    full = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "host budget" in r.getMessage()]
    assert len(full) == 1


def test_stats_are_frozen_and_reset(same_code: Callable[..., Any]) -> None:
    gradients(*same_code(compile_model))
    before = fxoffload.stats()
    assert before.bytes_offloaded > 0 < before.num_segments_compiled
    with pytest.raises(AttributeError):
        before.bytes_offloaded = 0  # type: ignore[misc]
    fxoffload.reset_stats()
    after = fxoffload.stats()
    assert (after.bytes_offloaded, after.num_copies, after.num_segments_compiled, after.host_wait_ms) == (0, 0, 0, 0)
    assert after.host_bytes_reserved == before.host_bytes_reserved  # not a counter
    assert before.bytes_offloaded > 0


def test_steady_steps_neither_pin_nor_hold_host_memory(same_code: Callable[..., Any]) -> None:
    model, compiled = same_code(compile_model)
    for _ in range(2):
        gradients(model, compiled)
    before = fxoffload.stats()
    for _ in range(3):
        gradients(model, compiled)
    after = fxoffload.stats()
    assert after.num_host_growths == before.num_host_growths
    assert after.host_wait_ms == before.host_wait_ms
    assert after.host_bytes_reserved == before.host_bytes_reserved
    assert after.num_segments_compiled == before.num_segments_compiled
    assert after.host_bytes_in_use == 0


def test_a_policy_can_be_changed_at_any_time_without_compiling(same_code: Callable[..., Any]) -> None:
    """Behind all others with the same code."""
    model, compiled = same_code(compile_model)
    expected = gradients(model, compiled)
    graph = fxoffload.graphs()[-1]
    compiled_before = fxoffload.stats().num_segments_compiled
    moved = fxoffload.stats().bytes_offloaded

    graph.policy = "keep_all"
    assert_equal(gradients(model, compiled), expected)
    assert fxoffload.stats().bytes_offloaded == moved
    graph.decisions[graph.saved.candidates[0].name] = True
    assert_equal(gradients(model, compiled), expected)
    one = fxoffload.stats().bytes_offloaded - moved
    assert one == graph.saved.candidates[0].nbytes
    with fxoffload.override_policy("offload_all"):
        graph.decisions.clear()
        assert_equal(gradients(model, compiled), expected)
    assert fxoffload.stats().bytes_offloaded == 2 * moved + one
    assert fxoffload.stats().num_segments_compiled == compiled_before


@pytest.mark.slow
def test_host_memory_can_be_given_back_between_steps() -> None:
    model, compiled = compile_model()
    expected = gradients(model, compiled)
    loss = compiled(example_input()).sum()
    with pytest.raises(RuntimeError, match="bytes in use: run or drop the pending backward passes"):
        fxoffload.release_host_memory()
    del loss
    reserved = fxoffload.stats().host_bytes_reserved
    assert fxoffload.release_host_memory() == reserved > 0
    assert fxoffload.stats().host_bytes_reserved == 0
    assert_equal(gradients(model, compiled), expected)


# -- policies --------------------------------------------------------------------------------------------------------


def moved_by(policy: str) -> tuple[list[Tensor], fxoffload.Stats]:
    torch.compiler.reset()
    fxoffload.reset_stats()
    found = gradients(*compile_model(policy=policy, in_flight_budget="1GiB"))
    return found, fxoffload.stats()


def test_policies_differ_in_what_they_move_and_in_nothing_else() -> None:
    (all_, offload_all), (none, keep_all) = map(moved_by, ("offload_all", "keep_all"))
    assert keep_all.bytes_offloaded == keep_all.num_copies == 0 < offload_all.bytes_offloaded
    assert_equal(all_, none)
    assert keep_all.num_segments_compiled == offload_all.num_segments_compiled


@pytest.mark.slow
def test_auto_is_the_default_and_without_the_planner_keeps_the_last_layer() -> None:
    options = rehearsal_options(disable=("planner",))
    del options["policy"]
    model = make_model(4)
    alive = set(fxoffload.graphs())
    compiled = torch.compile(model, backend="fxoffload", options=options)
    gradients(model, compiled)
    (graph,) = set(fxoffload.graphs()) - alive
    assert graph.policy == "auto"
    moves = {c.name: go for c, go in zip(graph.saved.candidates, graph.decide(), strict=True)}
    calls = {n.name: n for n in graph.forward.graph.nodes}
    last = calls["layers_3"]
    order = {n: i for i, n in enumerate(graph.forward.graph.nodes)}
    assert any(not go for go in moves.values())
    for name, go in moves.items():
        assert go == (order[calls[name]] < order[last]), name


def test_an_unknown_override_lists_the_policies() -> None:
    with pytest.raises(ValueError, match="unknown policy 'all'; the policies are auto, offload_all, keep_all"):
        with fxoffload.override_policy("all"):
            pass


def test_an_override_ends_with_an_exception_and_may_be_nested() -> None:
    from fxoffload.compiled_graph import _override

    with pytest.raises(KeyError):
        with fxoffload.override_policy("keep_all"):
            with fxoffload.override_policy("auto"):
                assert _override.policy == "auto"
            assert _override.policy == "keep_all"
            raise KeyError
    assert _override.policy is None


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_graphs_lists_what_was_compiled_in_order() -> None:
    alive = set(fxoffload.graphs())
    models = [compile_model(n) for n in (2, 3)]
    for model, compiled in models:
        gradients(model, compiled)
    first, second = [g for g in fxoffload.graphs() if g not in alive]
    assert first.layer_names == ("layers.0", "layers.1")
    assert second.layer_names == ("layers.0", "layers.1", "layers.2")
    assert first.layers.source == "modules"
    for graph in (first, second):
        assert isinstance(graph.forward, fx.GraphModule)
        assert isinstance(graph.backward, fx.GraphModule)
        for outer in (graph.forward, graph.backward):
            assert {str(n.target) for n in outer.graph.find_nodes(op="call_module")} >= {"layers_0", "layers_1"}
            assert [n.meta["layer"] for n in outer.graph.find_nodes(op="call_module") if n.meta["layer"]]


def test_graphs_forgets_what_is_dead() -> None:
    alive = set(fxoffload.graphs())
    model, compiled = compile_model()
    gradients(model, compiled)
    assert len(set(fxoffload.graphs()) - alive) == 1
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    assert not set(fxoffload.graphs()) - alive


STORY = """
import torch
from tests.capture import Tower, example_input, rehearsal_options
from tests.marks import slow
model = torch.compile(Tower(3), backend="fxoffload", options=rehearsal_options())
model(example_input()).sum().backward()
"""


def story(**environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "FXOFFLOAD_DISABLE")}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    found = subprocess.run([sys.executable, "-c", STORY], cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


@pytest.mark.slow
def test_torch_logs_tell_the_story() -> None:
    text = story(TORCH_LOGS="+fxoffload")
    lines = [
        r"layers \(from modules\): layers\.0, layers\.1, layers\.2",
        r"find_candidates, forward graph: [\d.]+ ms",
        r"keeps primals_\d+ \(\d+ bytes\): parameter, buffer, or computed from them alone",
        r"compiled layers_0 \(forward, \d+ ops, \d+ inputs, \d+ outputs\) in",
        r"forward: 5 segments, (\d+) of \1 candidates .* offloaded by policy offload_all",
        r"verify_pairing, backward graph: [\d.]+ ms",
        r"backward: 5 segments",
    ]
    at = 0
    for line in lines:  # in this order
        match = re.compile(line).search(text, at)
        assert match, f"{line!r} is not in what follows:\n{text[at:]}"
        at = match.end()


@pytest.mark.slow
def test_quiet_unless_asked() -> None:
    assert "fxoffload" not in story()
