"""An exception at any line of a step that offloads: no host memory is lost, and the next step is right.

See [Note: Asynchronous exceptions] in ``fxoffload.runtime.transactions``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fxoffload
from fxoffload.runtime.copies.streams import CopyStreams, HostCopies
from fxoffload.runtime.engine import CopyEngine, engine_for
from tests.interrupts import Place, drained, files, ours, some_of_each_line, storm, switches, try_each
from tests.phases.delayed import DelayedCopies
from tests.support import Halves, Observed, assert_equal, batch, compiled, effects

# What a step passes of the copy engine; the slow tests go through all that is called on the way.
COPIES = files(
    "runtime/engine.py",
    "runtime/transfer.py",
    "runtime/save_order.py",
    "runtime/copies/streams.py",
    "runtime/host_memory/arena.py",
    "runtime/host_memory/free_list.py",
)
ALL = files("runtime/**/*.py")
CPU = torch.device("cpu")


class Late(DelayedCopies):
    """What a backward reads is garbage until it waits."""

    def host_waits(self) -> bool:
        return False

    def pace(self) -> None:
        pass

    def compute_waits_for(self, event: Any, wait: Any, stream: Any = None) -> None:
        if event is not None:  # of a copy to the host, which was made at once
            super().compute_waits_for(event, wait, stream)


class Steps:
    """A compiled model with a graph break, whose steps give the same bits every time."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        self.engine = engine_for(torch.device(device))
        self.model = Halves(half=1).to(device)
        self.batches = [batch(i).to(device) for i in range(2)]
        self.call = compiled(self.model, device_types=(device,), **options)
        self.expected = self.step()
        assert fxoffload.stats().bytes_offloaded > 0
        gc.collect()
        gc.freeze()  # the collections to come take a hundredth of the time

    def step(self) -> Observed:
        self.model.zero_grad(set_to_none=True)
        loss = self.call(self.batches[0]).square().mean()
        loss.backward()
        return {"loss": loss.detach().clone(), **effects(self.model)}

    def step_with_release(self) -> None:
        """One whose host memory is new, and returned after it."""
        self.step()
        gc.collect()
        fxoffload.release_host_memory()

    def backward_twice(self) -> None:
        loss = self.call(self.batches[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def dropped(self) -> None:
        """One forward whose backward never comes, then a step."""
        self.call(self.batches[1])
        self.step()

    def problems(self) -> list[str]:
        """Differences from the state before the interrupt."""
        gc.collect()
        found = switches()
        held = fxoffload.stats()
        if held.host_bytes_in_use or held.num_groups_on_tape:
            found.append(f"{held.host_bytes_in_use} bytes, {held.num_groups_on_tape} groups")
        engine = self.engine
        try:
            assert_equal(self.step(), self.expected)
        except Exception as error:
            found.append(repr(error))
        gc.collect()
        left = fxoffload.stats().host_bytes_in_use, engine._in_flight_bytes, engine._ahead_bytes, len(engine._landing)
        if any(left):
            found.append(f"left after a step: {left}")
        return found


WORK: dict[str, Callable[[Steps], object]] = {
    "step": Steps.step,
    "new host memory": Steps.step_with_release,
    "two backwards": Steps.backward_twice,
    "a forward alone": Steps.dropped,
}


@pytest.fixture(params=["at once", "delayed"])
def copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """What copies, of the CPU's engine."""
    engine: CopyEngine = engine_for(CPU)
    made: CopyStreams = HostCopies() if request.param == "at once" else Late()  # type: ignore[assignment]
    with mock.patch.object(engine, "streams", made):
        yield
    lock: Any = engine.calls._lock  # A trace function, unlike a signal, may leave it held (``locked``).
    if lock._is_owned():
        lock._release_save()


def try_each_of(
    steps: Steps,
    name: str,
    printed: list[str],
    choose: Callable[[list[Place]], list[Place]],
    where: frozenset[str] = COPIES,
    kind: str = "line",
) -> None:
    work = WORK[name]
    try_each(lambda: work(steps), lambda: steps.problems() + drained(printed), choose, where, kind)
    fxoffload.release_host_memory()
    assert fxoffload.stats().host_bytes_reserved == 0


def every_fifth(found: list[Place]) -> list[Place]:
    """The first event of some lines; of others in the other tests."""
    firsts = some_of_each_line(found, 1)
    return firsts[len(firsts) % 5 :: 5]


@pytest.mark.slow_except("new host memory")
@pytest.mark.parametrize("name", WORK)
def test_no_host_memory_is_lost_and_the_next_step_is_right(name: str, printed: list[str]) -> None:
    try_each_of(Steps(), name, printed, every_fifth)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": "cheap"}, {"policy": "auto", "profile": "h200"}], ids=str)
@pytest.mark.parametrize("name", WORK)
def test_every_line(name: str, options: dict[str, Any], copies: None, printed: list[str]) -> None:
    try_each_of(Steps(**options), name, printed, lambda found: some_of_each_line(found, 3), ALL)


@pytest.mark.slow
def test_between_any_two_bytecodes(copies: None, printed: list[str]) -> None:
    try_each_of(Steps(), "step", printed, lambda found: some_of_each_line(found, 4), COPIES, "opcode")


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.05, 0.005])
def test_real_signals(gap: float, printed: list[str]) -> None:
    steps, raised = Steps(), 0
    while raised < 1000:
        try:
            with storm(gap):
                while True:
                    steps.dropped()
        except KeyboardInterrupt:
            raised += 1
            torch.set_grad_enabled(True)  # a ``no_grad`` that is interrupted as it ends leaves them off
        if raised % 50 == 0:
            assert steps.problems() == []
    assert not ours(printed)
    fxoffload.release_host_memory()
