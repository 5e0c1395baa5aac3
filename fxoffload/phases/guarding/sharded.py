"""Models sharded by FSDP: the state they must be in to be offloaded, and tensors they read without using parameters.

[Note: FSDP and streams]
FSDP reads shards on streams of its own, which wait for the caller's stream once per forward only, at its root. A fence
that lets the caller's stream wait for a copy is not enough for the layers: ``all_gather_streams`` have to wait as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.torch_private.autograd import in_backward
from fxoffload.torch_private.fsdp1 import fsdp1_activity, fsdp1_parameters, fsdp1_reshard, fsdp1_streams, fsdp1_tensors
from fxoffload.torch_private.fsdp2 import (
    fsdp2_activity,
    fsdp2_groups,
    fsdp2_is_gathering,
    fsdp2_parameters,
    fsdp2_prefetches,
    fsdp2_streams,
    fsdp2_tensors,
)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it cannot have been applied where it was not imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether this is a ``FullyShardedDataParallel``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def fsdp_modules(
    model: nn.Module, submodules: Iterable[tuple[str, nn.Module]] | None = None
) -> Iterator[tuple[str, Any]]:
    """(name, module) of everything in a model that FSDP was applied to.

    Args:
        submodules: ``model.named_modules()``, where the caller has it already.
    """
    for name, module in model.named_modules() if submodules is None else submodules:
        if is_fsdp2(module) or is_fsdp1(module):
            yield name or type(module).__name__, module


def fsdp_groups(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """Each FSDP module of a model with the parameters that it gathers."""
    return [(module, parameters_of(module)) for _, module in fsdp_modules(model)]


def prefetched_by(module: nn.Module) -> list[nn.Module]:
    """The FSDP modules whose parameters are gathered when the forward of this one begins.

    FSDP2 is told which; FSDP1 knows after its first step, and gathers the next one if ``forward_prefetch`` is on.
    """
    return list(fsdp2_prefetches(module)) if is_fsdp2(module) else []


class GatherStreams:
    """The streams on which FSDP reads the shards of some models; see [Note: FSDP and streams]. None on a CPU.

    Each root has streams of its own, from its first forward on: they are looked for until every module that FSDP was
    applied to has some. It may be applied later, too.

    Args:
        models: sharded or not.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        # Without streams so far. A walk through a model costs 30 times as much as a look through this.
        self._left = list({id(module): module for model in models for module in model.modules()}.values())
        self._streams: dict[Any, Any] = {}

    def wait(self, event: Any) -> None:
        """Lets them wait for an event. A root that has none yet lets its own wait for the caller's, when it makes them
        in its first forward."""
        self._find()
        for stream in list(self._streams.values()):
            stream.wait_event(event)

    def _find(self) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return
        kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
        found = {id(module): _streams_of(module) for module in self._left if isinstance(module, kinds)}
        self._streams |= {(s.device, s.stream_id): s for streams in found.values() for s in streams}
        if any(found.values()):
            self._left = [module for module in self._left if not found.get(id(module))]


def kept_on_cpu(module: Any) -> list[Tensor]:
    """The parameters that one FSDP module keeps on the CPU. They are pinned: their storages must not be resized."""
    if is_fsdp1(module):
        keeps = bool(module.cpu_offload.offload_params)
    else:
        from torch.distributed.fsdp import CPUOffloadPolicy

        keeps = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in fsdp2_groups(module))
    return parameters_of(module) if keeps else []


def settle(model: nn.Module) -> None:
    """Brings every FSDP module to its sharded state: the unsharded parameters are copies that need no offloading.

    Raises:
        RuntimeError: a forward or a backward is running, or ended with an exception. Nothing was changed.
    """
    found = list(fsdp_modules(model))
    if found and in_backward():
        raise RuntimeError("cannot offload inside a backward: expected to be called between steps")
    for name, module in found:
        activity = fsdp2_activity(module) if is_fsdp2(module) else fsdp1_activity(module)
        if activity is not None:
            raise RuntimeError(
                f"cannot offload while FSDP is in the middle of a step: expected {name} to be idle, found it in "
                f"{activity}. Call it after the forward or backward; if that ended with an exception, call "
                "reset_iter_state() of the root (FSDP2 from torch 2.13) or build the model again"
            )
    for _, module in found:
        if is_fsdp1(module):
            # FSDP1 looks at its parameters when it is first used: that must not be while they are away. Every public
            # method does this first; the first one met is the root.
            module.check_is_root()
    for _, module in found:
        if is_fsdp1(module):
            fsdp1_reshard(module)
            continue
        if fsdp2_is_gathering(module):
            module.unshard()  # waits for gathers that were started
        module.reshard()


def held_tensors(model: nn.Module, *, emptied: bool = False) -> list[tuple[str, Tensor]]:
    """All tensors that FSDP itself holds, by module and attribute; most share a parameter's storage.

    Args:
        emptied: also those that have no memory.
    """
    found = []
    for name, module in fsdp_modules(model):
        for attribute, tensor in fsdp2_tensors(module) if is_fsdp2(module) else fsdp1_tensors(module):
            if tensor is None:
                continue
            if emptied or any(plain.untyped_storage().nbytes() for plain in plain_tensors(tensor)):
                found.append((f"{name}.{attribute}", tensor))
    return found


def parameters_of(module: nn.Module) -> list[Tensor]:
    """The shards that an FSDP module gathers, also while its attributes are the gathered parameters."""
    return [*fsdp2_parameters(module)] if is_fsdp2(module) else fsdp1_parameters(module)


def _streams_of(module: nn.Module) -> list[Any]:
    return fsdp2_streams(module) if is_fsdp2(module) else fsdp1_streams(module)
