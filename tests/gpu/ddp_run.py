"""One rank of a model under DDP, whose buckets are graphs of several layers: a budget is for all of them.

Run by ``sharded_support.launch``, as ``python -m gpu.ddp_run``.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxoffload

from .gpu_support import MIB, Stack, allocated_above, differing, disturbed, gradients, join, kept_peak, sleep
from .sharded_support import Found, Rank, run_rank

DEPTH, STEPS = 8, 12
FOLLOWED_FROM = 4  # the first step that follows the plan for all graphs
MEASURED_FROM = 9  # by then that plan was made again with measured times
SCHEDULES = 4
SHARE = 0.48  # of what plain Inductor takes; each bucket alone takes more
BUCKET_MB = 4 * 6  # the parameters of four blocks, in bf16


def build(rank: Rank) -> tuple[Stack, nn.Module]:
    """A stack; and the same under DDP."""
    torch.manual_seed(0)
    model = Stack(DEPTH).to(rank.request.device, torch.bfloat16)
    return model, DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)


def digest(tensors: list[Tensor]) -> str:
    """Of all bits: ranks compare theirs by it."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def budget(rank: Rank) -> Found:
    """Steps under a budget, then steps of that plan that keep everything and steps with every copy delayed."""
    torch.compiler.reset()
    model, replicated = build(rank)
    limit: int | str = rank.request.budget  # in a rehearsal
    if rank.on_gpu:
        plain = torch.compile(replicated)
        limit = int(SHARE * kept_peak(model, lambda: plain(rank.input(0))))
        torch.compiler.reset()
    known = {p.graph for p in fxoffload.plans()}
    options = {**rank.request.options, "policy": "auto", "profile": "h200", "activation_budget": limit}
    # So small a model recomputes in less time than it copies; this tests copies.
    options["disable"] = ("tape_recompute",)
    ddp = torch.compile(replicated, backend="fxoffload", options=options)
    peaks, took = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(STEPS):
            x = rank.input(i)
            fxoffload.reset_stats()
            model.zero_grad(set_to_none=True)
            peaks.append(peak_of(rank, lambda x=x: ddp(x).backward()))
            took.append(fxoffload.stats().bytes_offloaded)
            join("fxoffload-chain-plan", "fxoffload-replan")
    plans = [p for p in fxoffload.plans() if p.graph not in known]
    wrong = []
    for schedule in range(SCHEDULES):
        x = rank.input(100 + schedule)
        with fxoffload.override_policy("keep_all"):
            kept = gradients(model, lambda x=x: ddp(x.clone()))
        wrong.append(differing(kept, late(rank, schedule, lambda x=x: gradients(model, lambda: ddp(x.clone())))))
    stats = fxoffload.stats()
    return {
        "budget_mib": limit / MIB if isinstance(limit, int) else None,
        "summaries": [p.summary for p in plans],
        "baselines_mib": [p.baseline.peak_bytes / MIB for p in plans],
        "calibrated_mib": None if (c := plans[-1].calibrated) is None else c.peak_bytes / MIB,
        "peaks_mib": [n / MIB for n in peaks],
        "offloaded": took,
        "told": [str(w.message) for w in caught if "activation_budget" in str(w.message)],
        "differing": wrong,
        "gradients": digest(kept[1:]),  # the loss is of this rank's own input
        "groups_on_tape": stats.num_groups_on_tape,
        "host_bytes_in_use": stats.host_bytes_in_use,
    }


def peak_of(rank: Rank, run: Callable[[], object]) -> int:
    """Bytes above those before it, while ``run`` goes; in a rehearsal none are read."""
    if rank.on_gpu:
        return allocated_above(run)
    run()
    return 0


def late(rank: Rank, schedule: int, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """``run``, on a GPU with copies delayed and freed memory poisoned."""
    if not rank.on_gpu:
        return run()
    with disturbed(schedule):
        sleep(5.0)  # the host runs ahead of the device
        return run()


def _phases(rank: Rank) -> Iterator[tuple[str, Callable[[], Found]]]:
    yield "budget", lambda: budget(rank)


if __name__ == "__main__":
    run_rank(_phases)
