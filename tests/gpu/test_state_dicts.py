"""State dicts of an offloaded model on a GPU: tensors of pinned memory, which torch copies itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxoffload.phases import PhaseManager
from fxoffload.phases.guarding.host_dtensor import HostDTensor
from tests.gpu.gpu_support import CYCLES_PER_MS

pytestmark = pytest.mark.gpu

# Three chunks of pinned memory and more, between two small ones.
SIZES = (1000, 100 << 20, 1000)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, size in enumerate(SIZES):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(size, device="cuda")))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}


def test_torch_copies_to_and_from_any_part_of_the_image() -> None:
    """One copy of torch may not touch two registrations; and the image is as good as before afterwards."""
    model = Model()
    manager = PhaseManager(model)
    for _ in range(2):
        expected = values(model)
        manager.offload()
        assert manager.image.pinned_bytes > 4 * sum(SIZES) - 4096 and manager.image.pageable_bytes == 0
        state = model.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        assert all(tensor.is_pinned() for tensor in state.values())
        for way in (
            lambda t: t.cuda(),
            lambda t: t.to("cuda", non_blocking=True),
            lambda t: torch.empty_like(t, device="cuda").copy_(t),
        ):
            assert all(torch.equal(way(tensor).cpu(), expected[name]) for name, tensor in state.items())
        for name, tensor in state.items():
            tensor.copy_(tensor.cuda().mul_(2))
            expected[name] *= 2
        del state, tensor
        manager.onload()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in values(model).items())
    manager.close()


@pytest.mark.parametrize("reused", ["by the same", "by others", "by nobody"])
def test_a_copy_that_is_under_way_has_the_values_of_then(reused: str) -> None:
    """On an unknown stream, from a state dict that is gone: the next offload waits for it."""
    model = Model()
    with torch.no_grad():
        torch.zeros_like(model.w0).zero_()  # to load a kernel waits for the device
    manager = PhaseManager(model)
    expected = values(model)
    manager.offload()
    manager.onload()
    manager.offload()
    stream, state = torch.cuda.Stream(), model.state_dict()
    with torch.cuda.stream(stream):
        found = {name: torch.empty_like(tensor, device="cuda") for name, tensor in state.items()}
        torch.cuda._sleep(200 * CYCLES_PER_MS)
        for name, tensor in found.items():
            tensor.copy_(state[name], non_blocking=True)
    del state
    manager.onload()
    with torch.no_grad():
        for parameter in model.parameters():
            if reused == "by others":
                parameter.data = torch.zeros_like(parameter)
            parameter.zero_()
    if reused == "by nobody":
        manager.close()
    else:
        manager.offload(wait=False)
    stream.synchronize()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in found.items())
    manager.close()


def _exit_status(child: int, patience_s: float = 30.0) -> int | None:
    """None for one that does not end."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_pinned_memory_and_its_parent_goes_on() -> None:
    model = Model()
    manager = PhaseManager(model)
    manager.offload()
    state = model.state_dict()
    # Without operators of torch, whose threads a child does not have.
    arrays = {name: (tensor.numpy(), tensor.numpy().copy()) for name, tensor in state.items()}
    child = os.fork()
    if child == 0:
        os._exit(0 if all((array == copied).all() for array, copied in arrays.values()) else 1)
    for tensor in state.values():
        tensor.zero_()
    assert _exit_status(child) == 0
    manager.onload()
    assert not any(parameter.any() for parameter in model.parameters())
    del state, tensor, arrays
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    manager.offload()
    manager.onload()
    assert all(parameter.eq(3.0).all() for parameter in model.parameters())
    manager.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which has no backend for CPU tensors."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_host_shards_go_to_the_device_one_by_one() -> None:
    """As verl's weight sync has it from 0.9 on, and whoever calls something else."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    model: Any = fully_shard(nn.Sequential(nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 4096)).cuda())
    expected = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    manager = PhaseManager(model)
    manager.offload()
    state: dict[str, Any] = model.state_dict()
    assert {type(tensor) for tensor in state.values()} == {HostDTensor}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name, shard in state.items():
        assert torch.equal(shard.to(0, non_blocking=True).full_tensor(), expected[name])
    # One shard and its whole at a time; and what equal() takes.
    assert torch.cuda.max_memory_allocated() - before < 3.1 * expected["0.weight"].nbytes
    ways = {
        "device": lambda s: s.to("cuda"),
        "cuda": lambda s: s.cuda(),
        "dtype": lambda s: s.to("cuda", torch.float64).float(),
        "other dtype": lambda s: s.double().float(),
        "cpu": lambda s: s.cpu(),
        "clone": lambda s: s.clone(),
        "arithmetic": lambda s: s * 2 / 2,
        "itself": lambda s: s,
        "redistribute": lambda s: s.redistribute(placements=[Replicate()]),
    }
    for way, use in ways.items():
        for name, shard in state.items():
            found = use(shard).full_tensor()
            assert found.device.type == "cuda" and torch.equal(found, expected[name]), way
    shard = state["0.weight"]
    assert type(shard.to("cuda")) is type(shard.cuda()) is DTensor
    assert type(shard.clone()) is type(shard.cpu()) is HostDTensor
    shard.copy_(shard.cuda().mul_(2))
    del state, shard, found
    manager.onload()
    assert torch.equal(model.state_dict()["0.weight"].full_tensor(), expected["0.weight"] * 2)
    manager.close()
