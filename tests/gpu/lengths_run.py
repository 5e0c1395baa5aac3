"""Trains a stack, layer by layer compiled, on batches of many lengths, and reads the process' memory as it goes.

``measure`` runs here. ``measure_alone`` runs in a process of its own, so that two backends start from the same state:
``python -m gpu.lengths_run SETTINGS FOUND``, with this checkout's ``tests`` on the path.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.process_memory import ProcessMemory

from .gpu_support import Block

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 240.0  # of one process


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        backend: of ``torch.compile``.
        options: fxoffload's.
        cudnn_attention: whether attention may be cuDNN's, where torch prefers it. torch keeps its plan for every
            length, in each thread (aten/src/ATen/native/cudnn/MHA.cpp).
        steps: of different lengths, behind ``warm_up`` steps of others.
    """

    backend: str
    device: str = "cuda"
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    cudnn_attention: bool = True
    width: int = 1024
    heads: int = 8
    depth: int = 6
    shortest: int = 1_024
    longest: int = 16_384
    warm_up: int = 24
    steps: int = 200

    def lengths(self) -> tuple[list[int], list[int]]:
        """Lengths of the warm-up, which begins with the longest, and those after it. No length is in both, none is in
        the second twice. A plan over several graphs is made of steps of one length."""
        every = random.Random(0).sample(range(self.shortest, self.longest), self.warm_up - 4 + self.steps)
        return [self.longest] * 4 + every[: self.warm_up - 4], every[self.warm_up - 4 :]


@dataclass(frozen=True)
class Found:
    """Findings of a run.

    Attributes:
        new: growth of the process in ``steps`` steps of new lengths.
        again: growth when the same lengths came once more, in another order.
        num_graphs: that Dynamo compiled.
        bytes_offloaded: in all steps.
    """

    new: ProcessMemory
    again: ProcessMemory
    num_graphs: int
    bytes_offloaded: int


class Stack(nn.Module):
    """Blocks, then a scalar."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def batch(length: int, width: int, device: str, dtype: torch.dtype) -> Tensor:
    """The batch of a length, (1, length, width): always the same one."""
    generator = torch.Generator(device).manual_seed(length)
    return torch.randn(1, length, width, device=device, dtype=dtype, generator=generator).requires_grad_()


def wait_for_plans() -> None:
    """Until no plan is being made: a plan in the making takes memory that it gives back."""
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join()


def measure(settings: Settings) -> Found:
    """Run it in this process."""
    import fxoffload

    torch.backends.cuda.enable_cudnn_sdp(settings.cudnn_attention)
    graphs = torch._dynamo.utils.counters["stats"]
    compiled_before, moved_before = graphs["unique_graphs"], fxoffload.stats().bytes_offloaded
    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)
    model = Stack(settings.width, settings.heads, settings.depth).to(settings.device, dtype)
    options = {"options": settings.options} if settings.options else {}
    for layer in model.layers:
        layer.compile(backend=settings.backend, dynamic=True, **options)

    def train(lengths: Sequence[int]) -> ProcessMemory:
        for length in lengths:
            wait_for_plans()
            model.zero_grad(set_to_none=True)
            model(batch(length, settings.width, settings.device, dtype)).backward()
        wait_for_plans()
        model.zero_grad(set_to_none=True)
        return ProcessMemory.read()

    first, lengths = settings.lengths()
    train(first)
    warm = train(first)  # once more: the first reading itself leaves something behind
    seen = train(lengths)
    again = train(random.Random(1).sample(lengths, len(lengths)))
    return Found(
        seen.since(warm),
        again.since(seen),
        graphs["unique_graphs"] - compiled_before,
        fxoffload.stats().bytes_offloaded - moved_before,
    )


def measure_alone(settings: Settings, folder: Path) -> Found:
    """Run it in a process of its own, for at most ``TIME_LIMIT_S``. ``folder``: for settings and findings."""
    asked, found = folder / "settings.json", folder / "found.json"
    asked.write_text(json.dumps(asdict(settings)))
    found.unlink(missing_ok=True)
    environment = dict(os.environ)
    path = [str(ROOT / "tests"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    ended = subprocess.run(
        [sys.executable, "-m", "gpu.lengths_run", str(asked), str(found)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    log = ended.stdout[-6000:]
    assert ended.returncode == 0 and found.exists(), f"{settings}: exit status {ended.returncode}:\n{log}"
    read = json.loads(found.read_text())
    return Found(**{**read, "new": ProcessMemory(**read["new"]), "again": ProcessMemory(**read["again"])})


def _main(asked: str, found: str) -> None:
    settings = Settings(**json.loads(Path(asked).read_text()))
    Path(found).write_text(json.dumps(asdict(measure(settings))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
