"""``override_policy("keep_all")`` in steps that follow a plan: they move nothing, and compute as much again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import fxoffload
from fxoffload.compiler import tape_plan
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.variant import Variants
from tests.planner.test_tape_plan import MODELS, recorded
from tests.support import assert_equal, assert_nothing_held


@contextmanager
def variants_that_run() -> Iterator[list[int]]:
    """Their numbers, by call of a forward that runs one."""
    ran: list[int] = []
    in_order = Variants.in_order

    def watched(variants: Variants, choice: Any) -> Any:
        ran.append(choice.variant)
        return in_order(variants, choice)

    with mock.patch.object(Variants, "in_order", watched):
        yield ran


@pytest.mark.parametrize("name", ["stack", "two graphs", "collecting", "shared"])
def test_calls_run_the_variants_of_the_plan_and_move_nothing(name: str) -> None:
    generator = random.Random(name)
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]

    def decide(planning: Any) -> Schedule:
        ways = planning.ways
        variants = tuple(generator.choice([None, *ways._drafts[kind][-2:]]) for kind in ways._kinds)
        planning.option = ways.with_variants(variants, None)
        step = planning.chain.step
        offload = tuple(bool(c.moved_bytes) for c in step.candidates)
        windows = no_windows(step)
        return Schedule(offload, windows, simulate(step, offload, copies=planning.rates, windows=windows))

    torch.compiler.reset()
    with mock.patch.object(tape_plan.TapePlanning, "run", decide):
        run = recorded(MODELS[name], steps=3, activation_budget="1GiB")
        found = []
        for context in (nullcontext(), fxoffload.override_policy("keep_all"), nullcontext()):
            fxoffload.reset_stats()
            with context, variants_that_run() as ran:
                assert_equal(run.step(), plain)
            assert_nothing_held()
            found.append((ran, fxoffload.stats().bytes_offloaded))
    before, kept, after = found
    assert before == after
    assert before[1] > 0 == kept[1]
    assert before[0] == kept[0] != []


def test_a_graph_that_was_told_something_of_its_own_runs_as_compiled() -> None:
    """``decisions`` outweigh both the plan and the policy."""
    run = recorded(MODELS["stack"], steps=3, activation_budget="1GiB")
    alive = [g for g in fxoffload.graphs() if g.policy == "auto"]
    with fxoffload.override_policy("keep_all"):
        assert all(g.may_keep() and not g.may_follow() for g in alive)
        alive[-1].decisions["x"] = True
        assert not alive[-1].may_keep()
        alive[-1].decisions.clear()
        alive[-1].policy = "offload_all"
        assert not alive[-1].may_keep()
        alive[-1].policy = "auto"
    assert not any(g.may_keep() for g in alive)
    run.step()
