"""Weights of sharded models, streamed by processes with gloo, are those of the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORLD = Path(__file__).with_name("weights_world.py")
TWO = (
    "fsdp2_even",
    "fsdp2_uneven",
    "fsdp2_after_a_step",
    "tensor_parallel",
    "placements",
    "fsdp1",
    "fsdp1_original_parameters",
    "early_close",
)
FOUR = ("fsdp2_on_tensor_parallel", "hybrid_sharding", "placements")

Ranks = list[dict[str, Any]]


def run(folder: Path, world: int, cases: tuple[str, ...]) -> Ranks:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log{rank}.txt").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORLD), str(folder), str(rank), str(world), *cases],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.wait(timeout=200)
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        log.seek(0)
        assert (folder / f"found{rank}.json").exists(), f"rank {rank}: {process.returncode}\n{log.read()[-4000:]}"
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(tmp_path_factory.mktemp("four"), 4, FOUR)


def of_case(ranks: Ranks, case: str) -> Ranks:
    for rank in ranks:
        raised = [found["raised"] for found in rank.values() if "raised" in found]
        if case not in rank or "raised" in rank[case]:
            pytest.fail(f"{case} did not finish: {''.join(raised)}", pytrace=False)
    return [rank[case] for rank in ranks]


def check(ranks: Ranks, case: str) -> None:
    for found in of_case(ranks, case):
        assert found["differing"] == []
        assert found["local"] == [[], []]
        assert found["names"][0] == found["names"][1]
        for peak, limit, held in found["peaks"]:
            assert 0 < peak <= limit
            assert held == 0
    assert len({json.dumps(found["names"]) for found in of_case(ranks, case)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TWO if case != "early_close"])
def test_two_ranks(two: Ranks, case: str) -> None:
    check(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(four: Ranks, case: str) -> None:
    check(four, case)


@pytest.mark.slow
def test_a_model_that_is_saved_in_another_shape(tmp_path: Path) -> None:
    check(run(tmp_path, 2, ("mixture_of_experts",)), "mixture_of_experts")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp2_even", "fsdp2_uneven", "fsdp1", "tensor_parallel"])
def test_one_collective_for_each_bucket(two: Ranks, case: str) -> None:
    for found in of_case(two, case):
        assert any(buckets > 4 for _, buckets, _ in found["collectives"])
        for collectives, buckets, lanes in found["collectives"]:
            assert collectives == lanes <= buckets


@pytest.mark.slow
def test_a_collective_for_each_mesh_dimension(four: Ranks) -> None:
    # Norms and embeddings are cut by FSDP2 alone, the linear layers by FSDP2 and along the mesh of tensor parallelism.
    for found in of_case(four, "fsdp2_on_tensor_parallel"):
        for collectives, buckets, lanes in found["collectives"]:
            assert lanes < collectives <= 2 * lanes
            assert collectives <= 3 * buckets


@pytest.mark.slow
def test_a_stream_that_ends_early_leaves_no_collective_behind(two: Ranks) -> None:
    for found in of_case(two, "early_close"):
        assert found["held"] == 0
        assert found["differing"] == []
        assert found["collectives"] > 1
