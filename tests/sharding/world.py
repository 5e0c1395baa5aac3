"""One rank of a world of CPU processes: trains models that are sharded in every way, and writes down its observations.

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
from collections.abc import Callable, Collection, Iterator, Sequence
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
PLANNED: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}
LENGTH = 16
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Observed = dict[str, Tensor]
Build = Callable[[Any], nn.Module]  # from options of fxoffload; None: nothing is compiled


class Rank:
    """One rank's inputs, and its steps with a model.

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

    def flip(self, build: Build, x: Tensor, **options: Any) -> Found:
        """Offload, keep and offload again on the same compiled code; and do the same steps with eager code."""
        reset()
        model = build({**OPTIONS, **options})
        observed, counts = [], []
        before = graphs_compiled()
        for policy in (None, None, "keep_all", None):
            compiled = graphs_compiled()
            fxoffload.reset_stats()
            with collectives() as issued, watched(model) as seen:
                with contextlib.nullcontext() if policy is None else fxoffload.override_policy(policy):
                    observed.append(self.train(model, x))
            counts.append(issued)
            if policy is not None:
                moved_keeping, held_keeping = fxoffload.stats().bytes_offloaded, held()
        stats = fxoffload.stats()
        found = {
            "graphs": len(fxoffload.graphs()),
            "num_compiled": graphs_compiled() - before,
            "num_compiled_last": graphs_compiled() - compiled,
            "differing": [name for o in observed for name in differing(observed[2], o)],
            "dull": [n for n, g in observed[2].items() if not bool(g.isfinite().all()) or not bool(g.any())],
            "num_compared": len(observed[2]),
            "bytes_offloaded": stats.bytes_offloaded,
            "bytes_reloaded": stats.bytes_reloaded,
            "bytes_offloaded_keeping": moved_keeping,
            "calls_kept": dict(stats.calls_kept),
            "kept_host_full": stats.bytes_kept_host_full,
            "held": [held_keeping, held()],
            "collectives": counts,
            **seen,
        }
        reference = build(None)
        counts = []
        for _ in range(4):
            with collectives() as issued:
                eager = self.train(reference, x)
            counts.append(issued)
        return {**found, "from_eager": distance(eager, observed[2]), "collectives_eager": counts}

    def follow(self, build: Build, x: Tensor, *, budget: int, steps: int = 5, **options: Any) -> Found:
        """Train under a budget that keeping everything does not meet: the plan for the step is there from the fourth
        step on at the latest."""
        reset()
        alive = {p.graph for p in fxoffload.plans()}
        model = build({**PLANNED, "activation_budget": budget, **options})
        observed, moved, counts = [], [], []
        for _ in range(steps):
            fxoffload.reset_stats()
            with collectives() as issued:
                observed.append(self.train(model, x))
            moved.append(fxoffload.stats().bytes_offloaded)
            counts.append(issued)
        return {**self._planned(model, x, observed, alive), "budget": budget, "moved": moved, "collectives": counts}

    def plan_graphs(self, build: Build, x: Tensor, **options: Any) -> Found:
        """Train graphs that have a plan each, made when they are compiled."""
        reset()
        alive = {p.graph for p in fxoffload.plans()}
        model = build({**PLANNED, "max_slowdown": 1.0, **options})
        observed, counts = [], []
        for _ in range(3):
            fxoffload.reset_stats()
            with collectives() as issued:
                observed.append(self.train(model, x))
            counts.append(issued)
        moved = [fxoffload.stats().bytes_offloaded]
        reference, eager_counts = build(None), []
        for _ in range(3):
            with collectives() as issued:
                eager = self.train(reference, x)
            eager_counts.append(issued)
        found = self._planned(model, x, observed, alive)
        return {
            **found,
            "moved": moved,
            "from_eager": distance(eager, observed[-1]),
            "collectives": counts,
            "collectives_eager": eager_counts,
        }

    def _planned(self, model: nn.Module, x: Tensor, observed: list[Observed], alive: Collection[int]) -> Found:
        calls_kept = dict(fxoffload.stats().calls_kept)
        after = held()
        with fxoffload.override_policy("keep_all"):
            kept = self.train(model, x)
        plans = [p for p in fxoffload.plans() if p.graph not in alive]
        return {
            "plans": [p.summary for p in plans],
            "predicted_peaks": [p.predicted.peak_bytes for p in plans],
            "baseline_peaks": [p.baseline.peak_bytes for p in plans],
            "predicted_moved": [p.predicted.bytes_offloaded for p in plans],
            "actions": sorted({d.action for p in plans for d in p.decisions}),
            "calls_kept": calls_kept,
            "differing": [name for o in observed for name in differing(kept, o)],
            "num_compared": len(kept),
            "held": [after, held()],
        }


def local(value: Tensor) -> Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers around the modules."""
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
    """The remains of a step that is over: there should be none."""
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
def watched(model: nn.Module) -> Iterator[Found]:
    """Which parameters are offloaded, out of those that could be mistaken for an activation: the unsharded ones. And,
    of these, the bytes that are still there at the end."""
    seen: Found = {"parameters_seen": 0, "parameters_offloaded": 0, "bytes_unsharded": 0}
    storages: dict[int, torch.UntypedStorage] = {}
    original = CopyEngine.offload

    def offload(engine: CopyEngine, moved: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> Any:
        now = {s.data_ptr(): s for s in (local(p).untyped_storage() for p in parameters_in_use(model)) if s.nbytes()}
        storages.update(now)
        seen["parameters_seen"] = max(seen["parameters_seen"], len(now))
        seen["parameters_offloaded"] += sum(m[0].untyped_storage().data_ptr() in now for m in moved)
        return original(engine, moved, *args, **kwargs)

    with mock.patch.object(CopyEngine, "offload", offload):
        yield seen
    after = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    seen["bytes_unsharded"] = sum(s.nbytes() for at, s in storages.items() if at not in after)


def parameters_in_use(model: nn.Module) -> list[Tensor]:
    """What the modules compute with now. FSDP1 puts views of its flat parameter where the parameters were."""
    found: list[Tensor] = []
    for module in model.modules():
        found += [p for p in module._parameters.values() if p is not None]
        found += [v for v in vars(module).values() if isinstance(v, Tensor)]
    return found


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
    gc.freeze()  # imported objects: cases collect garbage many times
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
        reset()
        gc.freeze()
    # Together: a rank that goes early would make the other's last collective fail.
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(Request.read(Path(sys.argv[1])))
