"""Private torch APIs of FSDP2: the tensors of an ``FSDPModule``, and the state that it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def fsdp2_is_used() -> bool:
    """Whether this process has a module that was given to ``fully_shard``. Nothing public knows all of them.

    Needed by torch 2.11 to 2.14: ``torch.distributed._composable_state._module_state_mapping``.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None or fsdp is None:
        return False
    # Not the mapping's own values(), which other threads may disturb.
    return any(isinstance(ref(), fsdp.FSDPState) for ref in list(states._module_state_mapping.data.values()))


def fsdp2_groups(module: Any) -> list[Any]:
    """The ``FSDPParamGroup`` s of one ``FSDPModule``: torch 2.11 knows at most one.

    Needed by torch 2.11 (``_fsdp_param_group``) and by torch 2.13 to 2.14 (``_fsdp_param_groups``).
    """
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def fsdp2_parameters(module: Any) -> list[torch.nn.Parameter]:
    """The sharded parameters that an ``FSDPModule`` gathers.

    Needed by torch 2.11 to 2.14: ``FSDPParamGroup.fsdp_params``.
    """
    return [p.sharded_param for group in fsdp2_groups(module) for p in group.fsdp_params]


@contextmanager
def fsdp2_keeps_shards(module: Any, is_kept: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In this block ``load_state_dict`` does not let an ``FSDPModule`` look for new shards in place of those for which
    ``is_kept``: it would pad and view them.

    Needed by torch 2.11 to 2.14: ``FSDPParam.reset_sharded_param``.
    """
    params = [p for group in fsdp2_groups(module) for p in group.fsdp_params if is_kept(p.sharded_param)]
    for p in params:
        p.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        for p in params:
            p.__dict__.pop("reset_sharded_param", None)


def fsdp2_prefetches(module: Any) -> list[torch.nn.Module]:
    """What ``set_modules_to_forward_prefetch`` was told.

    Needed by torch 2.11 to 2.14: ``FSDPState._states_to_forward_prefetch``.
    """
    return [m for state in module._get_fsdp_state()._states_to_forward_prefetch for m in state._modules]


def fsdp2_activity(module: Any) -> str | None:
    """What an ``FSDPModule`` is in the middle of ("forward", "pre_backward" ...); None if nothing.

    Needed by torch 2.11 to 2.14: ``_training_state`` of states and groups.
    """
    states = [module._get_fsdp_state(), *fsdp2_groups(module)]
    busy = [state._training_state.name for state in states if state._training_state.name != "IDLE"]
    return busy[0].lower() if busy else None


def fsdp2_is_gathering(module: Any) -> bool:
    """Whether an all-gather was started and not waited for yet.

    Needed by torch 2.11 to 2.14: ``FSDPParamGroup._all_gather_result``.
    """
    return any(group._all_gather_result is not None for group in fsdp2_groups(module))


def fsdp2_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor that an ``FSDPModule`` holds itself, by the name of its attribute.

    Needed by torch 2.11 to 2.14: attributes of ``FSDPParamGroup`` and ``FSDPParam``.
    """
    for group in fsdp2_groups(module):
        yield "_partial_reduce_output", group._partial_reduce_output
        for p in group.fsdp_params:
            yield "_sharded_param_data", p._sharded_param_data
            for name in ("_sharded_post_forward_param_data", "unsharded_accumulated_grad", "_unsharded_param"):
                yield name, getattr(p, name, None)
            if hasattr(p, "_unsharded_param"):
                yield "_unsharded_param.grad", p._unsharded_param.grad
            for tensor in (*p.all_gather_outputs, *p._unsharded_inner_tensors):
                yield "all_gather_outputs", tensor


def fsdp2_streams(module: Any) -> list[Any]:
    """The streams on which an ``FSDPModule`` reads its shards; none before its first forward, and none on a CPU.

    Needed by torch 2.11 to 2.14: ``FSDPParamGroup.comm_ctx``.
    """
    found = [
        getattr(group.comm_ctx, name, None)
        for group in fsdp2_groups(module)
        for name in ("all_gather_copy_in_stream", "all_gather_stream")
    ]
    return [stream for stream in found if isinstance(stream, torch.Stream)]


def fsdp2_forget_iteration(module: Any) -> None:
    """After an exception in a forward or a backward: as if it had not begun.

    Stands for ``FSDPModule.reset_iter_state``, which torch 2.11 lacks.

    Needed by torch 2.11; torch 2.13 has ``reset_iter_state``, for roots alone: it reshards, and waits.
    """
    context = module._get_fsdp_state()._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for state in context.all_states:
        state._comm_ctx.post_forward_order.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
