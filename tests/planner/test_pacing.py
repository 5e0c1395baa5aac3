"""Which forwards are paced, and how fast copies are thought to be for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from fxoffload.machine.shelf import load_profile
from fxoffload.planner.chain import Chain, concatenate
from fxoffload.planner.pacing import PACED, paced_calls, rates_with_pace
from fxoffload.planner.rates import BESIDE_COLLECTIVES, ProfileRates, beside_collectives
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.steps import TrainingStep
from tests.planner.test_tape_recompute import MB, layer, passed

COUNT = 6
RATES = ProfileRates(load_profile("h200")).reaching(BESIDE_COLLECTIVES, BESIDE_COLLECTIVES)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def lasting(ms: float, nbytes: int = 64 * MB) -> TrainingStep:
    """A layer whose forward takes so long, and which saves so much."""
    return layer((nbytes // MB,), ms=ms)


def forwards(*calls: TrainingStep) -> list:  # type: ignore[type-arg]
    return [c.forward for c in calls]


def planned(*calls: TrainingStep) -> tuple[Chain, Schedule]:
    chain = concatenate(calls, passed(len(calls)))
    return chain, Scheduler(chain.step, RATES, host_bytes=None).smallest()


def test_copies_of_forwards_that_can_be_paced_are_faster_and_only_to_the_host() -> None:
    found = rates_with_pace(RATES, forwards(*[lasting(14.0)] * COUNT))
    assert found.link == (pytest.approx(PACED), BESIDE_COLLECTIVES)
    assert rates_with_pace(RATES, forwards(*[lasting(1.0)] * COUNT)).link == RATES.link


def test_a_short_call_now_and_then_is_no_matter() -> None:
    long, short = [lasting(14.0)] * COUNT, lasting(1.0)
    assert rates_with_pace(RATES, forwards(*long, short)).link[0] == pytest.approx(PACED)
    assert rates_with_pace(RATES, forwards(*long, *[lasting(4.0)] * COUNT)).link == RATES.link


def test_calls_are_paced_where_copies_need_the_link_and_the_host_has_time() -> None:
    heavy, light, short = lasting(14.0, 600 * MB), lasting(14.0, 8 * MB), lasting(1.0, 600 * MB)
    chain, schedule = planned(*[heavy] * COUNT)
    assert schedule.simulation.bytes_offloaded > 0
    assert paced_calls(chain, schedule, RATES) == (True,) * COUNT
    chain, schedule = planned(*[light] * COUNT)
    assert schedule.simulation.bytes_offloaded > 0
    assert paced_calls(chain, schedule, RATES) == (False,) * COUNT
    assert paced_calls(*planned(heavy, short, heavy, heavy), RATES) == (True, False, True, True)


def test_nobody_is_paced_who_moves_nothing() -> None:
    chain = concatenate([lasting(14.0, 600 * MB)] * COUNT, passed(COUNT))
    kept = Scheduler(chain.step, RATES, host_bytes=None).keep_all()
    _, schedule = planned(*[lasting(14.0, 600 * MB)] * COUNT)
    assert paced_calls(chain, replace(schedule, simulation=kept), RATES) == (False,) * COUNT


def test_nobody_is_paced_without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    calls = [lasting(14.0, 600 * MB)] * COUNT
    assert not beside_collectives()
    assert rates_with_pace(RATES, forwards(*calls)).link == RATES.link
    assert paced_calls(*planned(*calls), RATES) == (False,) * COUNT


@pytest.mark.parametrize(("size", "expected"), [(1, False), (2, True)])
def test_a_rank_that_is_alone_on_its_machine_has_collectives(
    monkeypatch: pytest.MonkeyPatch, size: int, expected: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    store = dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    try:
        assert beside_collectives() is expected
    finally:
        dist.destroy_process_group()
