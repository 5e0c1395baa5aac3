"""The cyclic collector rests, and goes on afterwards."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from fxoffload.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is enabled


def test_pauses_of_two_threads_overlap() -> None:
    gc.enable()
    begun, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            begun.set()
            may_end.wait(60)

    other = threading.Thread(target=pause)
    with gc_paused():
        other.start()
        assert begun.wait(60)
    assert not gc.isenabled()
    may_end.set()
    other.join()
    assert gc.isenabled()


def test_a_forked_child_collects_again() -> None:
    gc.enable()
    with gc_paused():
        pid = os.fork()
        if not pid:
            with gc_paused():
                pass
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert gc.isenabled()
