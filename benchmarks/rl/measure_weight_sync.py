"""The scenario ``weight-sync``: the ways in which weights on the host come to a reader on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.phases import Phases
from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.peers import PerTensor
from benchmarks.rl.process import RlProcess
from benchmarks.rl.records import Streamed
from benchmarks.rl.strategy import EVERYTHING, PARAMS, Strategy
from benchmarks.rl.weight_reader import WeightReader, from_host, full, measure
from benchmarks.schema import Request, Result

DEFAULT_BUCKET = "512MiB"


class MeasureWeightSync:
    """``stream``: from the host image; ``stream_resident``: from parameters that are on the device; ``load_all``: load,
    read each, unload; ``per_parameter``: a pinned copy of each goes up and is gathered on its own."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.process = RlProcess(request, device, result)
        self.kind = request.variant.kind
        self.options = dict(request.variant.options)
        if self.kind in ("stream", "stream_resident"):
            self.options.setdefault("bucket_bytes", DEFAULT_BUCKET)
        manager_options = self.options if self.kind == "load_all" else {}
        self.strategy: Strategy = PerTensor(pinned=True) if self.kind == "per_parameter" else Fxoffload(manager_options)

    def run(self, phases: Phases) -> None:
        self.process.prepare(phases)
        phases.required("build", self.build)
        phases.required("read", self.read)
        phases.optional("link", self.link)
        phases.required("leave", self.process.leave)

    def build(self) -> None:
        self.process.build(self.strategy)
        self.job = self.process.job
        self.strategy.attach(self.job)
        self.reader = WeightReader(self.job)
        if self.kind != "stream_resident":
            self.strategy.offload(*EVERYTHING)

    def read(self) -> None:
        cycles = self.process.request.protocol.steps
        self.process.rl.stream = self._read(cycles)

    def link(self) -> None:
        self.process.measure_link()
        found, rate = self.process.rl.stream, self.process.link_rate("h2d")
        if found is not None and rate and self.kind != "stream_resident":
            found.of_link = found.gb_per_s / rate

    def _read(self, cycles: int) -> Streamed:
        if isinstance(self.strategy, Fxoffload) and self.kind != "load_all":
            return from_host(self.reader, self.strategy, self.options, cycles)
        once = self._load_all if self.kind == "load_all" else self._per_parameter
        return measure(self.reader, once, cycles)

    def _load_all(self) -> Iterator[tuple[str, Tensor]]:
        self.strategy.onload(*PARAMS)
        for name, parameter in self.job.model.named_parameters():
            yield name, full(parameter.detach())
        self.strategy.offload(*PARAMS)

    def _per_parameter(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.job.model.named_parameters():
            weight = parameter.detach()
            moved = weight.clone() if self.job.device.type == "cpu" else weight.to(self.job.device, non_blocking=True)
            yield name, full(moved) if isinstance(moved, DTensor) else moved
