"""``override_policy("keep_all")`` in steps that follow a plan: they move nothing, and compute as much again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.compiler import chain_planning
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.runtime.variant import Variants
from tests.planner import test_chain_planning
from tests.planner.test_chain_planning import LENGTH, MODELS, Paths, Run, loss_of, moved_by, per_layer, recorded
from tests.planner.test_chain_replan import measured, the_plan
from tests.support import Stack, assert_equal, assert_nothing_held, batch

alone = test_chain_planning.alone  # the fixture


def keep() -> Any:
    return fxoffload.override_policy("keep_all")


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


@contextmanager
def plans_with_variants(seed: str, *, some: bool = True) -> Iterator[None]:
    """Plans offload most of their candidates, as nothing else does. Calls run variants at random, or not ``some``."""
    generator = random.Random(seed)

    def decide(planning: Any) -> Schedule:
        ways = planning.chain_search
        if some:
            variants = tuple(generator.choice([None, *ways._variants_by_kind[kind][-2:]]) for kind in ways._kinds)
            planning.choice = ways.with_variants(variants, None)
        step = planning.chain.step
        offload = tuple(bool(c.moved_bytes) and i % 4 > 0 for i, c in enumerate(step.candidates))
        windows = windows_for(step, offload, 1 << 30) or no_windows(step)
        return Schedule(offload, windows, simulate(step, offload, copies=planning.rates, windows=windows))

    with mock.patch.object(chain_planning.ChainPlanning, "run", decide):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "two graphs", "collecting", "shared"])
def test_calls_run_the_variants_of_the_plan_and_move_nothing(name: str) -> None:
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]
    torch.compiler.reset()
    with plans_with_variants(name):
        run = recorded(MODELS[name], steps=3, activation_budget="1GiB")
        found = []
        for context in (nullcontext(), keep(), nullcontext()):
            fxoffload.reset_stats()
            with context, variants_that_run() as ran:
                assert_equal(run.step(), plain)
            assert_nothing_held()
            found.append((ran, fxoffload.stats().bytes_offloaded))
    before, kept, after = found
    assert before == after
    assert before[1] > 0 == kept[1]
    assert before[0] == kept[0] != []


@pytest.mark.slow
def test_nothing_is_compiled_for_it() -> None:
    """Until a step has followed the plan, calls run as they were compiled."""
    with plans_with_variants("stack"):
        run = recorded(MODELS["stack"], activation_budget="1GiB")
        found = []
        for context in (keep(), keep(), nullcontext(), keep()):
            with context, variants_that_run() as ran:
                run.step()
            found.append(ran)
    assert found[:2] == [[], []]
    assert found[2] == found[3] != []


@pytest.mark.slow
def test_first_steps_keep_everything_too() -> None:
    """Under a budget they would offload all that they may."""
    run = recorded(MODELS["stack"], steps=1, activation_budget="1GiB")
    with keep():
        assert moved_by(run) == 0


def test_calls_of_a_step_that_are_kept_leave_the_others_as_they_are() -> None:
    """What others have in flight may stay there as long as the plan says, and be taken back."""
    with plans_with_variants("", some=False):
        run = recorded(MODELS["stack"], steps=3, activation_budget="1GiB")
        moved_by(run)
        planned = fxoffload.stats()
        policy = keep()
        hook = run.model.layers[3].register_forward_pre_hook(lambda *_: policy.__enter__())  # type: ignore[index,union-attr]
        try:
            assert 0 < moved_by(run) < planned.bytes_offloaded
        finally:
            hook.remove()
            policy.__exit__(None, None, None)
    assert fxoffload.stats().bytes_reclaimed > 0


def _leaves_early(run: Run) -> None:
    path, run.model.path = run.model.path, (0, 1)  # type: ignore[assignment]
    run.step()
    run.model.path = path  # type: ignore[assignment]


def _two_microbatches(run: Run) -> None:
    losses = [loss_of(run.model(run.x)) for _ in range(2)]
    while losses:
        losses.pop().backward()


def _validates(run: Run) -> None:
    with torch.no_grad():
        run.model(run.x)
    run.model(run.x)  # dropped


@pytest.mark.slow
@pytest.mark.parametrize("odd", [_leaves_early, _two_microbatches, _validates])
def test_whatever_is_looked_at_the_plan_stays(odd: Callable[[Run], None]) -> None:
    with plans_with_variants("", some=False):
        run = Run(per_layer(Paths(), activation_budget="1GiB"), batch(length=LENGTH))
        run.steps(3)
        planned = moved_by(run)
    shown = len(test_chain_planning.new_plans())
    for _ in range(4):
        with keep():
            odd(run)
            odd(run)
        run.model.zero_grad(set_to_none=True)
        assert moved_by(run) == planned > 0
    assert len(test_chain_planning.new_plans()) == shown


def test_a_reference_may_be_held_while_a_step_follows_the_plan() -> None:
    with plans_with_variants("", some=False):
        run = Run(per_layer(Stack(4), activation_budget="1GiB"), batch(length=LENGTH))
        run.steps(3)
        planned, references = moved_by(run), list[Tensor]()
    for _ in range(4):
        with keep():
            references.append(run.model(run.x))
        assert moved_by(run) == planned > 0
    first = references[0]
    assert all(torch.equal(first, other) for other in references)
    run.model.zero_grad(set_to_none=True)
    loss_of(references.pop()).backward()  # after all others
    assert all(p.grad is not None for p in run.model.parameters())


@pytest.mark.slow
def test_no_try_to_measure_is_spent() -> None:
    with measured(1.0, count=3):
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=3)
        with keep():
            run.steps(20)
        run.steps(6)
        assert the_plan().calibrated is not None


@pytest.mark.slow
@pytest.mark.parametrize("told", ["decisions", "policy"])
def test_graphs_that_were_told_something_of_their_own_run_as_compiled(told: str) -> None:
    alive = set(fxoffload.graphs())
    with plans_with_variants("stack"):
        run = recorded(MODELS["stack"], steps=3, activation_budget="1GiB")
        run.step()
        for graph in set(fxoffload.graphs()) - alive:
            if told == "decisions":
                graph.decisions[graph.saved.candidates[0].name] = False
            else:
                graph.policy = "keep_all"
        with keep(), variants_that_run() as ran:
            run.step()
    assert ran == []
