"""Private torch APIs of AOTAutograd's partitioner: its own choices, and the values that it saves."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

# By these settings of functorch the partitioner chooses by itself; at these values it only follows tags, or chooses as
# plans expect.
_TAGS_DECIDE: dict[str, Any] = {
    "activation_memory_budget": 1.0,
    "aggressive_recomputation": False,
    "ban_recompute_long_fusible_chains": True,
    "ban_recompute_materialized_backward": True,
    "ban_recompute_not_in_allowlist": True,
    "ban_recompute_reductions": True,
    "ban_recompute_used_far_apart": True,
    "enable_activation_offloading": False,
    "recompute_views": False,
    "_sync_decision_cross_ranks": False,  # collectives, which the ranks' partitionings would meet at other times
}
# Keys of a node's ``meta``, and of ``meta["custom"]``, that carry a memory budget (``MemoryBudgetMode`` and
# ``torch.autograd.graph.region_activation_memory_budget``).
_BUDGET_OF_NODE, _BUDGET_OF_REGION = "memory_budget", "_region_activation_memory_budget"


@contextlib.contextmanager
def tags_decide() -> Iterator[None]:
    """Within it the partitioner chooses nothing that tags have decided, whatever the user has set.

    Needed by torch 2.11 to 2.14: settings of ``torch._functorch.config``.
    """
    import torch._functorch.config as functorch_config

    # Only settings that differ are patched: up to torch 2.11 a patch holds in all threads.
    changed = {k: v for k, v in _TAGS_DECIDE.items() if k in _own_choices()}
    with functorch_config.patch(changed) if changed else contextlib.nullcontext():
        yield


def take_partitioner_choices(joint: fx.GraphModule) -> dict[str, Any]:
    """Reasons for the partitioner to choose by itself, by name: settings, and annotations, which are removed.

    Needed by torch 2.11 to 2.14; torch 2.13 and newer have regions with a budget.
    """
    found = _own_choices()
    for module in joint.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _BUDGET_OF_NODE in node.meta:
                found["memory_budget of nodes"] = node.meta.pop(_BUDGET_OF_NODE)
            custom = node.meta.get("custom")
            if isinstance(custom, dict) and _BUDGET_OF_REGION in custom:
                found["region_activation_memory_budget"] = custom[_BUDGET_OF_REGION]
                # A new one: nodes share theirs.
                node.meta["custom"] = {k: v for k, v in custom.items() if k != _BUDGET_OF_REGION}
    return found


def _own_choices() -> dict[str, Any]:
    import torch._functorch.config as functorch_config

    now = {k: getattr(functorch_config, k) for k in _TAGS_DECIDE if hasattr(functorch_config, k)}
    return {k: v for k, v in now.items() if v != _TAGS_DECIDE[k]}


def put_opaque_values_last(forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> None:
    """Put the values that two graphs from the partitioner save in the order that AOTAutograd's runtime expects.

    That is tensors, then opaque objects (the DeviceMesh of a DTensor), then sizes.

    torch 2.13's ``functionalize_rng_ops`` puts the random states of recomputed ops after opaque objects. The forward
    then fails with "expected all tensors_saved_with_vc_check to be Tensors".

    Needed by torch 2.11 to 2.14: the order of values that ``functionalize_rng_ops`` makes.
    """
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    saved = range(num_user_outputs, len(values))
    order = [*range(num_user_outputs), *sorted(saved, key=lambda i: _saved_kind(values[i]))]
    if order == sorted(order):
        return
    output.args = (tuple(values[i] for i in order),)
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)) and len(described) == len(order):
        output.meta["desc"] = [described[i] for i in order]
    inputs = backward.graph.find_nodes(op="placeholder")
    # The backward takes sizes first.
    moved = sorted(inputs[: len(saved)], key=lambda n: (_saved_kind(n) + 1) % 3)
    for node in moved:
        inputs[len(saved)].prepend(node)
    forward.recompile()
    backward.recompile()


def _saved_kind(value: Any) -> int:
    """0: a tensor, 1: an opaque object, 2: a size."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(found, torch.Tensor):
        return 0
    return 2 if isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool)) else 1


def is_rng_state(node: fx.Node) -> bool:
    """Whether ``node`` is the state of a random generator that the forward saves (a checkpointed dropout's).

    Needed by torch 2.11 to 2.14: ``run_and_save_rng_state``.
    """
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    return isinstance(source, fx.Node) and saves_rng_state(source)


def saves_rng_state(node: fx.Node) -> bool:
    """Whether ``node`` gives the state of a random generator, together with an op's result.

    Needed by torch 2.11 to 2.14: ``run_and_save_rng_state``.
    """
    return node.target is torch.ops.higher_order.run_and_save_rng_state
