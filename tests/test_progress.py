"""One line about what takes long, and none about what does not."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import progress
from fxoffload.progress import Work, working
from fxoffload.runtime.host_memory.arena import HeapMemory, HostArena
from tests.runtime.arenas import LARGE, MIB, until


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.02)
    monkeypatch.setenv("FXOFFLOAD_PROGRESS", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.log, "disabled", True)  # whoever runs the tests may have asked for logs


def stderr(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> Stream:
    found = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", found)
    return found


def all_timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_one_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stderr(monkeypatch)
    with working("compiling a graph"), working("planning") as work:
        work.what = "planning 36 layers"
        until(lambda: "\n" in out.getvalue())
        with working("more"):
            pass
    assert out.getvalue() == (
        "fxoffload: compiling a graph: planning 36 layers, 0 s so far (FXOFFLOAD_PROGRESS=0 hides such lines)\n"
    )


def test_a_log_that_is_read_has_the_line_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = stderr(monkeypatch)
    monkeypatch.setattr(progress.log, "disabled", False)
    with caplog.at_level(logging.INFO, "fxoffload"), working("planning"):
        until(lambda: bool(caplog.messages))
    assert caplog.messages == ["fxoffload: planning, 0 s so far (FXOFFLOAD_PROGRESS=0 hides such lines)"]
    assert out.getvalue() == ""


def test_a_terminal_has_a_line_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_RENEWALS_PER_S", 50)
    out = stderr(monkeypatch, is_terminal=True)
    with pytest.raises(ValueError, match="of the work"), working("compiling a graph") as work:
        for what in ("planning", "compiling segments"):
            work.what = what
            until(lambda what=what: f"fxoffload: {what}, 0 s" in out.getvalue())
        raise ValueError("of the work")
    assert re.search(r"fxoffload: compiling segments: \d+\.\d s\n$", out.getvalue())
    written = out.getvalue()
    with working("nothing"):
        pass
    assert out.getvalue() == written


def test_in_the_background_the_line_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stderr(monkeypatch, is_terminal=True)
    with working("planning a step", in_background=True):
        until(lambda: "\n" in out.getvalue())
    assert out.getvalue().startswith("fxoffload: planning a step, 0 s so far") and out.getvalue().count("\n") == 1


def test_what_is_short_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 60.0)
    out, before = stderr(monkeypatch), all_timers()
    with working("planning"):
        assert len(all_timers()) == len(before) + 1
    until(lambda: all_timers() == before)
    assert out.getvalue() == ""


@pytest.mark.parametrize("setting", ["FXOFFLOAD_PROGRESS=0", "FXOFFLOAD_PROGRESS=False", "RANK=1"])
def test_switched_off_or_another_rank(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*setting.split("="))
    before = all_timers()
    with working("planning") as work:
        work.what = "still planning"
        assert all_timers() == before


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words with which works begin."""
    found: list[str] = []

    def begin(board: Any, work: Work) -> None:
        found.append(work.what)

    monkeypatch.setattr(progress._Board, "begin", begin)
    return found


def test_what_is_told_of_a_compilation(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_MEASURED_DEVICE_TYPES", "cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    options: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "profile": "h200"}
    compiled = fxoffload.compile(model, max_slowdown=1.0, **options)
    compiled(torch.ones(4096, 8)).sum().backward()
    first = begun.copy()
    assert first[:2] == ["compiling a graph", "measuring operators"] and "planning 3 layers" in first
    assert first[-3:] == ["compiling the backward", "compiling kernels", "measuring segments"]
    for _ in range(3):
        compiled(torch.ones(4096, 8)).sum().backward()
    assert begun == first  # steps use none of it


def test_who_waits_for_host_memory(begun: list[str]) -> None:
    gate = threading.Event()

    class Slow(HeapMemory):
        def register(self, address: int, nbytes: int) -> None:
            assert gate.wait(20)
            super().register(address, nbytes)

    arena = HostArena(Slow(), LARGE)
    arena.reserve(2 * MIB, LARGE)
    opening = threading.Timer(0.05, gate.set)
    opening.start()
    assert arena.allocate(MIB, LARGE) is not None and arena.wait_until_grown()
    opening.join()
    assert begun == ["pinning host memory"]
    assert arena.allocate(4096, LARGE) is not None and arena.wait_until_grown()
    assert begun == ["pinning host memory"]
