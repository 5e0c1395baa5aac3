"""Threads during training: the end of the interpreter, and plans one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fxoffload.runtime import background

# Each thread says so in one write: print() writes the end of its line separately, and another thread may come between.
# What still runs when the interpreter ends is ended by it, in the middle of torch's own code.
ENDS = """
import os, sys, threading, time, torch
from fxoffload.runtime import background

begun = threading.Event()

def work(name):
    begun.set()
    while not background.is_ending():
        torch.ones(64).add_(1)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.ones(64).add_(1)
    os.write(1, f"{{name}} ".encode())

for name in ("first", "second"):
    background.{start}(work, name, name=name)
begun.wait()
print("main", flush=True)
{end}
"""


def ended(start: str, end: str = "") -> tuple[int, list[str]]:
    """The exit code, and who came to an end."""
    script = ENDS.format(start=start, end=end)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    return run.returncode, run.stdout.split()


@pytest.mark.slow
def test_the_end_of_the_program_waits_for_what_has_begun() -> None:
    code, (main, *others) = ended("start")
    assert (code, main, sorted(others)) == (0, "main", ["first", "second"])


def test_a_plan_that_has_not_begun_is_not_begun_at_the_end() -> None:
    """And the program ends with the code that it chose. Which of the two comes first is the system's affair."""
    code, (main, *others) = ended("start_planning", end="sys.exit(3)")
    assert (code, main) == (3, "main") and others in (["first"], ["second"])


def test_plans_are_made_one_at_a_time() -> None:
    running, most = [], []

    def plan(number: int) -> None:
        running.append(number)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(number)

    threads = [background.start_planning(plan, i, name=f"plan-{i}") for i in range(5)]
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_a_plan_that_fails_lets_the_next_one_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    done = []
    for plan in (lambda: 1 / 0, lambda: done.append(True)):
        background.start_planning(plan, name="plan").join()
    assert done == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_plans_while_its_parent_does() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def plan() -> None:
        begun.set()
        go_on.wait()

    thread = background.start_planning(plan, name="plan")
    begun.wait()
    pid = os.fork()
    if not pid:
        background.start_planning(lambda: os._exit(7), name="plan").join(10)
        os._exit(1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        go_on.set()
        thread.join()


@pytest.fixture
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def switch_interval_in_a_plan(does: Callable[[], None] = lambda: None) -> float:
    """Of the interpreter, while a plan is made that ``does`` something."""
    found: list[float] = []

    def plan() -> None:
        found.append(sys.getswitchinterval())
        does()

    background.start_planning(plan, name="plan").join()
    return found[0]


def test_a_plan_in_the_making_does_not_keep_the_interpreter_for_long(interval: float) -> None:
    assert switch_interval_in_a_plan() == pytest.approx(background._SWITCH_S)
    assert sys.getswitchinterval() == interval


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_is_as_it_was_behind_a_plan_that_failed(interval: float) -> None:
    def fail() -> None:
        raise RuntimeError("a plan that fails")

    switch_interval_in_a_plan(fail)
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("chosen", [0.02, 1e-5])
def test_what_somebody_else_chose_while_a_plan_was_made_stays(interval: float, chosen: float) -> None:
    switch_interval_in_a_plan(lambda: sys.setswitchinterval(chosen))
    assert sys.getswitchinterval() == pytest.approx(chosen)


def test_a_shorter_one_stays(interval: float) -> None:
    sys.setswitchinterval(1e-6)
    assert switch_interval_in_a_plan() == sys.getswitchinterval() == pytest.approx(1e-6)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_the_one_that_was_there(interval: float) -> None:
    """No plan is made in it."""
    found: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == interval else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert switch_interval_in_a_plan(fork) == pytest.approx(background._SWITCH_S)
    assert found == [0]
    assert sys.getswitchinterval() == interval
