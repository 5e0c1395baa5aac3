"""Which forwards are paced, and the rates that copies are planned with for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxoffload.compiler import pacing, process_rates
from fxoffload.compiler.pacing import PACED, PACED_TOGETHER, paced_calls, rates_with_pace
from fxoffload.compiler.process_rates import WITH_COLLECTIVES, rates_for, with_collectives
from fxoffload.machine.shelf import load_profile
from fxoffload.planner.chain import concatenate
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.torch_private.fsdp2 import fsdp2_is_used
from tests.planner.test_chain_search import layer, passed

COUNT = 6
ALONE = ProfileRates(load_profile("h200"))
RATES = ALONE.reaching(WITH_COLLECTIVES, WITH_COLLECTIVES)


@pytest.fixture(autouse=True)
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "fsdp2_is_used", lambda: True)


def planned(ms: float, mb: int) -> Schedule:
    """Layers that take so long and save so much, with the least memory."""
    chain = concatenate([layer((mb,), ms=ms)] * COUNT, passed(COUNT))
    schedule = Scheduler(chain.step, RATES, host_bytes=None).smallest()
    assert schedule.simulation.bytes_offloaded > 0
    return schedule


def test_copies_of_forwards_that_can_be_paced_are_faster_and_only_to_the_host() -> None:
    assert rates_with_pace(RATES, [14.0] * COUNT).link == (PACED, WITH_COLLECTIVES)
    assert rates_with_pace(RATES, [1.0] * COUNT).link == RATES.link
    assert rates_with_pace(RATES, [0.0] * COUNT).link == RATES.link


def test_gpus_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "processes_on_this_machine", lambda: 2)
    assert rates_with_pace(RATES, [14.0] * COUNT).link == (PACED_TOGETHER, WITH_COLLECTIVES)
    assert WITH_COLLECTIVES < PACED_TOGETHER < PACED


def test_copies_are_never_faster_than_alone() -> None:
    """A graph that was compiled before the model was sharded, and a link that is known."""
    assert rates_with_pace(ALONE, [14.0] * COUNT).link == (1.0, 1.0)
    assert rates_with_pace(ALONE.reaching(0.98, 0.8), [14.0] * COUNT).link == (0.98, 0.8)


def test_a_short_call_now_and_then_is_no_matter() -> None:
    assert rates_with_pace(RATES, [*[14.0] * COUNT, 1.0]).link[0] == PACED
    assert rates_with_pace(RATES, [*[14.0] * COUNT, *[4.0] * COUNT]).link == RATES.link


def test_calls_are_paced_where_copies_need_the_link_and_the_host_has_time() -> None:
    heavy = planned(14.0, 600)
    assert paced_calls([14.0] * COUNT, heavy, RATES) == [True] * COUNT
    assert paced_calls([14.0, 1.0, 14.0, 4.9], heavy, RATES) == [True, False, True, False]
    assert paced_calls([14.0] * COUNT, planned(14.0, 8), RATES) == [False] * COUNT


def test_what_was_measured_decides() -> None:
    heavy = planned(14.0, 600)
    assert paced_calls([50.0] * COUNT, heavy, RATES) == [False] * COUNT, "the link has time enough"
    assert paced_calls([3.0] * COUNT, heavy, RATES) == [False] * COUNT, "the host has none"


def test_nobody_is_paced_without_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "fsdp2_is_used", lambda: False)
    assert rates_with_pace(RATES, [14.0] * COUNT).link == RATES.link
    assert paced_calls([14.0] * COUNT, planned(14.0, 600), RATES) == [False] * COUNT


@pytest.mark.parametrize(("ranks", "uses", "extra_memory"), [(1, False, False), (2, False, True), (1, True, True)])
def test_steps_with_collectives_are_planned_with_less_of_the_link(
    monkeypatch: pytest.MonkeyPatch, ranks: int, uses: bool, extra_memory: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(process_rates, "fsdp2_is_used", lambda: uses)
    assert with_collectives() is extra_memory
    found = rates_for("h200", torch.device("cpu"))
    assert found.link == ((WITH_COLLECTIVES,) * 2 if extra_memory else (1.0, 1.0))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_fsdp2_is_seen_for_as_long_as_there_is_a_module() -> None:
    gc.collect()
    before = fsdp2_is_used()  # by models that other tests have left
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    assert fsdp2_is_used()
    del model
    gc.collect()
    assert fsdp2_is_used() is before
