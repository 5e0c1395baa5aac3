"""What a stream of weights remembers of the one before, and when it must not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fxoffload.errors import UnsupportedError
from fxoffload.phases import PhaseManager
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.weight_sync import plans as weight_plans
from fxoffload.phases.weight_sync.cuts import TensorCut


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(3))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each plan that was made."""
    made: list[int] = []

    def plan(loads: list[object], *limits: int) -> object:
        made.append(len(loads))
        return real(loads, *limits)  # type: ignore[arg-type]

    real = weight_plans.plan_buckets
    monkeypatch.setattr(weight_plans, "plan_buckets", plan)
    return made


def managed(model: nn.Module) -> PhaseManager:
    return PhaseManager(model, device_types=("cpu",))


def streamed(manager: PhaseManager, **options: object) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in manager.stream_weights(bucket_bytes=256, **options)}  # type: ignore[arg-type]


def assert_streams_the_state(manager: PhaseManager, model: nn.Module, **options: object) -> None:
    expected = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for away in (False, True):
        if away:
            manager.offload("params", "buffers")
        found = streamed(manager, **options)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name].dtype is value.dtype
            assert torch.equal(found[name], value)
    manager.onload("params", "buffers").wait()


def test_the_same_weights_are_planned_once(planned: list[int]) -> None:
    model = Two()
    manager = managed(model)
    assert_streams_the_state(manager, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert_streams_the_state(manager, model)
    assert planned == [5]
    manager.close()


def replace_a_parameter(model: Two) -> None:
    model.first.weight = nn.Parameter(torch.full((4, 8), 7.0))


def replace_what_is_in_a_parameter(model: Two) -> None:
    model.first.weight.data = torch.full((4, 8), 7.0)


def cast(model: Two) -> None:
    model.to(torch.float64)


def reshape(model: Two) -> None:
    model.first.weight.data = torch.rand(8, 4)


def add_a_module(model: Two) -> None:
    model.third = nn.Linear(2, 2)


def rename_a_module(model: Two) -> None:
    model.renamed = model._modules.pop("second")


def swap_two_of_a_shape(model: Two) -> None:
    model.first.bias, model.second.bias = model.second.bias, model.first.bias


def tie(model: Two) -> None:
    model.first.bias = model.second.bias


def leave_a_buffer_out(model: Two) -> None:
    model.register_buffer("scale", torch.ones(3), persistent=False)


@pytest.mark.parametrize(
    ("change", "is_planned_again"),
    [
        (replace_a_parameter, False),
        (replace_what_is_in_a_parameter, False),
        (swap_two_of_a_shape, False),
        (cast, True),
        (reshape, True),
        (add_a_module, True),
        (rename_a_module, True),
        (leave_a_buffer_out, True),
    ],
)
def test_what_has_changed_is_streamed(
    planned: list[int], change: Callable[[Two], None], is_planned_again: bool
) -> None:
    model = Two()
    manager = managed(model)
    assert_streams_the_state(manager, model)
    change(model)
    assert_streams_the_state(manager, model)
    assert len(planned) == 1 + is_planned_again
    manager.close()


def test_tensors_that_were_tied_meanwhile_come_together(planned: list[int]) -> None:
    model = Two()
    manager = managed(model)
    streamed(manager)
    tie(model)
    found = streamed(manager)
    assert planned == [5, 4]
    assert torch.equal(found["first.bias"], model.second.bias)
    assert torch.equal(found["second.bias"], model.second.bias)
    manager.close()


def test_each_way_to_ask_has_a_plan(planned: list[int]) -> None:
    model = Two()
    manager = managed(model)
    for _ in range(2):
        assert streamed(manager)["first.weight"].dtype is torch.float32
        assert streamed(manager, dtype=torch.bfloat16)["first.weight"].dtype is torch.bfloat16
        assert list(streamed(manager, names=["scale"])) == ["scale"]
    assert planned == [5, 5, 1, 1], "names are looked at anew"
    manager.close()


def test_nothing_is_kept_alive() -> None:
    model = Two()
    manager = managed(model)
    streamed(manager)
    old = weakref.ref(model.first.weight)
    replace_a_parameter(model)
    gc.collect()
    assert old() is None
    manager.close()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_other_placements_and_meshes_are_planned_again(planned: list[int], mesh: DeviceMesh) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.rand(4, 4), mesh, [Shard(0)], src_data_rank=None))
    plans = weight_plans.WeightPlans()

    def cuts() -> tuple[TensorCut, ...]:
        return plans.plan(model, 1024)[0][0].cuts

    first = cuts()
    assert cuts() == first
    assert len(planned) == 1
    local = model.weight.to_local()
    for placements in ([Shard(1)], [Replicate()]):
        model.weight = nn.Parameter(DTensor.from_local(local.reshape(4, 2), mesh, placements, run_check=False))
        assert cuts() != first
    assert len(planned) == 3
    del model.weight
    for one in (mesh, init_device_mesh("cpu", (2,))):
        # A parameter would get the mesh of the first one: torch remembers what detach() of an equal DTensor made.
        model.register_buffer("weight", DTensor.from_local(local, one, [Shard(0)], run_check=False))
        cuts()
        assert model.weight.device_mesh is one
    assert len(planned) == 5
    gathered_over = cuts()[0].group
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    assert cuts()[0].group is not gathered_over
    assert cuts()[0].group is model.weight.device_mesh.get_group(0)
    assert len(planned) == 6


def test_what_has_no_values_any_more_is_refused(planned: list[int], mesh: DeviceMesh) -> None:
    model = nn.Module()
    plans = weight_plans.WeightPlans()
    for device in ("cpu", "meta"):
        local = torch.empty(2, 4, device=device)
        model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        if device == "meta":
            with pytest.raises(UnsupportedError, match="no values yet"):
                plans.plan(model, 1024)
        else:
            plans.plan(model, 1024)
    assert len(planned) == 1


class Scaled(DTensor):
    """With a second tensor inside."""

    _scale: Tensor

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "_scale"], context


def test_a_dtensor_with_more_inside_is_no_dtensor_of_one(planned: list[int], mesh: DeviceMesh) -> None:
    weight = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    assert plain_tensors(weight) == [weight._local_tensor]
    weight.__class__ = Scaled
    weight._scale = torch.ones(2)
    assert [id(t) for t in plain_tensors(weight)] == [id(weight._local_tensor), id(weight._scale)]
    model = nn.Module()
    model.register_buffer("weight", weight)
    with pytest.raises(UnsupportedError, match="DTensor of 2 tensors"):
        weight_plans.WeightPlans().plan(model, 1024)
