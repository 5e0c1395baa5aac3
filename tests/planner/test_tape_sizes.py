"""Plans for steps over several graphs whose sizes vary from call to call, on the CPU."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import session, tape_plan
from fxoffload.runtime import chains
from fxoffload.runtime.engine import engine_for
from tests.planner import test_tape_plan as tape
from tests.planner.rehearsal import CPU
from tests.planner.test_tape_plan import MODELS, Run, in_between, moved_by, new_plans, options
from tests.support import Block, Stack, assert_equal, assert_nothing_held, batch, compile_counts

alone = tape.alone

SHORT, MIDDLE, LONG = 16, 32, 48


def varying(make: Callable[[], nn.Module] = MODELS["stack"], *, dynamic: bool | None = True, **changes: Any) -> Run:
    """A model whose layers are compiled each on its own, for all lengths."""
    model = make()
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fxoffload", dynamic=dynamic, options=options(**changes))
    return Run(model, batch(length=LONG))


def at(run: Run, length: int) -> Run:
    """With a batch of that length."""
    run.x = batch(length, length=length)
    return run


class Plain:
    """What steps of each length do when everything is kept, by the same code."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.known: dict[int, dict[str, Tensor]] = {}

    def at(self, length: int) -> dict[str, Tensor]:
        if length not in self.known:
            with fxoffload.override_policy("keep_all"):
                self.known[length] = at(self.run, length).step()
        return self.known[length]


def moved_at(run: Run, plain: Plain, lengths: Sequence[int]) -> list[int]:
    """Bytes that steps of these lengths offload; each has the effects that it has without."""
    found = []
    for length in lengths:
        expected = plain.at(length)
        at(run, length)
        fxoffload.reset_stats()
        assert_equal(run.step(), expected)
        assert_nothing_held()
        found.append(fxoffload.stats().bytes_offloaded)
    return found


def tell_callers(run: Run, alive: set[Any]) -> None:
    for graph in set(fxoffload.graphs()) - alive:
        tape._tell_callers(run.watch, graph)


def peak_of(run: Run) -> int:
    """The most that was seen when a segment was called."""
    return max(s.live_bytes for s in run.watch.seen)


def planned_lengths() -> list[str]:
    return [p.label.partition("sizes ")[2] for p in new_plans()]


@pytest.mark.parametrize("name", ["stack", "dropout", "two graphs", "collecting", "shared"])
def test_each_length_does_what_its_size_needs(name: str) -> None:
    """Recorded while the lengths vary; then short batches move nothing, and long ones what they must."""
    budget = in_between(name)  # of the length that is called long here
    torch.compiler.reset()
    alive = set(fxoffload.graphs())
    run, plain = varying(MODELS[name], activation_budget=budget), Plain(varying(MODELS[name], policy="keep_all"))
    plain.at(LONG)
    moved_at(run, plain, (LONG,))
    tell_callers(run, alive)
    counts = compile_counts()
    moved_at(run, plain, (SHORT, MIDDLE))
    assert len(new_plans()) == 1
    lengths = (LONG, SHORT, 64, MIDDLE, LONG, 64, SHORT)
    moved = dict(zip(lengths, moved_at(run, plain, lengths), strict=True))
    assert moved[SHORT] == 0 < moved[LONG] < moved[64]
    assert compile_counts() == counts
    assert planned_lengths() == [f"2, {n}" for n in (MIDDLE, LONG, SHORT, 64)]
    # Bytes at each point, where the plan is for just these sizes; 64 is more than the budget holds, so it is not asked.
    for length in (LONG, SHORT, MIDDLE):
        at(run, length).step()
        assert peak_of(run) <= budget
    with mock.patch.object(tape_plan.TapePlanning, "describe", tape.tape_plan.TapePlanning.describe):
        pass
