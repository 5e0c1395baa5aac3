"""Where a step's compute waits for copies, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.table import label_ranges

# What takes less than this part of all waits is not worth its name.
_LEAST = 0.02


class ExposedWait(NamedTuple):
    """What compute waits in one layer, in all.

    Attributes:
        phase: "forward" or "backward".
        way: of the copies, "D2H" or "H2D"; "" where it was measured, which tells no copies apart.
        place: the layer, or the segment outside the layers.
        ms: in all.
    """

    phase: Literal["forward", "backward"]
    way: str
    place: str
    ms: float


@dataclass(frozen=True)
class Exposed:
    """The waits of one step, in its order.

    Attributes:
        source: "measured" (the host's own delays are in it), "calibrated" (simulated with measured times), "predicted",
            or "" where nothing is known by layer: of a plan that was read from JSON.
        waits: by phase, way and place.
        step_ms: that they are part of.
    """

    source: Literal["measured", "calibrated", "predicted", ""]
    waits: tuple[ExposedWait, ...]
    step_ms: float

    @staticmethod
    def of(plan: Plan) -> Exposed:
        """From the measured step where there is one, else from the simulation."""
        if plan.measured_step is not None:
            still = plan.measured_step.stands_still()
            found = [ExposedWait(s.segment.phase, "", s.segment.place, s.end_ms - s.begin_ms) for s in still]
            return Exposed("measured", _merged(found), plan.measured_step.step_ms)
        simulation = plan.simulation
        newest = plan.calibrated or plan.predicted
        if simulation is None:
            return Exposed("", (), newest.step_ms)
        found = []
        for event in simulation.events:
            if event.track == "compute" and event.name == "wait":
                at = simulation.boundaries[event.at]
                found.append(ExposedWait(at.phase, event.label, at.place, event.end_ms - event.begin_ms))
        source = "predicted" if plan.calibrated is None else "calibrated"
        return Exposed(source, _merged(found), simulation.step_ms)

    @property
    def ms(self) -> float:
        """All of them."""
        return sum(w.ms for w in self.waits)

    def in_words(self) -> list[str]:
        """One line for each direction: "forward, D2H: 12.3 ms, in layers.0-9"."""
        lines = []
        for (phase, way), some in self.by_direction().items():
            title = ", ".join(text for text in (phase, way) if text)
            lines.append(f"{title}: {in_ms(sum(w.ms for w in some))}, in {places_of(some)}")
        return lines

    def by_direction(self) -> dict[tuple[str, str], list[ExposedWait]]:
        """(phase, way) -> its waits, without those that are next to nothing."""
        found: dict[tuple[str, str], list[ExposedWait]] = defaultdict(list)
        for wait in self.waits:
            if wait.ms > _LEAST * self.ms:
                found[wait.phase, wait.way].append(wait)
        return dict(found)


def places_of(waits: Iterable[ExposedWait]) -> str:
    """The layers, consecutive ones as ranges: "layers.0-9"."""
    return label_ranges(w.place for w in waits)


def _merged(waits: Iterable[ExposedWait]) -> tuple[ExposedWait, ...]:
    found: dict[tuple[Literal["forward", "backward"], str, str], float] = defaultdict(float)
    for wait in waits:
        found[wait.phase, wait.way, wait.place] += wait.ms
    return tuple(ExposedWait(*key, ms) for key, ms in found.items())


def in_ms(value: float) -> str:
    """Milliseconds, with two digits at least."""
    return f"{value:.1f} ms" if value >= 0.1 else f"{value:.2g} ms"
