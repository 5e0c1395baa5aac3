"""Waiting for the kernels of all segments together: same results, same caches, errors that name their layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import fxoffload
from fxoffload.compiler import kernels
from fxoffload.errors import SegmentCompileError
from fxoffload.torch_private.inductor import needs_kernels_while_compiling
from fxoffload.torch_private.inductor_compiler import AsyncCompile, CodeCacheFuture, FxGraphCache
from tests.capture import Tower, example_input

OPTIONS: dict[str, Any] = {"policy": "offload_all", "device_types": ("cpu",), "min_bytes": 1, "inner": "inductor"}


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # With one compile thread Inductor compiles in line and there is nothing to wait for.
    with inductor_config.patch(compile_threads=2, fx_graph_cache=True):
        yield


def run(**options: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model: nn.Module = Tower(3)
    loss = torch.compile(model, backend="fxoffload", options={**OPTIONS, **options})(example_input()).sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def order_of_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ "compile" and "wait", in the order in which they happen."""
    from fxoffload.compiler import segments

    events: list[str] = []
    compile_segment, wait = segments.compile_fx_inner, AsyncCompile.wait

    def compiling(*args: Any, **kwargs: Any) -> Any:
        events.append("compile")
        return compile_segment(*args, **kwargs)

    def waiting(workers: AsyncCompile, scope: dict[str, Any]) -> None:
        events.append("wait")
        wait(workers, scope)

    monkeypatch.setattr(segments, "compile_fx_inner", compiling)
    monkeypatch.setattr(AsyncCompile, "wait", waiting)
    return events


@pytest.mark.slow
def test_all_segments_are_compiled_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events = order_of_events(monkeypatch)
    together = run()
    assert events.count("compile") == fxoffload.stats().num_segments_compiled > 4
    assert events == ["compile"] * events.count("compile") + ["wait"] * events.count("wait")
    assert events.count("wait") == events.count("compile")
    events.clear()
    apart = run(disable=("kernel_overlap", "segment_reuse"))
    assert events[:4] != ["compile"] * 4, "from the cache or not, each is finished before the next one begins"
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.slow
def test_with_a_fallback_each_segment_is_finished_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    events = order_of_events(monkeypatch)
    run(on_error="fallback")
    assert events[:4] == ["compile", "wait", "compile", "wait"]


@pytest.mark.slow
def test_the_next_start_finds_every_segment_in_the_cache() -> None:
    counters.clear()
    cold = run()
    compiled = fxoffload.stats().num_segments_compiled
    assert counters["inductor"]["fxgraph_cache_miss"] == compiled
    counters.clear()
    warm = run()
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == compiled
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))


@pytest.mark.slow
def test_a_kernel_that_fails_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    def wait(workers: AsyncCompile, scope: dict[str, Any]) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            raise RuntimeError("ptxas is not amused")
        original(workers, scope)

    original = AsyncCompile.wait
    monkeypatch.setattr(AsyncCompile, "wait", wait)
    with pytest.raises(SegmentCompileError, match=r"forward segment layers_0: .*ptxas is not amused"):
        run()


@pytest.mark.slow
def test_the_patches_are_taken_off() -> None:
    before = AsyncCompile.__dict__["wait"], FxGraphCache.__dict__["_save_graph"]
    run()
    assert (AsyncCompile.__dict__["wait"], FxGraphCache.__dict__["_save_graph"]) == before
    pending = kernels.PendingKernels()
    with pytest.raises(KeyError), pending.put_off(lambda error: error):
        raise KeyError
    assert (AsyncCompile.__dict__["wait"], FxGraphCache.__dict__["_save_graph"]) == before
    assert not pending


@pytest.mark.slow
def test_settings_that_time_kernels_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not needs_kernels_while_compiling()
    with inductor_config.patch({"triton.multi_kernel": 1}):
        assert needs_kernels_while_compiling()
    events = order_of_events(monkeypatch)
    run(inductor={"benchmark_kernel": True})
    assert events[:4] == ["compile", "wait", "compile", "wait"]


@pytest.mark.slow
def test_a_forward_that_runs_first_waits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd compiles the backward before the first step; should it not, nothing may run unfinished."""
    finish = kernels.PendingKernels.finish
    asked: list[bool] = []

    def put_off(self: kernels.PendingKernels, *, save: bool) -> None:
        asked.append(save)
        if not save:
            finish(self, save=False)

    expected = run()
    monkeypatch.setattr(kernels.PendingKernels, "finish", put_off)
    found = run(disable=("segment_reuse",))
    assert asked == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class _Shared(CodeCacheFuture):
    """A kernel that two segments have in common; it may be asked for once."""

    def __init__(self) -> None:
        self.asked = 0

    def result(self, timeout: float | None = None) -> str:
        self.asked += 1
        return "kernel"


def test_a_kernel_of_two_segments_is_asked_for_once() -> None:
    pending, future = kernels.PendingKernels(), _Shared()
    scopes: list[dict[str, Any]] = [{"triton_0": future}, {"triton_7": future, "other": 1}]
    for scope in scopes:
        with pending.put_off(lambda error: error):
            AsyncCompile().wait(scope)
    assert scopes[0]["triton_0"] is future
    pending.finish(save=False)
    assert scopes == [{"triton_0": "kernel"}, {"triton_7": "kernel", "other": 1}]
    assert future.asked == 1
    assert not pending
    assert not pending._kernels


def test_the_cache_gets_the_kernels_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor collects kernels while they are made; here that is when they are waited for."""
    said: list[str] = []

    class Bundler:
        @staticmethod
        def begin_compile() -> None:
            said.append("begin")

        @staticmethod
        def collect() -> tuple[str, None]:
            said.append("collect")
            return "bundle", None

        @staticmethod
        def end_compile() -> None:
            said.append("end")

    class Graph:
        prepared = False
        bundle = ""

        def prepare_for_serialization(self) -> None:
            self.prepared = True

        def set_triton_bundle(self, bundle: str) -> None:
            self.bundle = bundle

    class Kernel(_Shared):
        def result(self, timeout: float | None = None) -> str:
            said.append("kernel")
            return super().result()

    def save(key: str, graph: Graph, *rest: Any) -> None:
        said.append(f"save {key} {graph.bundle} {graph.prepared} {rest}")

    monkeypatch.setattr(kernels, "TritonBundler", Bundler)
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(save))
    pending, graph = kernels.PendingKernels(), Graph()
    with pending.put_off(lambda error: error):
        AsyncCompile().wait({"triton_0": Kernel()})
        FxGraphCache._save_graph("key", graph, [], True, None)  # type: ignore[arg-type]
    assert said == []
    pending.finish(save=True)
    assert said == ["begin", "kernel", "collect", "end", "save key bundle True ([], True, None)"]
    assert not graph.prepared, "the graph in use is left as it is"


def test_other_threads_are_left_alone() -> None:
    pending, future = kernels.PendingKernels(), _Shared()
    scope: dict[str, Any] = {"triton_0": future}
    with pending.put_off(lambda error: error):
        other = threading.Thread(target=lambda: AsyncCompile().wait(scope))
        other.start()
        other.join()
    assert scope == {"triton_0": "kernel"}
    assert not pending
