"""FSDP2 and tensor parallelism on a mesh of 2 x 2 ranks, every layer compiled on its own.

With four devices each rank has one and they meet by NCCL. With fewer they share, by Gloo: slower, the same otherwise.
"""

from __future__ import annotations

import pytest

from fxoffload.runtime.copies.streams import Wait
from tests.gpu.sharded_support import Ended, check_bytes, check_equality, check_training, launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist(gpus=1)]

WORLD, TENSOR_PARALLEL = 4, 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """What all ranks found. They run once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    size = {"world": WORLD, "tensor_parallel": TENSOR_PARALLEL}
    ended = launch(folder, reshard=True, **size, budget="60MiB", limit_s=280.0)
    for rank, one in enumerate(ended):
        print(f"rank {rank}, exit status {one.code}:\n{one.log[-4000:]}")
    return ended


def test_every_rank_ends_well(ranks: list[Ended]) -> None:
    assert [one.code for one in ranks] == [0] * WORLD, "\n".join(one.log[-3000:] for one in ranks)


def test_gradients_are_bit_equal_to_keeping(ranks: list[Ended]) -> None:
    for one in ranks:
        found = one.found("equality")
        check_equality(found)
        check_bytes(found)


@pytest.mark.parametrize("phase", ["trained", "trained with variants"])
def test_weights_are_bit_equal_after_many_steps_of_a_plan(ranks: list[Ended], phase: str) -> None:
    """Each rank plans on its own; recomputation is the same on both sides."""
    for one in ranks:
        check_training(one.found(phase))


@pytest.mark.parametrize("wait", [Wait.SOURCE_DONE, Wait.TARGET_READY])
def test_without_one_wait_gradients_are_wrong(ranks: list[Ended], wait: Wait) -> None:
    """The delays and the poison reach the copies of each rank: the equality above means something."""
    for one in ranks:
        found = one.found(f"without {wait.name}")
        assert found["wrong"] > 0
        assert found["after"] == 0
