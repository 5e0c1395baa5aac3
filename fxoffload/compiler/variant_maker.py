"""Makes variants of a graph that is compiled already: the same forward and backward with another recompute choice.

Dynamo and AOTAutograd know nothing of them. The joint graph, kept from before it was partitioned, is partitioned once
more, and what comes of it takes the place of the compiled programs, call by call (``fxoffload.runtime.variant``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from fxoffload.analysis.find_frontier import LayerClass, RecomputePoint
from fxoffload.analysis.op_costs import node_kind
from fxoffload.analysis.values import Storages, tensor_of, written_values
from fxoffload.compiled_graph import CompiledGraph, CompiledVariant
from fxoffload.compiler.batch_sizes import BatchSizes
from fxoffload.compiler.build import Builder, GraphKwargs
from fxoffload.compiler.choices import Choices
from fxoffload.compiler.fit import Signature, fit
from fxoffload.compiler.graph_estimates import GraphEstimates
from fxoffload.compiler.partitioning import (
    Partition,
    Partitioning,
    PartitionSettings,
    make_partitioning,
    own_values,
)
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.errors import PassError, in_brief
from fxoffload.passes.find_candidates import SavedValues
from fxoffload.passes.unwrap_random import UnwrapRandom
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.steps import TrainingStep, edges_of
from fxoffload.runtime.variant import Variant, VariantLayout, Variants
from fxoffload.step.edges import Edges
from fxoffload.torch_private.compile_context import Surroundings
from fxoffload.torch_private.graphs import copy_graph, graph_module
from fxoffload.torch_private.inductor import inductor_config

log = logging.getLogger(__name__)

# Of one graph, in addition to the one that was compiled first.
MOST_VARIANTS = 2

Points = Mapping[str, RecomputePoint]  # layer -> point


@dataclass(frozen=True, eq=False)
class Source:
    """Where variants come from.

    Attributes:
        joint: labelled, not tagged; never changed.
        partition: partitions (and changes) a copy of it.
        estimates: of ``joint``, made so far.
        num_checkpointed: ops that the graph which was compiled first recomputes because activation checkpointing says
            so; ``joint`` is without those tags, so that variants may recompute less.
    """

    joint: fx.GraphModule
    partition: Partition
    estimates: GraphEstimates
    num_checkpointed: int = 0


@dataclass(frozen=True, eq=False)
class Compiled:
    """The graph that was compiled first.

    Attributes:
        forward_kwargs: those that Inductor was given for the forward.
        backward_kwargs: those that Inductor was given for the backward.
    """

    graph: CompiledGraph
    forward: ForwardState
    backward: BackwardState
    forward_kwargs: GraphKwargs
    backward_kwargs: GraphKwargs


@dataclass(frozen=True, eq=False)
class PlannedVariant:
    """A variant that is not compiled.

    Attributes:
        step: of one forward and backward of it.
        edges: of its graphs, by the positions of the graph that was compiled first.
        saved: values that its forward saves; ``Choice.offload`` has one bool for each candidate.
        layout: of these values in the slots of the graph that was compiled first.
    """

    partitioning: Partitioning
    step: TrainingStep
    edges: Edges
    saved: SavedValues
    layout: VariantLayout


class _Unfit(Exception):
    """A partitioning that cannot stand in for the compiled one."""


class VariantMaker:
    """Everything that is kept of a graph to make variants of it.

    Any method may be called on any thread; ``compile`` belongs to those that run the forwards, between two steps,
    unless ``during_steps`` is set.

    Args:
        surroundings: that the graph was compiled in.
        builder: makes a builder; each variant has its own, so that one that fails leaves no trace in others.
        rates: those of ``settings``.
    """

    def __init__(
        self,
        source: Source,
        settings: PartitionSettings,
        surroundings: Surroundings,
        compiled: Compiled,
        builder: Callable[[], Builder],
        variants: Variants,
        rates: ProfileRates,
    ) -> None:
        self._source = source
        self._settings = settings
        self._rates = rates
        self._surroundings = surroundings
        self._builder = builder
        self._variants = variants
        self._graph = compiled.graph
        self._left_out = compiled.backward.left_out
        self._kwargs = (dict(compiled.forward_kwargs), dict(compiled.backward_kwargs))
        self._signature = Signature.of(compiled.forward.gm, compiled.backward.gm, settings.num_user_outputs)
        self._points: tuple[Points, ...] | None = None
        self._varies = BatchSizes.of(source.joint) is not None
        self._found: dict[int, PlannedVariant | None] = {}
        # (layer, positions that it recomputes) of all layers -> variant. A later plan that makes the same choice finds
        # it, maybe compiled.
        self._alive: weakref.WeakValueDictionary[Hashable, PlannedVariant] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of the next two
        self._numbers: dict[PlannedVariant, int] = {}
        self._lost: set[int] = set()
        self._compiling = threading.Lock()

    @property
    def is_checkpointed(self) -> bool:
        """Whether the graph that was compiled first obeys activation checkpointing, and variants need not."""
        return self._source.num_checkpointed > 0

    # -- not compiled --------------------------------------------------------------------------------------------------

    def points(self) -> tuple[Points, ...]:
        """The recompute choices, from least to most recomputation."""
        if self._points is None:
            classes = self._classes()
            count = max((len(c.points) for c in classes), default=0)
            self._points = tuple(
                {label: c.points[min(i, len(c.points) - 1)] for c in classes for label in c.layers}
                for i in range(count)
            )
        return self._points

    def variant(self, points: Points) -> PlannedVariant | None:
        """The variant that realises a choice; None where it cannot stand in for the graph that was compiled first.

        ``points``: one of ``points()``, or a mixture of them. Where sizes vary it is one of them, asked for at one size
        after the other, and described once.
        """
        if not self._varies:
            recomputed = frozenset((label, point.recomputed) for label, point in points.items())
            found = self._alive.get(recomputed)
            if found is None and (found := self._make(points)) is not None:
                self._alive[recomputed] = found
            with self._lock:
                return None if found is None or self._numbers.get(found) in self._lost else found
        key = id(points)
        if key not in self._found:
            self._found[key] = self._make(points)
        return self._found[key]

    def _make(self, points: Points) -> PlannedVariant | None:
        try:
            with self._surroundings.restored(compiles=False):
                return self._describe(make_partitioning(self._source.joint, points, self._partition, self._settings))
        except _Unfit as reason:
            log.debug("no variant: %s", reason)
        except Exception as error:
            log.warning("no variant of a graph, whose partitioning failed: %s", in_brief(error))
        return None

    def _partition(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        # The code of torch's modules is written again after each change, and nothing runs it.
        forward, backward = (graph_module(g, g.graph) for g in self._source.partition(gm))
        unwrap = UnwrapRandom(gm)
        if not (unwrap(forward) and unwrap(backward)):
            raise _Unfit("random numbers would be drawn again")
        return forward, backward

    def _describe(self, partitioning: Partitioning) -> PlannedVariant:
        settings, down, up = self._settings, partitioning.forward_state, partitioning.backward_state
        if partitioning.step is None or up is None or not partitioning.step.forward or not partitioning.step.backward:
            raise _Unfit("it saves nothing that may move")
        if up.left_out != self._left_out:
            raise _Unfit("its segments need zeros for other outputs")
        other = Signature.of(partitioning.forward, partitioning.backward, settings.num_user_outputs)
        layout = fit(self._signature, other)
        if layout is None:
            raise _Unfit("its values do not fit into the slots of what is saved")
        edges = replace(edges_at(self._signature, partitioning, settings), saved=(layout.carrier,))
        return PlannedVariant(partitioning, partitioning.step, edges, down.saved, layout)

    def choices(self, base: PlannedVariant) -> Choices:
        """What a variant may recompute, layer by layer. ``base``: the variant of the first of ``points()``."""
        return Choices(self._source.joint, base.partitioning, self._classes(), self._rates)

    def _classes(self) -> tuple[LayerClass, ...]:
        return self._source.estimates.layer_classes(self._source.joint, self._settings, self._rates)

    def step_at(self, variant: PlannedVariant, sizes: Mapping[Any, int]) -> TrainingStep:
        """The step of a variant with other sizes than it was described for. ``sizes``: size symbol -> value."""
        return variant.partitioning.step_at(sizes, self._settings)

    # -- compiled variants ---------------------------------------------------------------------------------------------

    def add(self, variant: PlannedVariant) -> int:
        """Reserve the next number for a variant; the same variant always has the same number.

        Raises:
            RuntimeError: there are as many variants as there may be.
        """
        with self._lock:
            if variant not in self._numbers:
                if len(self._numbers) == MOST_VARIANTS:
                    raise RuntimeError(f"expected at most {MOST_VARIANTS} variants of a graph, found one more")
                self._numbers[variant] = len(self._numbers) + 1
            return self._numbers[variant]

    def variants(self) -> list[PlannedVariant]:
        """Those that have a number, but for the ones that could not be compiled."""
        with self._lock:
            return [v for v, number in self._numbers.items() if number not in self._lost]

    def room(self) -> int:
        """How many more may be added. The number of a variant that could not be compiled is not free again: a plan may
        still name it."""
        with self._lock:
            return MOST_VARIANTS - len(self._numbers)

    def is_compiled(self, number: int) -> bool:
        """Whether calls may run it."""
        return number in self._variants

    def may_compile_during_steps(self) -> bool:
        """Whether ``compile(during_steps=True)`` may be called."""
        return self._surroundings.may_compile_during_steps()

    def compile(self, number: int, *, during_steps: bool = False) -> None:
        """Compile a reserved variant, unless it is compiled. Whatever it raises, nothing but the number is lost.

        ``during_steps``: other threads train meanwhile.
        """
        with self._compiling:
            if self.is_compiled(number):
                return
            with self._lock:
                variant = next((v for v, n in self._numbers.items() if n == number and n not in self._lost), None)
            if variant is None:
                raise RuntimeError(f"expected a variant that can be compiled, found {number}, which cannot")
            try:
                # An entry of Inductor's cache may assume more of sizes than this graph does, and yet be taken for it.
                cache = inductor_config.patch(fx_graph_cache=False) if self._varies else contextlib.nullcontext()
                with self._surroundings.restored(compiles=True, during_steps=during_steps), cache:
                    compiled, described = self._compile(number, variant)
            except BaseException:
                with self._lock:
                    self._lost.add(number)
                raise
            self._variants.add(number, compiled)
            self._graph.variants.append(described)

    def _compile(self, number: int, found: PlannedVariant) -> tuple[Variant, CompiledVariant]:
        builder, settings = self._builder(), self._settings
        forward_kwargs, backward_kwargs = self._kwargs
        down = builder.find(copy_graph(found.partitioning.forward), settings.num_user_outputs, settings.static_inputs)
        names = [[c.name for c in saved.candidates] for saved in (down.saved, found.saved)]
        if names[0] != names[1]:
            raise PassError(
                f"expected the candidates of the partitioning, {names[1]}, found {names[0]}", "find_candidates"
            )
        builder.lower(down)
        forward = builder.forward(down, forward_kwargs)
        gm = copy_graph(found.partitioning.backward)
        own = own_values(down) if settings.donates else frozenset()
        donatable = [n for n in gm.graph.find_nodes(op="placeholder") if n.name in own]
        up, backward = builder.backward(gm, down, forward.offload_candidates, donatable, backward_kwargs)
        assert down.outer is not None and up.outer is not None
        log.info(
            "variant %d: %d forward and %d backward segments, %.1f MiB of candidates",
            number,
            len(down.segmentation.segments),
            len(up.segmentation.segments),
            down.saved.candidate_bytes / 2**20,
        )
        described = CompiledVariant(number, down.outer, up.outer, down.saved)
        return Variant(forward.program, backward, forward.order, found.layout), described


def edges_at(first: Signature, partitioning: Partitioning, settings: PartitionSettings) -> Edges:
    """The edges of a partitioning that has a step, by the positions of another partitioning of its joint graph."""
    down, up = partitioning.forward_state, partitioning.backward_state
    assert up is not None and down.outer is not None and up.outer is not None
    edges = edges_of(
        down.outer,
        up.outer,
        partitioning.offload_candidates,
        num_user_outputs=settings.num_user_outputs,
        min_bytes=max(settings.min_bytes, 1),
        device=settings.device,
    )
    other = Signature.of(partitioning.forward, partitioning.backward, settings.num_user_outputs)
    inputs = dict(zip(other.inputs, with_all_inputs(edges, down).inputs, strict=True))
    tangents = dict(zip(other.given, edges.tangents, strict=True))
    return replace(
        edges,
        inputs=tuple(inputs.get(name) for name in first.inputs),
        tangents=tuple(tangents.get(name) for name in first.given),
    )


def with_all_inputs(edges: Edges, forward: ForwardState) -> Edges:
    """``edges``, in which inputs that are no candidates have their own names: a variant may save them."""
    settled = {s.name for s in forward.saved.skipped}
    inputs = list(edges.inputs)
    for i, node in enumerate(forward.gm.graph.find_nodes(op="placeholder")):
        value = tensor_of(node)
        if inputs[i] is None and value is not None and i not in forward.static_inputs and node.name not in settled:
            inputs[i] = node.name if value.device == forward.device else None
    return replace(edges, inputs=tuple(inputs))


def variant_maker_for(
    source: Source, compiled: Compiled, builder: Builder, variants: Variants, rates: ProfileRates
) -> VariantMaker | None:
    """The variant maker of a graph that AOTAutograd is compiling; None where it can have no variants."""
    surroundings = Surroundings.now()
    if surroundings is None or surroundings.mutates_inputs() or _writes_inputs(source.joint):
        return None
    if any(node_kind(n) == "collective" for n in source.joint.graph.nodes):
        return None  # ranks may run different variants, and must not run different collectives
    forward = compiled.forward
    settings = PartitionSettings(
        num_user_outputs=forward.num_user_outputs,
        static_inputs=forward.static_inputs,
        device=forward.device,
        min_bytes=forward.min_bytes,
        rates=rates,
        donates=builder.donates,
        logs=forward.logs,
        estimates=source.estimates.segments(rates),
    )
    return VariantMaker(source, settings, surroundings, compiled, builder.another, variants, rates)


def _writes_inputs(joint: fx.GraphModule) -> bool:
    storages = Storages(joint.graph.nodes)
    roots = {storages.root(n) for n in joint.graph.find_nodes(op="placeholder")}
    return any(storages.root(v) in roots for v in written_values(joint.graph.nodes))
