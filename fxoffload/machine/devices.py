"""The device that a caller means, and a key that differs between machines' devices."""

from __future__ import annotations

import functools
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from fxoffload.errors import ProfileError, UnsupportedError
from fxoffload.machine.profile import DEVICE_TYPES
from fxoffload.runtime.host_memory.limits import cgroup_limit_bytes

_DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


@dataclass(frozen=True, slots=True)
class Identity:
    """The device and software that a measured profile is valid for; the fields are those of MachineProfile."""

    device_name: str
    device_type: str
    driver: str
    torch_version: str


def resolve(device: torch.device | str | None) -> torch.device:
    """The device that is meant, with its index; None: the current CUDA device, else the CPU.

    Raises UnsupportedError (a NotImplementedError) for other kinds of devices, ProfileError (a RuntimeError) for a CUDA
    device on a machine that has none, or not that one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type not in DEVICE_TYPES:
        raise UnsupportedError(f"expected a device out of {', '.join(DEVICE_TYPES)}, found {device}")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None or not num_devices else torch.cuda.current_device()
    if index is None or index >= num_devices:
        raise ProfileError(
            f"expected {device} on this machine, found {num_devices} CUDA devices; to plan for a GPU that is not here, "
            "set FXOFFLOAD_PROFILE to a profile's file or shipped name, or use fxoffload.machine.load_profile"
        )
    return torch.device("cuda", index)


def identify(device: torch.device) -> Identity:
    """Name, driver and torch of a device that ``resolve`` gave."""
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _cuda_driver()
    else:
        # The number of threads belongs to the name: it sets the rates.
        name, driver = f"{_cpu_model()} ({torch.get_num_threads()} threads)", "none"
    return Identity(name, device.type, driver, str(torch.__version__))


def memory_bytes(device: torch.device) -> int:
    """All memory of a device; of a CPU the part that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total, limit = psutil.virtual_memory().total, cgroup_limit_bytes()
    return total if limit is None else min(total, limit)


@functools.cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((model for model in models if model), "") or platform.processor() or platform.machine() or "cpu"


@functools.cache
def _cuda_driver() -> str:
    for path in _DRIVER_FILES:
        try:
            return path.read_text(encoding="utf-8").strip() or "unknown"
        except OSError:
            continue
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if lines else "unknown"
