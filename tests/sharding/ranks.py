"""Ranks that do not do the same: fxoffload communicates with none of them, unless it is asked to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxoffload

from . import fsdp2
from .launch import Found
from .models import Stack
from .world import LENGTH, OPTIONS, PLANNED, Rank, collectives, differing, distance, graphs_compiled, held, reset


def fxoffload_on_one_rank(rank: Rank) -> Found:
    """Rank 0 compiles, plans, compiles variants and follows its plan; the others run eager code."""
    reset()
    alive = {g.index for g in fxoffload.graphs()}
    alone = {**PLANNED, "activation_budget": fsdp2.BUDGET} if rank.rank == 0 else None
    model, reference = fsdp2.sharded(rank, "before", alone), fsdp2.sharded(rank, "before", None)
    x, moved, issued = rank.input(), [], []
    for _ in range(5):
        fxoffload.reset_stats()
        with collectives() as mine:
            observed = rank.train(model, x)
        moved.append(fxoffload.stats().bytes_offloaded)
        issued.append(mine)
    with collectives() as expected:
        eager = rank.train(reference, x)
    return {
        "moved": moved,
        "num_variants": sum(len(g.variants) for g in fxoffload.graphs() if g.index not in alive),
        "collectives": issued,
        "collectives_eager": [expected] * 5,
        "from_eager": distance(eager, observed),
        "held": [held()],
    }


def other_length_on_one_rank(rank: Rank) -> Found:
    """All ranks follow a plan; then rank 0 alone gets longer batches: it compiles, records, and plans again."""
    reset()
    alive = {p.graph for p in fxoffload.plans()}
    options = {**PLANNED, "activation_budget": fsdp2.BUDGET}
    model, reference = (fsdp2.sharded(rank, "before", o) for o in (options, None))
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for _ in range(4):
            rank.train(model, rank.input())
        compiled, moved, issued = graphs_compiled(), [], []
        x = rank.input(1, length=LENGTH * 2 if rank.rank == 0 else LENGTH)
        for _ in range(7):
            fxoffload.reset_stats()
            with collectives() as mine:
                observed = rank.train(model, x)
            moved.append(fxoffload.stats().bytes_offloaded)
            issued.append(mine)
        with fxoffload.override_policy("keep_all"):
            kept = rank.train(model, x)
    with collectives() as expected:
        eager = rank.train(reference, x)
    return {
        "compiled_later": graphs_compiled() - compiled,
        "num_plans": len([p for p in fxoffload.plans() if p.graph not in alive]),
        "moved": moved,
        "differing": differing(kept, observed),
        "collectives": issued,
        "collectives_eager": [expected] * 7,
        "from_eager": distance(eager, observed),
        "held": [held()],
    }


def unequal_lengths(rank: Rank) -> Found:
    """Dynamic shapes; every rank has another length in every step."""
    reset()
    model, reference = Stack(), Stack()
    for layer in model.layers:
        layer.compile(backend="fxoffload", dynamic=True, options=OPTIONS)
    for one in (model, reference):
        for layer in one.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=rank.mesh())
        torch.distributed.fsdp.fully_shard(one, mesh=rank.mesh())
    compiled, wrong, far, moved = graphs_compiled(), [], [], []
    for seed in range(2):
        x = rank.input(seed, length=8 + 5 * seed + 7 * rank.rank)
        fxoffload.reset_stats()
        observed = rank.train(model, x)
        moved.append(fxoffload.stats().bytes_offloaded)
        with fxoffload.override_policy("keep_all"):
            wrong += differing(rank.train(model, x), observed)
        far.append(distance(rank.train(reference, x), observed))
    return {
        "compiled": graphs_compiled() - compiled,
        "moved": moved,
        "differing": wrong,
        "from_eager": max(far),
        "held": [held()],
    }


def checked(rank: Rank) -> Found:
    """``check_ranks``, with plans that agree, plans that may differ, and plans that do not fit together."""
    reset()
    found: Found = {}

    def compiled(**objective: Any) -> nn.Module:
        """A graph with a plan."""
        model: Any = torch.compile(Stack(2), backend="fxoffload", options={**PLANNED, **objective})
        rank.train(model, rank.input())
        return model

    def check(name: str, group: dist.ProcessGroup | None = None) -> None:
        with collectives() as issued:
            try:
                comparison = fxoffload.check_ranks(group)
                found[name] = {"agrees": comparison.agrees, "num_plans": comparison.num_plans, "text": str(comparison)}
            except RuntimeError as error:
                found[name] = {"agrees": False, "text": str(error)}
        found[name]["collectives"] = sum(issued.values())

    check("none")
    alike = compiled(activation_budget="1GiB")
    check("alike")
    check("of a group", dist.new_group([0, 1]))
    del alike
    reset()
    budgets = {**PLANNED, "activation_budget": fsdp2.BUDGET if rank.rank == 0 else "1GiB"}
    steps = fsdp2.sharded(rank, "before", budgets)
    for _ in range(3):
        rank.train(steps, rank.input())
    check("steps")
    del steps
    reset()
    unlike = compiled(**({"max_slowdown": 1.0} if rank.rank == 0 else {"activation_budget": "1GiB"}))
    check("unlike")
    if rank.rank == 1:
        del unlike
        reset()
    check("numbers")
    return found
