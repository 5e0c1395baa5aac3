"""The parts of this machine that fxoffload depends on, which of them would not work, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from fxoffload import __version__, environment
from fxoffload.errors import FxOffloadError, in_brief
from fxoffload.machine import cache
from fxoffload.machine.devices import identify, resolve
from fxoffload.machine.lookup import PROFILE_VARIABLE, profile_for
from fxoffload.machine.profile import MEASURED, MachineProfile
from fxoffload.machine.shelf import load_profile, shipped_names
from fxoffload.runtime.host_memory.limits import default_host_budget_bytes, describe_host_memory, describe_locked_memory
from fxoffload.runtime.host_memory.numa import cpus_of, memory_nodes, node_of
from fxoffload.sizes import format_bytes

# A step of a stock model keeps some half of the device's memory in activations.
_SMALL_SHARE = 0.5
_PACKAGES = ("transformers", "accelerate", "trl", "peft", "verl", "triton")
_VARIABLES = (
    environment.DISABLE_VARIABLE,
    environment.PHASES_DEVICE_TYPES_VARIABLE,
    environment.MEASURED_DEVICE_TYPES_VARIABLE,
    environment.PROGRESS_VARIABLE,
    PROFILE_VARIABLE,
    cache.CACHE_VARIABLE,
)
_LARGE_COPY_BYTES = 256 << 20
NO_GPU = "GPU"  # the subject of the finding where there is none


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        found: the state of it on this machine.
        problem: what does not work because of it, and what to do; "" where all is well.
        advice: what would be better, where all works; "" where nothing is.
    """

    subject: str
    found: str
    problem: str = ""
    advice: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which it matters. Starts a CUDA context where there is a GPU; takes seconds."""
    found: list[Finding] = []
    for look in (_software, _devices, _compiler, _profile, _pinned_memory, _nodes, _allocator, _variables):
        try:
            found += list(look())
        except Exception as error:  # one that fails must not hide the others
            subject = look.__name__.strip("_").replace("_", " ")
            found.append(Finding(subject, "?", f"could not be looked at: {in_brief(error)}"))
    return found


def _software() -> Iterator[Finding]:
    yield Finding("fxoffload", f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    cuda = torch.version.cuda
    is_cpu_build = cuda is None and shutil.which("nvidia-smi") is not None
    yield Finding(
        "torch",
        f"{torch.__version__}, {'CUDA ' + cuda if cuda else 'no CUDA'}",
        "this build of torch cannot use the GPU that nvidia-smi sees; install one with CUDA" if is_cpu_build else "",
    )
    there = [f"{name} {found}" for name in _PACKAGES if (found := _version(name))]
    yield Finding("packages", ", ".join(there) or "none of " + ", ".join(_PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            NO_GPU,
            "none",
            advice="compiled models run as plain Inductor's, and nothing is offloaded. Planning works: "
            "fxoffload.plan(model, inputs, device='h200')",
        )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        memory, who = f"{format_bytes(free)} of {format_bytes(total)} free", identify(device)
        yield Finding(f"GPU {index}", f"{who.device_name}, {memory}, driver {who.driver}")


def _compiler() -> Iterator[Finding]:
    cpp = next((c for c in (os.environ.get("CXX", ""), "g++", "clang++") if c and shutil.which(c)), None)
    yield Finding("C++ compiler", cpp or "none", "" if cpp else "Inductor needs one, also on a GPU: install g++")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        yield Finding("Triton", "none", "Inductor makes no kernels for a GPU without it: pip install triton")


def _profile() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        shipped = (f"{name} ({load_profile(name).source})" for name in shipped_names())
        yield Finding("profiles to plan with", ", ".join(shipped))
        return
    try:
        found = profile_for(None, allow_measure=False)
    except FxOffloadError as error:
        yield Finding("profile", "none", str(error))
        return
    here = identify(resolve(None))
    same = (found.device_name, found.driver, found.torch_version) == (here.device_name, here.driver, here.torch_version)
    is_measured = found.source == MEASURED
    other = "" if same or not is_measured else f", of driver {found.driver} and torch {found.torch_version}"
    problem = advice = ""
    if found.device_name != here.device_name:
        problem = f"plans are made for another device than {here.device_name}: unset {PROFILE_VARIABLE}"
    elif not is_measured:
        advice = f"unset {PROFILE_VARIABLE}: then this GPU is measured, in seconds"
    yield Finding("profile", f"{found.title}{other}", problem, advice)
    yield Finding("link", _rates(found))


def _rates(profile: MachineProfile) -> str:
    def rate(direction: str, duplex: bool) -> str:
        ms = profile.copy_ms(_LARGE_COPY_BYTES, direction, duplex)  # pyright: ignore[reportArgumentType]
        return f"{_LARGE_COPY_BYTES / ms / 1e6:.1f}"

    alone, both = ([rate(d, duplex) for d in ("d2h", "h2d")] for duplex in (False, True))
    return f"{alone[0]} GB/s to the host, {alone[1]} back; both at once {both[0]} and {both[1]}"


def _pinned_memory() -> Iterator[Finding]:
    budget, available = default_host_budget_bytes(), psutil.virtual_memory().available
    device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    advice = ""
    if budget < _SMALL_SHARE * device:
        advice = (
            f"that is little beside the GPU's {format_bytes(device)}: what does not fit stays on the device, with a "
            "warning. Give the container more memory, or run fewer processes"
        )
    elif available < budget:
        advice = f"only {format_bytes(available)} are free now"
    yield Finding("memory to pin", f"{format_bytes(budget)} of {describe_host_memory()}", advice=advice)
    # CUDA's driver pins for a process whatever this says; containers that enforce it fail to start it at all.
    yield Finding("locked memory (ulimit -l)", describe_locked_memory())


def _nodes() -> Iterator[Finding]:
    nodes = memory_nodes()
    yield Finding("memory nodes (NUMA)", str(len(nodes) or 1))
    for index in range(torch.cuda.device_count() if len(nodes) > 1 else 0):
        node = node_of(torch.device("cuda", index))
        near = set() if node is None else cpus_of(node)
        far = bool(near) and not near & os.sched_getaffinity(0)
        advice = f"this process may use no CPU of it: copies cross the machine. numactl --cpunodebind={node}"
        yield Finding(f"node of GPU {index}", "unknown" if node is None else str(node), advice=advice if far else "")


def _allocator() -> Iterator[Finding]:
    name = next((n for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(n)), None)
    settings = f"{name}={os.environ[name]}" if name else "torch's defaults"
    problem = advice = ""
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() != "native":
        problem = "peaks of steps can be read from torch's own allocator only: remove backend:..."
    elif torch.cuda.is_available() and "expandable_segments:True" not in settings:
        advice = "PYTORCH_ALLOC_CONF=expandable_segments:True leaves fewer gaps: a tight budget then fits the device"
    yield Finding("allocator", settings, problem, advice)


def _variables() -> Iterator[Finding]:
    there = {n: v for n, v in os.environ.items() if n.startswith("FXOFFLOAD_")}
    unknown = sorted(set(there) - set(_VARIABLES))
    off = environment.everything_disabled()
    problem = f"{environment.DISABLE_VARIABLE} is set: plain Inductor, nothing is offloaded. Unset it" if off else ""
    if unknown:
        problem = f"nothing reads {', '.join(unknown)}; the variables are {', '.join(_VARIABLES)}"
    yield Finding("variables", ", ".join(f"{n}={v}" for n, v in sorted(there.items())) or "none set", problem)
    folder = cache.folder()
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(parent, os.W_OK)
    yield Finding(
        "cache",
        str(folder),
        advice=""
        if writable
        else f"nobody may write there: measurements are made anew each time. Set {cache.CACHE_VARIABLE}",
    )
