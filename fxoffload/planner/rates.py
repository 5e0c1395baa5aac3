"""A machine profile in the form that the cost model asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from fxoffload.analysis.op_key import op_key
from fxoffload.errors import OptionsError, ProfileError
from fxoffload.machine.lookup import profile_for
from fxoffload.machine.profile import MachineProfile, dtype_name, grouped_name
from fxoffload.machine.shelf import load_profile
from fxoffload.planner.link import Direction
from fxoffload.processes import processes_on_this_machine
from fxoffload.torch_private.fsdp2 import fsdp2_is_used

# The machine that a rehearsal on the CPU rehearses for, unless told otherwise.
REHEARSED = "h200"
# Rate of a link during collectives, whose streams wait for the device, as a part of its rate alone. Measured: 0.89 to
# 0.94, with one H200 and with two ([Note: Streams that wait] in ``fxoffload.runtime.copies.host_lead``). Measured steps
# then replace it.
WITH_COLLECTIVES = 0.9
# A dtype without a measurement -> one that has one, and how many times slower than that it counts.
_STAND_INS = {"float64": ("float32", 2.0), "float8": ("bfloat16", 0.5)}


@dataclass(frozen=True)
class ProfileRates:
    """``Rates`` of ``fxoffload.analysis.estimate_costs`` and ``CopyRates``, from a profile.

    ``link``: the parts of the profile's rates that copies reach, to the host and back. ``op_times``: measured
    milliseconds of operators, by ``op_key``.
    """

    profile: MachineProfile
    link: tuple[float, float] = (1.0, 1.0)
    op_times: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def launch_us(self) -> float:
        """Device time of the smallest kernel in a queue."""
        return self.profile.kernel_floor_us

    def op_ms(self, node: fx.Node) -> float | None:
        key = op_key(node) if self.op_times else None
        return None if key is None else self.op_times.get(key)

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        try:
            return self.profile.matmul_ms(flops, dtype)
        except OptionsError:
            name, factor = self._stand_in(dtype)
            return factor * self.profile.matmul_ms(flops, name)

    def grouped_matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        """Time of a grouped matrix product; as any other where the profile does not know better."""
        name = grouped_name(dtype)
        if name in self.profile.matmul_tflop_per_s:
            return self.profile.matmul_ms(flops, name)
        return self.matmul_ms(flops, dtype)

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        try:
            return self.profile.attention_ms(flops, dtype, backward)
        except OptionsError:
            name, factor = self._stand_in(dtype)
            return factor * self.profile.attention_ms(flops, name, backward)

    def memory_ms(self, nbytes: float) -> float:
        return self.profile.memory_ms(round(nbytes))

    def copy_ms(self, nbytes: int, direction: Direction, duplex: bool) -> float:
        return self.profile.copy_ms(nbytes, direction, duplex) / self.link[direction == "h2d"]

    def reaching(self, down: float, up: float) -> ProfileRates:
        """The same with copies that reach these parts of their present rates."""
        return replace(self, link=(self.link[0] * down, self.link[1] * up))

    def bytes_per_ms(self, direction: Direction) -> float:
        """Of large copies."""
        size = 256 << 20
        return size / self.copy_ms(size, direction, False)

    def _stand_in(self, dtype: torch.dtype) -> tuple[str, float]:
        """A dtype with a measurement, and how many times slower than that this one counts."""
        name, factor = _STAND_INS.get(dtype_name(dtype), ("float32", 1.0))
        known = self.profile.matmul_tflop_per_s
        return name if name in known else next(iter(known)), factor


def rates_for(profile: str | None, device: torch.device) -> ProfileRates:
    """Rates to plan with: of ``profile`` (a shipped name or a file), else of ``device``.

    Nothing is measured in the middle of a step: a CUDA device of which there is no profile yet is measured only where
    that is possible now.

    Raises:
        OptionsError, ProfileError: there is no such profile, or none at all.
    """
    found = ProfileRates(_profile_for(profile, device))
    return found.reaching(WITH_COLLECTIVES, WITH_COLLECTIVES) if with_collectives() else found


def with_collectives() -> bool:
    """Whether steps of this process may have streams for communication next to the compute stream."""
    return processes_on_this_machine() > 1 or fsdp2_is_used()


def _profile_for(profile: str | None, device: torch.device) -> MachineProfile:
    if profile is not None:
        return load_profile(profile)
    if device.type == "cpu" and not os.environ.get("FXOFFLOAD_PROFILE", "").strip():
        return load_profile(REHEARSED)
    try:
        return profile_for(device, allow_measure=False)
    except ProfileError:
        return profile_for(device, allow_measure=True)
