"""Private torch APIs for things that need no compiler; ``fxoffload._torch_compat`` has the others, imports Inductor."""

from __future__ import annotations

import gc
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

# -- phases: who compiled a module -------------------------------------------------------------------------------------


def is_optimized_module(module: nn.Module) -> bool:
    """Whether ``torch.compile()`` returned it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


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


def in_backward() -> bool:
    """Whether this thread is running a node of an autograd backward (reentrant checkpoint's second forward)."""
    return torch._C._current_graph_task_id() != -1


def after_backward(work: Callable[[], None]) -> None:
    """Call ``work`` when autograd has ended the backward in which this is called, after earlier requests of this kind.

    Outside of a backward it is called at once. It is not called where the backward raises.
    """
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(work)
    else:
        work()


# -- profiles ----------------------------------------------------------------------------------------------------------


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of that name in profiles.

    Stands for ``torch.profiler.record_function``, which takes the host 8 us without a profiler. This one, which
    Inductor's own code uses, takes 0.3.
    """
    return _RECORD_FUNCTION(name)


_PROFILER: Any = getattr(torch._C, "_profiler", None)
_RECORD_FUNCTION: Any = getattr(_PROFILER, "_RecordFunctionFast", torch.profiler.record_function)

# -- the caching allocator's record ------------------------------------------------------------------------------------


class AllocatorEvent(NamedTuple):
    """One allocation, or one free that was asked for. ``nbytes``: as asked for, not as rounded. ``has_frames``: it was
    recorded with a traceback. ``address``: 0 where it is not known. ``stream``: the handle of the one that owns it."""

    is_allocation: bool
    nbytes: int
    has_frames: bool
    address: int = 0
    stream: int = 0


def records_allocator_events() -> bool:
    """Whether the caching allocator records its events now. True where that cannot be known."""
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_enabled is None or bool(is_enabled())


def record_allocator_events(most: int) -> None:
    """Have the caching allocator record its events on all devices, the last ``most`` of each, without tracebacks."""
    # Regions in it are marked by a callback: a global one, since it may end on another thread (autograd's).
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=most, clear_history=True, global_record_annotations=True
    )


def stop_recording_allocator_events() -> None:
    """Have the caching allocator record nothing. Earlier records are gone."""
    torch.cuda.memory._record_memory_history(None)


def allocator_events() -> list[list[AllocatorEvent]]:
    """The record of each device, in its order. Takes milliseconds, tens of them where there is much memory."""
    kinds = {"alloc": True, "free_requested": False}
    return [
        [
            AllocatorEvent(kinds[e["action"]], e["size"], bool(e.get("frames")), e.get("addr", 0), e.get("stream", 0))
            for e in trace
            if e["action"] in kinds
        ]
        for trace in torch.cuda.memory._snapshot().get("device_traces", [])
    ]


# -- phases: what FSDP holds, reads and is in the middle of ------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """Tells a plain tensor's storage from all others that are alive; also while it is empty."""
    return tensor.untyped_storage()._cdata


def fsdp2_is_used() -> bool:
    """Whether this process has a module that was given to ``fully_shard``. Nothing public knows all of them."""
    states = sys.modules.get("torch.distributed._composable_state")
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None or fsdp is None:
        return False
    # Not the mapping's own values(), which other threads may disturb.
    return any(isinstance(ref(), fsdp.FSDPState) for ref in list(states._module_state_mapping.data.values()))


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module, as it was before ``fully_shard`` or ``replicate`` changed it."""
    homes = (("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed._composable.replicate", "DDP"))
    mixed_in = tuple(getattr(sys.modules[home], name, ()) for home, name in homes if home in sys.modules)
    classes = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in classes if not issubclass(kind, mixed_in))


def fsdp2_groups(module: Any) -> list[Any]:
    """The ``FSDPParamGroup`` s of one ``FSDPModule``: torch 2.11 knows at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def fsdp2_parameters(module: Any) -> list[torch.nn.Parameter]:
    """The sharded parameters that an ``FSDPModule`` gathers."""
    return [p.sharded_param for group in fsdp2_groups(module) for p in group.fsdp_params]


@contextmanager
def fsdp2_keeps_shards(module: Any, is_kept: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In this block ``load_state_dict`` does not let an ``FSDPModule`` look for new shards in place of those for which
    ``is_kept``: it would pad and view them."""
    params = [p for group in fsdp2_groups(module) for p in group.fsdp_params if is_kept(p.sharded_param)]
    for p in params:
        p.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        for p in params:
            p.__dict__.pop("reset_sharded_param", None)


def fsdp2_prefetches(module: Any) -> list[torch.nn.Module]:
    """What ``set_modules_to_forward_prefetch`` was told."""
    return [m for state in module._get_fsdp_state()._states_to_forward_prefetch for m in state._modules]


def fsdp2_activity(module: Any) -> str | None:
    """What an ``FSDPModule`` is in the middle of ("forward", "pre_backward" ...); None if nothing."""
    states = [module._get_fsdp_state(), *fsdp2_groups(module)]
    busy = [state._training_state.name for state in states if state._training_state.name != "IDLE"]
    return busy[0].lower() if busy else None


def fsdp2_is_gathering(module: Any) -> bool:
    """Whether an all-gather was started and not waited for yet."""
    return any(group._all_gather_result is not None for group in fsdp2_groups(module))


def fsdp2_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor that an ``FSDPModule`` holds itself, by the name of its attribute."""
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
    """The streams on which an ``FSDPModule`` reads its shards; none before its first forward, and none on a CPU."""
    found = [
        getattr(group.comm_ctx, name, None)
        for group in fsdp2_groups(module)
        for name in ("all_gather_copy_in_stream", "all_gather_stream")
    ]
    return [stream for stream in found if isinstance(stream, torch.Stream)]


def fsdp2_forget_iteration(module: Any) -> None:
    """After an exception in a forward or a backward: as if it had not begun.

    Stands for ``FSDPModule.reset_iter_state``, which torch 2.11 lacks.
    """
    context = module._get_fsdp_state()._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for state in context.all_states:
        state._comm_ctx.post_forward_order.clear()
        state._training_state = type(state._training_state).IDLE
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                group._training_state = type(group._training_state).IDLE
                group._post_forward_indices.clear()


def fsdp1_handle(module: Any) -> Any:
    """The ``FlatParamHandle`` of a ``FullyShardedDataParallel``; None for one without parameters of its own."""
    return module._handle


def fsdp1_parameters(module: Any) -> list[torch.Tensor]:
    """The parameters that lie in the flat parameter of a ``FullyShardedDataParallel``: themselves, or the flat one."""
    handle = fsdp1_handle(module)
    return [] if handle is None else fsdp1_parameters_of(handle)


def fsdp1_parameters_of(handle: Any) -> list[torch.Tensor]:
    """The same, of a ``FlatParamHandle``."""
    flat = handle.flat_param
    if not handle._use_orig_params:
        return [flat]
    return [p for p in (*flat._params, *(flat._shared_params or ())) if p is not None]


def fsdp1_activity(module: Any) -> str | None:
    """What a ``FullyShardedDataParallel`` is in the middle of; None if nothing."""
    handle = fsdp1_handle(module)
    states = [module.training_state] + ([handle._training_state] if handle is not None else [])
    busy = [state.name for state in states if state.name != "IDLE"]
    return busy[0].lower() if busy else None


def fsdp1_reshard(module: Any) -> None:
    """Lets a ``FullyShardedDataParallel`` have its shard only: the root keeps everything after a forward."""
    from torch.distributed.fsdp import _runtime_utils

    handle = fsdp1_handle(module)
    if handle is None or module._is_root is None:
        return
    flat = handle.flat_param
    gathered = handle.uses_sharded_strategy and not handle.needs_unshard()
    if gathered or storage_key(flat) != storage_key(flat._local_shard):
        _runtime_utils._reshard(module, handle, handle.uses_sharded_strategy)


def fsdp1_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor that a ``FullyShardedDataParallel`` holds itself, by the name of its attribute."""
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
    """The streams on which a ``FullyShardedDataParallel`` reads its shard."""
    found = [getattr(module, name, None) for name in ("_pre_unshard_stream", "_unshard_stream")]
    return [stream for stream in found if isinstance(stream, torch.Stream)]


def fsdp1_forget_summons(handle: Any) -> None:
    """After an exception at the beginning of ``summon_full_params`` or ``state_dict``: as if it had not begun."""
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        handle._training_state = type(handle._training_state).IDLE


def dtensor_over(like: Any, local: torch.Tensor, kind: type | None = None) -> Any:
    """A DTensor with the mesh, placements and shape of ``like`` and another local tensor, on whatever device.

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor

    found = DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg]
    if kind is not None:
        found.__class__ = kind
    return found


def local_of(dtensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself: ``to_local`` makes another object."""
    return dtensor._local_tensor


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose values are the negative ones: the same bytes with the other negative bit."""
    return torch.ops.aten._neg_view(tensor)


def storage_behind(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it is still alive."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor has a ``__torch_dispatch__``."""
    disabled: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    return getattr(type(tensor), "__torch_dispatch__", disabled) is not disabled


def storage_reference(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to the storage of a plain tensor."""
    return StorageWeakRef(tensor.untyped_storage())


def is_gone(weak: StorageWeakRef) -> bool:
    """``weak.expired()``, in a tenth of the time."""
    return torch.UntypedStorage._expired(weak.cdata)  # type: ignore[attr-defined]


def gpus_in_use() -> list[int]:
    """The GPUs that this process has a context on; none where it has used none."""
    if not torch.cuda.is_initialized():
        return []
    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


_set_version_counters: Any = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Lets autograd believe that a tensor was written to ``version`` times.

    It is no inference tensor: those count nothing.

    One by one: several tensors, in different storages too, may have one counter (``detach()``, then ``.data = ``).
    """
    _set_version_counters((tensor,), (version,))


def write_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose ``_version`` grows when this one, or a view of it, is written to."""
    found = tensor.detach()
    found.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found


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
    """The parameters that FSDP1 flattened at this module; None where it flattened nothing."""
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


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that its state dict leaves out. ``Module._non_persistent_buffers_set``."""
    return module._non_persistent_buffers_set


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing ``torch.distributed.tensor``, which takes a second."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def is_made_like_dtensor(kind: type) -> bool:
    """Whether tensors of a class have the inner tensors of DTensors and nothing else."""
    dtensor: Any = _dtensor()
    return dtensor is not None and getattr(kind, "__tensor_flatten__", None) is dtensor.__tensor_flatten__


def _dtensor() -> type | None:
    # Another thread may be importing it just now.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def mesh_and_placements(tensor: Any) -> tuple[Any, Any]:
    """Of a DTensor, with less host time than by its properties."""
    spec = tensor._spec
    return spec.mesh, spec.placements


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
    """Starts to gather ``part`` of every rank into ``whole``; returns a handle to wait for.

    ``all_gather_single`` is torch 2.13's name for ``all_gather_into_tensor``, which it deprecates.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


# -- phases: functions that were compiled ------------------------------------------------------------------------------


def num_graphs_compiled() -> tuple[int, int] | None:
    """Changes whenever Dynamo compiles something; None if it was never imported.

    A reset of Dynamo sets its count of code objects back to zero, but not that of the frames that it looked at.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return None if dynamo is None else (dynamo.FRAME_COUNTER, dynamo.counters["frames"]["total"])


def compiled_functions() -> list[tuple[Any, list[Any]]]:
    """(the function itself, the hooks that Dynamo calls before each of its calls) of everything compiled and alive."""
    # Dynamo's wrapper closes over its context as `self`. Asked first: a function makes its dict when that is read, and
    # there are hundreds of thousands.
    wrappers = [
        one
        for one in gc.get_objects()
        if type(one) is types.FunctionType
        and "self" in one.__code__.co_freevars
        and "_torchdynamo_orig_callable" in one.__dict__
    ]
    found = []
    for one in wrappers:
        cells = dict(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True))
        hooks = getattr(cells["self"].cell_contents, "enter_exit_hooks", None)
        if isinstance(hooks, list):
            found.append((one.__dict__["_torchdynamo_orig_callable"], hooks))
    return found


# -- ranks -------------------------------------------------------------------------------------------------------------


def first_of_ranks(key: str, value: str) -> str | None:
    """The value of the rank that asked first for ``key``, by the store of the default process group. No collective: no
    rank waits for another. None: the store cannot do that."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(key, "", value).decode()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return None
