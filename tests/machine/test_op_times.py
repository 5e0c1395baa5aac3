"""Times of operators on disk: measured once, the same for all ranks of a machine, and never trusted when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fxoffload.machine import cache, op_times
from fxoffload.machine.devices import Identity
from fxoffload.machine.op_times import Outcomes, forget, path_of, times_of

GPU = Identity("Test GPU", "cuda", "1.0", "2.13")
OTHER = Identity("Other GPU", "cuda", "1.0", "2.13")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXOFFLOAD_CACHE_DIR", str(tmp_path))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    another_process()
    return tmp_path


def another_process() -> None:
    """Which knows nothing yet."""
    op_times._known.clear()


class Measure:
    def __init__(self, outcome: float | str = 1.5) -> None:
        self.outcome = outcome
        self.asked: list[list[str]] = []

    def __call__(self, keys: list[str]) -> Outcomes:
        self.asked.append(keys)
        return dict.fromkeys(keys, self.outcome)


def refuses(keys: list[str]) -> Outcomes:
    raise AssertionError(f"expected {keys} to be kept")


def test_measured_once_and_then_kept() -> None:
    measure = Measure()
    assert times_of(GPU, ["a", "b", "a"], measure).ms == {"a": 1.5, "b": 1.5}
    assert measure.asked == [["a", "b"]]
    another_process()
    assert times_of(GPU, ["b"], refuses).ms == {"b": 1.5}
    more = Measure(2.5)
    assert times_of(GPU, ["b", "c"], more).ms == {"b": 1.5, "c": 2.5}
    assert more.asked == [["c"]]
    another_process()
    assert times_of(GPU, ["a", "b", "c"], refuses).ms == {"a": 1.5, "b": 1.5, "c": 2.5}


def test_each_device_has_its_own() -> None:
    times_of(GPU, ["a"], Measure())
    assert times_of(OTHER, ["a"], Measure(9.0)).ms == {"a": 9.0}
    assert path_of(GPU) != path_of(OTHER)


def test_dropped_where_the_profile_is_measured_again() -> None:
    times_of(GPU, ["a"], Measure())
    forget(GPU)
    assert not path_of(GPU).exists()
    assert times_of(GPU, ["a"], Measure(3.0)).ms == {"a": 3.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 99, "ops": {"a": 1.0}}',
        '{"schema": 1, "ops": {"a": -1, "b": "x"}}',
        "\xff",
        "[" * 9999,
    ],
)
def test_a_damaged_file_is_measured_again(text: str) -> None:
    path_of(GPU).write_text(text, encoding="latin-1")
    assert times_of(GPU, ["a", "b"], Measure()).ms == {"a": 1.5, "b": 1.5}
    another_process()
    assert times_of(GPU, ["a", "b"], refuses).ms == {"a": 1.5, "b": 1.5}


def test_a_single_process_tries_again_what_failed() -> None:
    found = times_of(GPU, ["a"], Measure("there was no time left"))
    assert (found.ms, found.reasons) == ({}, {"there was no time left": 1})
    # Not in this process: its plans would rest on other numbers from then on.
    assert times_of(GPU, ["a"], refuses).ms == {}
    another_process()
    assert times_of(GPU, ["a"], Measure()).ms == {"a": 1.5}


def test_no_folder_to_write_to(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXOFFLOAD_CACHE_DIR", str(folder / "file" / "below"))
        assert times_of(GPU, ["a"], Measure()).ms == {"a": 1.5}
        assert times_of(GPU, ["a"], refuses).ms == {"a": 1.5}
        another_process()
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        found = times_of(GPU, ["a"], refuses)
        assert (found.ms, found.reasons) == ({}, {"the ranks cannot share times": 1})


class TestRanks:
    """Of one program: each knows what the first one found, no more and no less."""

    @pytest.fixture(autouse=True)
    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("WORLD_SIZE", "2")

    @pytest.mark.parametrize("outcome", [1.5, "the device ran out of memory"])
    def test_the_first_one_measures(self, outcome: float | str) -> None:
        first = times_of(GPU, ["a"], Measure(outcome))
        another_process()
        assert times_of(GPU, ["a"], refuses) == first

    def test_a_failure_holds_for_an_hour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times_of(GPU, ["a"], Measure("the device ran out of memory"))
        another_process()
        now = time.time()
        monkeypatch.setattr(op_times.time, "time", lambda: now + 3601)
        assert times_of(GPU, ["a"], Measure()).ms == {"a": 1.5}

    def test_on_several_machines_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times_of(GPU, ["a"], Measure())
        another_process()
        monkeypatch.setenv("WORLD_SIZE", "4")
        found = times_of(GPU, ["a"], refuses)
        assert (found.ms, found.reasons) == ({}, {"ranks on several machines share no times": 1})


def test_a_rank_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(op_times, "_PATIENCE_S", 0.1)
    with cache.locked(GPU) as is_locked:
        assert is_locked
        found = times_of(GPU, ["a"], refuses)
    assert (found.ms, found.reasons) == ({}, {"the ranks cannot share times": 1})


RANK = """
import json, os, random, sys, time
from fxoffload.machine.devices import Identity
from fxoffload.machine.op_times import times_of

def measure(keys):
    time.sleep(0.2)
    return {k: "no room" if k == "b" else random.uniform(1, 2) for k in keys}

found = times_of(Identity("Test GPU", "cuda", "1.0", "2.13"), ["a", "b", "c"], measure)
print(json.dumps([found.ms, found.reasons]))
"""


@pytest.mark.slow
def test_ranks_that_ask_at_the_same_time_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = [subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert first == second
    assert first[0].keys() == {"a", "c"} and first[1] == {"no room": 1}


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "_MOST_ENTRIES", 2)
    check: Callable[[], list[str]] = lambda: list(json.loads(path_of(GPU).read_text())["ops"])  # noqa: E731
    times_of(GPU, ["a", "b"], Measure())
    times_of(GPU, ["c"], Measure())
    assert check() == ["b", "c"]
