"""One call of the backend: partition, forward, backward.

AOTAutograd calls back three times: ``partition`` with the joint graph, then ``inner_compile`` with the forward and with
the backward graph. The session carries state from one to the next.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition

from fxoffload import tell
from fxoffload.analysis.recompute_rules import OFFLOADED
from fxoffload.compiled_graph import CompiledGraph, note_plain, register
from fxoffload.compiler import told
from fxoffload.compiler.batch_sizes import depends_on_data
from fxoffload.compiler.build import Builder
from fxoffload.compiler.call_choice import CallChoice
from fxoffload.compiler.callables import (
    counted,
    retainable,
    tracked_plain,
    tracked_plain_backward,
    watching,
    watching_backward,
    when_ready,
)
from fxoffload.compiler.chain_graphs import (
    ChainSettings,
    GraphDescription,
    describe_graph,
    is_dynamic,
    recomputed_by,
)
from fxoffload.compiler.graph_estimates import GraphEstimates
from fxoffload.compiler.graph_inputs import GraphInputs, parameters_in_joint
from fxoffload.compiler.measured_costs import MeasuredCosts
from fxoffload.compiler.partitioning import Partition, PartitionSettings
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.plain import compile_plain
from fxoffload.compiler.plan_of_graph import PlanOfGraph
from fxoffload.compiler.planning import (
    FEW_POINTS,
    GraphPlanning,
    NotWorthItError,
    Planning,
)
from fxoffload.compiler.returned import returned_by
from fxoffload.compiler.size_variants import plan_for_sizes
from fxoffload.compiler.step_member import StepMember
from fxoffload.compiler.tangents import zeros_of
from fxoffload.compiler.variant_maker import Compiled, Source, VariantMaker, variant_maker_for
from fxoffload.counters import counters
from fxoffload.errors import BudgetError, in_brief
from fxoffload.options import Options
from fxoffload.passes.annotate_layers import AnnotateLayers, LayerReport
from fxoffload.passes.checkpointed import clear_plain_checkpointing, num_checkpointed
from fxoffload.passes.match_layouts import MatchLayouts
from fxoffload.passes.open_regions import OpenRegions
from fxoffload.passes.runner import PassEntry, run_passes
from fxoffload.passes.shrink_constants import ShrinkConstants
from fxoffload.passes.tag_recompute import TagRecompute, TagReport
from fxoffload.passes.unwrap_random import UnwrapRandom
from fxoffload.planner.as_measured import measured_step, shared
from fxoffload.planner.objective import Objective
from fxoffload.planner.rates import ProfileRates
from fxoffload.processes import processes_on_this_machine
from fxoffload.progress import working
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.executor import backward_callable, forward_callable
from fxoffload.runtime.host_memory.arena import block_bytes
from fxoffload.runtime.layout import HookWatch
from fxoffload.runtime.tracker.own_plan import IS_PLAIN, OwnPlan
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.variant import Variants
from fxoffload.step.offload_candidate import OffloadCandidate
from fxoffload.step.readings import Phase
from fxoffload.torch_private.aot_autograd import take_donated_placeholders
from fxoffload.torch_private.dynamo_logging import logs_in_frame
from fxoffload.torch_private.graphs import calls_graph, copy_graph
from fxoffload.torch_private.inductor_compiler import CustomPartitionerFn
from fxoffload.torch_private.partitioner import (
    put_opaque_values_last,
    tags_decide,
    take_partitioner_choices,
)

log = logging.getLogger(__name__)

GraphKwargs = dict[str, Any]


@dataclass
class _JointState:
    """The joint graph before it is partitioned."""

    gm: fx.GraphModule
    recompute: str
    num_opened: int = 0
    num_shrunk: int = 0
    num_matched: int = 0
    layers: LayerReport = field(default_factory=LayerReport)
    tags: TagReport = field(default_factory=TagReport)


_PIECES_OF_CHAINS = frozenset({"tape_plan", "planner", "segments", "offload", "prefetch", "cross_graph_prefetch"})

_JOINT: tuple[PassEntry[_JointState], ...] = (
    PassEntry("open_regions", lambda s: OpenRegions(), "num_opened"),
    PassEntry("shrink_constants", lambda s: ShrinkConstants(), "num_shrunk"),
    PassEntry("match_layouts", lambda s: MatchLayouts(), "num_matched"),
    PassEntry("annotate_layers", lambda s: AnnotateLayers(), "layers"),
    PassEntry("tag_recompute", lambda s: TagRecompute(s.recompute), "tags", ("recompute",)),
)


@dataclass
class _CompiledForward:
    """The forward's results that its backward needs."""

    state: ForwardState
    offload_candidates: list[OffloadCandidate]
    donatable: frozenset[int]
    graph: CompiledGraph
    kwargs: GraphKwargs


class Partitioner(CustomPartitionerFn):
    """Inductor's hook for the partition; delegates to the session."""

    def __init__(self, session: CompileSession, base: Callable[..., Any]) -> None:
        self._session = session
        self._base = base

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._session.partition(gm, joint_inputs, self._base, kwargs)

    def uuid(self) -> None:
        """None: a graph that was partitioned for us must not come out of Inductor's cache of whole graphs."""


class CompileSession:
    """State of one call of the backend.

    Args:
        disabled: pieces that are switched off, by option or environment.
        device: the device that values leave and return to.
        inputs: of the graph that is compiled; None: what AOTAutograd says of them.
    """

    def __init__(
        self,
        options: Options,
        disabled: frozenset[str],
        device: torch.device,
        inputs: GraphInputs | None = None,
        num_points: int = FEW_POINTS,
    ) -> None:
        self.options = options
        self._num_points = num_points
        self._inputs = inputs
        self.disabled = disabled
        self.device = device
        self._layers = LayerReport()
        self._num_user_outputs = 0
        self._static_inputs: frozenset[int] = frozenset()
        self._plain = False
        self._own: PlanOfGraph | None = None
        self._must_offload = False  # A user's policy wants some value on the host.
        self._costs = MeasuredCosts(options.profile, device, is_off="measured_costs" in disabled)
        self._watched_graph: OwnPlan | None = None  # where a budget let it be plain Inductor's
        self._objective = Objective.of(
            options.budget_bytes, options.max_slowdown, num_processes=processes_on_this_machine()
        )
        self.leaves_gradients_undefined = False  # that nothing comes from: autograd is to pass None
        self._alike: dict[Phase, dict[str, object]] = {}
        self._forward: _CompiledForward | None = None
        self._hooks = HookWatch()
        self._tracked: TrackedGraph | None = None  # of a graph that saves something
        self._variants = Variants()  # of it
        self._source: Source | None = None  # that they are made from
        self._estimates = GraphEstimates()  # of the joint graph that is planned
        self._builder = Builder(options, disabled, device, logs=logs_in_frame())
        self._runtime = self._builder.runtime

    def partitioner(self, base: Callable[..., Any] | None = None) -> Partitioner:
        """Inductor calls it to partition the joint graph; ``base`` does the work (AOTAutograd's min-cut)."""
        return Partitioner(self, base or min_cut_rematerialization_partition)

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], base: Callable[..., Any], kwargs: GraphKwargs
    ) -> Any:
        """The forward and the backward graph: as planned, or as ``base`` makes them of the tagged joint graph."""
        if not joint_inputs:  # of a nested region, which AOTAutograd has partitioned before the graph around it
            with tags_decide() if self._chooses() else contextlib.nullcontext():
                return base(gm, joint_inputs, **kwargs)
        self._num_user_outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        self._static_inputs = parameters_in_joint(gm, self._inputs, static)
        self._must_offload = any(n.meta.get("recompute") in OFFLOADED for n in gm.graph.nodes)
        state = _JointState(gm, "default" if self.options.recompute == "auto" else self.options.recompute)

        chooses = self._chooses()
        if chooses and (ignored := take_partitioner_choices(gm)):
            told.the_plan_wins(", ".join(f"{name} ({value})" for name, value in ignored.items()))

        def split(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            with tags_decide() if chooses else contextlib.nullcontext():
                forward, backward = base(joint, joint_inputs, **kwargs)
            put_opaque_values_last(forward, backward, kwargs["num_fwd_outputs"])
            return forward, backward

        try:
            run_passes(_JOINT[:-1], state, "joint")
            self._layers = state.layers
            names = ", ".join(state.layers.layers) or "none, one segment"
            log.debug("layers (from %s): %s", state.layers.source, names)
            plans = self._plans(gm)
            free = self._without_plain_checkpointing(gm) if plans or self._may_vary() else gm
            if plans or not self.why_not_in_chain():
                self._costs.measure_ops(gm)
            if free is not gm and not num_checkpointed(free):  # plain Inductor's step is one without checkpointing
                self._builder.logs = logs_in_frame(checkpointing=False)
            if plans:
                self._own = self._plan(free, split, gm)
            elif free is not gm and tell.is_new("checkpointing of one layer"):
                log.info("activation checkpointing of a graph of one layer is obeyed until its step is planned")
            self._tell_checkpointing(gm if plans and self._own is None else free)
            if self._own is not None:
                self._plain = self._own.is_plain
                counters.add("num_plain_graphs", int(self._plain))
                partitioning = self._own.planning.partitioning
                if self._own.may_be_planned_as_step and self._may_vary():
                    self._source = Source(copy_graph(free), split, self._estimates)
                return partitioning.forward, partitioning.backward
            if self._may_vary():
                count = num_checkpointed(gm) - num_checkpointed(free)
                self._source = Source(copy_graph(free), split, self._estimates, count)
            run_passes(_JOINT[-1:], state, "joint")
        except BudgetError:
            raise
        except Exception as error:
            self._give_up(error)
        if state.tags.num_recomputed:
            log.debug("%d ops to save, %d to recompute", state.tags.num_saved, state.tags.num_recomputed)
        forward, backward = split(gm)
        if self._source is not None and self._source.num_checkpointed:
            self._unwrap_random(gm, forward, backward)
        return forward, backward

    def _without_plain_checkpointing(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The joint graph without the tags that a plan replaces; ``gm`` itself where all are obeyed.

        Where sizes depend on data, they are obeyed: checkpointing's peak is unknown.
        """
        if self.options.checkpoints != "plan" or self.options.recompute != "auto" or depends_on_data(gm):
            return gm
        free = copy_graph(gm)
        return free if clear_plain_checkpointing(free) else gm

    def _tell_checkpointing(self, obeyed: fx.GraphModule) -> None:
        """``obeyed``: the joint graph with the tags that stay."""
        count = num_checkpointed(obeyed) if self.options.policy == "auto" else 0
        if count:
            tell.checkpointing_inside(count, self._own.planning.checkpointing if self._own else "")

    def _unwrap_random(self, joint: fx.GraphModule, *graphs: fx.GraphModule) -> None:
        """Checkpointing recomputes attention with the random state that it had, even if it draws nothing: without those
        states, variants can take the place of the graph."""
        unwrap = UnwrapRandom(joint)
        try:
            is_drawing = not all(unwrap(copy_graph(gm)) for gm in graphs)
        except Exception as error:
            log.warning("a graph keeps its random states, and has no variants: %s", in_brief(error))
            return
        for gm in () if is_drawing else graphs:
            unwrap(gm)

    @property
    def layers(self) -> LayerReport:
        """Of the graph that was partitioned."""
        return self._layers

    @property
    def planned(self) -> GraphPlanning | None:
        """The graph's own plan, until its backward is compiled; None: it has none."""
        return None if self._own is None else self._own.planning

    def forget_plan(self) -> None:
        """``fxoffload.plans()`` stops listing it, and its partitionings go."""
        self._own = self._source = None

    def _chooses(self) -> bool:
        """Whether the options choose the saved and recomputed values, and not AOTAutograd's partitioner."""
        planned = self.options.policy == "auto" and "planner" not in self.disabled
        return planned or self.options.recompute == "cheap"

    def _plans(self, joint: fx.GraphModule) -> bool:
        """Whether there is something to plan. A graph of one layer has nothing, and no budget can be promised for
        sizes that are unknown before the step."""
        off = self.disabled & {"planner", "segments", "offload"}
        if self.options.policy != "auto" or off or len(self._layers.layers) < 2:
            return False
        if self._objective.budget_bytes is None or not depends_on_data(joint):
            return True
        told.sizes_depend_on_data(self._objective.budget_bytes)
        return False

    def partition_settings(self) -> PartitionSettings:
        """Of the graph that is partitioned."""
        rates = self.rates()
        return PartitionSettings(
            num_user_outputs=self._num_user_outputs,
            static_inputs=self._static_inputs,
            device=self.device,
            min_bytes=self.options.min_bytes,
            rates=rates,
            donates=self._builder.donates,
            logs=self._builder.logs,
            estimates=self._estimates.segments(rates),
        )

    def _plan(self, gm: fx.GraphModule, partition: Partition, tagged: fx.GraphModule) -> PlanOfGraph | None:
        """``tagged``: the same graph with all tags."""
        options = self.options
        rates = self.rates()
        scheduling = {
            "host_bytes": engine_for(self.device).host_budget_bytes(self._runtime.budgets),
            "in_flight_budget": options.in_flight_budget,
            "prefetch_budget": options.prefetch_budget,
        }
        planning = Planning(
            gm,
            partition,
            self.partition_settings(),
            rates,
            self._objective,
            recompute=options.recompute,
            scheduling=scheduling,
            num_points=self._num_points,
            checkpointed=None if tagged is gm else tagged,
            estimates=self._estimates,
        )
        with working(f"planning {len(self._layers.layers)} layers"):
            found = plan_for_sizes(planning)
        if found is None:
            return None
        settings = self.partition_settings()
        own = PlanOfGraph(found, planning.limit_bytes, rates, settings, self._objective, self._runtime.budgets)
        log.info("%s", own.plan.summary)
        return own

    def rates(self) -> ProfileRates:
        """The rates that plans are made with. Raises OptionsError, ProfileError: see ``rates_for``."""
        return self._costs.rates()

    def why_not_in_chain(self) -> str:
        """Why a graph may not be part of a plan for the whole step; "" where it may."""
        if off := self.disabled & _PIECES_OF_CHAINS:
            return f"{', '.join(sorted(off))}: switched off"
        # A plan for the step does not know of values that a user's policy wants on the host.
        if self._must_offload:
            return "a policy says MUST_CPU_OFFLOAD"
        return "" if self.options.policy == "auto" else f"its policy is {self.options.policy}"

    def _may_vary(self) -> bool:
        return (
            not self.why_not_in_chain() and "tape_recompute" not in self.disabled and self.options.recompute == "auto"
        )

    def chain_settings(self) -> ChainSettings:
        """The settings that the graph has to share with the others of its step."""
        return ChainSettings(
            self._objective,
            self._runtime.budgets,
            self.options.profile,
            self.device,
            calibrates="calibration" not in self.disabled,
            paces="pacing" not in self.disabled,
            records="allocator_record" not in self.disabled,
        )

    def variant_maker_of(self, compiled: Compiled) -> VariantMaker | None:
        """Makes variants of the graph; None: there are none."""
        source, self._source = self._source, None
        if source is None:
            return None
        try:
            return variant_maker_for(source, compiled, self._builder, self._variants, self.rates())
        except Exception as error:
            log.warning("a graph has no variants that recompute more: %s", in_brief(error))
            return None

    def _describe_for_chain(self, backward: BackwardState, kwargs: GraphKwargs) -> None:
        """Let a graph be part of a plan for the whole step.

        Normally that is at once. A graph with a plan of its own joins when a step runs it with others.
        """
        forward, tracked, source, own = self._forward, self._tracked, self._source, self._own
        if forward is None or tracked is None:
            return
        budget = self._objective.budget_bytes
        tracked.has_budget = budget is not None
        box, own_budget = (None, None) if own is None else (own.box, own.budget_bytes)
        observes = own is not None and own.may_be_planned_as_step
        member = StepMember(forward.graph, tracked, budget, box, own_budget or 0, observes)
        reason = self.why_not_in_chain()
        if own is not None and own.sized is not None:
            reason = reason or "its sizes vary from call to call"
        if reason:
            member.stay_out(reason)
            return
        variant_maker = self.variant_maker_of(Compiled(forward.graph, forward.state, backward, forward.kwargs, kwargs))
        if (
            source is not None
            and source.num_checkpointed
            and (variant_maker is None or not variant_maker.is_checkpointed)
        ):
            tell.checkpointing_inside(source.num_checkpointed, "")
        try:
            found = describe_graph(
                forward.graph,
                forward.state,
                backward,
                forward.offload_candidates,
                self.chain_settings(),
                self.rates(),
                variant_maker,
            )
            forms = {} if own is None else own.other_forms
            others = {name: form.description(forward.state, backward) for name, form in forms.items()}
        except Exception as error:
            member.fail(error)
            return
        if found is not None:
            recomputed = () if own is None else recomputed_by(own.plan)
            description = replace(found[0], **others, recomputed=recomputed)
            member.join(self._with_measured_segments(description, backward), found[1])

    def _with_measured_segments(self, description: GraphDescription, backward: BackwardState) -> GraphDescription:
        """``description`` with times and peaks of its segments on made-up inputs, where its sizes are fixed."""
        assert self._forward is not None
        if description.sized is not None:
            return description
        ran = self._costs.run_segments(self._forward.state, backward, description.step)
        if ran is None:
            return description
        sizes = shared(ran.readings.temp_bytes(), self._alike)
        step = measured_step(description.step, ran.readings.segment_ms(), sizes)
        return description.measured(step, "segments" if ran.are_all else description.basis)

    def inner_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[[list[Any]], Any]:
        """Compile one graph that AOTAutograd hands over. Has ``compile_fx_inner``'s signature."""
        if not kwargs.get("is_backward"):
            return self._inner_compile(gm, example_inputs, kwargs)
        try:
            found = self._inner_compile(gm, example_inputs, kwargs)
        finally:
            self._source = None  # as large as the graphs
            if self._own is not None:
                self._own.forget_graphs()
        if self._own is not None:
            self._own.guard_sizes()
        return found

    def _inner_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: GraphKwargs
    ) -> Callable[[list[Any]], Any]:
        if kwargs.get("is_inference"):
            log.info("nothing requires grad in a graph, plain Inductor")
        if kwargs.get("is_inference") or self._plain:
            return self._compile_plain(gm, example_inputs, kwargs)
        if not kwargs.get("is_backward"):
            try:
                return self._compile_forward(gm, example_inputs, kwargs)
            except Exception as error:
                self._give_up(error)
                return self._compile_plain(gm, example_inputs, kwargs)
        try:
            return self._compile_backward(gm, kwargs)
        except (BudgetError, NotWorthItError):
            raise
        except Exception as error:
            self._give_up(error)
            # The backward is compiled before the first forward runs: from here on nothing saves a token.
            assert self._forward is not None
            self._forward.graph.keeps_everything = True
            inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]  # as the forward lays them out
            return self._compile_plain(gm, inputs, kwargs)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _compile_forward(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: GraphKwargs
    ) -> Callable[[list[Any]], Any]:
        state = self._builder.find(gm, self._num_user_outputs, self._static_inputs)
        told.count_skipped(state)
        if not state.saved.candidates or "offload" in self.disabled:
            self._plain = True
            if "offload" in self.disabled:
                note_plain("the piece offload is switched off")
            else:
                told.nothing_moves(state, self.options)
            return self._compile_plain(gm, example_inputs, kwargs)
        donatable = frozenset(take_donated_placeholders())
        self._builder.lower(state)
        assert state.outer is not None

        policy = self.options.policy
        engine = engine_for(self.device)
        own = self._own
        planned = None if own is None else own.choice(state)
        flags = state.actions[policy] if planned is None else planned.offload
        chosen = [c for c, go in zip(state.saved.candidates, flags, strict=True) if go]
        moved = sum(c.nbytes or 0 for c in chosen)
        # Pinned in the background while the rest compiles.
        reserved = sum(block_bytes(c.nbytes or 0) for c in chosen)
        if own is not None:
            reserved = own.to_reserve(reserved)
        engine.reserve(reserved, self._runtime.budgets)
        built = self._builder.forward(state, kwargs)
        graph = CompiledGraph(
            forward=state.outer,
            layers=self._layers,
            saved=state.saved,
            policy=policy,
            actions=state.actions,
            masks=state.masks,
            returns=returned_by(state),
        )
        if own is not None:
            own.follow(graph, state)
        register(graph)
        self._forward = _CompiledForward(state, built.offload_candidates, donatable, graph, kwargs)
        log.info(
            "forward: %d segments, %d of %d candidates (%.1f of %.1f MiB) offloaded by policy %s",
            len(state.segmentation.segments),
            sum(flags),
            len(built.offload_candidates),
            moved / 2**20,
            state.saved.candidate_bytes / 2**20,
            policy,
        )
        by_size = None if own is None else own.by_size(state)
        tracked = self._tracked = engine.calls.track()
        tracked.reserved_bytes = reserved
        tracked.may_record = "allocator_record" not in self.disabled
        tracked.may_trim = "host_trim" not in self.disabled and not is_dynamic(state)
        calls = CallChoice(graph, tracked, self._variants, built.order, by_size)
        self._alike["forward"] = {name: id(call.fn) for name, call in state.modules.items()}
        if own is not None:
            own.correct(calls, state, self._alike, self.disabled, runs_segments=self._costs.will_run_segments)
        forward = forward_callable(built.program, calls.decide, self._hooks, calls.step_begins, tracked, self._variants)
        if own is not None:
            forward = watching(forward, graph.outputs, self._num_user_outputs)
        return when_ready(forward, self._builder.pending)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _compile_backward(self, gm: fx.GraphModule, kwargs: GraphKwargs) -> Callable[[list[Any]], Any]:
        forward = self._forward
        assert forward is not None
        donatable = [n for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if i in forward.donatable]
        state, program = self._builder.backward(gm, forward.state, forward.offload_candidates, donatable, kwargs)
        forward.graph.backward = state.outer
        log.info("backward: %d segments", len(state.segmentation.segments))
        self._alike["backward"] = {name: id(call.fn) for name, call in state.modules.items()}
        if self._own is not None:
            self._own.plan_first(forward.graph, forward.state, state, self._costs)
        self._describe_for_chain(state, kwargs)
        outputs, placeholders = forward.graph.outputs, gm.graph.find_nodes(op="placeholder")
        outputs.left_out = {i for i, n in enumerate(placeholders) if n.name in state.left_out}
        outputs.zeros = zeros_of(gm, state.left_out)
        self.leaves_gradients_undefined = bool(outputs.zeros)
        run = backward_callable(program, self._hooks, self._tracked, self._variants)
        if self._own is not None or outputs.zeros:
            run = watching_backward(run, outputs, None if self._own is None else self._own.settling(forward.graph))
        return counted(run, forward.graph)

    # -- shared --------------------------------------------------------------------------------------------------------

    def _compile_plain(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: GraphKwargs
    ) -> Callable[[list[Any]], Any]:
        is_backward, calls = kwargs.get("is_backward"), engine_for(self.device).calls
        if is_backward and any(map(calls_graph, gm.graph.nodes)):
            take_donated_placeholders()
        run = compile_plain(gm, example_inputs, inner=self.options.inner, **kwargs)
        if is_backward:
            overwritten = take_donated_placeholders()
            run = retainable(run, overwritten if self.options.inner == "inductor" else ())
            run = run if self._watched_graph is None else tracked_plain_backward(run, self._watched_graph, calls)
        elif self._own is not None and self._objective.budget_bytes is not None and not kwargs.get("is_inference"):
            predicted = self._own.plan.predicted.peak_bytes
            self._watched_graph = OwnPlan(predicted, self._objective.budget_bytes, IS_PLAIN)
            run = tracked_plain(run, self._watched_graph, calls, self._num_user_outputs)
        if self._own is not None:
            # The plan lives as long as the code that follows it.
            with contextlib.suppress(AttributeError):
                run._fxoffload_plan = self._own.box  # type: ignore[attr-defined]
        return run

    def _give_up(self, error: Exception) -> None:
        """Raise, or go on with plain Inductor where the user asked for it."""
        if self.options.on_error != "fallback":
            raise error
        if self._forward is None:
            self._plain = True
            note_plain(f"on_error='fallback', after {in_brief(error)}")
        counters.add("num_fallbacks")
        tell.warn(
            "fxoffload could not handle a graph and compiles it as plain Inductor (on_error='fallback'): "
            f"{in_brief(error)}"
        )
