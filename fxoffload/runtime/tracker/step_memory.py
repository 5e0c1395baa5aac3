"""Memory of a step: the device's bytes at each call's begin, the peak between two calls, and memory that calls pass on.

Neither class is thread-safe: ``fxoffload.runtime.tracker.step_tracker`` has a lock.

[Note: The end of a backward] FSDP2 gathers the parameters of a root module (embedding and head: 2.3 GiB of Qwen3-8B's
shape) before the step's first call, and lets go of them when autograd has ended the backward, after its last call. So
a step is watched until then. What existed when it began and is freed in its backward belongs to the step: those
parameters, and what eager code made for the first call (embeddings of 64 MiB, rotary tables).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import AllocatorTrace, Memory
from fxoffload.runtime.profiler.first_arguments import FirstArguments, OnOtherStreams
from fxoffload.runtime.profiler.gap_times import GapTimes
from fxoffload.runtime.transfer import Watch
from fxoffload.step.edges import CallAt, EdgeMemory, Moment
from fxoffload.step.readings import Phase
from fxoffload.torch_private.autograd import after_backward
from fxoffload.torch_private.storages import StorageRef
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass

log = logging.getLogger(__name__)


class LiveBytes:
    """The allocator's bytes when each call of a step begins, and the most between two calls.

    Args:
        others: watches the memory of other streams, from the arguments of the step's first call on; None: unknown.
        history: of the allocator's events, begun with the step; None: there is none.
        gap_times: of the step's calls; None: unknown.

    Attributes:
        gap_times: those.
        others_bytes: memory that was there when the step began, and yet belongs to it (see ``OnOtherStreams``,
            ``AllocatorHistory.carried_bytes`` and [Note: The end of a backward]); once it has ended.
        carried_bytes: the part of it that outputs of the step before are.
        left_bytes: memory of the first call's arguments that is gone when the step has ended (``FirstArguments``).
    """

    def __init__(
        self,
        others: Callable[[Sequence[Any]], OnOtherStreams] | None = None,
        history: AllocatorHistory | None = None,
        gap_times: GapTimes | None = None,
    ) -> None:
        self.gap_times = gap_times
        self.others_bytes = self.carried_bytes = 0
        self._read: dict[CallAt, int] = {}
        self._ended: Memory | None = None  # the call before
        self._gaps: dict[CallAt, AllocatorTrace] = {}
        self._history = history
        self._first: FirstArguments | None = None
        self.left_bytes = 0
        self._watch = others
        self._others: OnOtherStreams | None = None

    def __len__(self) -> int:
        return len(self._read)

    def read(self, at: CallAt, args: Sequence[Any], memory: Memory) -> None:
        """A call with these arguments begins."""
        if not self._read:
            self._first = FirstArguments(args)
            self._others = self._begin_to_watch(args)
        elif self._first is not None:
            self.left_bytes = self._first.left_bytes()
        if self._ended is not None:
            self._gaps[at] = AllocatorTrace.begin(self._ended)
            self._gaps[at].add(memory)
            self._ended = None
        self._read[at] = memory.allocated

    def call_ended(self, memory: Memory) -> None:
        """The call that began last has ended."""
        self._ended = memory

    def end(self) -> None:
        """The step's last call has run. See [Note: The end of a backward]."""
        if self.gap_times is not None:
            self.gap_times.end()
        if self._first is not None:
            self.left_bytes = self._first.left_bytes()
        if self._others is not None or self._history is not None:
            after_backward(self._end_with_backward)

    def _end_with_backward(self) -> None:
        others, self._others = self._others, None
        first, self._first = self._first, None
        if first is not None:
            self.left_bytes = first.left_bytes()
        if self._history is not None:
            self._history.end()
        try:
            self.others_bytes = 0 if others is None else others.gone_bytes()
        except RuntimeError as error:
            log.info("what other streams have is not known: %s", error)
        turn = next((gap for (phase, _), gap in self._gaps.items() if phase == "backward"), None)
        if self._history is None:
            return
        without = () if first is None else first.addresses  # those are in ``left_bytes``
        if turn is not None:
            self.carried_bytes = self._history.carried_bytes(turn.first, turn.last, without) or 0
            self.others_bytes += self.carried_bytes
        if (begin := self._ended if turn is None else turn.last) is not None:
            # Those of other streams are counted above.
            stream = None if others is None else others.compute
            self.others_bytes += self._history.freed_bytes_after(begin, stream, without)

    def drop(self) -> None:
        """The step is not the expected one: whatever has not ended is no longer watched."""
        self._others = None
        if self._history is not None:
            self._history.end(read=False)
        if self.gap_times is not None and not self.gap_times.is_ended:
            self.gap_times.drop()

    def _begin_to_watch(self, args: Sequence[Any]) -> OnOtherStreams | None:
        try:
            return None if self._watch is None else self._watch(args)
        except RuntimeError as error:  # a plan is worth having without it
            log.info("what other streams have is not known: %s", error)
            return None

    def above_start(self) -> dict[CallAt, int]:
        """Bytes when each call began, above those that are there whether the step runs or not."""
        base = next(iter(self._read.values()), 0) - self.left_bytes - self.others_bytes
        return {at: nbytes - base for at, nbytes in self._read.items()}

    def gap_bytes(self) -> dict[CallAt, int]:
        """Most bytes between the call before and each call, above those when it begins; where that is known."""
        peaks = {at: (gap.last.allocated, gap.exact_peak(self._history)) for at, gap in self._gaps.items()}
        return {at: peak - begun for at, (begun, peak) in peaks.items() if peak is not None}


@dataclass(eq=False)
class _Watched:
    """Memory at the edge of a call."""

    ref: StorageRef
    phase: Phase
    members: list[tuple[int, str]]
    until: Moment
    watched: bool = True


class EdgeWatch:
    """The memory at the edges of a step's calls.

    Attributes:
        now: the call that began last.
    """

    def __init__(self) -> None:
        self.now = Moment("forward", 0)
        self._watched: list[_Watched] = []
        self._by_key: dict[int, _Watched] = {}

    def look(self, in_flight: Mapping[int, int]) -> None:
        """Note which watched memory is held outside the engine. ``in_flight``: the engine's references, by key."""
        for key, item in list(self._by_key.items()):
            if item.ref.is_alive(in_flight.get(key, 0)):
                item.until = self.now
            elif item.ref.is_expired():
                # It does not come back; the next storage with its key is another one.
                del self._by_key[key]

    def watch(
        self, phase: Phase, place: int, names: Sequence[str | None], values: Sequence[Any], *, is_input: bool = False
    ) -> bool:
        """Watch these values from now on. False: the memory of some cannot be. ``is_input``: they are inputs of a
        forward, and the engine is to watch those that move ([Note: Watched inputs] in ``runtime/engine.py``)."""
        for name, value in zip(names, values, strict=False):
            if name is None or not isinstance(value, Tensor):
                continue
            if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
                return False  # its memory is not one storage
            ref = StorageRef(value)
            known = self._by_key.get(ref.key)
            if known is None:
                known = self._by_key[ref.key] = _Watched(ref, phase, [], self.now)
                self._watched.append(known)
            elif known.phase != phase:
                return False  # a forward's memory is a backward's gradient: no step says so
            known.until = self.now
            if is_input and Watch.of(value) is None:
                known.watched = False
            if (place, name) not in known.members:
                known.members.append((place, name))
        return True

    def edge_memory(self) -> tuple[EdgeMemory, ...]:
        """All of it. The step's last call has returned."""
        return tuple(
            EdgeMemory(tuple(w.members), None if w.until == self.now else w.until, w.watched) for w in self._watched
        )

    def clear(self) -> None:
        """Nothing is watched any longer."""
        self._watched.clear()
        self._by_key.clear()
