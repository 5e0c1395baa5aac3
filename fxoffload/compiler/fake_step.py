"""A step on fake tensors: the graphs that a model is compiled into, and the memory that passes between their calls.

Dynamo hands over a graph, AOTAutograd its forward and backward. Both run on fake tensors, op by op, so that the code
between graphs runs, and Dynamo comes to the next graph. Nothing is compiled for a device, and nothing computed. The
calls are watched as those of a real step are (``fxoffload.runtime.tracker.step_tracker``): which graphs run in which
order, and how long the memory at their edges is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.fx as fx

from fxoffload.analysis.values import output_values
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.batch_sizes import depends_on_data
from fxoffload.compiler.chain_graphs import GraphDescription, describe_graph, other_forms, recomputed_by
from fxoffload.compiler.partitioning import Partitioning, describe
from fxoffload.compiler.pipeline import ForwardState
from fxoffload.compiler.session import CompileSession, GraphKwargs
from fxoffload.compiler.variant_maker import Compiled, VariantMaker
from fxoffload.runtime.tracker.step_memory import EdgeWatch
from fxoffload.step.edges import EdgeMemory, Edges, Moment
from fxoffload.torch_private.graphs import boxed, boxed_eager, copy_graph


class FakeGraph:
    """A graph with a backward. Made while AOTAutograd hands it over.

    Args:
        session: that partitioned it.
        forward: as AOTAutograd hands it over.
        backward: as AOTAutograd hands it over.
        forward_kwargs: those that Inductor is given for the forward.
        backward_kwargs: those that Inductor is given for the backward.

    Attributes:
        layers: of it.
        planned: its own plan; None: it has no two layers, or sizes that depend on data.
        why_not_described: why a plan over several graphs may not have it; "" where it may.
        moved: positions of the forward's results that may leave the device.
    """

    def __init__(
        self,
        session: CompileSession,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        forward_kwargs: GraphKwargs,
        backward_kwargs: GraphKwargs,
    ) -> None:
        self.planned = session.planned
        self.layers: Sequence[str] = session.layers.layers
        self.why_not_described = session.why_not_in_chain() or (
            "sizes depend on data" if depends_on_data(forward) else ""
        )
        self._session, self._backward, self._variant_maker = session, backward, None
        planned = self.planned
        self._partitioning = (
            describe(forward, backward, session.partition_settings()) if planned is None else planned.partitioning
        )
        names = {n.name for c in self._partitioning.forward_state.saved.candidates for n in c.nodes}
        first, results = self._partitioning.forward_state.num_user_outputs, output_values(forward.graph)
        self.moved = [i for i, v in enumerate(results) if i >= first and isinstance(v, fx.Node) and v.name in names]
        if self.is_plain:
            return
        state, up = self._partitioning.forward_state, self._partitioning.backward_state
        if up is not None and not self.why_not_described:
            compiled = Compiled(self._graph_of(self._partitioning), state, up, forward_kwargs, backward_kwargs)
            self._variant_maker = session.variant_maker_of(compiled)

    @property
    def forward_state(self) -> ForwardState:
        return self._partitioning.forward_state

    @property
    def is_plain(self) -> bool:
        """Whether plain Inductor compiles it uncut: its own plan does nothing."""
        return self.planned is not None and self.planned.schedule is None

    @cached_property
    def description(self) -> GraphDescription | None:
        """The graph as data for a plan over several graphs, as it would be compiled.

        None: it saves nothing that may move, or such a plan may not have it.
        """
        description = None if self.why_not_described else self._description_of(self._partitioning, self._variant_maker)
        state, up = self._partitioning.forward_state, self._partitioning.backward_state
        if description is None or self.planned is None or up is None:
            return description
        others = {}
        for name, form in other_forms(self.planned, self._session.partition_settings()).items():
            step, edges = form.description(state, up)
            others[name] = step, _at_inputs_of(edges, self._partitioning.backward, self._backward)
        return replace(description, **others, recomputed=recomputed_by(self.planned.plan))

    def _description_of(
        self, partitioning: Partitioning, variant_maker: VariantMaker | None
    ) -> GraphDescription | None:
        state, up = partitioning.forward_state, partitioning.backward_state
        if up is None:
            return None
        graph = self._graph_of(partitioning)
        found = describe_graph(
            graph,
            state,
            up,
            partitioning.offload_candidates,
            self._session.chain_settings(),
            self._session.rates(),
            variant_maker,
        )
        if found is None:
            return None
        description, edges = found
        return replace(description, edges=_at_inputs_of(edges, partitioning.backward, self._backward))

    def _graph_of(self, partitioning: Partitioning) -> CompiledGraph:
        state = partitioning.forward_state
        assert state.outer is not None
        return CompiledGraph(
            state.outer, self._session.layers, state.saved, self._session.options.policy, state.actions
        )


def _at_inputs_of(edges: Edges, backward: fx.GraphModule, other: fx.GraphModule) -> Edges:
    """``edges``, of a partitioning whose backward is ``backward``, by the positions of another backward of the same
    joint graph."""
    names = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    known = dict(zip(names, edges.tangents, strict=True))
    return replace(edges, tangents=tuple(known.get(n.name) for n in other.graph.find_nodes(op="placeholder")))


# -- the step ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeStep:
    """The calls of one step, as they come.

    Attributes:
        graphs: that have a backward, in the order in which they were compiled.
        ran: of the forwards of the step that began last, in order.
        calls: of those that are watched: of graphs that have a description.
        watches: whether memory at the edges of calls is watched.
        has_forward: whether any graph was found, with a backward or without.
        is_regular: whether the backwards came in reverse, each of its forward.
    """

    graphs: list[FakeGraph] = field(default_factory=list)
    ran: list[FakeGraph] = field(default_factory=list)
    calls: list[FakeGraph] = field(default_factory=list)
    watches: bool = False
    has_forward: bool = False
    is_regular: bool = True
    _pending: list[int] = field(default_factory=list)
    _edges: EdgeWatch = field(default_factory=EdgeWatch)

    def begin(self, *, watches: bool) -> None:
        """Start another step, and forget the one before."""
        self.watches = watches
        self.ran, self.calls, self._pending, self.is_regular = [], [], [], True
        self._edges = EdgeWatch()

    @property
    def is_complete(self) -> bool:
        """Whether every forward had its backward."""
        return not self._pending

    def edge_memory(self) -> tuple[EdgeMemory, ...]:
        """Of the last step that began, in the names of the graphs as they would be compiled."""
        return self._edges.edge_memory()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def inner_compile(self, session: CompileSession) -> Callable[..., Callable[[list[Any]], Any]]:
        """Takes the place of ``session.inner_compile``: graphs run on fake tensors."""
        forwards: list[tuple[fx.GraphModule, GraphKwargs]] = []
        found: list[FakeGraph] = []

        def compile_graph(
            gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
        ) -> Callable[[list[Any]], Any]:
            self.has_forward = True
            run = boxed_eager(copy_graph(gm))
            if kwargs.get("is_inference"):
                return run
            if kwargs.get("is_backward"):
                forward, forward_kwargs = forwards.pop()
                found.append(FakeGraph(session, forward, gm, forward_kwargs, kwargs))
                self.graphs.append(found[0])
                session.forget_plan()
                return boxed(lambda args: self._backward(found[0], run, args))
            forwards.append((gm, kwargs))
            return boxed(lambda args: self._forward(found[0], run, args))

        return compile_graph

    def _forward(self, graph: FakeGraph, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        self.ran.append(graph)
        if not self.watches or graph.description is None:
            return run(args)
        at = Moment("forward", len(self.calls))
        self.calls.append(graph)
        self._pending.append(at.call)
        self._begins(at)
        self._watch(at, graph.description.edges.inputs, args)
        results = run(args)
        results = list(results)
        for i in graph.moved:  # as tokens do in training, other tensors wait for the backward
            results[i] = results[i].new_empty_strided(results[i].shape, results[i].stride())
        self._edges.look({})
        self._watch(at, graph.description.edges.outputs, results)
        return results

    def _backward(self, graph: FakeGraph, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        if not self.watches or graph.description is None:
            return run(args)
        mine = [call for call in self._pending if self.calls[call] is graph]
        if not mine:  # it runs once more (retain_graph)
            self.is_regular = False
            return run(args)
        at = Moment("backward", mine[-1])
        self.is_regular = self.is_regular and self._pending[-1] == at.call
        self._pending.remove(at.call)
        self._begins(at)
        self._watch(at, graph.description.edges.tangents, args)
        results = run(args)
        self._edges.look({})
        self._watch(at, graph.description.edges.gradients, results)
        return results

    # -- memory at their edges -----------------------------------------------------------------------------------------

    def _begins(self, at: Moment) -> None:
        self._edges.look({})
        self._edges.now = at

    def _watch(self, at: Moment, names: Sequence[str | None], values: Sequence[Any]) -> None:
        if not self._edges.watch(at.phase, at.call, names, values):
            self.is_regular = False
