"""What a measurement of a stock model knows besides a ``Result``: every step, and how far off estimates were."""

from dataclasses import dataclass, field


@dataclass
class StepFact:
    """One step, in the order in which they ran: forward, backward, AdamW, and all of it.

    ``peak_bytes``: above the bytes at the step's beginning, without gradients; None on a CPU. Timed steps share it.
    ``idle_ms``: before it, since AdamW of the step before; None in the first. ``wall_ms``: all of it; of the first step
    on the host's clock.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    wall_ms: float
    peak_bytes: int | None = None
    idle_ms: float | None = None


@dataclass
class SegmentEstimate:
    """A segment's time as the plan first had it, and as it was measured. ``ops``: the kinds of heavy ops in it."""

    phase: str
    segment: str
    estimated_ms: float
    measured_ms: float
    ops: str = ""


@dataclass
class StockRun:
    """``plan_after_steps``: how many steps had run when the plan that is shown was made; None: there is none.
    ``uncalibrated_peak_bytes``: of the last step before the plan was calibrated, and possibly changed. ``row_ms``: mean
    of the timed steps, which ran in a row, without AdamW; None: they did not."""

    steps: list[StepFact] = field(default_factory=list)
    num_timed: int = 0
    plan_after_steps: int | None = None
    uncalibrated_peak_bytes: int | None = None
    segments: list[SegmentEstimate] = field(default_factory=list)
    row_ms: float | None = None
