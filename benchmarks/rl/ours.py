"""The harness's only contact with ``fxoffload.phases``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.rl.job import RlJob
from benchmarks.rl.strategy import EVERYTHING, Strategy


class Fxoffload(Strategy):
    """``PhaseManager`` with the variant's options."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._begun: list[Any] = []

    def attach(self, job: RlJob) -> None:
        from fxoffload.phases import PhaseManager

        super().attach(job)
        self.manager = PhaseManager(job.model, job.optimizer, device_types=(job.device.type,), **self._options)

    def offload(self, *groups: str) -> None:
        self.manager.offload(*groups)

    def onload(self, *groups: str) -> None:
        self.manager.onload(*groups)

    def begin_offload(self, *groups: str) -> None:
        self._begun.append(self.manager.offload(*groups, wait=False))

    def begin_onload(self, *groups: str) -> None:
        self._begun.append(self.manager.onload(*groups, wait=False))

    def finish(self) -> None:
        while self._begun:
            self._begun.pop(0).wait()
        super().finish()

    def enter(self, phase: str) -> None:
        self.manager.enter(phase)

    def stream(self, **options: Any) -> Iterator[tuple[str, Tensor]]:
        return self.manager.stream_weights(**options)

    def ablations(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
        return {
            "giving_way": partial(_without, giving_way=False),
            "pace": partial(_without, pace=False),
            "both": partial(_without, giving_way=False, pace=False),
        }

    def host_pieces(self) -> list[Tensor]:
        away = self.manager._transit.ledger.on_host(EVERYTHING)
        image = self.manager.image
        return [host for held in away if held.block for _, host in image.pieces(held.block, held.nbytes)]

    def host_bytes(self) -> int | None:
        return self.manager.image.reserved_bytes

    def close(self) -> None:
        self.manager.close()


@contextlib.contextmanager
def _without(*, giving_way: bool = True, pace: bool = True) -> Iterator[None]:
    """Copies that do not let small ones pass (no burst is ever full), and offloads that start all of theirs at once."""
    from fxoffload.phases.moving import mover
    from fxoffload.runtime.copies import giving_way as bursts

    before = bursts.BURST_BYTES, mover.PACE_S_PER_BYTE
    if not giving_way:
        bursts.BURST_BYTES = sys.maxsize
    if not pace:
        mover.PACE_S_PER_BYTE = 0.0
    try:
        yield
    finally:
        bursts.BURST_BYTES, mover.PACE_S_PER_BYTE = before
