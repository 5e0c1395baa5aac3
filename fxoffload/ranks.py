"""Whether the ranks of a group run plans that fit together: the only place where fxoffload talks to other ranks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fxoffload.plan_report.compare import Comparison, compare_plans
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import plans
from fxoffload.processes import in_process_group


def check_ranks(group: dist.ProcessGroup | None = None) -> Comparison:
    """Compare the plans of all ranks of a group. Every rank of it has to call this, at the same place of the program:
    it gathers the plans, which is a collective. Nothing else of fxoffload is one; the ranks of a budget "auto" share
    it by the process group's store.

    Recompute choices of one compiled graph have to be the same on every rank, and so has the number of graphs with a
    plan. Keep and offload may differ, and so may plans for a step over several graphs.

    Args:
        group: the ranks; default: all.

    Returns:
        How the plans differ where they may; ``print`` shows it. Ranks are numbered as in the group; each one's plans,
        in the order in which they were made, with those for a step over several graphs last.

    Raises:
        RuntimeError: they do not fit together (on every rank, with the same text); or torch.distributed is not
            initialized, or this rank does not belong to the group.
    """
    if not in_process_group():
        raise RuntimeError(
            "expected an initialized torch.distributed, found none; call torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise RuntimeError("expected a rank of the group, found one outside it; call check_ranks on ranks of it only")
    gc.collect()  # plans of models that are gone would count on the ranks that have not collected them yet
    mine = plans()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, [plan.to_json() for plan in mine], group=group)
    found = compare_ranks([[Plan.from_json(text) for text in of_rank] for of_rank in gathered])
    if not found.agrees:
        raise RuntimeError(str(found))
    return found


def compare_ranks(ranks: Sequence[Sequence[Plan]]) -> Comparison:
    """``compare_plans`` of every rank's plans. Those for a step over several graphs come last, and only where the ranks
    have equally many: each rank plans a step anew when its own steps change."""
    of_graphs = [[plan for plan in of_rank if not plan.label] for of_rank in ranks]
    of_steps = [[plan for plan in of_rank if plan.label] for of_rank in ranks]
    if len({len(of_rank) for of_rank in of_steps}) > 1:
        return compare_plans(of_graphs)
    return compare_plans([a + b for a, b in zip(of_graphs, of_steps, strict=True)])
