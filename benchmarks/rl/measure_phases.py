"""The scenario ``phases``: everything leaves and returns, by one strategy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.phases import Phases
from benchmarks.rl.checksums import change_a_bit, checksums
from benchmarks.rl.machine_memory import Stopwatch, difference, free_bytes, reserved_bytes, rss_bytes
from benchmarks.rl.make_strategy import make_strategy
from benchmarks.rl.mark import Mark
from benchmarks.rl.measure_exposed import BesideLogprobs
from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.overlap_trace import trace_work
from benchmarks.rl.process import RlProcess, spread
from benchmarks.rl.records import CopiesAlone, Endurance, FirstForward, Switching, Way
from benchmarks.rl.strategy import EVERYTHING, PARAMS
from benchmarks.rl.weight_reader import WeightReader, from_host
from benchmarks.schema import Request, Result

CHECK_EVERY = 10
# Of a strategy whose cycle takes longer, the parts that would repeat whole cycles to say little are left out.
SLOW_CYCLE_S = 5.0
COPY_ROUNDS = 3


class MeasurePhases:
    """Order: first cycle, steady cycles, optimizer during log-probs, first forward, stream, endurance, the end."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.process = RlProcess(request, device, result)
        self.device = device
        self.rank_times: dict[str, float | None] = {}

    def run(self, phases: Phases) -> None:
        phases.required("strategy", self._make_strategy)
        self.process.prepare(phases)
        phases.required("build", self.build)
        phases.required("first cycle", self.first_cycle)
        phases.required("steady cycles", self.steady_cycles)
        phases.optional("optimizer beside log-probs", self.optimizer_beside_logprobs)
        phases.optional("first forward", self.first_forward)
        if self.process.request.variant.kind == "fxoffload":
            phases.optional("stream", self.stream)
        if self.process.request.protocol.endurance:
            phases.optional("endurance", self.endurance)
        phases.optional("free memory at the end", self.free_at_the_end)
        phases.optional("copies alone", self.copies_alone)
        phases.optional("link", self.link)
        phases.optional("ranks", self.gather_ranks)
        phases.required("leave", self.process.leave)

    def _make_strategy(self) -> None:
        self.strategy = make_strategy(self.process.request.variant)

    def build(self) -> None:
        self.process.build(self.strategy)
        self.job = self.process.job
        found = self.found = self.process.rl.switching = Switching()
        found.parameter_bytes = self.job.num_bytes("params")
        found.optimizer_bytes = self.job.num_bytes("optimizer")
        found.moved_bytes = self.job.num_bytes(*EVERYTHING)
        found.free_before_parameters_bytes = self.process.free_before
        # The kernels of a forward load and cuBLAS gets its workspace, as before any rollout of a real run.
        self.job.logprobs(1)
        self.job.tensors()

    # -- cycles --------------------------------------------------------------------------------------------------------

    def first_cycle(self) -> None:
        """From the first call, with whatever the strategy has still to do, until the driver has the memory."""
        found, before = self.found, checksums(self.job.tensors(*EVERYTHING))
        free_bytes(self.device)
        found.rss_before_bytes = rss_bytes()
        self.job.barrier()
        watch = Stopwatch(self.device)
        self.strategy.attach(self.job)
        found.attach_s = watch.seconds()
        self.job.barrier()
        found.first_offload_s = self._timed(lambda: self.strategy.offload(*EVERYTHING))
        found.first_offload_gb_per_s = found.moved_bytes / 1e9 / found.first_offload_s
        found.residue_bytes = difference(self.process.free_before, free_bytes(self.device))
        self._host_bytes()
        found.first_onload_s = self._timed(lambda: self.strategy.onload(*EVERYTHING))
        found.first_onload_gb_per_s = found.moved_bytes / 1e9 / found.first_onload_s
        found.bit_equal = checksums(self.job.tensors(*EVERYTHING)) == before

    def steady_cycles(self) -> None:
        """``steps`` of them, but none begins when ``cycles_s`` seconds are over, apart from the first."""
        found, protocol = self.found, self.process.request.protocol
        before = checksums(self.job.tensors(*EVERYTHING))
        down: list[float] = []
        up: list[float] = []
        end = time.monotonic() + protocol.cycles_s
        while len(down) < protocol.steps and self.job.agreed(not down or time.monotonic() < end):
            down.append(self._timed(lambda: self.strategy.offload(*EVERYTHING)))
            up.append(self._timed(lambda: self.strategy.onload(*EVERYTHING)))
        found.offload, found.onload = self._way(down), self._way(up)
        found.bit_equal = found.bit_equal and checksums(self.job.tensors(*EVERYTHING)) == before

    # -- overlap -------------------------------------------------------------------------------------------------------

    def optimizer_beside_logprobs(self) -> None:
        """The same forwards and training step with and without the state going and coming meanwhile."""
        beside = BesideLogprobs(self.job, self.strategy, self.process.request.protocol)
        self.found.exposed = beside.measure(self._timed, self._repeats(self.found.offload), self._trace)

    def first_forward(self) -> None:
        """Parameters are loaded while the first forward runs; apart from that, all of them alone."""
        if self._is_slow():
            return
        starts: list[float] = []
        loads: list[float] = []

        def first_forward() -> None:
            self.strategy.begin_onload(*PARAMS)
            self.job.logprobs(1)
            self.strategy.finish()

        if self.process.request.protocol.trace_overlap:
            self.strategy.offload(*PARAMS)
            self._trace("first forward", first_forward)
        for _ in range(self._repeats(self.found.offload)):
            self.strategy.offload(*PARAMS)
            loads.append(self._timed(lambda: self.strategy.onload(*PARAMS)))
            self.strategy.offload(*PARAMS)
            self.job.barrier()
            mark = Mark(self.device, self.job.first_matmul())
            first_forward()
            starts.append(mark.seconds())
        first, load = spread(starts), spread(loads)
        self.found.first_forward = FirstForward(first, load, first.median / load.median)

    def stream(self) -> None:
        """Weights to a reader while everything is away."""
        assert isinstance(self.strategy, Fxoffload)
        protocol = self.process.request.protocol
        reader = WeightReader(self.job)
        self.strategy.offload(*EVERYTHING)
        try:
            self.found.stream = from_host(reader, self.strategy, {"bucket_bytes": protocol.bucket}, protocol.steps)
        finally:
            reader.release()
            self.strategy.onload(*EVERYTHING)

    # -- endurance -----------------------------------------------------------------------------------------------------

    def endurance(self) -> None:
        job, strategy, cycles = self.job, self.strategy, self.process.request.protocol.endurance
        equal = True
        strategy.offload(*EVERYTHING)
        host, free, rss = strategy.host_bytes(), free_bytes(self.device), rss_bytes()
        strategy.onload(*EVERYTHING)
        reserved = reserved_bytes(self.device)
        for cycle in range(cycles):
            check = cycle % CHECK_EVERY == 0 or cycle == cycles - 1
            before = self._changed_checksums() if check else None
            strategy.offload(*EVERYTHING)
            strategy.onload(*EVERYTHING)
            equal = equal and (before is None or checksums(job.tensors(*EVERYTHING)) == before)
        free_bytes(self.device)
        reserved_growth = difference(reserved_bytes(self.device), reserved)
        strategy.offload(*EVERYTHING)
        free_growth = difference(free, free_bytes(self.device))
        self.found.endurance = Endurance(
            cycles,
            equal,
            rss_bytes() - rss,
            difference(strategy.host_bytes(), host),
            reserved_growth,
            free_growth,
        )
        strategy.onload(*EVERYTHING)

    def _changed_checksums(self) -> dict[str, tuple[int, int]]:
        tensors = self.job.tensors(*EVERYTHING)
        change_a_bit(tensors)
        return checksums(tensors)

    # -- the end -------------------------------------------------------------------------------------------------------

    def free_at_the_end(self) -> None:
        """Training has run by now: what its kernels keep counts here, as it does before a second rollout."""
        if self._is_slow():
            return
        self.strategy.offload(*EVERYTHING)
        self.found.residue_later_bytes = difference(self.process.free_before, free_bytes(self.device))
        self.strategy.onload(*EVERYTHING)

    def copies_alone(self) -> None:
        """What the host memory that the strategy has chosen gives of the link, with all else taken away.

        Up first, then the same bytes down to where they were.
        """
        if self._is_slow():
            return
        self.strategy.offload(*EVERYTHING)
        try:
            pieces = self.strategy.host_pieces()
            if pieces:
                self.found.copies_alone = self._copy_alone(pieces)
        finally:
            self.strategy.onload(*EVERYTHING)

    def _copy_alone(self, pieces: list[Tensor]) -> CopiesAlone:
        sizes = [piece.numel() for piece in pieces]
        there = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device).split(sizes)
        up = [self._timed(lambda: _copy_all(there, pieces)) for _ in range(COPY_ROUNDS)]
        down = [self._timed(lambda: _copy_all(pieces, there)) for _ in range(COPY_ROUNDS)]
        d2h, h2d = (sum(sizes) / 1e9 / statistics.median(seconds) for seconds in (down, up))
        return CopiesAlone(d2h, h2d)

    def link(self) -> None:
        self.process.measure_link()
        found = self.found
        for way, direction in ((found.offload, "d2h"), (found.onload, "h2d"), (found.stream, "h2d")):
            rate = self.process.link_rate(direction)
            if way is not None and rate:
                way.of_link = way.gb_per_s / rate

    def gather_ranks(self) -> None:
        """Every rank's figures: the slowest counts."""
        found = self.found
        mine: dict[str, float | None] = {
            "first_offload_gb_per_s": found.first_offload_gb_per_s,
            "offload_gb_per_s": found.offload and found.offload.gb_per_s,
            "onload_gb_per_s": found.onload and found.onload.gb_per_s,
            "offload_of_link": found.offload and found.offload.of_link,
            "onload_of_link": found.onload and found.onload.of_link,
            "exposed_vs_serial": found.exposed and found.exposed.exposed_vs_serial,
            "first_forward_fraction": found.first_forward and found.first_forward.fraction,
            "residue_bytes": found.residue_bytes,
            "residue_later_bytes": found.residue_later_bytes,
            "host_vs_device": found.host_vs_device,
            "copies_alone_d2h_gb_per_s": found.copies_alone and found.copies_alone.d2h_gb_per_s,
            "copies_alone_h2d_gb_per_s": found.copies_alone and found.copies_alone.h2d_gb_per_s,
            "stream_of_link": found.stream and found.stream.of_link,
            "bit_equal": None if found.bit_equal is None else float(found.bit_equal),
            "endured": None if found.endurance is None else float(found.endurance.bit_equal),
        }
        found.by_rank = [mine] * self.job.ranks
        if self.job.ranks > 1:
            dist.all_gather_object(found.by_rank, mine)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _trace(self, name: str, work: Callable[[], None]) -> None:
        self.job.barrier()
        self.found.traces[name] = trace_work(work, self.device)

    def _timed(self, work: Callable[[], None]) -> float:
        self.job.barrier()
        watch = Stopwatch(self.device)
        work()
        return watch.seconds()

    def _way(self, seconds: list[float]) -> Way:
        times = spread(seconds)
        return Way(times, self.found.moved_bytes / 1e9 / times.median)

    def _host_bytes(self) -> None:
        found = self.found
        assert found.rss_before_bytes is not None
        found.rss_away_bytes = rss_bytes()
        found.host_reserved_bytes = self.strategy.host_bytes()
        grown = found.rss_away_bytes - found.rss_before_bytes
        found.host_bytes = grown if found.host_reserved_bytes is None else found.host_reserved_bytes
        found.host_vs_device = found.host_bytes / found.moved_bytes

    def _repeats(self, way: Way | None) -> int:
        """As many as the steady cycles were: slow strategies get few."""
        count = len(way.seconds.values) if way is not None else 0
        return max(1, min(count, self.process.request.protocol.steps))

    def _is_slow(self) -> bool:
        found = self.found
        both = sum(way.seconds.median for way in (found.offload, found.onload) if way is not None)
        return self.job.agreed(both > SLOW_CYCLE_S)


def _copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
