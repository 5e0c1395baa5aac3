"""``python -m fxoffload.machine``: measure a machine into a file, or show a profile."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fxoffload.errors import FxOffloadError
from fxoffload.machine import cache
from fxoffload.machine.devices import resolve
from fxoffload.machine.lookup import profile_for
from fxoffload.machine.measure import measure
from fxoffload.machine.profile import MachineProfile
from fxoffload.machine.shelf import load_profile
from fxoffload.sizes import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m fxoffload.machine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure this machine and write the profile to a file")
    measuring.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    measuring.add_argument("--device", help="for example cuda:1; default: the current CUDA device, else the CPU")
    measuring.add_argument("--notes", default="", help="added to the profile's notes")
    showing = commands.add_parser("show", help="print a profile")
    showing.add_argument("profile", nargs="?", help="a file or a shipped name; default: this machine's, if known")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "measure":
            found = measure(resolve(chosen.device))
            if chosen.notes:
                found = dataclasses.replace(found, notes=f"{found.notes} {chosen.notes}")
            cache.write(chosen.out, found)
        else:
            found = load_profile(chosen.profile) if chosen.profile else profile_for(None, allow_measure=False)
    except (FxOffloadError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(describe(found))
    return 0


def describe(profile: MachineProfile) -> str:
    """The profile as lines of text."""
    lines = [
        f"{profile.device_name}, {format_bytes(profile.device_memory_bytes)}, driver {profile.driver}, "
        f"torch {profile.torch_version}",
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


if __name__ == "__main__":
    sys.exit(main())
