"""FSDP1, FSDP2, DDP and tensor parallel models on two CPU processes: offloading goes unnoticed, and forbidden uses
raise.

All cases run in the same two processes, with those of tests/sharding; each test reads what one case found.
"""

from __future__ import annotations

import pytest

from ..sharding.launch import TIME_LIMIT_S
from ..sharding.shared import FoundBy, found_by

__all__ = ["found_by"]  # the fixture
pytestmark = pytest.mark.timeout(TIME_LIMIT_S + 60)

MODELS = (
    "fsdp2",
    "fsdp2_kept",
    "fsdp2_mixed",
    "fsdp2_prefetching",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_mixed",
    "fsdp1_kept",
    "fsdp1_unsharded",
    "ddp",
    "ddp_views",
    "tensor_parallel",
)
USED = ("fsdp2", "fsdp2_kept", "fsdp1", "fsdp1_flat", "ddp", "tensor_parallel")
SAVED = ("fsdp2", "ddp", "tensor_parallel")


@pytest.mark.slow_except("away.noop_fsdp2", "away.noop_tensor_parallel")
@pytest.mark.parametrize("case", [f"away.noop_{model}" for model in MODELS])
def test_nothing_is_left_of_an_offload(found_by: FoundBy, case: str) -> None:
    """Objects, layouts, aliases, padding and bytes; and the next five steps, offloaded three times in between."""
    for found in found_by(case):
        assert found["changed"] == []
        assert found["same"]
        assert found["held"] > 2000
        assert found["left"] == 0
        assert found["hidden"] == []
        assert found["left_behind"] == []
        assert found["num_tensors"] >= 20
        assert found["num_waits"] > 1


@pytest.mark.slow_except("away.uses_fsdp1", "away.fresh_fsdp2")
@pytest.mark.parametrize("case", [f"away.{steps}_{model}" for steps in ("uses", "fresh") for model in USED])
def test_every_use_raises_and_breaks_nothing(found_by: FoundBy, case: str) -> None:
    """On both ranks, so that neither waits for the other in a collective. ``fresh``: offloaded before the first step,
    when FSDP has not initialized itself."""
    for found in found_by(case):
        assert len(found["tried"]) >= 8
        for use, (kind, message) in found["tried"].items():
            assert kind == "OffloadedError", (use, kind, message)
            assert "onload(" in message, (use, message)
            assert "offloaded" in message, (use, message)
        assert found["changed"] == []
        assert found["same"]


@pytest.mark.slow_except("away.uses_fsdp1")
@pytest.mark.parametrize("case", ["away.uses_fsdp1", "away.uses_fsdp1_flat"])
def test_state_dicts_of_fsdp1_name_what_streams_weights(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        assert "stream_weights()" in found["tried"]["state dict"][1]


@pytest.mark.slow_except("away.checkpoint_fsdp2")
@pytest.mark.parametrize("case", [f"away.checkpoint_{model}" for model in SAVED])
def test_checkpoints_are_written_from_the_host(found_by: FoundBy, case: str) -> None:
    """By DCP into a fresh model, and by ``torch.save``; shapes, dtypes and placements are those of the device."""
    for found in found_by(case):
        assert found["kinds"]
        assert len(found["equal"]) >= 16
        assert all(found["equal"])
        assert len(found["reread"]) >= 4
        assert all(found["reread"])


@pytest.mark.parametrize("case", ["away.settled"])
def test_settle(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        for name in ("fsdp2", "fsdp1"):
            in_forward, in_backward = found[name]
            assert "to be idle, found it in forward" in in_forward
            assert "inside a backward" in in_backward
            assert found[f"{name} ended"] == 2
            assert found[f"{name} unsharded"] > 0
            assert found[f"{name} hidden"] == []


@pytest.mark.parametrize("case", ["away.cpu_offloaded"])
def test_parameters_that_fsdp_keeps_on_the_cpu_are_known(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        for name in ("fsdp2", "fsdp1"):
            assert found[name]["kept"] == found[name]["parameters"] > 0
        assert found["none"]["kept"] == 0


@pytest.mark.parametrize("case", ["away.backward_between"])
@pytest.mark.parametrize("model", ["fsdp2", "fsdp2_kept"])
def test_a_backward_after_an_offload_raises_and_breaks_nothing(found_by: FoundBy, case: str, model: str) -> None:
    for rank in found_by(case):
        found = rank[model]
        assert found["backward"][0] == "OffloadedError"
        assert found["same"]


@pytest.mark.parametrize("case", ["away.optimizer_alone"])
@pytest.mark.parametrize("model", ["fsdp2", "fsdp2_kept", "fsdp1"])
def test_shards_do_not_leave_with_the_optimizer(found_by: FoundBy, case: str, model: str) -> None:
    for rank in found_by(case):
        found = rank[model]
        assert found["groups"] == ["optimizer"]
        assert found["parameters"] == []
        assert found["forward"] == ["nothing", ""]
        assert found["step"][0] == "OffloadedError"
        assert found["same"]


@pytest.mark.parametrize("case", ["host_shards.gathered"])
@pytest.mark.parametrize("build", ["fsdp2", "two_dimensions", "replicated", "tensor_parallel"])
def test_host_shards_are_gathered_on_the_device(found_by: FoundBy, case: str, build: str) -> None:
    """In every way, and nothing is copied before. Gathered tensors keep their values."""
    for rank in found_by(case):
        found = rank[build]
        assert found["num_shards"] == 3
        assert found["wrong"] == []
        assert found["sums"] < 1e-5
        assert found["plain"] and found["host"] and found["in the image"] and found["kept"]


@pytest.mark.parametrize("case", ["host_shards.without_a_backend_for_the_cpu"])
def test_what_needs_other_ranks_and_cannot_reach_them_says_what_to_do(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        assert [kind for kind, _ in found["tried"].values()] == ["OffloadedError", "OffloadedError", "nothing"]
        assert "Call .to('cuda') of it first" in found["tried"]["row"][1]
        assert found["kind"] == "HostDTensor"


@pytest.mark.parametrize("case", ["host_shards.loaded"])
def test_what_is_loaded_in_place_into_shards_on_the_host_is_there_afterwards(found_by: FoundBy, case: str) -> None:
    for rank in found_by(case):
        refused = [kind for name, kind in rank.items() if name.startswith("from rank 0 of")]
        assert refused == ["OffloadedError"] * 2
        wrong = {name: names for name, names in rank.items() if isinstance(names, list)}
        assert len(wrong) == 2 * 8
        assert {name: names for name, names in wrong.items() if names} == {}
