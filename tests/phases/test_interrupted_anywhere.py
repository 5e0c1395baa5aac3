"""An exception at any line while memory moves: every byte comes back, nothing hangs, nothing is left behind.

See [Note: Asynchronous exceptions] in ``fxoffload.runtime.transactions``.
"""

from __future__ import annotations

import faulthandler
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fxoffload.phases import PhaseManager
from fxoffload.runtime.copies.streams import CopyStreams

from ..interrupts import (
    Interrupt,
    Place,
    drained,
    files,
    is_in_threading,
    ours,
    places,
    some_of_each_line,
    storm,
    switches,
    try_each,
)
from .delayed import DelayedCopies, LateStreams
from .phase_support import batch, differences, make, snapshot

# Where bytes are moved; the slow tests go through everything that is called on the way too.
MOVING = files(
    "phases/moving/*.py",
    "phases/transit.py",
    "phases/ledger.py",
    "phases/weight_sync/bucket_stream.py",
    "phases/guarding/sentinel.py",
    "runtime/copies/streams.py",
    "runtime/host_memory/arena.py",
    "runtime/host_memory/free_list.py",
)
ALL = files("phases/**/*.py", "runtime/**/*.py", "gc_pause.py")
PATIENCE_S = 60.0  # with an interrupt


class Scene:
    """A model with gradients and optimizer state, which are looked at after every interrupt."""

    def __init__(self, copies: CopyStreams | None = None, device: str = "cpu", **options: object) -> None:
        self.model, self.optimizer = make()
        self.model.to(device)
        self.batch = batch(0).to(device)
        self._is_over = False
        if isinstance(copies, DelayedCopies):
            threading.Thread(target=self._run, args=(copies,), daemon=True).start()
        make_copies = None if copies is None else lambda device: copies
        self.manager = PhaseManager(
            self.model,
            self.optimizer,
            device_types=(device,),
            make_copies=make_copies,
            **options,  # type: ignore[arg-type]
        )
        self.train()
        self.manager.offload()
        self.manager.onload()
        self.before = snapshot(self.model, self.optimizer)

    def _run(self, copies: DelayedCopies) -> None:
        """Copies happen, whoever waits for them."""
        while not self._is_over:
            copies.run_all()
            time.sleep(0.001)

    def close(self) -> None:
        """It works as ever, and ends."""
        self.train()
        self.manager.close()
        self._is_over = True

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).backward()
        self.optimizer.step()

    def problems(self) -> list[str]:
        """Differences from the state before the interrupt."""
        gc.collect()
        found = switches()
        self.manager.onload()
        found += differences(self.before, snapshot(self.model, self.optimizer))
        self.manager.release_host_memory()
        if self.manager.image.in_use_bytes or self.manager.image.reserved_bytes:
            found.append("host memory")
        return found


def offload(manager: PhaseManager) -> None:
    manager.offload()


def offload_behind(manager: PhaseManager) -> None:
    manager.offload(wait=False).wait()


def onload(manager: PhaseManager) -> None:
    manager.onload()


def onload_behind(manager: PhaseManager) -> None:
    manager.onload(wait=False).wait()


def use_what_arrives(manager: PhaseManager) -> None:
    handle = manager.onload(wait=False)
    for parameter in manager.models[""].parameters():
        assert parameter.sum() is not None
    handle.wait()


def stream(manager: PhaseManager) -> None:
    for _ in manager.stream_weights(bucket_bytes=4096):
        pass


def enter_phases(manager: PhaseManager) -> None:
    with manager.phase("rollout"), manager.phase("logprob"):
        pass
    manager.enter("train").wait()


def close(manager: PhaseManager) -> None:
    manager.close()


def release(manager: PhaseManager) -> None:
    manager.onload()
    manager.release_host_memory()


# Interrupted calls, and whether everything is away when it begins.
WORK: dict[str, tuple[Callable[[PhaseManager], None], bool]] = {
    "offload": (offload, False),
    "offload behind": (offload_behind, False),
    "onload": (onload, True),
    "onload behind": (onload_behind, True),
    "use": (use_what_arrives, True),
    "stream": (stream, True),
    "phases": (enter_phases, False),
    "close": (close, True),
    "release": (release, True),
}
DEVICES: dict[str, Callable[[], CopyStreams | None]] = {
    "at once": lambda: None,
    "late": LateStreams,
    "delayed": DelayedCopies,
}


def this_does_not_hang() -> None:
    """Unless it is called again, the tests end soon, with a list of what all threads do."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """See ``this_does_not_hang``."""
    this_does_not_hang()
    yield
    faulthandler.cancel_dump_traceback_later()


def try_each_on(
    scene: Scene,
    name: str,
    printed: list[str],
    choose: Callable[[list[Place]], list[Place]],
    where: frozenset[str] = MOVING,
    kind: str = "line",
) -> None:
    work, is_away = WORK[name]

    def prepare() -> None:
        this_does_not_hang()
        if is_away:
            scene.manager.offload()

    try_each(lambda: work(scene.manager), lambda: scene.problems() + drained(printed), choose, where, kind, prepare)
    scene.close()


def every_seventh(found: list[Place]) -> list[Place]:
    """The first event of some lines; of others in the other tests."""
    firsts = some_of_each_line(found, 1)
    return firsts[len(firsts) % 7 :: 7]


@pytest.mark.slow_except("offload")
@pytest.mark.parametrize("name", WORK)
def test_every_byte_comes_back(name: str, printed: list[str]) -> None:
    try_each_on(Scene(), name, printed, every_seventh)


@pytest.mark.slow_except("late")
@pytest.mark.parametrize("device", ["late", "delayed"])
def test_every_byte_comes_back_from_a_device_with_streams(device: str, printed: list[str]) -> None:
    try_each_on(Scene(DEVICES[device]()), "onload behind", printed, every_seventh)


def test_gradients_that_an_offload_would_drop_are_there(printed: list[str]) -> None:
    """Or were dropped, where it came to its end."""
    scene = Scene(grads="drop")
    gradients = {name: p.grad for name, p in scene.model.named_parameters() if p.grad is not None}
    assert gradients == {}  # by the offload of the scene
    work = files("phases/transit.py", "phases/gradients.py")

    def count() -> int:
        scene.model(scene.batch).backward()
        return sum(p.grad is not None for p in scene.model.parameters())

    number = count()
    passed = places(work, lambda: scene.manager.offload())
    scene.manager.onload()
    for place in some_of_each_line(passed, 1)[::3]:
        assert count() == number
        Interrupt(place.nth, work).during(lambda: scene.manager.offload())
        gc.collect()
        left = sum(p.grad is not None for p in scene.model.parameters())
        away = scene.manager.where("params").value
        assert left == number if away == "device" else left == 0, str(place)
        scene.manager.onload()
    scene.close()
    assert not printed


def test_a_phase_that_was_interrupted_is_no_phase_around_later_ones(printed: list[str]) -> None:
    scene = Scene()
    where = files("phases/manager.py")

    def enter() -> None:
        with scene.manager.phase("rollout"):
            pass

    for place in places(where, enter):
        Interrupt(place.nth, where).during(enter)
        gc.collect()
        scene.manager.enter("train").wait()
        with scene.manager.phase("logprob"):
            pass
        assert scene.manager.phase_now is not None and scene.manager.phase_now.value == "logprob", str(place)
    assert scene.problems() == [] and not printed
    scene.close()


def test_nothing_of_a_model_keeps_what_an_interrupted_offload_put_there() -> None:
    scene = Scene()
    where = files("phases/guarding/*.py")
    owner = next(scene.model.parameters())
    for place in some_of_each_line(places(where, lambda: scene.manager.offload()), 1)[::4]:
        scene.manager.onload()
        Interrupt(place.nth, where).during(lambda: scene.manager.offload())
        gc.collect()
        scene.manager.onload()
        hooks = [hook for module in scene.model.modules() for hook in module._forward_pre_hooks.values()]
        methods = [name for module in scene.model.modules() for name in vars(module) if callable(vars(module)[name])]
        assert not hooks and not methods and not owner._backward_hooks, str(place)
        assert "step" not in vars(scene.optimizer)
        assert nn.parallel.DistributedDataParallel.forward.__module__.startswith("torch.")
        scene.manager.offload()
    scene.manager.onload()
    scene.close()


def test_real_signals_at_any_time(printed: list[str]) -> None:
    raised = run_through_a_storm(0.8, 0.02)
    assert not ours(printed), raised


def run_through_a_storm(
    seconds: float, gap: float, error: type[BaseException] = KeyboardInterrupt, device: str = "cpu"
) -> int:
    """All kinds of work, in turn. Returns how often it was interrupted."""
    scene = Scene(device=device)
    end, raised = time.monotonic() + seconds, 0
    for _ in range(3):  # a signal may come where its error is caught
        try:
            with storm(gap, error):
                while time.monotonic() < end:
                    this_does_not_hang()
                    for work, _ in WORK.values():
                        try:
                            work(scene.manager)
                        except error:
                            raised += 1
                        except Exception as other:
                            if not is_in_threading(other, error):
                                raise
        except error:
            pass
    torch.set_grad_enabled(True)  # a ``no_grad`` that is interrupted as it ends leaves autograd off
    assert scene.problems() == []
    scene.close()
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("gap", [0.1, 0.02, 0.005])
def test_real_signals_for_long(gap: float, error: type[BaseException], printed: list[str]) -> None:
    run_through_a_storm(20, gap, error)
    assert not ours(printed)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WORK)
def test_every_line(name: str, device: str, printed: list[str]) -> None:
    try_each_on(Scene(DEVICES[device]()), name, printed, lambda found: some_of_each_line(found, 2), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_between_any_two_bytecodes(name: str, printed: list[str]) -> None:
    try_each_on(Scene(), name, printed, lambda found: some_of_each_line(found, 4)[::2], MOVING, "opcode")
