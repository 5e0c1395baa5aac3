"""Times and bytes of transitions: one record each, and one flat dict for loggers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from fxoffload.phases.stand_still import StandStill


@dataclass(eq=False)
class Transition:
    """One offload or onload of some groups.

    Attributes:
        kind: "offload", "onload" or "stream".
        groups: the groups that were asked for.
        phase: the phase that was being entered, or "".
        nbytes: that were copied.
        seconds: from the call until the last byte had arrived; exactly 0.0 where nothing had to move.
        host_wait_seconds: that the calling thread stood still.
        freed_bytes: by which the device's free memory grew, as the driver sees it (an offload that was waited for).
        host_bytes: of the host image afterwards.
        failed: whether it was rolled back.
        stream: the clock that is charged with the waits of streams.
        is_over: whether it has ended, one way or the other.
    """

    kind: str
    groups: tuple[str, ...]
    phase: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    host_wait_seconds: float = 0.0
    freed_bytes: int = 0
    host_bytes: int = 0
    failed: bool = False
    stream: StandStill = field(default_factory=StandStill)
    is_over: bool = False
    _began: float = field(default_factory=time.perf_counter)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes in a second; 0.0 where nothing moved."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def exposed_seconds(self) -> float:
        """That the calling thread or its stream stood still for copies. Counts the waits of streams that are over."""
        return self.host_wait_seconds + self.stream.seconds

    def stood_still_since(self, began: float) -> None:
        """The calling thread did nothing else since then (``time.perf_counter()``)."""
        if self.nbytes:
            self.host_wait_seconds += time.perf_counter() - began

    def finish(self, *, failed: bool = False) -> None:
        """The last byte has arrived, or everything is back."""
        if self.nbytes and not failed:
            self.seconds = time.perf_counter() - self._began
        self.failed, self.is_over = failed, True

    def let_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Lets a stream wait for a copy of this transition, and measures for how long it does."""
        with self.stream.on_stream(stream):
            stream.wait_event(event)


def summed(transitions: Iterable[Transition], host_bytes: int, phases: Iterable[str]) -> dict[str, float]:
    """``phases/<kind>/<quantity>`` over the transitions that are over, and ``phases/<phase>/switch_seconds``."""
    found: dict[str, float] = {}
    transitions = [transition for transition in transitions if transition.is_over]
    for kind in ("offload", "onload", "stream"):
        some = [t for t in transitions if t.kind == kind and not t.failed]
        nbytes, seconds = sum(t.nbytes for t in some), sum((t.seconds for t in some), 0.0)
        found |= {
            f"phases/{kind}/bytes": float(nbytes),
            f"phases/{kind}/seconds": seconds,
            f"phases/{kind}/gb_per_s": nbytes / 1e9 / seconds if seconds else 0.0,
            f"phases/{kind}/exposed_seconds": sum((t.exposed_seconds for t in some), 0.0),
        }
    found["phases/offload/freed_bytes"] = float(sum(t.freed_bytes for t in transitions))
    found["phases/host_bytes"] = float(host_bytes)
    found["phases/failures"] = float(sum(t.failed for t in transitions))
    for phase in phases:
        found[f"phases/{phase}/switch_seconds"] = sum(
            (t.exposed_seconds for t in transitions if t.phase == phase and not t.failed), 0.0
        )
    return found
