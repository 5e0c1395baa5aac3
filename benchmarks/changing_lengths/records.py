"""What the scenario ``fsdp-lengths`` measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.process_memory import ProcessMemory


@dataclass
class LengthsRun:
    """Timed steps of changing lengths, after a warm-up of lengths all over the range, which took ``warmup_s``
    (compiling, tuning and planning included).

    ``lengths``: of each timed step on this rank; every rank has its own, but for one step in the middle, which is the
    longest on all. ``offloaded_bytes``: of each step. ``peak_so_far_bytes``: after each step, the most since the first
    timed one began, above the bytes at that time. ``device_reserved_bytes``, ``host_reserved_bytes``: after each step,
    by torch's caching allocator and fxoffload's arena. ``after_warmup``: of this rank's process; ``grown``: since then,
    after every 25 steps. By rank, in their order: ``grown_by_rank``, of each process, from the end of the warm-up to
    that of the timed steps. ``graphs_by_rank``: compiled by Dynamo in the whole process until then.
    ``grown_again_by_rank``: of each process while the last 50 of the timed lengths came once more.
    """

    num_warmup: int
    after_warmup: ProcessMemory
    lengths: list[int] = field(default_factory=list)
    offloaded_bytes: list[int] = field(default_factory=list)
    peak_so_far_bytes: list[int] = field(default_factory=list)
    device_reserved_bytes: list[int] = field(default_factory=list)
    host_reserved_bytes: list[int] = field(default_factory=list)
    grown: list[ProcessMemory] = field(default_factory=list)
    grown_by_rank: list[ProcessMemory] = field(default_factory=list)
    graphs_by_rank: list[int] = field(default_factory=list)
    warmup_s: float = 0.0
    grown_again_by_rank: list[ProcessMemory] = field(default_factory=list)

    @property
    def num_still_steps(self) -> int:
        """Steps that moved nothing."""
        return sum(nbytes == 0 for nbytes in self.offloaded_bytes)

    def most_grown(self, kind: str) -> int:
        """Bytes of that kind (a field of ``ProcessMemory``), of the rank where it grew most."""
        return max(getattr(grown, kind) for grown in self.grown_by_rank)

    def most_grown_again(self, kind: str) -> int | None:
        """The same while lengths came once more; None where none did."""
        return max((getattr(grown, kind) for grown in self.grown_again_by_rank), default=None)
