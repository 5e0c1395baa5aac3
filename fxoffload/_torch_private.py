"""Private torch APIs for what needs no compiler; ``fxoffload._torch_compat`` has the others and imports Inductor."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

# -- phases: who compiled a module -------------------------------------------------------------------------------------


def optimized_modules_of(module: nn.Module) -> list[nn.Module]:
    """The modules that ``torch.compile(module)`` returned and that are still alive; ``module`` itself may be one."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    kind = dynamo.OptimizedModule
    if isinstance(module, kind):
        return [module]
    children = [found for found in gc.get_referrers(module) if isinstance(found, dict) and "_orig_mod" in found]
    owners = [owner for one in children for owner in gc.get_referrers(one)]
    # The dict may be the module's own __dict__, or the _modules in it.
    owners += [o for d in owners if isinstance(d, dict) and d.get("_modules") in children for o in gc.get_referrers(d)]
    return list({id(owner): owner for owner in owners if isinstance(owner, kind)}.values())


# -- phases: what a model's weights are called, and how they are cut over ranks ----------------------------------------


@dataclass(frozen=True)
class FlatView:
    """One parameter inside an FSDP1 flat parameter.

    Attributes:
        names: below the FSDP module; more than one where it is shared.
        start: its first element in the whole flat parameter.
        local_start: its first element in this rank's shard.
        local_numel: how many of its elements lie there.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    local_start: int
    local_numel: int


@dataclass(frozen=True, eq=False)
class FlatParameterInfo:
    """An FSDP1 flat parameter. Stands for ``FullyShardedDataParallel._handle`` and ``FlatParameter``'s attributes.

    Attributes:
        local: this rank's shard with its padding; the whole of it where it is not sharded.
        aliases: tensors on the same storage that a module has registered.
        numel: of the whole, without the padding for the number of ranks.
        group: over which it is sharded; None where it is not.
        members: (module, name) of everything that it stands for.
        extended: whether parameters were transformed before they were flattened (tensor parallelism).
    """

    local: torch.Tensor
    aliases: tuple[torch.Tensor, ...]
    numel: int
    group: Any
    views: tuple[FlatView, ...]
    members: tuple[tuple[nn.Module, str], ...]
    extended: bool


def flat_parameter_of(module: nn.Module) -> FlatParameterInfo | None:
    """What FSDP1 flattened at this module; None where it flattened nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
    if handle is None:
        return None
    flat = handle.flat_param
    numel = int(flat._unpadded_unsharded_size.numel())
    sharded = bool(handle.uses_sharded_strategy)
    local = flat
    if sharded and flat.shape != flat._sharded_size:  # it is gathered at the moment
        local = flat._local_shard
    members = [(info.module, info.param_name) for info in flat._param_infos]
    members += [(info.module, info.param_name) for info in flat._shared_param_infos]
    if not handle._use_orig_params:
        members.append((handle._fully_sharded_module, "_flat_param"))
    return FlatParameterInfo(
        local=local,
        aliases=(flat, *(flat._params or ())),
        numel=numel,
        group=handle.process_group if sharded and handle.world_size > 1 else None,
        views=tuple(_flat_views(flat)),
        members=tuple(members),
        extended=any(extension is not None for extension in flat._param_extensions),
    )


def _flat_views(flat: Any) -> Iterator[FlatView]:
    shared: dict[tuple[int, str], list[str]] = defaultdict(list)
    for info in flat._shared_param_infos:
        shared[id(info.prim_module), info.prim_param_name].append(_dotted(info.module_name, info.param_name))
    paddings = iter(flat._is_padding_mask)
    position, numels = 0, iter(flat._numels_with_padding)
    for info, shape, in_shard in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
        while next(paddings):
            position += next(numels)
        names = [_dotted(info.module_name, info.param_name), *shared[id(info.module), info.param_name]]
        yield FlatView(
            names=tuple(names),
            shape=tuple(shape),
            start=position,
            local_start=in_shard.offset_in_shard or 0,
            local_numel=in_shard.numel_in_shard or 0,
        )
        position += next(numels)


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that its state dict leaves out. ``Module._non_persistent_buffers_set``."""
    return module._non_persistent_buffers_set


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing ``torch.distributed.tensor``, which takes a second."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def mesh_dims_in_order_of_cuts(placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int] | None:
    """The mesh dimensions that cut a DTensor, first cut first; None for an order that is no sequence of plain cuts.

    Stands for ``_StridedShard``: FSDP2 on top of tensor parallelism cuts along a mesh dimension to the left after those
    to the right. Its ``split_factor`` is the number of parts that were there before.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if not isinstance(getattr(placement, "dim", None), int):
            continue
        after, parts = 0, 1
        wanted = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        while parts < wanted and after < len(order):
            if placements[order[after]].dim == placement.dim:
                parts *= mesh_shape[order[after]]
            after += 1
        if parts != wanted:
            return None
        order.insert(after, mesh_dim)
    return order


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Starts to gather ``part`` of every rank into ``whole``; returns what to wait for.

    ``all_gather_single`` is what torch 2.13 calls ``all_gather_into_tensor``, and deprecates the old name.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)
