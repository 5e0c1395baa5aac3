"""A machine profile in the form that the cost model asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from fxoffload.analysis.op_key import op_key
from fxoffload.errors import OptionsError
from fxoffload.machine.profile import MachineProfile, dtype_name, grouped_name
from fxoffload.planner.link import Direction

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
