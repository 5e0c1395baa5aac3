"""The ranks of the tests of several GPUs: each a process that trains a sharded model and writes down its observations.

``launch`` starts them as ``python -m gpu.sharded_support``, with this checkout's ``tests`` on the path: another package
may install a ``tests`` of its own, which would hide ``tests.gpu``.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxoffload
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.runtime.copies.streams import Wait
from fxoffload.runtime.engine import CopyEngine
from fxoffload.runtime.transfer import Group
from fxoffload.step.choice import Choice

from .gpu_support import MIB, TOKENS, WIDTH, Stack, deterministic, differing, disturbed, sleep

ROOT = Path(__file__).resolve().parents[2]
DEPTH = 4
SCHEDULES = 6
TRAINED_DEPTH, TRAINED_STEPS = 8, 20
TIME_LIMIT_S = 170.0  # of one launch
COLLECTIVE_LIMIT_S = 60.0  # the ranks compile at different speeds
GRACE_S = 10.0  # for a rank to say why it failed, after another one did

OPTIONS: dict[str, Any] = {
    "policy": "offload_all",
    "min_bytes": 1,
    "in_flight_budget": 8 * MIB,
    "prefetch_budget": 24 * MIB,
}
KEPT_AS_PARAMETER = "parameter, buffer, or computed from them alone"

Found = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What one rank is asked to do. ``options``: fxoffload's; ``budget``: of the plans that train."""

    folder: str
    rank: int
    world: int
    tensor_parallel: int
    reshard: bool
    device_type: str
    tokens: int
    budget: str
    limit_s: float
    options: dict[str, Any]

    @property
    def device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    @property
    def backend(self) -> str:
        """NCCL wants a device for each rank; Gloo lets ranks share one."""
        enough = self.device_type == "cuda" and torch.cuda.device_count() >= self.world
        return "nccl" if enough else "gloo"


@dataclass(frozen=True)
class Ended:
    """What one rank left: findings by phase, its exit status (None: it was ended from here) and its output."""

    phases: dict[str, Found]
    code: int | None
    log: str

    def found(self, phase: str) -> Found:
        assert phase in self.phases, f"did not finish {phase!r} (exit status {self.code}):\n{self.log[-6000:]}"
        return self.phases[phase]


# -- the parent --------------------------------------------------------------------------------------------------------


def launch(
    folder: Path,
    *,
    reshard: bool,
    world: int = 2,
    tensor_parallel: int = 1,
    device_type: str = "cuda",
    tokens: int = TOKENS,
    budget: str = "100MiB",
    limit_s: float = TIME_LIMIT_S,
    options: Mapping[str, Any] | None = None,
    program: str = "gpu.sharded_support",
) -> list[Ended]:
    """Run all ranks, for at most ``limit_s`` seconds. ``device_type="cpu"`` (gloo) is for rehearsals.

    ``program``: the module that each rank runs, with ``run_rank``.
    """
    asked = {**OPTIONS, **(options or {})}
    processes = []
    try:
        for rank in range(world):
            place = (str(folder), rank, world, tensor_parallel)
            request = Request(*place, reshard, device_type, tokens, budget, limit_s, asked)
            processes.append(_start(request, folder, program))
        _wait(processes, limit_s)
    finally:
        codes = [p.poll() for p in processes]
        for process in processes:
            # The whole session: Inductor's compile workers outlive a killed parent.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [
        Ended(_read(folder / f"found{rank}.json"), code, (folder / f"log{rank}.txt").read_text(errors="replace"))
        for rank, code in enumerate(codes)
    ]


def _start(request: Request, folder: Path, program: str) -> subprocess.Popen[bytes]:
    asked = folder / f"request{request.rank}.json"
    asked.write_text(json.dumps(asdict(request)))
    environment = dict(os.environ)  # NCCL's variables pass through as they are
    path = [str(ROOT / "tests"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    # As torchrun sets it: each rank takes its share of the host memory.
    environment["LOCAL_WORLD_SIZE"] = str(request.world)
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (folder / f"log{request.rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", program, str(asked)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended or the time is up. Where one failed, the others hang in a collective."""
    deadline = time.monotonic() + limit_s
    failed = False
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if not failed and any(p.poll() not in (None, 0) for p in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.1)


def _read(path: Path) -> dict[str, Found]:
    return json.loads(path.read_text()) if path.exists() else {}


_RECOMPUTES = re.compile(r"\d+ of \d+ calls recompute more")


def check_training(found: Found) -> str:
    """Checks a phase of training on one rank, whatever the mesh. Returns the plan's numbers."""
    assert found["moved"] > 15, "the losses of different inputs and weights differ"
    assert (found["losses_differing"], found["weights_differing"]) == (0, 0)
    (summary,), (nbytes,) = found["summaries"], found["planned_bytes"]
    # Times and bytes of the two plans differ: one of them was measured with copies.
    recomputes, kept = (_RECOMPUTES.findall(str(s)) for s in (summary, found["kept_summaries"]))
    assert recomputes == kept, f"the same is recomputed on both sides: {summary}; {found['kept_summaries']}"
    # What recomputes may fit without offloading: between that and the least peak of all lie 8 MiB (two H200s).
    assert nbytes > 0 or "recompute more" in summary
    assert found["offloaded"] > 10 * nbytes
    assert (found["groups_on_tape"], found["host_bytes_in_use"]) == (0, 0)
    return summary


def check_equality(found: Found) -> None:
    """Checks gradients with everything offloaded, against those with everything kept."""
    assert found["kept_twice"] == 0
    assert found["dull"] == 0, "gradients that are zero or not finite compare equal for nothing"
    assert not any(found["differing"]), found["differing"]
    assert found["compiled_meanwhile"] == 0, "flipping the decision must not compile"


def check_bytes(found: Found) -> None:
    """Checks that all offloaded values came back, and that nothing is kept alive."""
    assert found["offloaded"] > 0
    assert found["reloaded"] + found["reclaimed"] == found["offloaded"]
    assert found["calls_kept"] == {}
    assert (found["groups_on_tape"], found["host_bytes_in_use"]) == (0, 0)


# -- one rank ----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank's models and inputs."""

    def __init__(self, request: Request, mesh: DeviceMesh) -> None:
        self.request = request
        self.mesh = mesh
        self.on_gpu = request.device_type == "cuda"

    def build(self, depth: int, **options: Any) -> Stack:
        """A stack, each layer compiled on its own and sharded, and the root sharded around them."""
        torch.manual_seed(0)
        model = Stack(depth).to(self.request.device, torch.bfloat16)
        reshard = self.request.reshard
        for layer in model.layers:
            if self.request.tensor_parallel > 1:
                parallelize_module(layer, self.mesh["tensor"], _projections())
            layer.compile(backend="fxoffload", options={**self.request.options, **options})
            fully_shard(layer, mesh=self.mesh["fsdp"], reshard_after_forward=reshard)
        fully_shard(model, mesh=self.mesh["fsdp"], reshard_after_forward=reshard)
        return model

    def input(self, seed: int) -> Tensor:
        """Another one for each replica: the ranks that share its layers see the same."""
        replica = self.request.rank // self.request.tensor_parallel
        generator = torch.Generator().manual_seed(self.request.world * seed + replica)
        x = torch.randn(2, self.request.tokens // 2, WIDTH, generator=generator)
        return x.to(self.request.device, torch.bfloat16)

    def train(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        """Loss, the input's gradient and the local shard of every gradient of one step."""
        model.zero_grad(set_to_none=True)
        # A copy: the input is offloaded too, and freed memory is poisoned. It takes a gradient as every other layer's
        # input does, so that all layers are the same code.
        x = x.clone().requires_grad_()
        loss = model(x)
        loss.backward()
        return [loss.detach().clone(), _local(x.grad), *(_local(p.grad) for p in model.parameters())]

    def keep(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        """The same on the same compiled code, with everything kept on the device."""
        with fxoffload.override_policy("keep_all"):
            return self.train(model, x)

    def offload(self, model: nn.Module, x: Tensor, schedule: int, left_out: Wait | None = None) -> list[Tensor]:
        """The same with everything offloaded and, on a GPU, copies delayed and freed memory poisoned."""
        if not self.on_gpu:
            return self.train(model, x)
        with disturbed(schedule, left_out=left_out):
            sleep(5.0)  # the host runs ahead of the device
            return self.train(model, x)


def _projections() -> dict[str, ColwiseParallel | RowwiseParallel]:
    """Half of the heads and of the MLP each. A query of the whole model may be a key here: ranks of one mesh are
    compared with themselves."""
    columns = {name: ColwiseParallel() for name in ("qkv", "up")}
    return {**columns, **{name: RowwiseParallel() for name in ("out", "down")}}


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().clone()


def _held() -> Found:
    stats = fxoffload.stats()
    return {"groups_on_tape": stats.num_groups_on_tape, "host_bytes_in_use": stats.host_bytes_in_use}


@contextlib.contextmanager
def _compilations() -> Iterator[Found]:
    """Code compiled meanwhile, from scratch."""
    torch.compiler.reset()
    fxoffload.reset_stats()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    found: Found = {}
    yield found
    stats = fxoffload.stats()
    found.update(
        dynamo_graphs=graphs["unique_graphs"] - before,
        segments=stats.num_segments_compiled,
        plain_graphs=stats.num_plain_graphs,
        bytes_kept_as_parameters=stats.bytes_skipped.get(KEPT_AS_PARAMETER, 0),
    )


@contextlib.contextmanager
def _watched_requests() -> Iterator[list[tuple[int, int]]]:
    """When the backward of a layer begins: how many of its storages are on the device or on their way, of how many."""
    seen: list[tuple[int, int]] = []
    original = CopyEngine.request

    def request(engine: CopyEngine, group: Group, **kwargs: bool) -> None:
        transfers = group.in_need_order()
        seen.append((sum(t.there is not None for t in transfers), len(transfers)))
        original(engine, group, **kwargs)

    with mock.patch.object(CopyEngine, "request", request):
        yield seen


@contextlib.contextmanager
def _watched_parameters(model: nn.Module) -> Iterator[Found]:
    """Whether the storages that are offloaded are parameters; counts the unsharded ones that could have been."""
    seen: Found = {"unsharded": 0, "offloaded": 0}
    original = CopyEngine.offload

    def offload(engine: CopyEngine, storages: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> Any:
        unsharded = {p.untyped_storage().data_ptr() for p in model.parameters() if not isinstance(p, DTensor)}
        seen["unsharded"] += len(unsharded)
        seen["offloaded"] += sum(s[0].untyped_storage().data_ptr() in unsharded for s in storages)
        return original(engine, storages, *args, **kwargs)

    with mock.patch.object(CopyEngine, "offload", offload):
        yield seen


def _equality(rank: Rank, model: Stack) -> Found:
    """Many schedules against keeping everything."""
    before = fxoffload.stats().num_segments_compiled
    kept_twice = differing(rank.keep(model, rank.input(3)), rank.keep(model, rank.input(3)))
    wrong, dull = [], 0
    for seed in range(SCHEDULES):
        x = rank.input(100 + seed)
        expected = rank.keep(model, x)
        dull += sum(not bool(g.isfinite().all()) or not bool(g.any()) for g in expected)
        wrong.append(differing(expected, rank.offload(model, x, seed)))
    stats = fxoffload.stats()
    return {
        "kept_twice": kept_twice,
        "differing": wrong,
        "dull": dull,
        "compiled_meanwhile": stats.num_segments_compiled - before,
        "offloaded": stats.bytes_offloaded,
        "reloaded": stats.bytes_reloaded,
        "reclaimed": stats.bytes_reclaimed,
        "kept_host_full": stats.bytes_kept_host_full,
        "calls_kept": dict(stats.calls_kept),
        **_held(),
    }


def _without(rank: Rank, model: Stack, wait: Wait) -> Found:
    """With one wait taken out; and that nothing of it leaks into the next step."""
    wrong, after = 0, 0
    for seed in range(3):
        x = rank.input(200 + seed)
        expected = rank.keep(model, x)
        wrong += differing(expected, rank.offload(model, x, seed, left_out=wait)) > 0
        after += differing(expected, rank.train(model, x)) > 0
    return {"wrong": wrong, "after": after, **_held()}


def _prefetch(rank: Rank, model: Stack) -> Found:
    """Copies under way when each layer's backward begins, undisturbed; and equality, disturbed."""
    x = rank.input(300)
    expected = rank.keep(model, x)
    fxoffload.reset_stats()
    with _watched_requests() as seen:
        wrong = differing(expected, rank.train(model, x))
    stats = fxoffload.stats()
    wrong += differing(expected, rank.offload(model, x, 0))
    return {
        "ahead": seen,
        "differing": wrong,
        "misses": stats.num_prefetch_misses,
        "exposed_copy_ms": round(stats.exposed_copy_ms, 3),
        **_held(),
    }


@contextlib.contextmanager
def _nothing_moves() -> Iterator[None]:
    """Plans over several graphs are followed, with every call's recompute choice, and keep the values that they would
    offload."""
    choose = ChainPlanning._choice

    def keep(*args: Any) -> Choice:
        choice = choose(*args)
        return replace(choice, offload=(False,) * len(choice.offload))

    with mock.patch.object(ChainPlanning, "_choice", keep):
        yield


def _train(rank: Rank, **options: Any) -> tuple[list[Tensor], list[Tensor], Found]:
    """Losses, weights and what happened, of some steps of AdamW with a plan over all layers."""
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    model = rank.build(TRAINED_DEPTH, policy="auto", activation_budget=rank.request.budget, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    fxoffload.reset_stats()
    for i in range(TRAINED_STEPS):
        for thread in threading.enumerate():
            if thread.name in ("fxoffload-chain-plan", "fxoffload-replan"):
                thread.join()  # on every rank as many steps are planned
        losses.append(model(rank.input(1000 + i)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    plans = [p for p in fxoffload.plans() if p.graph not in before]
    found = {
        "summaries": [p.summary for p in plans],
        "planned_bytes": [p.predicted.bytes_offloaded for p in plans],
        "offloaded": fxoffload.stats().bytes_offloaded,
        **_held(),
    }
    return [x.detach().clone() for x in losses], [_local(p) for p in model.parameters()], found


def _training(rank: Rank, **options: Any) -> Found:
    """Weights after many steps of a plan that offloads, against those of one that keeps."""
    losses, weights, found = _train(rank, **options)
    with _nothing_moves():
        others, kept, found_kept = _train(rank, **options)
    return {
        "losses_differing": differing(losses, others),
        "weights_differing": differing(weights, kept),
        "moved": sum(not torch.equal(a, b) for a, b in itertools.pairwise(losses)),
        **found,
        "kept_summaries": found_kept["summaries"],
    }


def _phases(rank: Rank) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Name and work of each phase, in order. All ranks run the same ones: each trains, and so communicates."""
    models: list[Stack] = []

    def compile_and_train(depth: int, **options: Any) -> Found:
        with _compilations() as found:
            model = rank.build(depth, **options)
            for seed in (1, 2):
                rank.train(model, rank.input(seed))
        models[:] = [model]
        fxoffload.reset_stats()
        return found

    def parameters() -> Found:
        with _watched_parameters(models[0]) as found:
            rank.train(models[0], rank.input(4))
        return found

    yield "trained", lambda: _training(rank, profile="h200", disable=("tape_recompute",))
    # Measured, another model's calls may run other variants, which round elsewhere.
    yield "trained with variants", lambda: _training(rank, profile="h200", disable=("calibration",))
    yield "shallow", lambda: compile_and_train(DEPTH // 2)
    yield "deep", lambda: compile_and_train(DEPTH)
    yield "equality", lambda: _equality(rank, models[0])
    if rank.request.tensor_parallel == 1:
        yield "parameters", parameters
        yield "across", lambda: _prefetch(rank, models[0])
        yield "apart compiled", lambda: compile_and_train(DEPTH, disable=("cross_graph_prefetch",))
        yield "apart", lambda: _prefetch(rank, models[0])
    if rank.on_gpu:
        for wait in (Wait.SOURCE_DONE, Wait.TARGET_READY):
            yield f"without {wait.name}", lambda wait=wait: _without(rank, models[0], wait)


def run_rank(phases: Callable[[Rank], Iterator[tuple[str, Callable[[], Found]]]]) -> None:
    """What the process of a rank does: run ``phases`` in order, and write down what each found.

    ``phases``: of a rank, name and work of each.
    """
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    began = time.monotonic()
    faulthandler.dump_traceback_later(request.limit_s - 25.0, exit=False)  # says where it hangs
    device = request.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        request.backend,
        init_method=f"file://{request.folder}/store",
        rank=request.rank,
        world_size=request.world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT_S),
        device_id=device if request.backend == "nccl" else None,
    )
    shape = (request.world // request.tensor_parallel, request.tensor_parallel)
    rank = Rank(request, init_device_mesh(device.type, shape, mesh_dim_names=("fsdp", "tensor")))
    found: dict[str, Found] = {}
    with deterministic():
        for name, work in phases(rank):
            found[name] = work()
            # Phase by phase, so that a hang in one does not hide the others.
            (Path(request.folder) / f"found{request.rank}.json").write_text(json.dumps(found))
            print(f"{time.monotonic() - began:6.1f} s  {name}: {found[name]}", flush=True)
    # Together: a rank that goes early would make the other's last collective fail.
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run_rank(_phases)
