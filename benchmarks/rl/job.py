"""What trains: Qwen3 of the case's shape with AdamW, its forwards, its training step, and where its bytes are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer

from benchmarks.clock import synchronize
from benchmarks.job import CausalLM
from benchmarks.ranks import gather_and_scatter
from benchmarks.rl.mixed_adamw import MixedAdamW, plain
from benchmarks.schema import Case
from benchmarks.workloads import build_job

LEARNING_RATE = 1e-6
Allocating = Callable[[str], contextlib.AbstractContextManager[None]]


class RlJob:
    """Model, optimizer with its state, inputs. ``allocating(group)`` is around everything that makes a group."""

    def __init__(self, case: Case, device: torch.device, rank: int, ranks: int, allocating: Allocating) -> None:
        if case.name != "causal_lm":
            raise ValueError(f"expected the case causal_lm, found {case.name}: log-probs need a head")
        self.case, self.device, self.ranks = case, device, ranks
        with allocating("params"):
            job = build_job(case, device, rank)
            assert isinstance(job.module, CausalLM)
            self.model: CausalLM = job.module
            self._shape()
        self.inputs = job.inputs
        with allocating("optimizer"):
            self.optimizer = self._optimizer()

    # -- work ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, forwards: int) -> None:
        for _ in range(forwards):
            self.model(*self.inputs)

    def train_step(self) -> None:
        """As many forwards and backwards as the case has micro-batches, and the optimizer's step."""
        for _ in range(self.case.micro_batches):
            self.model(*self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forwards_for(self, seconds: float) -> int:
        """How many log-prob forwards take at least ``seconds``; the same on all ranks."""
        self.logprobs(2)
        synchronize(self.device)
        start = time.perf_counter()
        self.logprobs(2)
        synchronize(self.device)
        count = int(seconds / ((time.perf_counter() - start) / 2)) + 1
        counts = [count] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(counts, count)
        return max(counts)

    def barrier(self) -> None:
        """All ranks begin together."""
        if self.ranks > 1:
            dist.barrier()
        synchronize(self.device)

    def agreed(self, mine: bool) -> bool:
        """What rank 0 says: all ranks do the same."""
        said = [mine]
        if self.ranks > 1:
            dist.broadcast_object_list(said, src=0)
        return said[0]

    def first_matmul(self) -> nn.Module:
        """The module of the first matmul after the embedding."""
        return self.model.decoder.get_submodule("model.layers.0.self_attn.q_proj")

    def reshard(self) -> None:
        """FSDP2 leaves its root gathered after a forward without a backward; ``Module.to`` then fails."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def tensors(self, *groups: str) -> dict[str, Tensor]:
        """This rank's plain tensors on the device, by name. To be read only while they are there."""
        self.reshard()  # a gathered root would show its full parameters, under which no state is filed
        named: dict[str, Tensor] = {}
        if "params" in groups:
            named |= dict(self.model.named_parameters())
        if "buffers" in groups:
            named |= dict(self.model.named_buffers())
        if "optimizer" in groups:
            names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
            for parameter, state in self.optimizer.state.items():
                named |= {f"{names[parameter]}.{k}": v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
        return {name: plain(tensor).detach() for name, tensor in named.items()}

    def storages(self, *groups: str) -> list[torch.UntypedStorage]:
        """Each storage of the groups once."""
        found = [tensor.untyped_storage() for tensor in self.tensors(*groups).values()]
        return list({storage._cdata: storage for storage in found}.values())

    def num_bytes(self, *groups: str) -> int:
        return sum(storage.nbytes() for storage in self.storages(*groups))

    # -- building ------------------------------------------------------------------------------------------------------

    def _shape(self) -> None:
        """Layers compiled on their own, then sharded: as the case asks."""
        layers = list(self.model.decoder.get_submodule("model.layers").children())
        if self.case.compile == "layers":
            for layer in layers:
                layer.compile()
        elif self.case.compile != "no":
            raise ValueError(f"expected compile=no or compile=layers, found compile={self.case.compile}")
        if self.case.parallel == "fsdp2":
            mesh = init_device_mesh(self.device.type, (self.ranks,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif self.case.parallel != "no" or self.ranks > 1:
            raise ValueError(f"expected parallel=fsdp2, or parallel=no on one rank, found {self.case.parallel}")

    def _optimizer(self) -> Optimizer:
        """With its state, which holds random numbers: zeros would hide that bytes got lost."""
        parameters = list(self.model.parameters())
        same = self.case.state == self.case.dtype
        if not same and self.case.state != "float32":
            raise ValueError(f"expected state=float32 or state={self.case.dtype}, found state={self.case.state}")
        on_gpu = self.device.type == "cuda"
        optimizer = (
            AdamW(parameters, lr=LEARNING_RATE, fused=on_gpu) if same else MixedAdamW(parameters, lr=LEARNING_RATE)
        )
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        generator = torch.Generator(device=self.device).manual_seed(self.case.seed)
        for state in optimizer.state.values():
            plain(state["exp_avg"]).normal_(0.0, 1e-3, generator=generator)
            plain(state["exp_avg_sq"]).uniform_(1e-6, 1e-5, generator=generator)
        return optimizer


def warm_up_group(device: torch.device, ranks: int) -> None:
    """The collectives that FSDP2 uses, so that their buffers are there before the first parameter."""
    small = torch.ones(1024, device=device)
    gathered = torch.empty(1024 * ranks, device=device)
    dist.all_reduce(small)
    gather, scatter = gather_and_scatter()
    gather(gathered, small)
    scatter(small, gathered)
    synchronize(device)
