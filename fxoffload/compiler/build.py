"""Builds the programs of a forward and its backward: passes, segments, kernels. Of what AOTAutograd hands over, and of
variants of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.values import tensor_of
from fxoffload.compiler.offload_candidates import offload_candidates_of, rank_offload_candidates
from fxoffload.compiler.pipeline import BACKWARD, FIND, FORWARD, BackwardState, ForwardState, without_proofs
from fxoffload.compiler.segments import SegmentCompiler
from fxoffload.errors import PassError
from fxoffload.options import Options
from fxoffload.passes.runner import PassEntry, run_passes, without
from fxoffload.progress import working
from fxoffload.runtime.engine import Budgets
from fxoffload.runtime.outer_program import OuterProgram, RuntimeOptions
from fxoffload.step.offload_candidate import OffloadCandidate
from fxoffload.torch_private.fake_tensors import with_strides

GraphKwargs = Mapping[str, Any]


@dataclass(frozen=True)
class BuiltForward:
    """A forward that is compiled.

    Attributes:
        offload_candidates: the program's data about each storage; ranked when the backward is built.
        order: for each of them, its place among the candidates.
    """

    program: OuterProgram
    offload_candidates: list[OffloadCandidate]
    order: tuple[int, ...]


class Builder:
    """Builds the graphs of one call of the backend.

    Args:
        disabled: pieces that are switched off, by option or environment.
        device: the device that values leave and return to.
        logs: whether plain Inductor breaks the graph at a message.
    """

    def __init__(self, options: Options, disabled: frozenset[str], device: torch.device, *, logs: bool = False) -> None:
        self.options = options
        self.disabled = disabled
        self.device = device
        self.logs = logs
        self.runtime = RuntimeOptions(
            budgets=Budgets(options.host_budget, options.in_flight_budget, options.prefetch_budget),
            min_bytes=options.min_bytes,
            prefetch="prefetch" not in disabled,
            across_graphs="cross_graph_prefetch" not in disabled,
        )
        # With a fallback at hand, a segment that fails has to say so at once.
        together = "kernel_overlap" not in disabled and options.on_error == "raise"
        self._compiler = SegmentCompiler(inner=options.inner, reuse="segment_reuse" not in disabled, together=together)
        self.pending = self._compiler.pending

    def another(self) -> Builder:
        """One for the same options, which shares no compiled code with this one."""
        return Builder(self.options, self.disabled, self.device)

    @property
    def donates(self) -> bool:
        """Whether segments may overwrite values that they are the last to read."""
        return self.options.inner == "inductor" and "donation" not in self.disabled

    def _enabled(self, steps: tuple[PassEntry[Any], ...]) -> tuple[PassEntry[Any], ...]:
        return without_proofs(steps) if "verify" in self.disabled else steps

    def _compile_segments(self, state: ForwardState | BackwardState, kwargs: GraphKwargs) -> None:
        segments = state.segmentation.segments
        direction = "backward" if kwargs.get("is_backward") else "forward"
        with working(f"compiling the {direction}") as work:
            for i, segment in enumerate(segments):
                work.what = f"compiling segment {i + 1} of {len(segments)} of the {direction}"
                self._compiler.compile(state.gm, segment, state.modules[segment.name], kwargs)

    # -- forward -------------------------------------------------------------------------------------------------------

    def find(self, gm: fx.GraphModule, num_user_outputs: int, static_inputs: frozenset[int]) -> ForwardState:
        """The saved values and candidates of a forward graph; nothing else is done to it."""
        state = ForwardState(
            gm,
            num_user_outputs=num_user_outputs,
            static_inputs=static_inputs,
            device=self.device,
            min_bytes=self.options.min_bytes,
            logs=self.logs,
            whole="segments" in self.disabled,
        )
        run_passes(FIND, state, "forward")
        return state

    def lower(self, state: ForwardState) -> None:
        """Make the outer graph of what ``find`` found."""
        run_passes(self._enabled(FORWARD), state, "forward")

    def forward(self, state: ForwardState, kwargs: GraphKwargs) -> BuiltForward:
        """Compile the graph that was lowered. ``kwargs``: those that Inductor was given for the whole graph."""
        assert state.outer is not None
        self._compile_segments(state, kwargs)
        ordered, offload_candidates = offload_candidates_of(state)
        place = {c.name: i for i, c in enumerate(state.saved.candidates)}
        program = OuterProgram(
            state.outer, device=self.device, options=self.runtime, offload_candidates=offload_candidates
        )
        return BuiltForward(program, offload_candidates, tuple(place[c.name] for c in ordered))

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(
        self,
        gm: fx.GraphModule,
        forward: ForwardState,
        offload_candidates: Sequence[OffloadCandidate],
        donatable: Collection[fx.Node],
        kwargs: GraphKwargs,
    ) -> tuple[BackwardState, OuterProgram]:
        """Compile a backward, and wait for the kernels of both graphs.

        Args:
            forward: of its forward.
            offload_candidates: of its forward; they are ranked.
            donatable: placeholders that belong to one backward alone.
            kwargs: as of ``forward``.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = {n.name for n in placeholders}
        _lay_out_as_saved(placeholders, forward.gm)
        copies = frozenset(n.name for c in forward.saved.candidates for n in c.nodes)
        if not copies <= names:
            raise PassError(
                f"expected every saved value among the backward's inputs, did not find {sorted(copies - names)[:5]}",
                "insert_reloads",
            )
        shared = {n.name for c in forward.saved.candidates if c.is_shared for n in c.nodes}
        state = BackwardState(
            gm,
            forward=forward,
            copies=copies,
            donatable=frozenset(n for n in donatable if n.name not in shared) if self.donates else frozenset(),
            device=self.device,
            whole="segments" in self.disabled,
        )
        steps = self._enabled(BACKWARD)
        run_passes(steps if self.donates else without(steps, "choose_donations"), state, "backward")
        assert state.outer is not None
        self._compile_segments(state, kwargs)
        with working("compiling kernels"):
            self.pending.finish(save=True)
        rank_offload_candidates(offload_candidates, forward.saved.candidates, state)
        overwritten = {s.inputs[i] for s in state.segmentation.segments for i in state.donations.get(s.name, ())}
        program = OuterProgram(
            state.outer,
            device=self.device,
            options=self.runtime,
            copies={i: n.name for i, n in enumerate(placeholders) if n.name in copies},
            overwritten=[i for i, n in enumerate(placeholders) if n in overwritten],
        )
        return state, program


def _lay_out_as_saved(placeholders: Sequence[fx.Node], forward: fx.GraphModule) -> None:
    """Write on the inputs of a backward how its compiled forward lays them out."""
    saved = {n.name: n for n in forward.graph.output_node().all_input_nodes}
    for node in placeholders:
        value = None if node.name not in saved else tensor_of(saved[node.name])
        if value is not None and value.layout is torch.strided:
            node.meta["val"] = with_strides(node.meta["val"], value.stride())
