"""The distinct segments of a step: calls of one code have the same costs, and are measured once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxoffload.analysis.estimate_memory import dying_inputs
from fxoffload.analysis.segmentation import Segment
from fxoffload.compiler.made_up import MadeUp
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.segments import SegmentCall
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.step.readings import Phase

# A call of a step: its phase and its segment's name.
CallName = tuple[Phase, str]


@dataclass(eq=False)
class DistinctSegment:
    """Calls of one code.

    Attributes:
        segment, call, estimate: of the first one.
        dying: positions of inputs that die in all of them.
        places: of each call in the step, in its order.
        made: makes its inputs; None until it ran.
        peak: ``SegmentStep.temp_bytes`` as measured; None where that is not known.
    """

    segment: Segment
    call: SegmentCall
    estimate: SegmentStep
    dying: frozenset[int]
    places: dict[CallName, int] = field(default_factory=dict)
    made: MadeUp | None = None
    peak: int | None = None

    @property
    def total_ms(self) -> float:
        """Of all calls, by estimate."""
        return len(self.places) * self.estimate.ms

    @property
    def temp_bytes(self) -> int:
        """As far as it is known."""
        return self.estimate.temp_bytes if self.peak is None else self.peak

    def run(self, args: list[Any]) -> None:
        """One call, which empties ``args``."""
        assert self.call.fn is not None
        self.call.fn(args)


def distinct_segments(forward: ForwardState, backward: BackwardState, step: TrainingStep) -> list[DistinctSegment]:
    """Segments of different code in two compiled graphs, those that take longest in all first."""
    found: dict[int, DistinctSegment] = {}
    graphs: Sequence[tuple[Phase, ForwardState | BackwardState, Sequence[SegmentStep], Collection[str]]] = (
        ("forward", forward, step.forward, frozenset()),
        ("backward", backward, step.backward, backward.owned),
    )
    place = 0
    for phase, state, steps, owned in graphs:
        dying = dying_inputs(state.gm, state.segmentation, owned)
        estimates: Mapping[str, SegmentStep] = {s.name: s for s in steps}
        for segment in state.segmentation.segments:
            call = state.modules[segment.name]
            estimate = estimates.get(segment.name, SegmentStep(segment.name))
            ends = frozenset(i for i, v in enumerate(segment.inputs) if v.name in dying[segment.name])
            distinct = found.setdefault(id(call.fn), DistinctSegment(segment, call, estimate, ends))
            distinct.dying &= ends
            distinct.places[phase, segment.name] = place
            place += 1
    return sorted(found.values(), key=lambda d: -d.total_ms)
