"""A profile with round numbers, to be changed field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

from fxoffload.machine import CopyCurve, MachineProfile
from fxoffload.machine.devices import Identity

MIB = 1 << 20

# 10 us and then 50 bytes per ns, up to a step at 4 MiB.
CURVE = CopyCurve(latency_ms=0.01, sizes_bytes=(MIB, 2 * MIB, 4 * MIB), times_ms=(0.03, 0.05, 0.10))
SLOWER = dataclasses.replace(CURVE, times_ms=(0.04, 0.08, 0.16))


def example(**changes: Any) -> MachineProfile:
    """A profile of no real machine, with ``changes``."""
    fields: dict[str, Any] = {
        "device_name": "Example GPU",
        "device_type": "cuda",
        "driver": "1.2.3",
        "torch_version": "2.11.0",
        "device_memory_bytes": 80 << 30,
        "d2h": CURVE,
        "h2d": dataclasses.replace(CURVE, times_ms=(0.02, 0.04, 0.08)),
        "duplex_d2h": SLOWER,
        "duplex_h2d": dataclasses.replace(SLOWER, times_ms=(0.05, 0.09, 0.18)),
        "matmul_tflop_per_s": {"bfloat16": 500.0, "float32": 50.0, "tf32": 250.0, "float8": 1000.0},
        "attention_forward_tflop_per_s": {"bfloat16": 400.0},
        "attention_backward_tflop_per_s": {"bfloat16": 200.0},
        "memory_gb_per_s": 2000.0,
        "launch_overhead_us": 5.0,
        "kernel_floor_us": 2.0,
        "notes": "an example",
    }
    return MachineProfile(**{**fields, **changes})


def example_of(identity: Identity, **changes: Any) -> MachineProfile:
    """The example as if it were of that device."""
    names = {name: getattr(identity, name) for name in ("device_name", "device_type", "driver", "torch_version")}
    return example(**names, **changes)
