"""How many bytes of a device are left for activations, once gradients and optimizer state are there as well."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from fxoffload.errors import OptionsError, UnsupportedError
from fxoffload.machine.devices import memory_bytes, resolve
from fxoffload.machine.profile import MachineProfile
from fxoffload.machine.shelf import load_profile
from fxoffload.sizes import format_bytes, parse_bytes
from fxoffload.torch_private.fake_tensors import FakeTensor
from fxoffload.torch_private.tensor_subclasses import TorchDispatchMode

# CUDA's caching allocator hands out multiples of this.
_BLOCK = {"cuda": 512}
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)


# Part of a device's memory that is counted on: the rest is for fragments, for libraries' memory, and for errors.
DEVICE_FRACTION = 0.9
GRADIENTS = "gradients"
# AdamW keeps two values for each parameter.
_ASSUMED_STATES = 2


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device now. Unused memory of the caching allocator counts as free.

    Attributes:
        total: all of it.
        here: in tensors of this process; on the CPU, of the whole process.
        others: in other processes, and in CUDA contexts and libraries.
    """

    total: int
    here: int = 0
    others: int = 0


@dataclass(frozen=True)
class BudgetRoom:
    """What a device leaves for activations, in bytes.

    Attributes:
        total: its memory.
        takes: bytes in use now or later, by their purpose in words.
        fraction: of the memory that is counted on.
    """

    total: int
    takes: Mapping[str, int]
    fraction: float = DEVICE_FRACTION

    @property
    def limit(self) -> int:
        """Bytes that are counted on."""
        return int(self.fraction * self.total)

    def left_bytes(self) -> int:
        """Raises OptionsError, with what takes how much, where nothing is left."""
        left = self.limit - sum(self.takes.values())
        if left <= 0:
            raise OptionsError(
                f"expected room for activations in {self._of()}, found {format_bytes(-left)} too little: "
                f"{self.listed()}. Shard the model, use an optimizer with less state, "
                "or raise device_fraction (of fxoffload.activation_budget)"
            )
        return left

    def listed(self) -> str:
        """What takes how much, in words."""
        return ", ".join(f"{what} {format_bytes(n)}" for what, n in self.takes.items() if n) or "nothing"

    def _of(self) -> str:
        return f"{format_bytes(self.limit)} ({100 * self.fraction:g} % of {format_bytes(self.total)})"

    def __str__(self) -> str:
        return f"{format_bytes(self.left_bytes())} are left of {self._of()}, after {self.listed()}"


@dataclass(frozen=True)
class _Target:
    """``device``: where the step will run. ``is_here``: on this machine, so that tensors may lie there already."""

    device: torch.device
    memory: DeviceMemory
    is_here: bool = True

    def holds(self, tensor: Tensor) -> bool:
        return self.is_here and tensor.device == self.device and not isinstance(tensor, FakeTensor)

    def nbytes(self, tensor: Tensor, itemsize: int | None = None) -> int:
        """Bytes that the tensor takes there."""
        block = _BLOCK.get(self.device.type, 1)
        found = tensor.numel() * (itemsize or tensor.element_size())
        return math.ceil(found / block) * block


def activation_budget(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_fraction: float = DEVICE_FRACTION,
    device: torch.device | str | Path | MachineProfile | None = None,
    gradients_persist: bool = True,
    state_bytes: int | str | None = None,
) -> int:
    """Bytes of the device that a training step may add to the memory in use for good: an ``activation_budget``.

    That is ``device_fraction`` of its memory, less the bytes in use now and the gradients and optimizer state that do
    not exist yet. Parameters, buffers, gradients and state that are elsewhere count too, as if moved there. Call it
    between steps. It does not foresee memory that is allocated later for good: another model, communication buffers,
    the gathered parameters of FSDP. Of sharded parameters (DTensor) the local shards count.

    The state is found by stepping a copy of the optimizer that holds nothing, on fake parameters.

    Args:
        model: as it is trained.
        optimizer: None: there is none on this device.
        device_fraction: the rest is for fragments, for libraries' memory, and for errors of the plan.
        device: None: the GPU that the parameters are on, else the current one, else the CPU. A shipped profile's name,
            a profile's file or a profile stand for an empty device of that kind, which need not be here.
        gradients_persist: they accumulate, or are zeroed in place. False: every step begins without
            (``zero_grad(set_to_none=True)`` and one backward); then they are in the plan's own peak.
        state_bytes: of the optimizer state that does not exist yet, where the optimizer cannot be tried; or "4GiB".

    Raises:
        OptionsError: (a ValueError) nothing is left, with the bytes of each part; or a bad argument.
        UnsupportedError: (a NotImplementedError) the optimizer cannot be tried.
        ProfileError: (a RuntimeError) there is no such device.
    """
    if not 0 < device_fraction <= 1:
        raise OptionsError(f"device_fraction is {device_fraction!r}; expected a fraction of the memory such as 0.9")
    target = _target(model, device)
    with torch.no_grad():
        existing = [*model.parameters(), *model.buffers()]
        takes = {
            f"in use by this process on {target.device}": target.memory.here,
            "in use by others": target.memory.others,
            "parameters and buffers to be moved there": _to_move(existing, target),
            GRADIENTS: _gradient_bytes(model.parameters(), target, gradients_persist),
            "optimizer state": _state_bytes(optimizer, target, state_bytes),
        }
    return BudgetRoom(target.memory.total, takes, device_fraction).left_bytes()


def room_on(
    device: torch.device, parameters: Sequence[Tensor], optimizers: Iterable[torch.optim.Optimizer | None]
) -> BudgetRoom:
    """What a device leaves, for parameters that are trained on it.

    Args:
        device: as ``resolve`` gives it.
        parameters: each once; those elsewhere are left out.
        optimizers: those that train them; None stands for one of which nothing is known: AdamW's state is assumed.

    Raises:
        UnsupportedError: (a NotImplementedError) an optimizer cannot be tried.
    """
    target = _Target(device, device_memory(device))
    with torch.no_grad():
        there = [p for p in parameters if target.holds(_local(p))]
        state = sum(
            assumed_state_bytes(there, target) if one is None else _state_bytes(one, target, None, there)
            for one in optimizers
        )
        takes = {
            f"in use by this process on {device}": target.memory.here,
            "in use by others": target.memory.others,
            GRADIENTS: _gradient_bytes(there, target, persist=True),
            "optimizer state": state,
        }
    return BudgetRoom(target.memory.total, takes)


def room_elsewhere(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: str | Path | MachineProfile
) -> BudgetRoom:
    """What an empty device leaves for a model that is trained there. ``optimizer``: as one of those of ``room_on``."""
    found = lasting(model, optimizer, device)
    if optimizer is None:
        found = replace(found, state=assumed_state_bytes(model.parameters(), _target(model, device)))
    return found.room()


@dataclass(frozen=True)
class Lasting:
    """Bytes on an empty device of which a training step takes nothing away.

    Attributes:
        device: its memory.
        parameters: and buffers.
        gradients: of the trained parameters.
        state: of the optimizer.
    """

    device: int
    parameters: int
    gradients: int
    state: int

    def room(self) -> BudgetRoom:
        """The rest of the device."""
        takes = {"parameters and buffers": self.parameters, GRADIENTS: self.gradients, "optimizer state": self.state}
        return BudgetRoom(self.device, takes)


def lasting(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: str | Path | MachineProfile) -> Lasting:
    """Bytes that a model that lies elsewhere (on meta, say) takes on a device. Arguments and errors: see
    ``activation_budget``."""
    target = _target(model, device)
    with torch.no_grad():
        return Lasting(
            target.memory.total,
            _to_move([*model.parameters(), *model.buffers()], target),
            _gradient_bytes(model.parameters(), target, persist=True),
            _state_bytes(optimizer, target, None),
        )


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory in use now. ``device``: as ``resolve`` gives it.

    On the CPU the memory is the machine's, or that of this process' control group, of which others are then not known.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return DeviceMemory(total, torch.cuda.memory_allocated(device), max(total - free - reserved, 0))
    total, machine, here = memory_bytes(device), psutil.virtual_memory(), psutil.Process().memory_info().rss
    others = machine.total - machine.available - here if total == machine.total else 0
    return DeviceMemory(total, here, max(others, 0))


def _target(model: nn.Module, device: torch.device | str | Path | MachineProfile | None) -> _Target:
    if device is None:
        device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    if isinstance(device, str):
        device = _as_device(device)
    if isinstance(device, (str, Path)):
        device = load_profile(device)
    if isinstance(device, MachineProfile):
        kind = torch.device("cuda", 0) if device.device_type == "cuda" else torch.device("cpu")
        return _Target(kind, DeviceMemory(device.device_memory_bytes), is_here=False)
    found = resolve(device)
    return _Target(found, device_memory(found))


def _as_device(name: str) -> torch.device | str:
    try:
        return torch.device(name)
    except RuntimeError:
        return name  # a profile


# -- tensors that exist ------------------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    """This process' part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _to_move(tensors: Iterable[Tensor], target: _Target) -> int:
    parts = {id(t): _local(t) for t in tensors}
    return sum(target.nbytes(t) for t in parts.values() if not target.holds(t))


def _gradient_bytes(parameters: Iterable[Tensor], target: _Target, persist: bool) -> int:
    """Bytes that gradients will take beyond what they do; negative where those that exist will be freed."""
    found = 0
    for parameter in parameters:
        grad = parameter.grad
        if not persist:
            found -= target.nbytes(_local(grad)) if grad is not None and target.holds(_local(grad)) else 0
        elif grad is not None:
            found += _to_move([grad], target)
        elif parameter.requires_grad:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            found += target.nbytes(_local(parameter), dtype.itemsize)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


# -- optimizer state ---------------------------------------------------------------------------------------------------


def _state_bytes(
    optimizer: torch.optim.Optimizer | None,
    target: _Target,
    given: int | str | None,
    only: Iterable[Tensor] | None = None,
) -> int:
    """Bytes that the optimizer's state will take there beyond its present ones. ``only``: of these parameters."""
    ids = None if only is None else {id(p) for p in only}
    moved = 0
    if optimizer is not None:
        for parameter, state in optimizer.state.items():
            if ids is not None and id(parameter) not in ids:
                continue
            # State that an optimizer keeps elsewhere than the parameter (a step count on the host) stays there.
            near = [t for t in _tensors(state) if not isinstance(parameter, Tensor) or t.device == parameter.device]
            moved += _to_move(near, target)
    if given is not None:
        return moved + parse_bytes(given, "state_bytes", allow_zero=True)
    if optimizer is None:
        return 0
    missing = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and not optimizer.state.get(p)]
    missing = [p for p in missing if ids is None or id(p) in ids]
    return moved + (_missing_state_bytes(optimizer, missing, target) if missing else 0)


def assumed_state_bytes(parameters: Iterable[Tensor], target: _Target) -> int:
    """What AdamW would keep for those that require grad."""
    return _ASSUMED_STATES * sum(target.nbytes(_local(p)) for p in parameters if p.requires_grad)


class _AnyNumber(TorchDispatchMode):
    """``.item()`` of a fake tensor is a number that is neither 0 nor 1: step counts and norms are divided by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 0.5 if dtype.is_floating_point else True if dtype is torch.bool else 2
        return func(*args, **(kwargs or {}))


def _missing_state_bytes(optimizer: torch.optim.Optimizer, missing: list[nn.Parameter], target: _Target) -> int:
    """Of the state that one step makes for ``missing``."""
    from fxoffload.torch_private.fake_tensors import FakeTensorMode

    kind = type(optimizer).__name__
    parameters = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    # A learning rate, for example.
    others = _tensors([v for name, v in vars(optimizer).items() if name != "state"])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            fakes: dict[int, Tensor] = {id(t): _fake(t, t.device) for t in others}
            fakes |= {at: nn.Parameter(_fake(p, target.device), p.requires_grad) for at, p in parameters.items()}
        trial = _trial(optimizer, fakes)
        with mode, _AnyNumber():
            for parameter in missing:
                fake = fakes[id(parameter)]
                fake.grad = torch.empty_like(fake)
            type(optimizer).step(trial)
    except Exception as error:
        raise UnsupportedError(
            f"expected a {kind} that can step on fake parameters, found {type(error).__name__}: {error}. Call "
            "activation_budget after the first step, when its state exists, or pass state_bytes (of the state that "
            "does not exist yet, on this device)"
        ) from error
    made = {t.untyped_storage()._cdata: t for t in _tensors(dict(trial.state)) if t.device == target.device}
    return sum(target.nbytes(t) for t in made.values())


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    part = _local(tensor)
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)


def _trial(optimizer: torch.optim.Optimizer, fakes: Mapping[int, Tensor]) -> torch.optim.Optimizer:
    """The same optimizer over other tensors, without state and hooks.

    Not by its constructor: that might take other arguments than the attributes that it made of them.
    """
    trial = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): trial, id(optimizer.state): defaultdict(dict), **fakes}
    memo |= {id(h): OrderedDict() for name in _HOOKS if (h := getattr(optimizer, name, None)) is not None}
    trial.__dict__.update(copy.deepcopy(optimizer.__dict__, memo))
    return trial
