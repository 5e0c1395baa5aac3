"""Weights of an FSDP2 model on two GPUs are gathered by NCCL, during the copies."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.weight_sync.weights import stream_weights

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
MIB = 1 << 20


def run(rank: int, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl", rank=rank, world_size=2, store=store, device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2047 + i % 2) for i in range(8))).cuda()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    manager = PhaseManager(model)
    for away in (False, True):
        if away:
            manager.offload("params")
        for dtype in (None, torch.bfloat16):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            stream = stream_weights(manager, 48 * MIB, dtype=dtype)
            wrong = []
            for name, tensor in stream:
                torch.cuda._sleep(1_000_000)
                if not torch.equal(tensor, whole[name].to(tensor.dtype)):
                    wrong.append(name)
            del tensor
            assert wrong == [], (rank, away, dtype, wrong)
            # The comparison makes a cast copy and a mask of the largest tensor.
            room = 2 * max(t.numel() * t.itemsize for t in whole.values())
            assert torch.cuda.max_memory_allocated() - before <= stream.ledger.limit_bytes + room
            assert torch.cuda.memory_allocated() == before
    with stream_weights(manager, 20 * MIB) as stream:
        next(stream)
    dist.barrier()
    dist.destroy_process_group()


def test_two_gpus() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=2)  # type: ignore[attr-defined]
