"""A record of the allocator's events, with an allocator of our own in the place of CUDA's."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory, cuda_history
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.tracker.step_memory import LiveBytes
from fxoffload.torch_private.autograd import after_backward
from fxoffload.torch_private.cuda import AllocatorEvent
from tests.allocator import Allocator

DEVICE = torch.device("cuda", 1)


def test_the_peak_between_any_two_reads() -> None:
    """Below what the process has been before."""
    allocator = Allocator()
    history = allocator.history()
    reads = [allocator.read()]
    for sizes in ([1000, 3000], [700], [], [512 * 40]):
        for nbytes in sizes:
            allocator.allocate(nbytes)
        for nbytes in sizes:
            allocator.free(nbytes)
        reads.append(allocator.read())
    allocator.allocate(100)
    reads.append(allocator.read())
    assert history.peak_between(reads[0], reads[1]) is None, "nothing is known before it has ended"
    history.end()
    history.end()
    assert allocator.stops == 1
    found = [history.peak_between(a, b) for a, b in itertools.pairwise(reads)]
    assert found == [5000 + n for n in (1024 + 3072, 1024, 0, 512 * 40, 512)]
    assert history.peak_between(reads[1], reads[4]) == 5000 + 512 * 40
    assert history.peak_between(reads[4], reads[1]) is None
    assert history.peak_between(reads[5], reads[5]) == reads[5].allocated


def test_what_was_there_before_may_be_freed() -> None:
    allocator = Allocator()
    history = allocator.history()
    first = allocator.read()
    allocator.free(2048)
    middle = allocator.read()
    allocator.allocate(1024)
    last = allocator.read()
    history.end()
    assert history.peak_between(first, last) == 5000
    assert history.peak_between(middle, last) == 5000 - 1024


def test_blocks_that_are_larger_than_what_was_asked_for() -> None:
    """The record does not say how large they are: live blocks do."""
    allocator = Allocator()
    history = allocator.history()
    first = allocator.read()
    allocator.allocate(4096, larger=300_000)
    allocator.allocate(8192)
    allocator.free(8192)
    last = allocator.read()
    history.end()
    assert history.peak_between(first, last) == 5000 + 4096 + 300_000 + 8192


def test_a_record_that_does_not_hold_what_was_counted_says_nothing() -> None:
    """It was too short, or another thread allocated while it began."""
    allocator = Allocator()
    history = allocator.history()
    first = allocator.read()
    allocator.allocate(512)
    last = allocator.read()
    assert allocator.events is not None
    allocator.events.pop()
    history.end()
    assert allocator.stops == 1 and history.peak_between(first, last) is None


def test_counters_that_somebody_reset_say_nothing() -> None:
    allocator = Allocator()
    history = allocator.history()
    first = allocator.read()
    allocator.allocate(512)
    allocator.counts = [0, 0]
    last = allocator.read()
    history.end()
    assert history.peak_between(first, last) is None
    allocator = Allocator()
    history = allocator.history()
    allocator.allocate(512)
    stranger = Memory(5000, 5000, 70, 61)  # a free that is not in the record
    history.end()
    assert history.peak_between(stranger, allocator.read()) is None


def test_it_ends_whatever_happens() -> None:
    allocator = Allocator()
    history = allocator.history()
    history.end(read=False)
    assert allocator.stops == 1 and history.peak_between(allocator.read(), allocator.read()) is None

    def broken() -> list[AllocatorEvent]:
        raise RuntimeError("no snapshot")

    history = AllocatorHistory(allocator.read, broken, allocator.stop, allocator.read())
    history.end()
    assert allocator.stops == 2 and history.peak_between(allocator.read(), allocator.read()) is None


# -- torch's -----------------------------------------------------------------------------------------------------------


class Torch:
    """What torch has of it: one record for all devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_recording = False
        self.calls: list[Any] = []
        self.traces: list[list[dict[str, Any]]] = [[], []]
        self.counts = {"allocated": 7, "freed": 3}
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_recording, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": self.traces})
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)

    def record(self, enabled: Any = "all", **options: Any) -> None:
        self.is_recording = enabled is not None
        self.calls.append((enabled, options))

    def stats(self, index: int) -> Any:
        assert index == 1
        return {
            "allocated_bytes": {"all": {"current": 100, "peak": 900, "allocated": 0}},
            "allocation": {"all": dict(self.counts)},
        }


def test_torch_records_without_tracebacks_and_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Torch(monkeypatch)
    begin = cuda_history(DEVICE)
    assert begin is not None
    history = begin()
    assert history is not None and found.is_recording
    ((enabled, options),) = found.calls
    assert enabled == "all" and options["context"] is None and options["clear_history"]
    assert options["global_record_annotations"], "it ends on autograd's thread"
    first = Memory(100, 900, 7, 3)
    found.traces[0] = [{"action": "alloc", "size": 999999}]
    found.traces[1] = [
        {"action": "segment_alloc", "size": 1 << 21},
        {"action": "alloc", "size": 1024, "frames": []},
        {"action": "free_requested", "size": 1024},
        {"action": "free_completed", "size": 1024},
    ]
    found.counts = {"allocated": 8, "freed": 4}
    history.end()
    assert not found.is_recording and len(found.calls) == 2
    assert history.peak_between(first, Memory(100, 900, 8, 4)) == 100 + 1024


def test_a_record_that_somebody_keeps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Torch(monkeypatch)
    found.is_recording = True
    begin = cuda_history(DEVICE)
    assert begin is not None and begin() is None and found.calls == []
    found.is_recording = False
    history = begin()
    assert history is not None
    found.traces[1] = [{"action": "alloc", "size": 1024, "frames": [{"name": "train"}]}]  # they began meanwhile
    found.counts = {"allocated": 8, "freed": 3}
    history.end()
    assert found.is_recording
    found.traces[1].clear()
    for read in (False, True):
        found.is_recording = False
        history = begin()
        assert history is not None
        found.traces[0] = [{"action": "free_requested", "size": 1024, "frames": [{"name": "train"}]}]  # elsewhere
        history.end(read=read)
        assert found.is_recording, "also of a step that is dropped"
        assert history.peak_between(Memory(0, 0, 7, 3), Memory(0, 0, 7, 3)) is None
    found.is_recording = False
    monkeypatch.delattr(torch._C, "_cuda_isHistoryEnabled")
    assert begin() is None, "nobody knows"


@pytest.mark.parametrize("broken", ["memory_stats_as_nested_dict", "memory._record_memory_history"])
def test_what_cannot_be_begun_is_none(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    found = Torch(monkeypatch)
    begin = cuda_history(DEVICE)
    assert begin is not None

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not in this torch")

    monkeypatch.setattr(f"torch.cuda.{broken}", fail)
    assert begin() is None and not found.is_recording


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_allocators_that_record_nothing(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert cuda_history(DEVICE) is None


# -- what one step leaves to the next ----------------------------------------------------------------------------------


def test_outputs_of_the_step_before_are_carried() -> None:
    """Freed when the forwards have ended, with as large a block that stays: logits. Not ``.grad`` tensors that are
    dropped there and come again in the backward, and nothing that goes at another time."""
    allocator = Allocator()
    logits, grad, early, late = (allocator.allocate(n) for n in (5000, 3000, 2000, 2500))
    history = allocator.history()
    allocator.allocate(2000)
    allocator.allocate(2500)
    allocator.free(2000, address=early)
    turn_begin = allocator.read()
    allocator.allocate(5000)
    allocator.pass_by(3000)
    allocator.free(5000, address=logits)
    allocator.free(3000, address=grad)
    turn_end = allocator.read()
    allocator.allocate(3000)
    allocator.free(2500, address=late)
    history.end()
    assert history.carried_bytes(turn_begin, turn_end) == 5120
    assert history.carried_bytes(turn_end, turn_end) == 0
    assert history.carried_bytes(Memory(0, 0), turn_end) is None


def test_what_is_freed_at_once_is_carried_too() -> None:
    allocator = Allocator()
    logits = allocator.allocate(5000)
    history = allocator.history()
    turn_begin = allocator.read()
    allocator.free(5000, address=logits)
    turn_end = allocator.read()
    allocator.allocate(5000)
    last = allocator.read()
    history.end()
    assert history.carried_bytes(turn_begin, last) == 5120
    assert history.carried_bytes(turn_begin, turn_end) == 0, "nothing stays in its place"
    assert history.carried_bytes(turn_end, last) == 0


def test_without_addresses_nothing_is_known_to_be_carried() -> None:
    allocator = Allocator()
    history = allocator.history()
    turn_begin = allocator.read()
    allocator.allocate(5000)
    allocator.free(5000)
    history.end()
    assert history.carried_bytes(turn_begin, allocator.read()) == 0


# -- memory given back when a step ends --------------------------------------------------------------------------------


def test_what_was_there_before_a_step_and_goes_with_its_end() -> None:
    allocator = Allocator()
    gathered, earlier, stays = (allocator.allocate(n) for n in (4000, 3000, 2000))
    history = allocator.history()
    inside = allocator.allocate(6000)
    allocator.free(3000, address=earlier)
    last_call_ended = allocator.read()
    allocator.free(6000, address=inside)
    allocator.free(4000, address=gathered)
    allocator.pass_by(1000)
    # Memory that is used again is the step's from then on.
    allocator._note(True, 4000, 4096, gathered)
    allocator.free(4000, address=gathered)
    history.end()
    assert stays
    assert history.freed_bytes_after(last_call_ended) == 4096
    assert history.freed_bytes_after(last_call_ended, stream=0) == 4096
    assert history.freed_bytes_after(last_call_ended, stream=7) == 0
    assert history.freed_bytes_after(allocator.read()) == 0
    assert history.freed_bytes_after(Memory(0, 0)) == 0


def test_a_step_is_watched_until_its_backward_has_ended() -> None:
    """FSDP2 lets go of a root module's parameters then, and the first call of the embeddings that it was given."""
    allocator = Allocator()
    gathered, embeddings = allocator.allocate(4096), allocator.allocate(2048)
    live = LiveBytes(history=allocator.history())
    live.read(("forward", 0), [], allocator.read())
    live.call_ended(allocator.read())

    class Root(torch.autograd.Function):
        """After the last call in the backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            after_backward(lambda: allocator.free(4096, address=gathered))
            live.read(("backward", 0), [], allocator.read())
            allocator.free(2048, address=embeddings)
            live.call_ended(allocator.read())
            live.end()
            assert live.others_bytes == 0
            return grad

    Root.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert live.others_bytes == 4096 + 2048
    assert live.above_start() == {("forward", 0): 4096 + 2048, ("backward", 0): 4096 + 2048}
    assert allocator.stops == 1


@pytest.mark.parametrize("gone", ["some calls later", "between the forward and the backward", "in the backward"])
def test_an_argument_of_the_first_call_belongs_to_the_step(gone: str) -> None:
    """An embedding that eager code made for the first call: offloaded, it is gone some calls later; kept, at the end.
    Memory that is freed at the turn may be the step before's, if as much stays."""
    allocator = Allocator()
    embedding = torch.ones(512)
    allocator.address = embedding.data_ptr() - 1
    address = allocator.allocate(embedding.nbytes)
    live = LiveBytes(history=allocator.history())

    def let_go(when: str) -> None:
        if gone == when:
            embedding.untyped_storage().resize_(0)
            allocator.free(2048, address=address)

    for call in range(3):
        live.read(("forward", call), [embedding] if call == 0 else [], allocator.read())
        if call == 1:
            let_go("some calls later")
        if call == 2:
            allocator.allocate(2048)  # a result that stays
        live.call_ended(allocator.read())
    let_go("between the forward and the backward")
    for call in (2, 1, 0):
        live.read(("backward", call), [], allocator.read())
        if call == 0:
            let_go("in the backward")
        live.call_ended(allocator.read())
    live.end()
    assert live.left_bytes + live.others_bytes == 2048 == live.above_start()["forward", 0]
    assert live.left_bytes == 2048


def test_an_argument_of_the_first_call_may_go_after_the_last_one() -> None:
    """Autograd lets go of it when it has ended the backward."""
    given = torch.ones(512)
    allocator = Allocator()
    live = LiveBytes(history=allocator.history())
    live.read(("forward", 0), [given], allocator.read())
    live.call_ended(allocator.read())

    class First(torch.autograd.Function):
        """Its backward ends the step."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            live.read(("backward", 0), [], allocator.read())
            live.call_ended(allocator.read())
            live.end()
            assert live.left_bytes == 0
            given.untyped_storage().resize_(0)
            return grad

    First.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert live.left_bytes == 2048 == live.above_start()["forward", 0]


def test_what_waits_for_a_backward_is_done_at_once_outside_of_one() -> None:
    done: list[int] = []
    after_backward(partial(done.append, 1))
    assert done == [1]
