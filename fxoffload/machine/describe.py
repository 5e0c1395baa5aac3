"""A machine profile as text."""

from __future__ import annotations

from collections.abc import Mapping

from fxoffload.machine.profile import MEASURED, MachineProfile
from fxoffload.sizes import format_bytes


def describe(profile: MachineProfile) -> str:
    """The profile as lines of text."""
    made = f", driver {profile.driver}, torch {profile.torch_version}" if profile.source == MEASURED else ""
    lines = [
        f"{profile.title}, {format_bytes(profile.device_memory_bytes)}{made}",
        "",
        "copy size      d2h GB/s   h2d GB/s   at once: d2h   h2d",
    ]
    for size in profile.d2h.sizes_bytes:
        alone = [size / profile.copy_ms(size, way) / 1e6 for way in ("d2h", "h2d")]
        both = [size / profile.copy_ms(size, way, duplex=True) / 1e6 for way in ("d2h", "h2d")]
        lines.append(f"{format_bytes(size):<13}{alone[0]:10.1f}{alone[1]:11.1f}{both[0]:15.1f}{both[1]:6.1f}")
    latencies = (1e3 * profile.d2h.latency_ms, 1e3 * profile.h2d.latency_ms)
    lines += [
        "a copy's latency: d2h {:.1f} us, h2d {:.1f} us".format(*latencies),
        "",
        f"matmul TFLOP/s:             {_listed(profile.matmul_tflop_per_s)}",
        f"attention forward TFLOP/s:  {_listed(profile.attention_forward_tflop_per_s)}",
        f"attention backward TFLOP/s: {_listed(profile.attention_backward_tflop_per_s)}",
        f"device memory, read and written: {profile.memory_gb_per_s:.1f} GB/s",
        f"kernel launch: {profile.launch_overhead_us:.1f} us on the host; at least {profile.kernel_floor_us:.1f} us "
        "on the device",
        "",
        profile.notes,
    ]
    return "\n".join(lines)


def _listed(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
