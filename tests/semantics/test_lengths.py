"""Training on batches of many lengths leaves nothing behind in the process, step by step. A CPU rehearsal of
``tests/gpu/test_lengths.py``, by the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fxoffload
from benchmarks.process_memory import MIB, ProcessMemory, table
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.save_order import SaveOrder
from fxoffload.runtime.transfer import Group
from tests.gpu import lengths_run
from tests.gpu.lengths_run import Found, Settings, measure, measure_alone
from tests.planner.rehearsal import CPU

STEPS, DEPTH = 60, 3
OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1024, "profile": "h200"}


def settings(**options: Any) -> Settings:
    return Settings(
        "fxoffload",
        device="cpu",
        dtype="float32",
        options={**OPTIONS, **options},
        width=32,
        heads=2,
        depth=DEPTH,
        shortest=33,
        longest=256,
        warm_up=24,
        steps=STEPS,
    )


def check(found: Found) -> None:
    """Not one tracked Python object for each forward call of a layer, nor one block for each call; nothing in the
    arena, next to nothing in native code. Some blocks come and go with plans (183 in 60 steps, 31 in 240)."""
    shown = table({"new lengths": found.new, "again": found.again})
    assert found.num_graphs == 1
    assert found.new.arena == found.again.arena == 0, shown
    assert found.again.objects < STEPS * DEPTH, shown
    assert found.again.python_blocks < 2 * STEPS * DEPTH, shown
    assert found.again.malloc_used < 4 * MIB, shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": "keep_all"}, id="keep_all"),
        pytest.param({"policy": "offload_all"}, id="offload_all"),
        pytest.param({}, id="auto", marks=pytest.mark.slow),
        pytest.param({"activation_budget": "1MiB"}, id="budget"),
    ],
)
def test_steps_of_many_lengths_leave_nothing_behind(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU: plans are made on a thread.
    monkeypatch.setattr(engine_for(CPU).calls.plans, "in_background", True)
    found = measure(settings(**options))
    check(found)
    moves = options.get("policy") == "offload_all" or "activation_budget" in options
    assert (found.bytes_offloaded > 0) is moves or not options
    assert fxoffload.stats().num_groups_on_tape == 0


@pytest.mark.slow
def test_one_object_for_each_call_is_seen() -> None:
    """What the test above would say of a leak: a save order that remembers what went by."""
    kept: list[list[object]] = []
    push = SaveOrder.push

    def remembers(self: SaveOrder, group: Group) -> None:
        kept.append([group.windows])
        push(self, group)

    with mock.patch.object(SaveOrder, "push", remembers):
        found = measure(settings(policy="offload_all"))
    with pytest.raises(AssertionError, match="objects"):
        check(found)
    assert kept


@pytest.mark.slow
def test_a_process_of_its_own_measures_the_same_run(tmp_path: Path) -> None:
    asked = settings(policy="offload_all")
    here, there = measure(asked), measure_alone(asked, tmp_path)
    check(there)
    assert there.bytes_offloaded == here.bytes_offloaded > 0


def test_memory_is_told_apart_by_kind() -> None:
    """A block of native memory is resident, anonymous and handed out by malloc; objects are counted."""
    ProcessMemory.read()
    before = ProcessMemory.read()
    held = bytearray(b"\1" * (48 * MIB))
    objects = [[i] for i in range(5000)]
    grown = ProcessMemory.read().since(before)
    assert len(held) == 48 * MIB and len(objects) == 5000
    for kind in ("resident", "anonymous", "malloc_used"):
        assert abs(getattr(grown, kind) - 48 * MIB) < 8 * MIB, kind
    # The kernel may take pages of files back meanwhile.
    assert grown.file < 8 * MIB and abs(grown.shared) < 8 * MIB
    assert 5000 <= grown.objects < 5500
    first, second = lengths_run.Settings("inductor").lengths()
    assert not set(first) & set(second) and len(set(second)) == len(second) == 200
