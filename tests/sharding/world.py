"""One rank of a world of CPU processes: trains models that are sharded in every way, and writes down what it saw.

``launch.py`` starts the ranks as ``python -m sharding.world``, with this checkout's ``tests`` on the path.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxoffload
from fxoffload.runtime.engine import CopyEngine

from .launch import COLLECTIVE_LIMIT_S, TIME_LIMIT_S, Found, Request
from .models import WIDTH

OPTIONS: dict[str, Any] = {
    "device_types": ("cpu",),
    "inner": "aot_eager",
    "policy": "offload_all",
    "min_bytes": 1,
    "in_flight_budget": 1,  # nothing is reclaimed in place of a reload
    "prefetch_budget": "64KiB",
}
LENGTH = 16
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Observed = dict[str, Tensor]
Step = Callable[[nn.Module, Tensor], Observed]


class Rank:
    """One rank's inputs, and what it does with a model.

    Attributes:
        rank: its number.
        world: how many there are.
    """

    def __init__(self, request: Request) -> None:
        self.rank, self.world = request.rank, request.world

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> Any:
        """A device mesh; of all ranks in one dimension unless said otherwise."""
        return init_device_mesh("cpu", shape or (self.world,), mesh_dim_names=names)

    def input(self, seed: int = 0, *, length: int = LENGTH, everywhere: bool = False) -> Tensor:
        """A batch; another one for each rank unless it is the same ``everywhere``."""
        generator = torch.Generator().manual_seed(1000 * seed + (0 if everywhere else self.rank))
        return torch.randn(2, length, WIDTH, generator=generator)

    def train(self, model: nn.Module, x: Tensor) -> Observed:
        """One step: loss, the input's gradient and the local shard of every gradient."""
        model.zero_grad(set_to_none=True)
        # As every other layer's input, so that all layers are the same code.
        x = x.clone().requires_grad_()
        loss = local(model(x)).float().square().mean()
        loss.backward()
        found = {"loss": loss.detach().clone(), "input": x.grad}
        found.update((plain_name(n), p.grad) for n, p in model.named_parameters() if p.requires_grad)
        return {name: local(value).detach().clone() for name, value in found.items() if value is not None}

    def flip(self, model: nn.Module, x: Tensor, reference: nn.Module, *, steps: int = 2) -> Found:
        """Offload, keep and offload again on the same compiled code, and compare with eager. ``steps``: before it is
        settled what runs."""
        reset()
        compiled_before = graphs_compiled()
        with collectives() as compiling:
            for _ in range(steps):
                first = self.train(model, x)
        compiled = graphs_compiled()
        with fxoffload.override_policy("keep_all"):
            kept = self.train(model, x)
        after_keeping = held()
        fxoffload.reset_stats()
        with collectives() as running, parameters_watched(model) as parameters:
            offloaded = self.train(model, x)
        stats = fxoffload.stats()
        with collectives() as eager_running:
            eager = self.train(reference, x)
        with collectives() as eager_twice:
            for _ in range(steps):
                self.train(reference, x)
        return {
            "graphs": compiled - compiled_before,
            "compiled_meanwhile": graphs_compiled() - compiled,
            "differing": differing(kept, first) + differing(kept, offloaded),
            "dull": [n for n, g in kept.items() if not bool(g.isfinite().all()) or not bool(g.any())],
            "num_compared": len(kept),
            "from_eager": distance(eager, kept),
            "bytes_offloaded": stats.bytes_offloaded,
            "bytes_reloaded": stats.bytes_reloaded,
            "calls_kept": dict(stats.calls_kept),
            "kept_host_full": stats.bytes_kept_host_full,
            "held_after_keeping": after_keeping,
            "held": held(),
            "collectives": running,
            "collectives_eager": eager_running,
            "collectives_compiling": compiling,
            "collectives_eager_steps": eager_twice,
            **parameters,
        }


def local(value: Tensor) -> Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def plain_name(name: str) -> str:
    """A parameter's name without those of what is wrapped around the modules."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def differing(a: Observed, b: Observed) -> list[str]:
    """Names under which two steps did not give the same bits."""
    names = sorted(a.keys() ^ b.keys())
    return names + [n for n in a.keys() & b.keys() if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]


def distance(a: Observed, b: Observed) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp(min=1e-20)) for n in a)


def reset() -> None:
    """Nothing compiled, counted or planned before."""
    torch.compiler.reset()
    gc.collect()
    fxoffload.reset_stats()


def graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def held() -> Found:
    """What is left of a step that is over: nothing, it should say."""
    stats = fxoffload.stats()
    return {"groups_on_tape": stats.num_groups_on_tape, "host_bytes_in_use": stats.host_bytes_in_use}


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, int]]:
    """How many collectives this rank takes part in meanwhile, per group."""

    def numbers() -> dict[str, int]:
        # Gloo's sequence number counts what goes through the group, whoever issues it.
        groups = distributed_c10d._world.pg_names
        return {name: group._get_sequence_number_for_group() for group, name in groups.items()}

    found: dict[str, int] = {}
    before = numbers()
    yield found
    found.update({name: count - before.get(name, 0) for name, count in numbers().items()})


@contextlib.contextmanager
def parameters_watched(model: nn.Module) -> Iterator[Found]:
    """Which parameters are offloaded. Counts what could be mistaken for an activation: unsharded ones."""
    seen: Found = {"unsharded_seen": 0, "parameters_offloaded": 0}
    original = CopyEngine.offload

    def offload(engine: CopyEngine, storages: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> Any:
        now = {local(p).untyped_storage().data_ptr() for p in unsharded(model)} - {0}
        seen["unsharded_seen"] = max(seen["unsharded_seen"], len(now))
        seen["parameters_offloaded"] += sum(s[0].untyped_storage().data_ptr() in now for s in storages)
        return original(engine, storages, *args, **kwargs)

    with mock.patch.object(CopyEngine, "offload", offload):
        yield seen


def unsharded(model: nn.Module) -> list[Tensor]:
    """What the modules use as their parameters now."""
    found: list[Tensor] = []
    for module in model.modules():
        found += [p for p in module._parameters.values() if p is not None]
        # FSDP1 puts views of its flat parameter where the parameters were.
        found += [v for v in vars(module).values() if isinstance(v, Tensor)]
    return [p for p in found if not isinstance(p, DTensor) or p._local_tensor.untyped_storage().nbytes()]


def run(request: Request) -> None:
    """All cases of the request, one after the other. A case that raises is written down; the next one goes on."""
    import importlib

    began = time.monotonic()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIME_LIMIT_S - 10.0, exit=False)  # says where it hangs
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request.folder}/store",
        rank=request.rank,
        world_size=request.world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    rank = Rank(request)
    found: dict[str, Found] = {}
    for name in request.cases:
        module, function = name.split(".")
        start = time.monotonic()
        try:
            torch.manual_seed(0)
            found[name] = getattr(importlib.import_module(f"sharding.{module}"), function)(rank)
        except Exception:
            found[name] = {"raised": traceback.format_exc()}
        found[name]["seconds"] = round(time.monotonic() - start, 2)
        (Path(request.folder) / f"found{request.rank}.json").write_text(json.dumps(found))
        print(f"{time.monotonic() - began:6.1f} s  {name}: {found[name]}", flush=True)
    # Together: a rank that goes early would make the other's last collective fail.
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(Request.read(Path(sys.argv[1])))
