"""What a way to move training's bytes must offer, so that all are measured alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from benchmarks.clock import synchronize
from benchmarks.rl.job import RlJob
from benchmarks.rl.machine_memory import give_back

PARAMS = ("params", "buffers")
EVERYTHING = ("params", "buffers", "optimizer")


class Strategy:
    """Leaves everything where it is (the variant ``none``); the others override it.

    ``attach`` is called once, before the first cycle.
    """

    job: RlJob

    def allocating(self, group: str) -> contextlib.AbstractContextManager[None]:
        """Around whatever allocates a group's tensors."""
        return contextlib.nullcontext()

    def attach(self, job: RlJob) -> None:
        self.job = job

    def offload(self, *groups: str) -> None:
        """Returns when the groups' memory is free for others, as the driver sees it."""
        self.begin_offload(*groups)
        give_back(self.job.device)  # as every framework does at the end of an offload

    def onload(self, *groups: str) -> None:
        """Returns when the groups are on the device."""
        self.begin_onload(*groups)
        synchronize(self.job.device)

    def begin_offload(self, *groups: str) -> None:
        """May return before anything has moved."""

    def begin_onload(self, *groups: str) -> None:
        """May return before anything has moved; what runs next on this stream finds it."""

    def finish(self) -> None:
        """Whatever has begun is over."""
        synchronize(self.job.device)

    def enter(self, phase: str) -> None:
        """A phase of ``rl-step``, in the order of the frameworks: whoever needs memory has it on return."""
        if phase == "rollout":
            self.offload(*EVERYTHING)
        elif phase == "logprob":
            self.begin_onload(*PARAMS)
        elif phase == "train":
            self.begin_onload("optimizer")
        elif phase == "sync":
            self.offload("optimizer")

    def ablations(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
        """By name: around work that runs without a mechanism that helps work during copies."""
        return {}

    def host_pieces(self) -> list[Tensor]:
        """Where the bytes lie that are away now, as copies take them; empty where that is not known."""
        return []

    def host_bytes(self) -> int | None:
        """Host memory that is reserved for offloaded tensors; None where it is not counted."""
        return None

    def close(self) -> None:
        """Gives the host memory back."""
