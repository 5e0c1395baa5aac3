"""The data of a plan: an action for every saved value, a reason, and predictions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fxoffload.machine.estimate_error import EstimateError
from fxoffload.planner.measured import MeasuredStep
from fxoffload.planner.simulate import Boundary, Simulation

Action = Literal["keep", "offload", "recompute", "stay", "mask"]

# Whether an output of the compiled graphs is a loss; see ``Plan.loss``.
Loss = Literal["inside", "outside"]

# Measurements on the device before the plan, from least to most; see ``Plan.basis``.
Basis = Literal["estimated", "operators", "segments", "steps"]
BASES: tuple[Basis, ...] = get_args(Basis)

# ``Plan.graph`` of a plan of no compiled graph.
NO_GRAPH = -1


@dataclass(frozen=True)
class Decision:
    """What happens to one candidate of one layer class. Layers of the same structure and the same action share one.

    Attributes:
        layers: labels of the layers that share it; () for what stands outside the layers. In a step over several
            graphs, the calls ("call 0", "call 1", ... in the order of the forwards).
        name: the first saved value's name, in the first of the layers.
        producer: the op that computes it, for example "aten.mm.default".
        nbytes: bytes of one layer's storage.
        action: "stay": the value may not move, being a parameter, seen by the caller, or too small. "mask" decides
            nothing: it names a mask of S x S that attention is called with. A mask that is saved has another decision
            of its own.
        reason: why, in words.
        names: the first saved value's name in each of the layers; () where only ``name`` is known.
        value: its name in the first of the layers, for people: "layers.3.mlp.gate_proj [16384, 12288] bf16". Where
            Dynamo knows no module, the op and ``name`` take the path's place. Plans of earlier versions have "".
        values: the same in each of the layers; () where only ``value`` is known.
    """

    layers: tuple[str, ...]
    name: str
    producer: str
    nbytes: int
    action: Action
    reason: str
    names: tuple[str, ...] = ()
    value: str = ""
    values: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' storages."""
        return self.nbytes * max(len(self.layers), 1)


@dataclass(frozen=True)
class FrontierPoint:
    """Peak and time of a plan for a budget, as that plan would predict them.

    Attributes:
        budget_bytes: the ``activation_budget`` to ask for.
        peak_bytes: most bytes on the device.
        step_ms: milliseconds of forward and backward.
    """

    budget_bytes: int
    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a step. Bytes are those above the bytes allocated when the step began.

    Attributes:
        peak_bytes: most bytes on the device.
        peak_without_gradients_bytes: the same, less the gradients that the backward has made so far to return.
        step_ms: forward and backward.
        forward_ms: from the beginning to the forward's end on the compute stream.
        backward_ms: from there to the backward's.
        exposed_ms: time that compute waits for copies.
        bytes_offloaded: copied to the host.
        peak_phase: "forward" or "backward".
        peak_segment: name of the segment in which the peak is.
        outside_bytes: most bytes that eager code and FSDP have at a time outside the compiled graphs, as far as is
            known: a head and a loss in eager, gathered parameters. Part of the peak where they are at it.
        outside_ms: time between the calls of compiled graphs. Part of the step's.
    """

    peak_bytes: int
    peak_without_gradients_bytes: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    exposed_ms: float
    bytes_offloaded: int
    peak_phase: str
    peak_segment: str
    outside_bytes: int = 0
    outside_ms: float = 0.0

    @staticmethod
    def of(simulation: Simulation) -> Prediction:
        """The prediction of a simulation."""
        return Prediction(**{name: getattr(simulation, name) for name in Prediction.__dataclass_fields__})

    def scaled(self, ratio: float) -> Prediction:
        """The same with all times multiplied: applies the measured ratio of one partition to another."""
        return replace(
            self,
            step_ms=self.step_ms * ratio,
            forward_ms=self.forward_ms * ratio,
            backward_ms=self.backward_ms * ratio,
            exposed_ms=self.exposed_ms * ratio,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanData:
    """What ``fxoffload.Plan`` holds: the plan of one compiled graph, or of a step over several.

    A plan does not change. Later knowledge (calibration, measurements) makes another one, with
    ``dataclasses.replace``. Bytes are those above the bytes allocated when the step began.

    Attributes:
        graph: place among the plans of this process; -1 (``NO_GRAPH``) in a plan made ahead.
        label: a short name for the planned model or step, or "".
        device: name of the device that was planned for, from its profile.
        shape: of the planned input, for example "1 x 16384 tokens", or "".
        activation_budget: most bytes that were asked for, or None.
        max_slowdown: most slowdown over plain Inductor that was asked for (0.02 is 2 %), or None.
        source: where the budget or the slowdown comes from: "options", "default", or "checkpointing", where the budget
            is the predicted peak of the model's own activation checkpointing.
        basis: source of the predictions. "estimated": the profile's rates alone. "operators": times of heavy operators
            on the device. "segments": times and peaks of the compiled segments on the device. "steps": times of the
            graphs in steps before their plan.
        estimate_error: how far estimates from this profile were off on stock models; None: not measured yet.
        predicted: the plan's step, before a step ran.
        calibrated: the same with measured segment times; None before.
        baseline: the step of plain Inductor, which keeps everything, before a step ran.
        calibrated_baseline: the same with measured segment times; None before.
        checkpointing: the step with the model's own activation checkpointing, which the plan replaces, before anything
            ran, without zeros for outputs that nothing uses; None where there is none, or the plan obeys it.
        smallest_budget_bytes: the smallest ``activation_budget`` that a plan was found to meet. Where nothing is done:
            plain Inductor's peak.
        decisions: the actions on the values that the forward saves.
        floors: memory at the peak under every plan, with its bytes and advice.
        summary: why this plan.
        frontier: budgets that can be asked for, ascending, with their plans' peaks and times: this plan's and plain
            Inductor's peak; from ``fxoffload.plan()``, also the smallest budget and some between. Empty: none was
            planned.
        measured_peak_bytes: most bytes of steps not used to calibrate; None before there are any.
        measured_step_ms: their time; None before.
        measured_exposed_ms: time in them that compute waited for copies; None before.
        between_steps_ms: from the last graph of a step to the next step's first, as measured: the optimizer, if it runs
            after each backward, and what the training loop and the model do there. In no ``step_ms``. None: not
            measured yet, or other graphs run there.
        measured_step: one of them, segment by segment; None before, on a CPU, whose times predict nothing, and of a
            pipeline, whose forwards and backwards take turns.
        loss: "outside": no output of the graph is a loss, so what the loss takes is in no prediction until the plan is
            calibrated.
        breaks: of a plan ahead: what breaks the model into several graphs, place by place, and runs between them as it
            is. Its time and memory are not in the plan.
        boundaries: those of the simulation, which JSON keeps; given with a simulation, they have no effect.
        simulation: the step that ``calibrated`` is read from, or else ``predicted``. None in a plan that was read from
            JSON. Plans are compared without it.
    """

    graph: int
    label: str = ""
    device: str
    shape: str = ""
    activation_budget: int | None = None
    max_slowdown: float | None = None
    source: str = "default"
    summary: str
    basis: Basis = "estimated"
    estimate_error: EstimateError | None = None
    predicted: Prediction
    calibrated: Prediction | None = None
    baseline: Prediction
    calibrated_baseline: Prediction | None = None
    checkpointing: Prediction | None = None
    smallest_budget_bytes: int
    measured_peak_bytes: int | None = None
    measured_step_ms: float | None = None
    measured_exposed_ms: float | None = None
    between_steps_ms: float | None = None
    measured_step: MeasuredStep | None = None
    decisions: tuple[Decision, ...] = ()
    floors: tuple[str, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    loss: Loss = "inside"
    breaks: tuple[str, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    simulation: Simulation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.simulation is not None:
            object.__setattr__(self, "boundaries", self.simulation.boundaries)

    @property
    def predicted_peak_bytes(self) -> int:
        """Most bytes on the device, before anything ran."""
        return self.predicted.peak_bytes

    @property
    def predicted_step_ms(self) -> float:
        """Milliseconds of forward and backward, before anything ran."""
        return self.predicted.step_ms

    @property
    def predicted_exposed_ms(self) -> float:
        """Milliseconds that compute waits for copies, before anything ran."""
        return self.predicted.exposed_ms

    @property
    def baseline_peak_bytes(self) -> int:
        """Most bytes on the device with plain Inductor, before anything ran."""
        return self.baseline.peak_bytes

    @property
    def baseline_step_ms(self) -> float:
        """Milliseconds of forward and backward with plain Inductor, before anything ran."""
        return self.baseline.step_ms


def why_not_measured(plan: PlanData) -> str:
    """Why a plan has no measured step, in words; "" where it has one."""
    if plan.measured_step is not None:
        return ""
    if plan.measured_step_ms is not None:
        return "of the steps that were measured this plan, of an earlier version, has the time and the peak alone"
    if plan.graph < 0:
        return "no step was measured: the plan was made ahead, and nothing ran"
    if plan.calibrated is not None:
        return "no step was measured yet: the plan was calibrated, and the next steps that follow it are measured"
    return (
        "no step was measured: steps are timed on a GPU, once the first ones that follow the plan have calibrated it, "
        "and only where the plan moves something. On a CPU times predict nothing"
    )
