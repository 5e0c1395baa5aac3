"""Times of a layer's all-gather and reduce-scatter during copies to and from the host.

In a training step a collective's kernel waits for the rank that comes last, and its time differs from step to step by
more than copies cost it. Here collectives follow each other with nothing between them, so that all ranks come to each
at once. A round has a block of them without copies, one during copies down, one up and one both ways. The order turns
from round to round. The variant ``matmul`` has matrix products on the compute stream meanwhile, as a layer has.

A collective counts where copies (and products) ran on every rank all the while, by the profiler's records, and with the
time of the rank where it was shortest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import ranks
from benchmarks.collectives.beside import Beside
from benchmarks.collectives.blocks import KINDS, PER_BLOCK, WAYS, Block, Round, split_blocks, summarize_rounds
from benchmarks.phases import Phases
from benchmarks.schema import Case, Request, Result

# The device stands so long before a block, so that all of it is queued by then.
QUEUE_MS = 40.0
CYCLES_PER_MS = 1_900_000


class CollectivesBeside:
    """Measures one variant on this rank. Every rank's result says what all of them found together."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.request, self.device, self.result = request, device, result
        self.rounds: list[Round] = []

    def run(self, phases: Phases) -> None:
        phases.required("process group", lambda: ranks.join(self.request, self.device))
        phases.required("tensors", self.make_tensors)
        phases.required("collectives", self.measure)
        phases.required("ranks", self.gather_ranks)
        phases.required("leave", ranks.leave)

    def make_tensors(self) -> None:
        world = dist.get_world_size()
        dtype = getattr(torch, self.request.case.dtype)
        count = layer_elements(self.request.case) // world
        self.shard = torch.ones(count, dtype=dtype, device=self.device)
        self.whole = torch.ones(count * world, dtype=dtype, device=self.device)
        self._gather, self._scatter = ranks.gather_and_scatter()
        self._pair()  # connects the ranks
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.beside = Beside(self.device, products=self.request.variant.kind == "matmul")
            self.stream = torch.cuda.Stream(self.device, priority=-1)  # FSDP2's are of high priority

    def measure(self) -> None:
        on_gpu = self.device.type == "cuda"
        ways = list(WAYS) if on_gpu else ["none"]  # a CPU's copies are made at once: nothing runs during them
        protocol = self.request.protocol
        for number in range(protocol.warmup + protocol.steps):
            turn = number % len(ways)
            found = self._trace(ways[turn:] + ways[:turn]) if on_gpu else {"none": self._on_the_host()}
            if number >= protocol.warmup:
                self.rounds.append(found)

    def gather_ranks(self) -> None:
        everyone: list[list[Round]] = [self.rounds] * dist.get_world_size()
        dist.all_gather_object(everyone, self.rounds)
        self.result.collectives_beside = summarize_rounds(everyone, self.whole.nbytes)

    def _pair(self) -> None:
        self._gather(self.whole, self.shard)
        self._scatter(self.shard, self.whole)

    def _on_the_host(self) -> Block:
        """A rehearsal: the host's clock around collectives that the host makes."""
        found: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
        self._pair()
        for _ in range(PER_BLOCK):
            times = [time.perf_counter()]
            self._gather(self.whole, self.shard)
            times.append(time.perf_counter())
            self._scatter(self.shard, self.whole)
            times.append(time.perf_counter())
            for kind, began, ended in zip(KINDS, times, times[1:], strict=False):
                found[kind].append(1e3 * (ended - began))
        return Block(found)

    def _trace(self, order: Sequence[str]) -> Round:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for way in order:
                self._queue_block(*WAYS[way])
        blocks = split_blocks(profiler.events() or (), len(order), products=self.beside.products)
        self.beside.collectives_ms = max(block.took_ms for block in blocks)
        return {way: block.judge(*WAYS[way]) for way, block in zip(order, blocks, strict=True)}

    def _queue_block(self, down: bool, up: bool) -> None:
        """Copies, products and collectives begin at once: the device stands until all are queued."""
        dist.barrier()
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(QUEUE_MS * CYCLES_PER_MS))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.beside.queue_copies(down, up)
        self.beside.queue_products()
        with torch.cuda.stream(self.stream):
            for _ in range(1 + PER_BLOCK):
                self._pair()
        torch.cuda.synchronize(self.device)


def layer_elements(case: Case) -> int:
    """Of the matrices of a layer: what FSDP2 gathers for it but for a few vectors."""
    attention = case.hidden * case.head_dim * 2 * (case.heads + case.kv_heads)
    return attention + 3 * case.hidden * case.ffn
