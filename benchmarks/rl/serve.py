"""Which scenario a measuring process runs."""

from __future__ import annotations

import torch

from benchmarks.phases import Phases
from benchmarks.schema import Request, Result


def measure(request: Request, device: torch.device, result: Result, phases: Phases) -> None:
    """Imports what the scenario needs: ``pinning`` needs no model."""
    if request.scenario == "pinning":
        from benchmarks.rl.measure_pinning import MeasurePinning

        MeasurePinning(request, device, result).run(phases)
    elif request.scenario == "phases":
        from benchmarks.rl.measure_phases import MeasurePhases

        MeasurePhases(request, device, result).run(phases)
    elif request.scenario == "weight-sync":
        from benchmarks.rl.measure_weight_sync import MeasureWeightSync

        MeasureWeightSync(request, device, result).run(phases)
    else:
        from benchmarks.rl.measure_rl_step import MeasureRlStep

        MeasureRlStep(request, device, result).run(phases)
