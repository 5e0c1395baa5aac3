"""Compile segments, each distinct one once."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import op_name
from fxoffload.analysis.segmentation import Segment
from fxoffload.analysis.values import TRACED_KEY
from fxoffload.compiler.kernels import PendingKernels
from fxoffload.compiler.structural_key import structural_key
from fxoffload.compiler.tangents import zeros_like
from fxoffload.compiler.without_tangents import WithoutTangents
from fxoffload.counters import counters
from fxoffload.errors import SegmentCompileError
from fxoffload.passes.cut_segments import is_submodule
from fxoffload.passes.leave_out_zeros import LeaveOutZeros
from fxoffload.torch_private.compile_context import Surroundings, segment_tracing_context
from fxoffload.torch_private.graphs import boxed_eager, copy_graph, graph_module
from fxoffload.torch_private.inductor import cached_with_sizes, compiled_layouts, inductor_config
from fxoffload.torch_private.inductor_compiler import compile_fx_inner
from fxoffload.torch_private.op_schemas import mutated_args
from fxoffload.torch_private.symbolic_sizes import told_all_symbols

log = logging.getLogger(__name__)

Compiled = Callable[[list[Any]], Sequence[Any]]


class SegmentCall(torch.nn.Module):
    """A segment in an outer graph: a module whose ``fn`` takes a list of inputs, which it clears.

    Attributes:
        mutates: positions of inputs that the segment writes in place.
        donates: positions of inputs whose memory it may reuse.
        left_out: positions of tangents that it is compiled without; they may be None.
        ops: how often each op is among them, by name.
    """

    def __init__(self, segment: Segment, donates: Sequence[int] = (), left_out: Collection[str] = frozenset()) -> None:
        super().__init__()
        self.layer = segment.layer
        self.donates = tuple(donates)
        self.left_out = tuple(i for i, value in enumerate(segment.inputs) if value.name in left_out)
        written = {v for node in segment.nodes for v in mutated_args(node)}
        self.mutates = tuple(i for i, value in enumerate(segment.inputs) if value in written)
        self.num_ops = len(segment.nodes)
        self.ops = Counter(op_name(node.target) for node in segment.nodes)
        self.fn: Compiled | None = None

    def forward(self, *inputs: Any) -> Sequence[Any]:
        """Run the segment (the executor calls ``fn`` itself, so that inputs can be freed early)."""
        if self.fn is None:
            raise RuntimeError("expected a compiled segment, found one that is not compiled yet")
        return self.fn(list(inputs))

    def extra_repr(self) -> str:
        return f"layer={self.layer!r}, ops={self.num_ops}, mutates={self.mutates}, donates={self.donates}"


def extract_segment(gm: fx.GraphModule, segment: Segment, donated: Sequence[int]) -> fx.GraphModule:
    """The segment as a graph of its own. Placeholders of donated inputs are named so: Inductor's cache key reads the
    generated code but not which inputs are donated."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    for i, value in enumerate(segment.inputs):
        placeholder = graph.placeholder(f"donated_{i}" if i in donated else f"arg_{i}")
        for key in ("val", "tensor_meta"):
            if key in value.meta:
                placeholder.meta[key] = value.meta[key]
        env[value] = placeholder
    for node in segment.nodes:
        for value in node.all_input_nodes:
            if value not in env and is_submodule(gm, value):
                attributes[str(value.target)] = operator.attrgetter(str(value.target))(gm)
                env[value] = graph.get_attr(str(value.target))
                env[value].meta = dict(value.meta)
        env[node] = graph.node_copy(node, lambda n: env[n])
    output = graph.output(tuple(env[n] for n in segment.outputs))
    # The next segment reads them as they are here, but for what ``compiled_layouts`` finds.
    output.meta["user_visible_output_idxs"] = list(range(len(segment.outputs)))
    return graph_module(attributes, graph)


class SegmentCompiler:
    """Compiles the segments of one forward or backward graph; identical ones share their code.

    One instance belongs to one call of the backend and so to one ``ShapeEnv`` (see ``structural_key``).

    Args:
        reuse: whether identical segments share code.
        together: whether to wait for the kernels of all segments together, in ``pending.finish``.
    """

    def __init__(self, *, inner: str, reuse: bool, together: bool = False) -> None:
        self._inner = inner
        self._reuse = reuse
        self._together = together
        self._cache: dict[Any, Compiled] = {}
        self.pending = PendingKernels()

    def compile(self, gm: fx.GraphModule, segment: Segment, call: SegmentCall, graph_kwargs: Mapping[str, Any]) -> None:
        """Set ``call.fn``, and write on the outputs how the compiled segment lays them out.

        Args:
            graph_kwargs: those that Inductor was given for the whole graph.

        Raises:
            SegmentCompileError: names the layer.
        """
        whole = extract_segment(gm, segment, call.donates)
        is_backward = bool(graph_kwargs.get("is_backward"))
        key = (is_backward, call.left_out, structural_key(whole, call.donates)) if self._reuse else object()
        compiled = self._cache.get(key)
        if compiled is None:
            began = time.perf_counter()
            if call.left_out:
                compiled = self._without_tangents(whole, segment, call, graph_kwargs)
            else:
                compiled = self._compile(whole, segment, call.donates, graph_kwargs)
            self._cache[key] = compiled
            counters.add("num_segments_compiled")
            log.debug(
                "compiled %s (%s, %d ops, %d inputs, %d outputs) in %.1f s",
                segment.name,
                "backward" if is_backward else "forward",
                len(segment.nodes),
                len(segment.inputs),
                len(segment.outputs),
                time.perf_counter() - began,
            )
        else:
            counters.add("num_segments_reused")
        call.fn = compiled
        code = compiled.compiled if isinstance(compiled, WithoutTangents) else compiled
        found = compiled_layouts(code, [node.meta.get("val") for node in segment.outputs])
        for node, value in zip(segment.outputs, found, strict=True):
            if value is not node.meta.get("val"):
                node.meta[TRACED_KEY], node.meta["val"] = node.meta["val"], value

    def _without_tangents(
        self, whole: fx.GraphModule, segment: Segment, call: SegmentCall, graph_kwargs: Mapping[str, Any]
    ) -> WithoutTangents:
        surroundings, outputs = Surroundings.now(), [node.meta.get("val") for node in segment.outputs]

        def without(positions: Sequence[int]) -> fx.GraphModule:
            extracted = copy_graph(whole)  # Inductor changes the graphs that a segment runs
            LeaveOutZeros(positions)(extracted)
            return extracted

        def compile_without(positions: Sequence[int]) -> Compiled:
            donated = [p - sum(out < p for out in positions) for p in call.donates]
            return self._compile(without(positions), segment, donated, graph_kwargs)

        def compile_later(positions: Sequence[int]) -> Compiled:
            try:
                restored = contextlib.nullcontext() if surroundings is None else surroundings.restored(compiles=True)
                # An entry of Inductor's cache may assume more of sizes that vary.
                with restored, inductor_config.patch(fx_graph_cache=False):
                    found = compile_without(positions)
                    self.pending.finish(save=True)
                return found
            except SegmentCompileError as error:
                log.warning("a segment runs op by op where outputs besides the loss are given gradients: %s", error)
                return boxed_eager(without(positions))

        compiled = compile_without(call.left_out)
        zeros = [z for i in call.left_out if (z := zeros_like(i, segment.inputs[i].meta["val"])) is not None]
        made = zeros if all(z.is_fixed for z in zeros) else ()
        return WithoutTangents(compiled, call.left_out, made, compile_later, compiled_layouts(compiled, outputs))

    def _compile(
        self, extracted: fx.GraphModule, segment: Segment, donated: Sequence[int], graph_kwargs: Mapping[str, Any]
    ) -> Compiled:
        if self._inner == "aot_eager":
            return boxed_eager(extracted)
        example_inputs = [node.meta["val"] for node in extracted.graph.find_nodes(op="placeholder")]
        kwargs = {**graph_kwargs, "static_input_idxs": ()}
        failure = functools.partial(
            _failure, segment.name, segment.layer, "backward" if graph_kwargs.get("is_backward") else "forward"
        )
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(segment_tracing_context(donated))
                if not told_all_symbols(example_inputs):
                    # Inductor's cache would guard on sizes that the segment's inputs do not tell, and fail on that
                    # guard when it finds the segment again.
                    stack.enter_context(inductor_config.patch(fx_graph_cache=False))
                stack.enter_context(cached_with_sizes(example_inputs))
                if self._together:
                    stack.enter_context(self.pending.put_off(failure))
                return compile_fx_inner(extracted, example_inputs, **kwargs)  # type: ignore[return-value]
        except Exception as error:
            raise failure(error) from error


def _failure(name: str, layer: str, direction: str, error: Exception) -> SegmentCompileError:
    return SegmentCompileError(
        f"Inductor failed on the {direction} segment {name}: {type(error).__name__}: {error}. Run once with "
        "FXOFFLOAD_DISABLE=1, which is plain Inductor. If that fails too, the fault is in Inductor or in an op of this "
        'layer. If it works, options={"on_error": "fallback"} uses it for such graphs, and options={"disable": '
        '("segments",)} compiles graphs in one piece',
        layer or name,
    )
