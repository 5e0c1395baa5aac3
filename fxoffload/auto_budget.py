"""``activation_budget="auto"`` and ``"80%"``: what the device leaves when its first training graph is compiled.

[Note: Auto budget] A budget is worked out once for a device, when its first graph with a backward is compiled. All
later graphs get the same, as the graphs of one step must agree on it. It is worked out anew after
``torch.compiler.reset()``, or when the optimizers that it counted are gone. The backend sees one graph, not the model
and its optimizer. So the optimizers that hold parameters on the device are looked for among live objects. Where there
are none, every parameter that requires grad counts as trained by an AdamW: a guess, which warns.

[Note: One budget for all ranks] What a graph with collectives recomputes must be the same on every rank, and free
memory differs by megabytes. A collective here could hang: one rank may compile while the others do not. The key-value
store of the process group cannot: the first rank writes its budget, all others read that.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxoffload.errors import BudgetError, OptionsError, UnsupportedError
from fxoffload.machine.profile import MachineProfile
from fxoffload.memory_budget import GRADIENTS, BudgetRoom, room_elsewhere, room_on
from fxoffload.options import Options
from fxoffload.processes import in_process_group
from fxoffload.reset import on_reset
from fxoffload.sizes import format_bytes, share_of
from fxoffload.tell import warn
from fxoffload.torch_private.fake_tensors import FakeTensor
from fxoffload.torch_private.process_groups import first_of_ranks

log = logging.getLogger(__name__)

# Devices with memory of their own.
_DEVICE_TYPES = ("cuda",)


@dataclasses.dataclass(frozen=True)
class _FoundModel:
    """``refs``: to the optimizers, or else the parameters, that were counted."""

    room: BudgetRoom
    left_bytes: int
    refs: tuple[weakref.ref[Any], ...]

    @property
    def is_stale(self) -> bool:
        return all(ref() is None for ref in self.refs)


_found: dict[torch.device, _FoundModel] = {}
_times: Counter[str] = Counter()  # How often the ranks that train the same have agreed.
on_reset(_found.clear)


def in_bytes(options: Options, device: torch.device) -> Options:
    """``options`` with a budget in bytes, where they ask for a share of what ``device`` leaves ([Note: Auto budget]).

    Raises:
        OptionsError: (a ValueError) the device has no memory to ask, nothing is left, or no parameters are found.
    """
    asked = options.activation_budget
    if not isinstance(asked, str):
        return options
    if device.type not in _DEVICE_TYPES:
        raise OptionsError(
            f"activation_budget is {asked!r}, which is of the device's own memory, and the model is on {device}. Give "
            "bytes, for example activation_budget='2GiB'; or plan for a GPU that is not here: "
            f"fxoffload.plan(model, inputs, device='h200', activation_budget={asked!r})"
        )
    found = _found.get(device)
    if found is None or found.is_stale:
        found = _found[device] = _work_out(device)
        log.info("activation_budget=%r: %s; 'auto' is %s", asked, found.room, format_bytes(found.left_bytes))
    return _with_share(options, found.left_bytes)


def in_bytes_elsewhere(
    options: Options, model: nn.Module, optimizer: torch.optim.Optimizer | None, profile: MachineProfile
) -> Options:
    """The same for a model that is planned on an empty device. ``optimizer``: None stands for an AdamW."""
    if not isinstance(options.activation_budget, str):
        return options
    room = room_elsewhere(model, optimizer, profile)
    log.info("activation_budget=%r: %s", options.activation_budget, room)
    return _with_share(options, room.left_bytes())


def told_of_gradients(error: BudgetError, asked: object, device: torch.device) -> BudgetError:
    """``error``, with what would help where a budget that was worked out is too small."""
    found = _found.get(device)
    gradients = 0 if found is None else found.room.takes.get(GRADIENTS, 0)
    if not isinstance(asked, str) or gradients <= 0:
        return error
    return BudgetError(
        f"{error}. activation_budget={asked!r} leaves {format_bytes(gradients)} for gradients that stay between "
        "backwards, as with gradient accumulation. If every step begins without gradients, they are in the plan's own "
        "peak: give fxoffload.activation_budget(model, optimizer, gradients_persist=False)",
        error.smallest_bytes,
        error.segment,
        error.inductor_bytes,
        error.checkpointing_bytes,
    )


def _with_share(options: Options, left_bytes: int) -> Options:
    share = share_of(str(options.activation_budget))
    return dataclasses.replace(options, activation_budget=max(int(share * left_bytes), 1))


def _work_out(device: torch.device) -> _FoundModel:
    gc.collect()  # an optimizer that is gone may be held by a cycle
    optimizers, parameters = _trained(device)
    if not parameters:
        raise OptionsError(
            f"expected parameters on {device} that require grad, to work out an activation_budget, found none (what "
            "gc.freeze() has frozen is not found). Give bytes: fxoffload.activation_budget(model, optimizer) says how "
            "many"
        )
    if not optimizers:
        warn(
            f"expected an optimizer of the parameters on {device}, to work out an activation_budget, found none: "
            "AdamW's two values are counted for each parameter that requires grad. Make the optimizer before the first "
            "step, or give bytes: fxoffload.activation_budget(model, optimizer, state_bytes=...)"
        )
    try:
        room = room_on(device, parameters, optimizers or [None])
    except UnsupportedError as error:
        warn(f"AdamW's two values are counted for each trained parameter, to work out an activation_budget: {error}")
        room = room_on(device, parameters, [None])
    left = _agreed(room, device, parameters)
    return _FoundModel(room, left, tuple(weakref.ref(one) for one in optimizers or parameters))


def _trained(device: torch.device) -> tuple[list[Any], list[Tensor]]:
    """Optimizers with parameters on ``device``, each once, and those that require grad; without optimizers, all."""
    from fxoffload.phases.optimizers import leaves, parameters_of

    living = _living()
    found: dict[int, Tensor] = {}
    optimizers: list[Any] = []
    for one in leaves([thing for thing in living if isinstance(thing, torch.optim.Optimizer)]):
        own = {id(p): p for p in parameters_of(one) if _is_trained(p, device)}
        if not own.keys() <= found.keys():  # a wrapper has the parameters of the optimizer that it wraps
            optimizers.append(one)
            found |= own
    if not optimizers:
        found = {id(p): p for p in living if isinstance(p, Tensor) and _is_trained(p, device)}
    return optimizers, list(found.values())


def _living() -> list[Any]:
    """Optimizers and parameters. Their types are asked first: a proxy would answer for another object. A parameter that
    is a DTensor has DTensor's type."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), (torch.optim.Optimizer, Tensor))]
    return [thing for thing in found if not isinstance(thing, Tensor) or isinstance(thing, nn.Parameter)]


def _is_trained(parameter: Tensor, device: torch.device) -> bool:
    is_real = not isinstance(parameter, FakeTensor) and parameter.is_leaf
    return is_real and parameter.requires_grad and parameter.device == device


# -- ranks -------------------------------------------------------------------------------------------------------------


def _agreed(room: BudgetRoom, device: torch.device, parameters: Sequence[Tensor]) -> int:
    """The bytes left, equal on all ranks that train the same; see [Note: One budget for all ranks]."""
    mine = room.left_bytes()
    if not in_process_group() or dist.get_world_size() < 2:
        return mine
    key = hashlib.sha256("\n".join(_described(room, device, parameters)).encode()).hexdigest()[:16]
    _times[key] += 1  # After a reset, or for a second model of the same shapes, ranks agree anew.
    text = first_of_ranks(f"fxoffload/auto_budget/{key}/{_times[key]}", str(mine))
    if text is None or not re.fullmatch(r"\d+", text):
        warn(
            "the ranks could not agree on one activation_budget, and each works out its own; fxoffload.check_ranks() "
            "says whether their plans fit together. Give every rank the same bytes instead"
        )
        return mine
    agreed = int(text)
    if agreed > mine + room.total - room.limit:
        warn(
            f"expected {device} to leave what another rank's device does, {format_bytes(agreed)}, found "
            f"{format_bytes(mine)}: steps may run out of memory here. Give every rank the smaller one as bytes"
        )
    return agreed


def _described(room: BudgetRoom, device: torch.device, parameters: Iterable[Tensor]) -> Iterator[str]:
    """The same on ranks that train the same: a sharded parameter has the shape of the whole."""
    yield f"{device.type} {room.total}"
    yield from sorted(f"{tuple(p.shape)} {p.dtype}" for p in parameters)
