"""What no exception of a signal, or of a trace function, leaves half done: locks, transactions, latches, switches."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxoffload.gc_pause import gc_paused
from fxoffload.phases.moving.worker import Worker
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.host_memory.ledger import Booking, Ledger
from fxoffload.runtime.switches import without_grad
from fxoffload.runtime.transactions import Latch, transaction
from fxoffload.runtime.weak_bag import WeakBag

from ..interrupts import Interrupt, files, places

HERE = frozenset([__file__])
CORE = files("runtime/transactions.py", "runtime/fork_safe_lock.py") | HERE


def is_free(lock: ForkSafeRLock) -> bool:
    """For another thread."""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(timeout=5.0))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found == [True]


class Account:
    """Two numbers that are one: ``total`` is the truth."""

    def __init__(self) -> None:
        self._lock = ForkSafeRLock()
        self._torn = False
        self.total, self.double = 0, 0
        self.num_mended = 0

    @transaction
    def add(self, amount: int) -> None:
        self.total += amount
        self.double += amount
        self._add_to_double(amount)

    @transaction
    def _add_to_double(self, amount: int) -> None:
        self.double += amount

    def _mend(self) -> None:
        self.num_mended += 1
        self.double = 2 * self.total


@pytest.mark.parametrize("kind", ["line", "opcode"])
def test_a_transaction_is_done_or_undone(kind: str) -> None:
    number = len(places(CORE, lambda: Account().add(3), kind))
    assert number > 20
    for nth in range(1, number + 1):
        account = Account()
        interrupt = Interrupt(nth, CORE, kind=kind)
        interrupt.during(lambda account=account: account.add(3))
        if interrupt.at is None:
            continue  # __init__ took fewer events
        account.add(0)
        assert (account.double, account.total) in ((0, 0), (6, 3)), str(interrupt.at)
        assert not account._torn and is_free(account._lock), str(interrupt.at)


def test_who_comes_next_mends_what_could_not_be_mended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account()
    monkeypatch.setattr(account, "_add_to_double", lambda amount: 1 / 0)
    mend = account._mend
    monkeypatch.setattr(account, "_mend", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        account.add(3)
    assert is_free(account._lock)
    with pytest.raises(ZeroDivisionError):
        account.add(0)  # says why it cannot be done
    monkeypatch.undo()
    account._mend = mend  # type: ignore[method-assign]
    account.add(1)
    assert (account.total, account.double, account.num_mended) == (4, 8, 1)


def test_what_goes_well_is_not_mended() -> None:
    account = Account()
    account.add(1)
    account.add(1)
    assert (account.double, account.num_mended) == (4, 0)


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def alarm() -> Iterator[Callable[[float], object]]:
    """Sets when a real signal raises."""
    before = signal.signal(signal.SIGALRM, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_real_signals_leave_no_lock_held(alarm: Callable[[float], object]) -> None:
    chooser = random.Random(0)
    for _ in range(100):
        lock = ForkSafeRLock()
        try:
            alarm(chooser.uniform(2e-4, 1e-3))
            while True:
                with lock:
                    for _ in range(20):
                        pass
        except KeyboardInterrupt:
            pass
        assert is_free(lock)


@pytest.mark.parametrize("kind", ["line", "opcode"])
def test_a_function_that_is_locked_lets_go(kind: str) -> None:
    lock = ForkSafeRLock()

    @locked(lambda: lock)
    def work() -> int:
        return 3

    for place in places(CORE, work, kind):
        Interrupt(place.nth, CORE, kind=kind).during(work)
        assert is_free(lock), str(place)


class TestLatch:
    def test_all_that_wait_go_on(self) -> None:
        latch, went = Latch(), []
        threads = [threading.Thread(target=lambda: went.append(latch.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert not latch.wait(0.01) and not went
        began = time.monotonic()
        latch.open()
        for thread in threads:
            thread.join()
        assert went == [True] * 4 and time.monotonic() - began < 0.9
        assert latch.wait()

    def test_one_that_is_interrupted_holds_nobody_up(self, alarm: Callable[[float], object]) -> None:
        latch = Latch()
        for _ in range(50):
            # Within: on a busy machine the signal comes before the next line.
            with pytest.raises(KeyboardInterrupt):
                alarm(2e-4)
                latch.wait()
        opener = threading.Thread(target=latch.open)
        opener.start()
        opener.join(5)
        assert not opener.is_alive() and latch.wait(1)


def test_a_bag_knows_what_is_alive() -> None:
    bag: WeakBag[Account] = WeakBag()
    first, second = Account(), Account()
    bag.add(first)
    bag.add(second)
    del first
    assert list(bag) == [second]
    bag.add(third := Account())
    assert list(bag) == [second, third] and len(bag._known) == 2


class TestSwitches:
    """Of the process or the thread: as they were, wherever an exception came, once its frames are gone."""

    @pytest.mark.parametrize("kind", ["line", "opcode"])
    def test_the_collector(self, kind: str) -> None:
        where = files("gc_pause.py", "runtime/fork_safe_lock.py") | HERE

        def pause() -> None:
            with gc_paused():
                pass

        assert gc.isenabled()
        for place in places(where, pause, kind):
            Interrupt(place.nth, where, kind=kind).during(pause)
            assert gc.isenabled(), str(place)
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled()

    @pytest.mark.parametrize("kind", ["line", "opcode"])
    def test_autograd(self, kind: str) -> None:
        where = files("runtime/switches.py") | HERE
        work = without_grad(lambda: torch.is_grad_enabled())
        assert work() is False
        for place in places(where, work, kind):
            Interrupt(place.nth, where, kind=kind).during(work)
            assert torch.is_grad_enabled(), str(place)


class TestWorker:
    def test_a_job_is_queued_or_not(self) -> None:
        where = files("phases/moving/worker.py")
        worker = Worker("a-test")
        done: list[int] = []
        for place in places(where, lambda: worker.submit(lambda: done.append(0))):
            Interrupt(place.nth, where).during(lambda place=place: worker.submit(lambda: done.append(place.nth)))
            worker.drain()
            assert done.count(place.nth) <= 1
            assert is_free(worker._lock)
        for place in places(where, worker.drain):
            Interrupt(place.nth, where).during(worker.drain)
            worker.drain()
        worker.stop()

    def test_one_that_was_interrupted_as_it_ended_goes_on(self) -> None:
        where = files("phases/moving/worker.py")
        worker = Worker("a-test")
        worker.drain()
        worker.submit(lambda: None)
        for place in places(where, worker.stop):
            order: list[int] = []
            worker.submit(lambda: time.sleep(0.002))
            Interrupt(place.nth, where).during(worker.stop)
            for number in range(3):
                worker.submit(lambda number=number, order=order: order.append(number))
            worker.drain()
            assert order == [0, 1, 2], str(place)
        worker.stop()

    def test_what_an_exception_in_its_thread_cuts_short_has_failed(self) -> None:
        """At any line of the thread: who waits for the job is told, and later jobs run."""
        where = files("phases/moving/worker.py")
        told: list[str] = []

        def until_told() -> None:
            end = time.monotonic() + 10
            while not told and time.monotonic() < end:
                time.sleep(0.0005)

        for nth in range(1, 40):
            worker = Worker("a-test")
            run = Interrupt(nth, where)
            # The thread of a worker traces itself in the middle of a job: from there on its lines count.
            worker.submit(lambda run=run: _trace_from_here(run))
            told.clear()
            worker.submit(lambda: told.append("done"), lambda error: told.append("failed"))
            until_told()
            reached = Latch()
            worker.submit(reached.open, lambda error, reached=reached: reached.open())
            assert reached.wait(10), nth
            assert told in (["done"], ["failed"], ["done", "failed"]), (nth, told)
            worker.stop()


def _trace_from_here(interrupt: Interrupt) -> None:
    """Of the thread that calls it."""
    import sys

    frame = sys._getframe(1)
    seen = [0]

    def trace(frame: object, event: str, arg: object) -> object:
        if event == "line" and frame.f_code.co_filename in interrupt._files:  # type: ignore[attr-defined]
            seen[0] += 1
            if seen[0] == interrupt._nth:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    while frame is not None:
        frame.f_trace = trace  # type: ignore[assignment]
        frame = frame.f_back  # type: ignore[assignment]


def test_bookings_are_whole_and_the_folder_is_not_locked(tmp_path: Path) -> None:
    where = files("runtime/host_memory/ledger.py", "runtime/host_memory/ledger_files.py")
    ledger = Ledger(tmp_path)
    booking, other = Booking(ledger), Booking(ledger)

    def work() -> None:
        booking.grow_to(1 << 20)
        booking.backed(1 << 20)
        other.grow_within(2 << 20)
        other.shrink_to(1 << 20)
        booking.release()
        other.release()

    passed = places(where, work)
    for place in passed[:: max(1, len(passed) // 120)]:
        Interrupt(place.nth, where).during(work)
        assert is_free(ledger._lock), str(place)
        assert ledger.booked_bytes() == booking.nbytes + other.nbytes, str(place)
        began = time.monotonic()
        assert Booking(Ledger(tmp_path)).grow_to(1)
        assert time.monotonic() - began < 1.0, "another process would wait for the folder"
        booking.release()
        other.release()
        assert ledger.booked_bytes() == 0
