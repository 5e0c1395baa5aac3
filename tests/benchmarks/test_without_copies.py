"""What collectives are compared with: steps of a plan that move nothing, and compute as much again as with copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

import fxoffload
from benchmarks.offload import without_copies
from fxoffload.compiler import tape_plan
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.variant import Variants
from tests.planner.test_tape_plan import MODELS, recorded
from tests.support import assert_equal


@contextmanager
def variants_that_ran() -> Iterator[list[int]]:
    """By call of a forward; 0: as compiled, not told."""
    ran: list[int] = []
    in_order = Variants.in_order

    def watched(variants: Variants, choice: Any) -> Any:
        ran.append(choice.variant)
        return in_order(variants, choice)

    with mock.patch.object(Variants, "in_order", watched):
        yield ran


def test_calls_of_a_plan_run_the_same_variants_and_move_nothing() -> None:
    generator = random.Random(0)
    plain = recorded(MODELS["stack"], policy="keep_all").steps(1)[0]

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
        run = recorded(MODELS["stack"], steps=3, activation_budget="1GiB")
        found = {}
        ways = {"plan": nullcontext, "none": without_copies, "plan again": nullcontext}
        for name, context in ways.items():
            fxoffload.reset_stats()
            with context(), variants_that_ran() as ran:
                assert_equal(run.step(), plain)
            found[name] = (ran, fxoffload.stats().bytes_offloaded)
    assert found["plan"] == found["plan again"]
    assert found["plan"][1] > 0 == found["none"][1]
    assert found["none"][0] == found["plan"][0] != []
    assert any(found["none"][0])


def test_graphs_without_a_plan_keep_everything_too() -> None:
    run = recorded(MODELS["stack"], policy="offload_all")
    fxoffload.reset_stats()
    with without_copies():
        run.step()
    assert fxoffload.stats().bytes_offloaded == 0
    run.step()
    assert fxoffload.stats().bytes_offloaded > 0
