"""A rank of an FSDP2 worker with verl's functions: ``python verl_world.py RANK WORLD STORE``. Raises when wrong."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fxoffload.integrations import verl
from fxoffload.phases import OffloadedError
from fxoffload.phases.guarding.sentinel import untouched

WIDTH, STEPS = 7, 3  # not divisible by two ranks: the shards are padded


def make_model(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def local(tensor: Any) -> Tensor:
    """A shard, or a tensor that is none."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


class Worker:
    """As in test_verl.py, of sharded parameters."""

    def __init__(self, *, offloads: bool) -> None:
        def function(one: Callable[..., None]) -> Callable[..., None]:
            return one if offloads else lambda *_: None

        self.offload_model = function(verl.offload_fsdp_model_to_cpu)
        self.load_model = function(verl.load_fsdp_model_to_gpu)
        self.offload_optimizer = function(verl.offload_fsdp_optimizer)
        self.load_optimizer = function(verl.load_fsdp_optimizer)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.offload_model(self.model)

    def weights(self) -> dict[str, Tensor]:
        """From verl 0.9 on: the state dict of a model that stays on the host."""
        return self._gathered(self.model.state_dict())

    def weights_by_loading(self) -> dict[str, Tensor]:
        """Before."""
        self.load_model(self.model)
        params = self.model.state_dict()
        self.offload_model(self.model)
        return self._gathered(params)

    @staticmethod
    def _gathered(params: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: param.to("cpu", non_blocking=True).full_tensor() if isinstance(param, DTensor) else param
            for name, param in params.items()
        }

    def shards(self) -> dict[str, Tensor]:
        """What the delta engine sends: each rank's own part, in bf16."""
        params: dict[str, Any] = self.model.state_dict()
        return {name: p.to("cpu", non_blocking=True).to(torch.bfloat16).to_local() for name, p in params.items()}

    def save_checkpoint(self) -> bytes:
        """Each rank its own, of a model that is loaded."""
        stream = io.BytesIO()
        self.load_model(self.model)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, stream)
        self.offload_model(self.model)
        return stream.getvalue()

    def load_checkpoint(self, saved: bytes) -> None:
        self.load_model(self.model)
        loaded = torch.load(io.BytesIO(saved), weights_only=False)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.offload_model(self.model)
        self.offload_optimizer(self.optimizer)

    def log_prob(self, step: int) -> Tensor:
        self.load_model(self.model)
        with torch.no_grad():
            found = F.log_softmax(self.model(batch(step)), dim=-1)
        self.offload_model(self.model)
        return found

    def update(self, step: int) -> Tensor:
        self.load_model(self.model)
        self.load_optimizer(self.optimizer, 0)
        loss = self.model(batch(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.offload_model(self.model)
        self.offload_optimizer(self.optimizer)
        return loss.detach()


def check_steps() -> None:
    """The same numbers as without offloading, and nothing of the model in memory in between."""
    ours, resident = Worker(offloads=True), Worker(offloads=False)
    storages = []
    for parameter in resident.model.parameters():
        assert isinstance(parameter, DTensor)
    ours.load_model(ours.model)
    for parameter in ours.model.parameters():
        assert isinstance(parameter, DTensor)
        storages.append(parameter.to_local().untyped_storage())
    held = sum(storage.nbytes() for storage in storages)
    assert held > 0
    for step in range(STEPS):
        sent, loaded, expected = ours.weights(), ours.weights_by_loading(), resident.weights()
        assert sent.keys() == expected.keys() and len(sent) == 6
        assert all(torch.equal(sent[name], expected[name]) for name in sent)
        assert all(torch.equal(loaded[name], expected[name]) for name in sent)
        parts = resident.shards()
        assert all(torch.equal(part, parts[name]) for name, part in ours.shards().items())
        assert sum(storage.nbytes() for storage in storages) == 0
        assert torch.equal(ours.log_prob(step), resident.log_prob(step))
        assert torch.equal(ours.update(step), resident.update(step))
        assert sum(storage.nbytes() for storage in storages) == 0
    assert all(torch.equal(sent[name], expected[name]) for name in sent), "what was sent has changed"
    check_checkpoints(ours)
    try:
        ours.model(batch(0))
    except OffloadedError:
        pass
    else:
        raise AssertionError("a forward of an offloaded model was not refused")
    ours.load_model(ours.model)
    assert sum(storage.nbytes() for storage in storages) == held


def check_checkpoints(ours: Worker) -> None:
    """One that was saved from the host and is loaded; and its optimizer's state is off the device afterwards."""
    saved = ours.save_checkpoint()
    again, fresh = Worker(offloads=True), Worker(offloads=False)
    for worker in (again, fresh):
        worker.load_checkpoint(saved)
    with untouched():
        held = [local(t).untyped_storage().nbytes() for entry in again.optimizer.state.values() for t in entry.values()]
    assert held and not any(held), "optimizer state has stayed on the device"
    assert torch.equal(again.update(STEPS), fresh.update(STEPS))
    sent, expected = again.weights(), fresh.weights()
    assert all(torch.equal(sent[name], expected[name]) for name in expected)


def check_a_state_dict_from_before() -> None:
    """It is readable; and what FSDP holds for itself is not taken for one."""
    model, same = make_model(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    others: dict[str, Any] = same.state_dict()
    expected = {name: value.full_tensor() for name, value in others.items()}
    taken: dict[str, Any] = model.state_dict()
    verl.offload_fsdp_optimizer(optimizer)
    verl.offload_fsdp_model_to_cpu(model)
    assert all(torch.equal(value.full_tensor(), expected[name]) for name, value in taken.items())
    del taken
    verl.load_fsdp_model_to_gpu(model)
    verl.load_fsdp_optimizer(optimizer, 0)
    for step in range(2):
        assert torch.equal(model(batch(step)), same(batch(step)))
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), same.parameters(), strict=True):
            parameter.add_(1)
            other.add_(1)
    assert torch.equal(model(batch(3)), same(batch(3))), "FSDP's shards are the parameters' memory no longer"


def check_parameters_on_the_host() -> None:
    """A model that FSDP keeps on the CPU is left alone: here the devices are GPUs, and there are none."""
    os.environ["FXOFFLOAD_PHASES_DEVICE_TYPES"] = "cuda"
    model = make_model(offload_policy=CPUOffloadPolicy(pin_memory=False))
    verl.offload_fsdp_model_to_cpu(model)
    model(batch(0))
    verl.load_fsdp_model_to_gpu(model)
    model(batch(0)).sum().backward()


def main(rank: int, world: int, store: str) -> None:
    os.environ["FXOFFLOAD_PHASES_DEVICE_TYPES"] = "cpu"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    check_steps()
    check_a_state_dict_from_before()
    check_parameters_on_the_host()
    dist.barrier()
    dist.destroy_process_group()
    print("finished")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
