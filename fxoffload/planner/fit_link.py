"""How fast the link was in steps that were measured: the rate at which a simulated step waits as long as they did.

A profile knows what one GPU's copies reach. In a step they share the host's memory with other GPUs' copies, and the bus
with collectives. The waits of a step are what matters, and they are measured anyway: no copy has to be timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.choice import Windows
from fxoffload.step.readings import Phase, Readings

# Waits that differ by less than this part of their phase are the same: events, and a host that is late now and then,
# make up as much. Without this, waits of 4 ms of 563 gave 0.64 for a link that reached 0.92, and the plan made from
# that was slower (two H200s, 2026-11-22).
_SAME = 0.01
# Copies are never assumed to be slower than this part of the planned rates. With 0.7, steps that waited 38
# to 51 ms for copies were calibrated as if they waited for none (two H200s on a slow host, 2026-11-27).
_LEAST = 0.25
_HALVINGS = 9


def waits_of(readings: Readings) -> dict[Phase, float]:
    """Milliseconds per phase that are in no segment."""
    inside = {phase: sum(ms.values()) for phase, ms in readings.segment_ms().items()}
    return {phase: max(ms - inside.get(phase, 0.0), 0.0) for phase, ms in readings.step_ms().items()}


def fit_link(
    step: TrainingStep, offload: Sequence[bool], windows: Windows, rates: ProfileRates, waits_ms: Mapping[Phase, float]
) -> ProfileRates:
    """The rates with copies as slow as the waits say: to the host by those of the forward, then back. Waits that no
    such link explains are something else, and say nothing of it.

    Args:
        offload: as it ran.
        windows: as they ran.
        rates: it was planned with; copies are never found faster.
        waits_ms: as of ``waits_of``.
    """

    def waits(found: ProfileRates, phase: Phase) -> float:
        ran = simulate(step, offload, copies=found, windows=windows)
        segments = step.forward if phase == "forward" else step.backward
        return _ms(ran, phase) - sum(s.ms for s in segments)

    for phase in ("forward", "backward"):
        seen = waits_ms.get(phase, 0.0)
        enough = seen - _SAME * _ms(simulate(step, offload, copies=rates, windows=windows), phase)
        if waits(rates, phase) >= enough or waits(_reaching(rates, phase, _LEAST), phase) < enough:
            continue
        low, high = _LEAST, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if waits(_reaching(rates, phase, middle), phase) >= seen:
                low = middle
            else:
                high = middle
        rates = _reaching(rates, phase, low)
    return rates


def _ms(found: Simulation, phase: Phase) -> float:
    return found.forward_ms if phase == "forward" else found.backward_ms


def _reaching(rates: ProfileRates, phase: Phase, part: float) -> ProfileRates:
    return rates.reaching(part, 1.0) if phase == "forward" else rates.reaching(1.0, part)
