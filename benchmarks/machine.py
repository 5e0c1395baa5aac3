"""What the numbers were measured on, read by code. Anything that is absent is recorded as None, never guessed."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.schema import Scalar

ROOT = Path(__file__).resolve().parent.parent
RECORDED_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE")
GPU_FIELDS = (
    "driver_version",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "clocks.max.sm",
    "power.limit",
)


def describe_run() -> dict[str, Scalar]:
    """The parent's view: command, source, host. It imports no torch and starts no CUDA."""
    environment: dict[str, Scalar] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "git_commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "git_dirty": _git_dirty(),
        "source_sha256": source_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "cgroup_limit_bytes": cgroup_limit_bytes(),
        "memory_nodes": _read(Path("/sys/devices/system/node/has_memory")),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "triton": _version("triton"),
    }
    environment.update({name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ})
    answers = _output("nvidia-smi", f"--query-gpu=name,{','.join(GPU_FIELDS)}", "--format=csv,noheader")
    if answers:
        gpus = answers.splitlines()
        values = [value.strip() for value in gpus[0].split(",")]
        environment["num_gpus"] = len(gpus)
        environment.update({f"gpu_{n}": v for n, v in zip(("name", *GPU_FIELDS), values, strict=False)})
        environment["gpu_memory_nodes"] = ",".join(_memory_node(line.split(",")[2].strip()) for line in gpus)
    return environment


def _memory_node(bus_id: str) -> str:
    """The memory node of a GPU by its address as nvidia-smi writes it ("00000000:01:00.0"); "?" where it is unknown."""
    return _read(Path("/sys/bus/pci/devices", bus_id[4:].lower(), "numa_node")) or "?"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def describe_process() -> dict[str, Scalar]:
    """A measuring process's view: the torch that ran and the device it ran on."""
    import torch

    software: dict[str, Scalar] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        software["gpu"] = properties.name
        software["gpu_memory_bytes"] = properties.total_memory
    return software


def source_digest() -> str:
    """Identifies the measured source where .git did not travel with it."""
    digest = hashlib.sha256()
    paths = {p.resolve() for folder in ("fxoffload", "passes", "benchmarks") for p in (ROOT / folder).rglob("*.py")}
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cgroup_limit_bytes() -> int | None:
    """The tighter of the cgroup's limits, or None where there is none. Version 1 writes a huge number for "none"."""
    limits = []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            limits.append(int(text))
    return min(limits, default=None)


def _git_dirty() -> bool | None:
    status = _output("git", "-C", str(ROOT), "status", "--porcelain")
    return None if status is None else bool(status)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
