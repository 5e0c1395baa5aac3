"""Readers of a model's memory that do not ask its modules, on two CPU processes: they wait, or name the missing
tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..sharding.launch import Found, launch

CASES = ("unwrapped_ddp", "ddp_around_others", "compiled_ddp", "two_roots", "sharded_later")

Ranks = Callable[[str], list[Found]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found in a case."""
    ended = launch(tmp_path_factory.mktemp("unasked"), 2, [f"unasked.{case}" for case in CASES])
    return lambda case: [rank.found(f"unasked.{case}") for rank in ended]


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["before", "after", "around"])
def test_ddp_around_a_model_that_was_given_without_it(ranks: Ranks, wrapped: str) -> None:
    """Its broadcast of buffers waits for them, and refuses to read missing memory, which would end the process."""
    for rank in ranks("unwrapped_ddp"):
        found = rank[wrapped]
        mine, expected = found["losses"]
        assert mine == expected
        assert found["same"]
        assert "the forward of DistributedDataParallel" in found["said"]
        assert "onload('buffers')" in found["said"]
        assert not found["left"]


@pytest.mark.slow
def test_ddp_around_other_models(ranks: Ranks) -> None:
    for found in ranks("ddp_around_others"):
        assert found["as ever"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["around", "inside", "function"])
def test_compiled_ddp_is_not_compiled_again(ranks: Ranks, compiled: str) -> None:
    for found in ranks("compiled_ddp"):
        assert found[compiled][0] > 0
        assert found[compiled][2:] == [0, 0]


@pytest.mark.slow
def test_all_gathers_of_each_fsdp_root_wait(ranks: Ranks) -> None:
    """Each root has streams of its own, and only from its first forward on."""
    for found in ranks("two_roots"):
        assert found["counts"] == [0, 1, 2, 2]
        assert found["both"]


@pytest.mark.slow
def test_fsdp_that_is_applied_later(ranks: Ranks) -> None:
    for found in ranks("sharded_later"):
        assert found["events"] == [1]
