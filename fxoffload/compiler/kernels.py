"""Let Inductor's workers compile the kernels of all segments at once.

Inductor hands the Triton (or C++) source of one graph to its worker processes and waits for all of it before it
returns. One segment has few kernels, so waiting segment by segment leaves most workers idle. Here a segment returns as
soon as its code is written, and ``finish`` waits for the kernels of all segments together. With 36 layers on an H200,
12 s of waiting become less than one.

The steps after the wait are put off with it. Inductor's cache stores the compiled kernels together with the graph, so
an entry written before they exist would make the next start slower.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fxoffload.torch_private.inductor import needs_kernels_while_compiling, replaced
from fxoffload.torch_private.inductor_compiler import AsyncCompile, CodeCacheFuture, FxGraphCache, TritonBundler

Failure = Callable[[Exception], Exception]


@dataclass
class _Unfinished:
    """One compiled graph whose kernels are on their way. ``failure`` says whose they are."""

    failure: Failure
    waits: list[tuple[AsyncCompile, dict[str, Any]]] = field(default_factory=list)
    stored: Any = None
    save: Callable[[], None] | None = None


class PendingKernels:
    """The kernels of segments that are compiled but not yet ready to run.

    Not thread-safe: the compilation that it belongs to runs on one thread.
    """

    def __init__(self) -> None:
        self._unfinished: list[_Unfinished] = []
        # Segments with the same kernel share its future, which may be asked once. Futures stay alive with their ids.
        self._kernels: dict[int, tuple[object, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    @contextlib.contextmanager
    def put_off(self, failure: Failure) -> Iterator[None]:
        """Around one call of Inductor. ``failure``: makes the exception to raise should one of its kernels fail."""
        if needs_kernels_while_compiling():
            yield
            return
        graph = _Unfinished(failure)
        mine, wait_now, save_now = threading.get_ident(), AsyncCompile.wait, FxGraphCache._save_graph

        def wait(workers: AsyncCompile, scope: dict[str, Any]) -> None:
            if threading.get_ident() != mine:
                return wait_now(workers, scope)
            graph.waits.append((workers, scope))

        def save(key: str, compiled: Any, *rest: Any) -> None:
            if threading.get_ident() != mine:
                return save_now(key, compiled, *rest)
            # A copy without what belongs to this process: Inductor goes on to change the graph, and a graph that dies
            # takes its runner with it.
            graph.stored = copy.copy(compiled)
            graph.stored.prepare_for_serialization()
            graph.save = functools.partial(save_now, key, graph.stored, *rest)

        with replaced(AsyncCompile, "wait", wait), replaced(FxGraphCache, "_save_graph", staticmethod(save)):
            yield
        if graph.waits:
            self._unfinished.append(graph)
        elif graph.save is not None:
            graph.save()

    def finish(self, *, save: bool) -> None:
        """Wait for all kernels. ``save``: write the graphs to Inductor's cache too, which needs the tracing context."""
        unfinished, self._unfinished = self._unfinished, []
        for graph in unfinished:
            try:
                self._finish(graph, save=save)
            except Exception as error:
                raise graph.failure(error) from error
        self._kernels.clear()

    def _finish(self, graph: _Unfinished, *, save: bool) -> None:
        if not save or graph.save is None:
            self._wait(graph)
            return
        TritonBundler.begin_compile()
        try:
            self._wait(graph)
            bundle, _ = TritonBundler.collect()
        finally:
            TritonBundler.end_compile()
        graph.stored.set_triton_bundle(bundle)
        graph.save()

    def _wait(self, graph: _Unfinished) -> None:
        for workers, scope in graph.waits:
            futures = {name: value for name, value in scope.items() if isinstance(value, (Future, CodeCacheFuture))}
            for name, future in futures.items():
                if id(future) in self._kernels:
                    scope[name] = self._kernels[id(future)][1]
            workers.wait(scope)
            self._kernels.update({id(future): (future, scope[name]) for name, future in futures.items()})
