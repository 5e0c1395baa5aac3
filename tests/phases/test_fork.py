"""A process that is forked while something is away, or on its way: uses raise, and nothing hangs."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fxoffload.phases import PhaseManager
from fxoffload.phases.guarding import sentinel
from fxoffload.phases.moving.worker import Worker
from fxoffload.runtime import fork_safe_lock
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock

from .phase_support import make, rehearse, train

SECONDS = 20.0


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` gave or raised in a forked child; "hung" if it did not end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = repr(work())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    end = time.monotonic() + SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            return "hung"
        time.sleep(0.005)
    found = os.read(read, 10_000).decode()
    os.close(read)
    return found


@pytest.fixture
def manager() -> Iterator[PhaseManager]:
    model, optimizer = make()
    train(model, optimizer, 0)
    made = rehearse(model, optimizer)
    made._transit._lock = ForkSafeRLock()  # type: ignore[assignment]
    yield made
    made.onload()


class Held:
    """Another thread holds a lock while this block runs."""

    def __init__(self, lock: ForkSafeRLock) -> None:
        self._lock, self._taken, self._enough = lock, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._lock:
            self._taken.set()
            self._enough.wait()

    def __enter__(self) -> None:
        self._thread.start()
        self._taken.wait()

    def __exit__(self, *exception: object) -> None:
        self._enough.set()
        self._thread.join()


class TestLock:
    def test_what_another_thread_held_is_free_in_the_child(self) -> None:
        lock = ForkSafeRLock()
        with Held(lock):
            assert not lock.acquire(blocking=False)
            assert in_child(lambda: lock.acquire(timeout=5)) == "True"
        assert lock.acquire(blocking=False)

    def test_what_the_forking_thread_held_it_still_holds(self) -> None:
        lock = ForkSafeRLock()

        def work() -> tuple[bool, bool]:
            found: list[bool] = []

            def attempt() -> None:
                found.append(lock.acquire(blocking=False))

            def asked() -> None:
                thread = threading.Thread(target=attempt)
                thread.start()
                thread.join()

            asked()
            lock.release()
            lock.release()
            asked()
            return found[0], found[1]

        with lock, lock:
            assert in_child(work) == "(False, True)"
            assert lock.is_mine()
        assert not lock.is_mine()

    def test_it_excludes_threads(self) -> None:
        lock, total = ForkSafeRLock(), [0]

        def add() -> None:
            for _ in range(300):
                with lock, lock:
                    before = total[0]
                    time.sleep(0)
                    total[0] = before + 1

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert total == [1200] and not lock.is_mine()

    def test_only_the_owner_releases(self) -> None:
        lock = ForkSafeRLock()
        with Held(lock), pytest.raises(RuntimeError):
            lock.release()

    def test_locks_that_are_gone_are_not_kept(self) -> None:
        for _ in range(3):
            ForkSafeRLock()
        lock = ForkSafeRLock()
        assert list(fork_safe_lock._LOCKS)[-1] is lock
        assert len(fork_safe_lock._LOCKS._known) == len(list(fork_safe_lock._LOCKS))


class TestTensors:
    @pytest.mark.parametrize("held", ["nothing", "sentinel", "transit"])
    def test_what_is_away_raises(self, manager: PhaseManager, held: str) -> None:
        manager.offload()
        weight = manager.models[""].get_parameter("first.weight")
        locks = {"nothing": ForkSafeRLock(), "sentinel": sentinel._LOCK, "transit": manager._transit._lock}
        with Held(locks[held]):  # type: ignore[arg-type]
            found = in_child(lambda: weight + 1)
        assert found.startswith("OffloadedError: ") and "when this process was forked" in found, found
        assert "first.weight (2.2 KiB of the params)" in found

    def test_what_was_leaving_raises(self, manager: PhaseManager, monkeypatch: pytest.MonkeyPatch) -> None:
        blocked = threading.Event()
        take = manager.image.take
        monkeypatch.setattr(manager.image, "take", lambda nbytes: blocked.wait() and take(nbytes))
        handle = manager.offload(wait=False)
        weight = manager.models[""].get_parameter("first.weight")
        try:
            found = in_child(lambda: weight.clone())
        finally:
            blocked.set()
        assert found.startswith("OffloadedError: clone needs "), found
        handle.wait()

    def test_what_is_at_home_works(self, manager: PhaseManager) -> None:
        manager.offload("optimizer")
        weight = manager.models[""].get_parameter("first.weight")
        assert in_child(lambda: float((weight * 0).sum())) == "0.0"
        manager.onload()
        optimizer = manager.optimizers[0]
        assert in_child(lambda: len([t + 1 for s in optimizer.state.values() for t in s.values()])) != "hung"

    def test_the_parent_notices_nothing(self, manager: PhaseManager) -> None:
        weight = manager.models[""].get_parameter("first.weight")
        before = weight.detach().clone()
        manager.offload()
        in_child(lambda: weight + 1)
        manager.onload()
        assert torch.equal(weight, before)


class TestManager:
    """Inherited objects say so, whether the parent's threads were idle or at work."""

    CALLS: dict[str, Callable[[PhaseManager], object]] = {  # noqa: RUF012
        "offload": lambda manager: manager.offload("params"),
        "offload_async": lambda manager: manager.offload("params", wait=False),
        "onload": lambda manager: manager.onload("optimizer"),
        "rollout": lambda manager: manager.enter("rollout"),
        "train": lambda manager: manager.enter("train").wait(),
        "drain": lambda manager: manager.drain(),
    }

    @pytest.mark.parametrize("call", CALLS)
    def test_while_the_optimizer_leaves(
        self, manager: PhaseManager, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        blocked = threading.Event()
        take = manager.image.take
        monkeypatch.setattr(manager.image, "take", lambda nbytes: blocked.wait() and take(nbytes))
        handle = manager.offload("optimizer", wait=False)
        try:
            found = in_child(lambda: self.CALLS[call](manager))
        finally:
            blocked.set()
        assert found.startswith("RuntimeError: expected ") and "this process was forked" in found, found
        handle.wait()

    @pytest.mark.parametrize("call", ["offload", "offload_async", "rollout"])
    def test_before_anything_moved(self, manager: PhaseManager, call: str) -> None:
        found = in_child(lambda: self.CALLS[call](manager))
        assert found.startswith("RuntimeError: expected ") and "this process was forked" in found, found
        manager.offload("params")

    def test_a_handle_of_the_parent(self, manager: PhaseManager, monkeypatch: pytest.MonkeyPatch) -> None:
        blocked = threading.Event()
        take = manager.image.take
        monkeypatch.setattr(manager.image, "take", lambda nbytes: blocked.wait() and take(nbytes))
        handle = manager.offload("optimizer", wait=False)
        try:
            found = in_child(lambda: handle.wait())
        finally:
            blocked.set()
        assert found.startswith("RuntimeError: expected wait() for the offload of optimizer"), found
        handle.wait()
        assert in_child(lambda: handle.wait().done()) == "True", "what was done is done in the child too"

    def test_a_manager_of_the_child_works(self) -> None:
        def work() -> bool:
            model, optimizer = make()
            before = [p.detach().clone() for p in model.parameters()]
            with rehearse(model, optimizer) as own:
                own.enter("rollout")
            return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))

        with Held(sentinel._LOCK):
            assert in_child(work) == "True"


class TestWorker:
    def test_a_job_that_raises_does_not_end_it(self, caplog: pytest.LogCaptureFixture) -> None:
        worker = Worker("a-test")

        def broken() -> None:
            raise SystemExit("broken")

        ran: list[int] = []
        with caplog.at_level(logging.ERROR):
            worker.submit(broken)
            worker.submit(lambda: ran.append(1))
            drained = threading.Thread(target=worker.drain, daemon=True)
            drained.start()
            drained.join(SECONDS)
        assert not drained.is_alive() and ran == [1]
        assert "a-test" in caplog.text and "SystemExit: broken" in caplog.text
        worker.stop()

    def test_in_a_child_it_refuses_and_stops(self) -> None:
        worker = Worker("a-test")
        worker.submit(lambda: None)
        with Held(worker._lock):
            assert "this process was forked" in in_child(lambda: worker.submit(print))
            assert "this process was forked" in in_child(worker.drain)
            assert in_child(worker.stop) == "None"
        worker.stop()
