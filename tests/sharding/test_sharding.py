"""Models that are sharded in every way, on two and on four CPU processes (gloo): the same bits as without offloading,
and not one collective more.

All cases of one world run in the same processes (``shared.py``); each test reads what one case found.
"""

from __future__ import annotations

from typing import Any

import pytest

from .launch import TIME_LIMIT_S, Found
from .shared import ON_FOUR, FoundBy, found_by

__all__ = ["found_by"]  # the fixture
pytestmark = pytest.mark.timeout(TIME_LIMIT_S + 60)

FLIPPED = (
    "fsdp2.compiled_before",
    "fsdp2.compiled_after",
    "fsdp2.mixed_precision",
    "fsdp2.parameters_on_host",
    "fsdp2.whole_model",
    "fsdp2.inductor",
    "wrapped.fsdp1_layers",
    "wrapped.fsdp1_whole",
    "wrapped.ddp_of_layers",
    "wrapped.compiled_ddp",
    "tensor.tensor_layers",
    "tensor.sequence_whole",
    "tensor.sequence_dtensors",
)
NOT_COMPILED = "wrapped.fsdp1_flat"
FOLLOWED = (
    "fsdp2.planned",
    "fsdp2.planned_as_compiled",
    "fsdp2.mixed_precision_planned",
    "fsdp2.parameters_on_host_planned",
    "fsdp2.whole_model_planned",
    "wrapped.fsdp1_planned",
    "wrapped.ddp_planned",
    "tensor.tensor_planned",
    "tensor.sequence_dtensors_planned",
)
PLANNED_GRAPHS = ("wrapped.compiled_ddp_planned", "tensor.sequence_whole_planned")
NOTHING = {"groups_on_tape": 0, "host_bytes_in_use": 0}


def assert_same_collectives(found: Found) -> None:
    assert sum(sum(step.values()) for step in found["collectives_eager"]) > 0
    assert found["collectives"] == found["collectives_eager"]


def assert_flipped(found: Found) -> None:
    """Of ``Rank.flip``."""
    assert found["differing"] == found["dull"] == []
    assert found["num_compared"] >= 16
    assert 0 < found["bytes_offloaded"] == found["bytes_reloaded"]
    assert found["bytes_offloaded_keeping"] == 0
    assert found["calls_kept"] == {}
    assert found["kept_host_full"] == 0
    assert found["held"] == [NOTHING, NOTHING]
    assert found["num_compiled"] > found["num_compiled_last"] == 0
    assert_same_collectives(found)
    assert found["parameters_seen"] > 0
    assert found["parameters_offloaded"] == 0


def assert_followed(found: Found) -> None:
    """Of ``Rank.follow``."""
    assert found["differing"] == []
    assert found["num_compared"] >= 16
    assert len(found["plans"]) == 1, found["plans"]
    assert found["predicted_peaks"][0] <= found["budget"] < found["baseline_peaks"][0]
    # Everything until there is a plan, then what the plan says.
    assert 0 < found["moved"][-1] == found["moved"][-2] == found["predicted_moved"][0] < found["moved"][0]
    assert found["calls_kept"] == {}
    assert found["held"] == [NOTHING, NOTHING]


# Gradients in bfloat16 differ by how they are rounded: compiled code rounds less often.
FAR = {"fsdp2.mixed_precision": 0.03}
SHARDED = ("fsdp2.", "wrapped.fsdp1")


@pytest.mark.slow_except("fsdp2.compiled_before")
@pytest.mark.parametrize("case", FLIPPED)
def test_offloading_changes_no_bit_and_no_collective(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        assert_flipped(found)
        assert found["from_eager"] < FAR.get(case, 1e-5)
        if case.startswith(SHARDED):
            assert found["bytes_unsharded"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [NOT_COMPILED])
def test_flat_parameters_of_fsdp1_run_uncompiled(found_by: FoundBy, case: str) -> None:
    """Dynamo leaves modules alone whose parameters FSDP1 keeps to itself."""
    for found in found_by(case):
        assert found["differing"] == []
        assert found["from_eager"] == found["num_compiled"] == found["bytes_offloaded"] == 0
        assert_same_collectives(found)


@pytest.mark.slow_except("fsdp2.planned")
@pytest.mark.parametrize("case", FOLLOWED)
def test_a_plan_for_the_step_is_followed(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        assert_followed(found)
        steps = found["collectives"]
        if not case.startswith("wrapped.ddp"):  # which sends once more when it rebuilds its buckets
            assert steps == [steps[0]] * len(steps)
        # Graphs with collectives have no variants, and none has where that is switched off.
        recomputes = case.startswith(("fsdp2.", "wrapped.")) and case != "fsdp2.planned_as_compiled"
        assert ("recompute" in found["actions"]) == recomputes


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANNED_GRAPHS)
def test_plans_of_graphs_recompute_no_collective(found_by: FoundBy, case: str) -> None:
    for found in found_by(case):
        assert found["differing"] == []
        assert "recompute" in found["actions"]
        assert min(found["predicted_peaks"]) < max(found["baseline_peaks"])
        assert found["from_eager"] < 1e-5
        assert found["held"] == [NOTHING, NOTHING]
        assert_same_collectives(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR)
def test_on_a_mesh_of_two_dimensions(found_by: FoundBy, case: str) -> None:
    """Of 2 x 2: sequence parallelism with FSDP2, and FSDP2 that replicates (HSDP)."""
    for found in found_by(case):
        if case.endswith("planned"):
            assert_followed(found)
        else:
            assert_flipped(found)
            assert found["from_eager"] < 1e-5
            assert found["bytes_unsharded"] == 0


# -- ranks that do not do the same -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ranks.fxoffload_on_one_rank"])
def test_fxoffload_on_one_rank_alone(found_by: FoundBy, case: str) -> None:
    """Whatever it would exchange with the others, they would not answer."""
    mine, other = found_by(case)
    assert 0 < mine["moved"][-1] < mine["moved"][0]
    assert mine["num_variants"] > 0
    assert other["moved"] == [0] * len(mine["moved"])
    for found in (mine, other):
        assert found["from_eager"] < 1e-5
        assert found["held"] == [NOTHING]
        assert_same_collectives(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ranks.other_length_on_one_rank"])
def test_one_rank_compiles_and_plans_again(found_by: FoundBy, case: str) -> None:
    mine, other = found_by(case)
    assert (mine["compiled_later"], other["compiled_later"]) == (1, 0)
    assert (mine["num_plans"], other["num_plans"]) == (2, 1)
    assert len(set(other["moved"])) == 1
    assert 0 < mine["moved"][-1] < mine["moved"][0]
    for found in (mine, other):
        assert found["differing"] == []
        assert found["from_eager"] < 1e-5
        assert found["held"] == [NOTHING]
        assert_same_collectives(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ranks.unequal_lengths"])
def test_unequal_lengths(found_by: FoundBy, case: str) -> None:
    both = found_by(case)
    for found in both:
        assert found["differing"] == []
        assert found["from_eager"] < 1e-5
        assert found["compiled"] == 1
        assert found["held"] == [NOTHING]
    assert all(0 < a < b for a, b in zip(both[0]["moved"], both[1]["moved"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ranks.checked"])
def test_check_ranks(found_by: FoundBy, case: str) -> None:
    first, second = found_by(case)
    for name in first.keys() - {"seconds"}:
        assert first[name] == second[name], "ranks are told different things"
    found: dict[str, Any] = first
    assert found["none"]["agrees"] and found["none"]["num_plans"] == [0, 0]
    for name in ("alike", "of a group"):
        assert found[name]["agrees"] and found[name]["num_plans"] == [1, 1]
        assert found[name]["text"] == "2 ranks fit together"
    # In a step over several graphs each rank may recompute other values.
    assert found["steps"]["agrees"] and found["steps"]["num_plans"] == [1, 1]
    assert "recompute on rank 0; keep on rank 1" in found["steps"]["text"]
    assert not found["unlike"]["agrees"]
    assert "do NOT fit together" in found["unlike"]["text"]
    assert "plan 0, layers." in found["unlike"]["text"]
    assert "recompute on rank 0; keep on rank 1" in found["unlike"]["text"]
    assert not found["numbers"]["agrees"]
    assert "different numbers of plans: 1 on rank 0, 0 on rank 1" in found["numbers"]["text"]
    # Lengths, then the plans; of a group, in that group.
    assert {name: f["collectives"] for name, f in found.items() if name != "seconds"} == dict.fromkeys(
        ("none", "alike", "of a group", "steps", "unlike", "numbers"), 2
    )


def test_check_ranks_without_a_process_group() -> None:
    import fxoffload

    with pytest.raises(RuntimeError, match="expected an initialized torch"):
        fxoffload.check_ranks()
