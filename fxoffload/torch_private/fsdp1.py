"""Private torch APIs of FSDP1: the tensors of a ``FullyShardedDataParallel``, and the state that it is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxoffload.torch_private.storages import storage_key


def fsdp1_handle(module: Any) -> Any:
    """The ``FlatParamHandle`` of a ``FullyShardedDataParallel``; None for one without parameters of its own.

    Needed by torch 2.11 to 2.14: ``FullyShardedDataParallel._handle``.
    """
    return module._handle


def fsdp1_parameters(module: Any) -> list[torch.Tensor]:
    """The parameters that lie in the flat parameter of a ``FullyShardedDataParallel``: themselves, or the flat one.

    Needed by torch 2.11 to 2.14: ``FlatParamHandle.flat_param``, ``FlatParameter._params`` and ``_shared_params``.
    """
    handle = fsdp1_handle(module)
    if handle is None:
        return []
    flat = handle.flat_param
    if not handle._use_orig_params:
        return [flat]
    return [p for p in (*flat._params, *(flat._shared_params or ())) if p is not None]


def fsdp1_activity(module: Any) -> str | None:
    """What a ``FullyShardedDataParallel`` is in the middle of; None if nothing.

    Needed by torch 2.11 to 2.14: ``training_state`` of both.
    """
    handle = fsdp1_handle(module)
    states = [module.training_state] + ([handle._training_state] if handle is not None else [])
    busy = [state.name for state in states if state.name != "IDLE"]
    return busy[0].lower() if busy else None


def fsdp1_reshard(module: Any) -> None:
    """Lets a ``FullyShardedDataParallel`` have its shard only: the root keeps everything after a forward.

    Needed by torch 2.11 to 2.14: ``torch.distributed.fsdp._runtime_utils._reshard``.
    """
    from torch.distributed.fsdp import _runtime_utils

    handle = fsdp1_handle(module)
    if handle is None or module._is_root is None:
        return
    flat = handle.flat_param
    gathered = handle.uses_sharded_strategy and not handle.needs_unshard()
    if gathered or storage_key(flat) != storage_key(flat._local_shard):
        _runtime_utils._reshard(module, handle, handle.uses_sharded_strategy)


def fsdp1_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor that a ``FullyShardedDataParallel`` holds itself, by the name of its attribute.

    Needed by torch 2.11 to 2.14: attributes of ``FlatParameter``.
    """
    handle = fsdp1_handle(module)
    if handle is None:
        return
    flat = handle.flat_param
    yield "flat_param", flat
    yield "flat_param.grad", flat.grad
    for name in (
        "_local_shard",
        "_mp_shard",
        "_full_param_padded",
        "_full_prec_full_param_padded",
        "_saved_grad_shard",
        "_cpu_grad",
    ):
        yield name, getattr(flat, name, None)


def fsdp1_streams(module: Any) -> list[Any]:
    """The streams on which a ``FullyShardedDataParallel`` reads its shard.

    Needed by torch 2.11 to 2.14: ``_pre_unshard_stream`` and ``_unshard_stream``.
    """
    found = [getattr(module, name, None) for name in ("_pre_unshard_stream", "_unshard_stream")]
    return [stream for stream in found if isinstance(stream, torch.Stream)]


def fsdp1_forget_summons(handle: Any) -> None:
    """After an exception at the beginning of ``summon_full_params`` or ``state_dict``: as if it had not begun.

    Needed by torch 2.11 to 2.14: ``FlatParamHandle._training_state``.
    """
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        handle._training_state = type(handle._training_state).IDLE


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
    """The parameters that FSDP1 flattened at this module; None where it flattened nothing.

    Needed by torch 2.11 to 2.14.
    """
    handle = module.__dict__.get("_handle")  # asked of every module: most have none
    if handle is None:
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(module, FullyShardedDataParallel):
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
