"""Host memory that only the steps before a plan over several graphs needed goes, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.runtime.engine import CopyEngine, engine_for
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory import trim as host_trim
from fxoffload.runtime.host_memory.trim import STEADY_STEPS, HostTrim
from tests.capture import rehearsal_options
from tests.marks import slow
from tests.planner import test_chain_planning
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import MODELS, Run, in_between, moved_by, recorded
from tests.planner.test_chain_replan import measured
from tests.planner.test_chain_sizes import LONG, at, varying
from tests.support import Block, Stack, assert_equal, assert_nothing_held

alone = test_chain_planning.alone  # the fixture

PAGE = 1 << 12
# Two steps are recorded; the next ones follow the plan: one in front of the mark, and those that count. It is told when
# a step begins.
RECORDED, UNTIL_TRIM = 2, 1 + STEADY_STEPS


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> CopyEngine:
    """With chunks of a page, no memory, and nothing known of models of other tests. All goes at once."""
    found = engine_for(CPU)
    found.calls._step = None
    gc.collect()
    found.release_host_memory()
    monkeypatch.setattr(host_trim, "STEP_SHARE", math.inf)
    monkeypatch.setattr(host_arena, "_PAGE", PAGE)
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", PAGE)
    monkeypatch.setattr(found.calls, "_trim", HostTrim(found))
    monkeypatch.setattr(found.calls, "_tracked_graphs", weakref.WeakSet())
    fxoffload.reset_stats()
    return found


def reserved() -> int:
    return fxoffload.stats().host_bytes_reserved


def trimmed() -> int:
    return fxoffload.stats().bytes_host_trimmed


@contextlib.contextmanager
def trims(engine: CopyEngine) -> Iterator[list[int]]:
    """What each trim gave back; none for those that found nothing."""
    found: list[int] = []
    trim = engine.arena.trim

    def spy(*args: object, **kwargs: object) -> int:
        given = trim(*args, **kwargs)  # type: ignore[arg-type]
        found.extend([given] if given else [])
        return given

    with mock.patch.object(engine.arena, "trim", spy):
        yield found


def plain_of(name: str) -> dict[str, Tensor]:
    return recorded(MODELS[name], policy="keep_all").steps(1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", slow("dropout"), "two graphs", slow("collecting"), slow("shared")])
def test_what_only_the_first_steps_needed_goes_and_no_bit_changes(name: str, engine: CopyEngine) -> None:
    budget = in_between(name)
    torch.compiler.reset()
    plain = plain_of(name)
    engine.calls._step = None
    gc.collect()
    engine.release_host_memory()
    fxoffload.reset_stats()
    with trims(engine) as found:
        run = recorded(MODELS[name], activation_budget=budget)
        before = reserved()
        for _ in range(UNTIL_TRIM):
            assert_equal(run.step(), plain)
        assert (reserved(), found) == (before, [])
        assert_equal(run.step(), plain)
        (given,) = found
        assert 0 < given == trimmed() == before - reserved()
        assert engine.arena._booking.nbytes == reserved()
        assert_equal(run.step(), plain)  # finds nothing left
        engine.arena.mark()
        assert_equal(run.step(), plain)
        # What a step needs, in whole chunks.
        assert reserved() - PAGE < engine.arena.highest_bytes <= reserved()
        after, growths = reserved(), fxoffload.stats().num_host_growths
        for _ in range(3 * UNTIL_TRIM):
            assert_equal(run.step(), plain)
        assert (reserved(), fxoffload.stats().num_host_growths, found) == (after, growths, [given])
        assert_nothing_held()


def hungry(run: Run) -> None:
    """A step that takes more: several forwards wait for their backwards, unlike in the plan."""
    waiting = [run.model(run.x).square().mean() for _ in range(4)]
    while waiting:
        waiting.pop().backward()


@pytest.mark.slow
def test_steps_that_keep_what_the_plan_offloads_do_not_count(engine: CopyEngine) -> None:
    """They need no host memory, and the plan does."""
    run = recorded(MODELS["stack"], activation_budget=in_between())
    before = reserved()
    run.steps(UNTIL_TRIM - 1)
    with fxoffload.override_policy("keep_all"):
        run.steps(3 * UNTIL_TRIM)
    assert (trimmed(), reserved()) == (0, before)
    run.steps(UNTIL_TRIM)
    assert (trimmed(), reserved()) == (0, before)
    run.step()
    assert 0 < trimmed() == before - reserved()
    engine.arena.mark()
    run.step()
    assert reserved() - PAGE < engine.arena.highest_bytes <= reserved()


@pytest.mark.slow
def test_what_a_step_needs_that_is_not_the_plan_s_does_not_count(engine: CopyEngine) -> None:
    """Steps are counted anew after it."""
    run = recorded(MODELS["stack"], activation_budget=in_between())
    run.steps(UNTIL_TRIM - 1)
    hungry(run)
    grown = reserved()
    run.steps(UNTIL_TRIM)
    assert (trimmed(), reserved()) == (0, grown)
    run.step()
    assert trimmed() == grown - reserved()
    engine.arena.mark()
    run.step()
    # Memory freed in between lies otherwise: a step may come to need a page less than those that counted.
    assert reserved() - 2 * PAGE < engine.arena.highest_bytes <= reserved()


@pytest.mark.slow
def test_later_growth_stays() -> None:
    run = recorded(MODELS["stack"], activation_budget=in_between())
    run.steps(UNTIL_TRIM + 1)
    small, given = reserved(), trimmed()
    assert given > 0
    hungry(run)
    grown = reserved()
    assert grown > small
    run.steps(4 * UNTIL_TRIM)
    assert (reserved(), trimmed()) == (grown, given)


@pytest.mark.slow
def test_evaluations_and_accumulation_do_not_put_it_off() -> None:
    """A forward without a backward between any two steps; gradients add up over all of them."""
    run = recorded(MODELS["stack"], activation_budget=in_between())
    before = reserved()
    for _ in range(UNTIL_TRIM + 1):
        with torch.no_grad():
            run.model(run.x)
        run.model(run.x).square().mean().backward()
        assert_nothing_held()
    assert 0 < trimmed() == before - reserved()


@pytest.mark.slow
def test_an_exception_puts_it_off() -> None:
    """Steps are counted anew after it, and run as before."""
    failing = False

    def between(i: int, x: Tensor) -> Tensor:
        if failing and i == 2:
            raise RuntimeError("on purpose")
        return x

    budget = in_between()
    plain = plain_of("stack")
    torch.compiler.reset()
    run = recorded(lambda: Stack(5, between=between), activation_budget=budget)
    run.steps(UNTIL_TRIM - 1)
    failing = True
    with pytest.raises(RuntimeError, match="on purpose"):
        run.step()
    failing = False
    gc.collect()
    for _ in range(2):
        assert_equal(run.step(), plain)
    for _ in range(UNTIL_TRIM + 2):
        assert_equal(run.step(), plain)
    assert trimmed() > 0


@pytest.mark.slow
def test_not_before_all_is_measured() -> None:
    """It is planned again and measured once more first."""
    budget = in_between()
    torch.compiler.reset()
    with measured() as time:
        run = recorded(MODELS["stack"], activation_budget=budget)
        steps = 0
        while not time.followers or not time.followers[0].is_settled:
            run.step()
            assert trimmed() == 0
            steps += 1
            assert steps < 30
        assert steps > UNTIL_TRIM
        # The one that found that all is measured follows the plan to the end.
        run.steps(STEADY_STEPS)
        assert trimmed() == 0
        run.step()
        assert trimmed() > 0


@pytest.mark.slow
def test_a_plan_is_not_settled_while_it_is_made_again() -> None:
    """Neither the first clock nor the second one is there meanwhile."""
    with measured() as time:
        found = []
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=3)
        (observer,) = time.followers
        calibration = observer._calibration
        assert calibration is not None
        recalibrate = calibration.recalibrate

        def spy(readings: object) -> None:
            found.append((observer.clock, observer._calibration, observer.is_settled))
            recalibrate(readings)  # type: ignore[arg-type]

        with mock.patch.object(calibration, "recalibrate", spy):
            run.steps(5)
        assert found == [(None, None, False)]
        assert not observer.is_settled
        run.steps(3)
        assert observer.is_settled


@pytest.mark.slow
def test_where_sizes_vary_nothing_goes() -> None:
    run = varying(activation_budget=in_between())
    for _ in range(RECORDED):
        at(run, LONG).step()
    grown = reserved()
    for _ in range(3 * UNTIL_TRIM):
        at(run, LONG).step()
    assert (trimmed(), reserved()) == (0, grown)
    generator = random.Random(3)
    for _ in range(2 * UNTIL_TRIM):
        at(run, generator.randrange(3, LONG)).step()
    assert (trimmed(), reserved()) == (0, grown)
    assert moved_by(at(run, LONG)) > 0


@pytest.mark.slow
def test_nor_beside_another_model_whose_sizes_vary() -> None:
    budget = in_between()
    torch.compiler.reset()
    other = varying(activation_budget=budget)
    at(other, LONG).step()
    run = recorded(MODELS["stack"], activation_budget=budget)
    run.steps(3 * UNTIL_TRIM)
    assert trimmed() == 0
    del other
    test_chain_planning.WATCHES.clear()
    engine_for(CPU).calls._step = None
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.slow
def test_a_model_that_is_one_graph_keeps_what_was_pinned_for_it(engine: CopyEngine) -> None:
    critic = Stack(6, block=CriticBlock)
    compiled = torch.compile(critic, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    x = torch.randn(2, 4, 16)

    def critic_step() -> None:
        critic.zero_grad()
        compiled(x).square().mean().backward()

    critic_step()
    critic_step()
    needed = reserved()
    assert needed > 0
    actor = recorded(MODELS["stack"], activation_budget="1GiB")  # all of it is kept
    actor.steps(3 * UNTIL_TRIM)
    assert trimmed() > 0, "the actor's first steps needed more"
    assert reserved() >= needed
    growths = fxoffload.stats().num_host_growths
    critic_step()
    assert fxoffload.stats().num_host_growths == growths


@pytest.mark.slow
def test_what_the_user_reserved_stays(engine: CopyEngine) -> None:
    fxoffload.reserve_host_memory(100 * PAGE, CPU)
    while engine.arena.is_growing:
        pass
    run = recorded(MODELS["stack"], activation_budget=in_between())
    run.steps(3 * UNTIL_TRIM)
    assert reserved() >= 100 * PAGE
    engine.calls._step = None
    gc.collect()
    fxoffload.release_host_memory()
    assert reserved() == 0
    assert engine.host_bytes_needed() == 0


class CriticBlock(Block):
    """Code of its own, so that Dynamo makes graphs of its own of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


@pytest.mark.slow
def test_two_models(engine: CopyEngine) -> None:
    """An actor and a critic take turns: each is trimmed for once, after which neither makes it grow."""
    budget = in_between()
    torch.compiler.reset()
    with trims(engine) as found:
        makers = (MODELS["stack"], lambda: Stack(6, block=CriticBlock))
        runs = [recorded(make, activation_budget=budget) for make in makers]
        plain = [run.step() for run in runs]
        for _ in range(4 * UNTIL_TRIM):
            for run, expected in zip(runs, plain, strict=True):
                assert_equal(run.step(), expected)
        assert sum(found) == trimmed() > 0
        count = len(found)
        assert count <= 2, "once for each"
        before = fxoffload.stats()
        for _ in range(2):
            for run in runs:
                run.steps(2 * UNTIL_TRIM)
        after = fxoffload.stats()
    assert len(found) == count
    assert (after.host_bytes_reserved, after.num_host_growths) == (before.host_bytes_reserved, before.num_host_growths)
