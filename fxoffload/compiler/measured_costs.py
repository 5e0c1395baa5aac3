"""The costs of one graph that are measured on the device before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from fxoffload.compiler.batch_sizes import BatchSizes
from fxoffload.compiler.measure_ops import measure_ops
from fxoffload.compiler.measure_segments import RanSegments, measure_segments
from fxoffload.compiler.measuring import Allowance, allowance_of_step, note_estimated, reason_of
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.process_rates import rates_for
from fxoffload.environment import measured_device_types
from fxoffload.machine.devices import identify
from fxoffload.machine.meters import Meter, meter_for
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.steps import TrainingStep
from fxoffload.progress import working


class MeasuredCosts:
    """First the heavy operators of the joint graph, by which it is partitioned; then the compiled segments.

    Args:
        profile: of the machine, by name or file; None: of ``device``.
        device: to measure on.
        is_off: nothing is measured.
    """

    def __init__(self, profile: str | None, device: torch.device, *, is_off: bool) -> None:
        self._profile = profile
        self._device = device
        self._is_off = is_off
        self._op_times: Mapping[str, float] = {}
        self._meter: Meter | None = None  # until the segments ran
        self._allowance = Allowance()
        self._ran: RanSegments | None = None

    @property
    def will_run_segments(self) -> bool:
        """Whether the segments are to run once they are compiled."""
        return self._meter is not None

    def rates(self) -> ProfileRates:
        """The profile's, with the operators' times. Raises OptionsError, ProfileError: see ``rates_for``."""
        return replace(rates_for(self._profile, self._device), op_times=self._op_times)

    def measure_ops(self, joint: fx.GraphModule) -> None:
        """Know the times of the heavy operators of ``joint``, where they may be measured. Never raises."""
        if self._is_off or self._device.type not in measured_device_types():
            return
        if BatchSizes.of(joint) is not None:
            # Measured at one size and estimated at others, a plan would be compared with itself by two measures.
            note_estimated("graphs", "sizes vary from call to call")
            return
        try:
            rates, identity = rates_for(self._profile, self._device), identify(self._device)
            if self._device.type == "cuda" and rates.profile.device_name != identity.device_name:
                note_estimated("graphs", "the plan is for another device")
                return
            self._meter, self._allowance = meter_for(self._device), allowance_of_step()
            with working("measuring operators"):
                self._op_times = measure_ops(joint, identity, rates, self._meter, self._allowance).ms
        except Exception as error:  # a bad profile is for planning to report
            note_estimated("graphs", reason_of(error))

    def run_segments(self, forward: ForwardState, backward: BackwardState, step: TrainingStep) -> RanSegments | None:
        """Readings of the compiled segments on made-up inputs, which run once; None where none could. Never raises.

        Args:
            step: as estimated.
        """
        meter, self._meter = self._meter, None
        if meter is not None:
            try:
                with working("measuring segments"):
                    self._ran = measure_segments(forward, backward, step, meter, self._allowance)
            except Exception as error:
                note_estimated("graphs", reason_of(error))
        return self._ran
