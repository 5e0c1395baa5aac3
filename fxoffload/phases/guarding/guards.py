"""Overrides for uses that away classes and gates in front of forwards cannot see, while tensors are away.

See [Note: Away classes] and [Note: Gates]. Some uses would have done half of their work when the first away tensor
stops them: Adam counts its steps first, ``Module.to`` converts module after module. Some read memory that no known
tensor object stands for (FSDP's shards). And state dicts can be answered from the host. Each has an override: before
anything has happened, it fences arriving tensors and raises ``OffloadedError`` for those on the host.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.compiled import CompiledFunctions
from fxoffload.phases.guarding.guarded import Guarded
from fxoffload.phases.guarding.overrides import Override, is_ours
from fxoffload.phases.guarding.sentinel import OffloadedError, answered, fence_arriving, holdings_of, is_away, touch
from fxoffload.phases.guarding.state_dicts import HostReader
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.optimizers import parameters_of, state_tensors
from fxoffload.phases.phase import OPTIMIZER
from fxoffload.torch_private.fsdp1 import fsdp1_forget_summons, fsdp1_handle, fsdp1_parameters
from fxoffload.torch_private.fsdp2 import fsdp2_forget_iteration, fsdp2_groups, fsdp2_keeps_shards
from fxoffload.torch_private.pytree import tree_leaves


class Guards:
    """Overrides that are put in place while something is away; see the module.

    Args:
        manager: whose models and optimizers are guarded.
    """

    def __init__(self, manager: Guarded) -> None:
        self._manager = manager
        self.reader = HostReader(manager)
        # In place, noted before they are.
        self._overrides: list[Override] = []
        self._of_optimizers: list[Override] = []
        self._hooks: list[Any] = []
        self._hooked: list[Any] = []
        # The same ones each time: see [Note: Overrides]. By the id of their optimizer, which they hold.
        self._steps: dict[int, Override] = {}
        self._of_modules: list[Override] = []
        self._guarded: list[int] = []
        self._compiled = CompiledFunctions()
        self._is_whole = True

    def install(self, *, of_modules: bool = True) -> None:
        """Puts the overrides in place. Nothing happens where they already are.

        Args:
            of_modules: whether something that modules have is away: not so where only the optimizer's state is.
        """
        self.mend()
        self._is_whole = False
        optimizers = self._manager.optimizers
        self.watch(optimizers)
        modules = self._manager.modules
        if not self._of_optimizers:
            for optimizer in optimizers:
                if hasattr(optimizer, "step"):
                    if id(optimizer) not in self._steps:
                        self._steps[id(optimizer)] = self._step_of(optimizer)
                    self._of_optimizers.append(self._steps[id(optimizer)])
                    self._of_optimizers[-1].put()
            self._compiled.install(modules.values(), optimizers)
        if of_modules and not self._overrides:
            self._install_of_modules(modules)
        self._is_whole = True

    def mend(self) -> None:
        """After an exception in between: takes away overrides that were put up in part."""
        if not self._is_whole:
            self.remove()
            self._is_whole = True

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Hooks the state dicts of optimizers, for those that were not hooked yet."""
        for optimizer in optimizers:
            if not any(optimizer is hooked for hooked in self._hooked):
                # They stay until ``close``: compiled code never walks through these lists.
                self._hooked.append(optimizer)
                self._hooks += self._optimizer_hooks(optimizer)
                self._after_load(optimizer)

    def _install_of_modules(self, modules: Mapping[str, nn.Module]) -> None:
        members = named_members(modules)
        guarded = [id(target) for _, module in members for target in (module, *_gatherers(module))]
        if guarded != self._guarded:
            self._of_modules = [override for name, module in members for override in self._overrides_of(module, name)]
            self._guarded = guarded
        for override in self._of_modules:
            self._overrides.append(override)
            override.put()

    def remove(self) -> None:
        """Takes the overrides away."""
        for overrides in (self._overrides, self._of_optimizers):
            while overrides:
                overrides[-1].remove()
                overrides.pop()
        self._compiled.remove()

    def close(self) -> None:
        """Takes everything away, for good."""
        self.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], []

    def _overrides_of(self, module: nn.Module, name: str) -> list[Override]:
        everything = functools.partial(tensors_under, module)
        found = [
            Override(module, "_apply", self._touching(everything, f"Module.to() or another conversion of {name}")),
            Override(module, "__reduce_ex__", self._reduce(module, f"pickle or deepcopy of {name}")),
            Override(module, "_save_to_state_dict", self._save(module, name)),
            Override(module, "load_state_dict", self._load(module, f"load_state_dict(assign=True) of {name}")),
            Override(module, "_load_from_state_dict", self._load_own(module)),
        ]
        gathering = f"FSDP's all-gather of {name}"
        if sharded.is_fsdp2(module):
            forget = functools.partial(fsdp2_forget_iteration, module)
            for group in fsdp2_groups(module):
                shards = functools.partial(_shards, group)
                found.append(Override(group, "unshard", self._touching(shards, gathering, forget)))
        elif sharded.is_fsdp1(module):
            what = f"state_dict() of {name} (FSDP1 gathers it on the device; stream_weights() need not)"
            found.append(Override(module, "state_dict", self._touching(everything, what)))
            what = f"load_state_dict() of {name} (FSDP1 gathers it on the device)"
            found.append(Override(module, "load_state_dict", self._touching(everything, what)))
            gradients = functools.partial(gradients_under, module)
            found.append(Override(module, "clip_grad_norm_", self._touching(gradients, f"clip_grad_norm_() of {name}")))
            handle = fsdp1_handle(module)
            if handle is not None:
                shards = functools.partial(fsdp1_parameters, module)
                forget = functools.partial(fsdp1_forget_summons, handle)
                found.append(Override(handle, "pre_unshard", self._touching(shards, gathering, forget)))
        return found

    def _step_of(self, optimizer: Any) -> Override:
        touch_its: Any = torch.compiler.disable(
            lambda: touch_all(tensors_of(optimizer), f"{type(optimizer).__name__}.step()")
        )

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            touch_its()
            return original(*args, **kwargs)

        # Called and not traced, but its callees are compiled as ever.
        return Override(optimizer, "step", torch.compiler.disable(call, recursive=False))

    def _touching(
        self, tensors: Callable[[], Iterable[Tensor]], what: str, refused: Callable[[], None] = lambda: None
    ) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                touch_all(tensors(), what)
            except OffloadedError:
                refused()
                raise
            return original(*args, **kwargs)

        return call

    def _reduce(self, module: nn.Module, what: str) -> Callable[..., Any]:
        """A copy of a module must not take our overrides and hooks along."""

        def call(original: Callable[..., Any], *args: Any) -> Any:
            touch_all(tensors_under(module), what)
            reduced = original(*args)
            if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
                return (*reduced[:2], without_ours(reduced[2]), *reduced[3:])
            return reduced

        return call

    def _save(self, module: nn.Module, name: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], destination: Any, prefix: str, keep_vars: bool) -> Any:
            own = own_tensors(module)
            if keep_vars:
                touch_all(own, f"state_dict(keep_vars=True) of {name}")
            fence_arriving(own, "a state dict")
            with answered("detach", self.reader.stand_in):
                original(destination, prefix, keep_vars)

        return call

    def _load(self, module: nn.Module, what: str) -> Callable[..., Any]:
        """``assign=True`` would put CPU tensors in the place of parameters. Without it values go to the host image."""

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("assign", len(args) > 2 and args[2]):
                touch_all(tensors_under(module), what)
            with contextlib.ExitStack() as stack:
                for _, one in sharded.fsdp_modules(module):
                    if sharded.is_fsdp2(one):
                        stack.enter_context(fsdp2_keeps_shards(one, is_away))
                return original(*args, **kwargs)

        return call

    def _load_own(self, module: nn.Module) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            fence_arriving(own_tensors(module), "load_state_dict()")
            with answered("copy_", self.reader.stand_in):
                return original(*args, **kwargs)

        return call

    def _optimizer_hooks(self, optimizer: Any) -> Iterator[Any]:
        if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # a wrapper may not call Optimizer.__init__
            return

        # Weakly: while something is away its tensors keep us, and afterwards a hook is no reason to keep a host image.
        def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
            reference = weakref.WeakMethod(method)

            def hook(*args: Any) -> Any:
                ours = reference()
                return None if ours is None else ours(*args)

            return hook

        yield optimizer.register_load_state_dict_pre_hook(weakly(self._before_load), prepend=True)
        yield optimizer.register_load_state_dict_post_hook(weakly(self._after_load))
        yield optimizer.register_state_dict_post_hook(weakly(self._after_save), prepend=True)

    def _before_load(self, optimizer: Any, state_dict: Any) -> None:
        """State is loaded next to the parameters. So away state returns, unless they are away too: then the device is
        meant to be free."""
        what = f"{type(optimizer).__name__}.load_state_dict()"
        if any(map(is_away, state_of(optimizer))):
            touch_all((p for p in parameters_of(optimizer) if not _is_state(p)), what)
            self._manager.onload(OPTIMIZER)
        touch_all(stepped_by(optimizer), what)

    def _after_load(self, optimizer: Any) -> None:
        """Gives loaded state memory of its own. On the CPU an optimizer keeps the tensors that it is given, also those
        of ``torch.load`` or of a host image, whose memory torch cannot empty."""
        types = self._manager.device_types
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in state_tensors(optimizer):
            if not is_away(tensor):
                for plain in plain_tensors(tensor):
                    storage = plain.untyped_storage()
                    if plain.device.type in types and not storage.resizable() and not storage.is_shared():
                        own = found.setdefault(storage._cdata, storage.clone())
                        plain.data = torch.empty(0, dtype=plain.dtype, device=plain.device).set_(
                            own, plain.storage_offset(), plain.shape, plain.stride()
                        )

    def _after_save(self, optimizer: Any, state_dict: Any) -> Any:
        if self._has_fsdp1(optimizer):
            what = f"state_dict() of {type(optimizer).__name__} (FSDP1 gathers it on the device)"
            touch_all(tree_leaves(state_dict), what)
        return self.reader.read_tree(state_dict)

    def _has_fsdp1(self, optimizer: Any) -> bool:
        own = {id(p) for p in parameters_of(optimizer)}
        return any(
            id(p) in own
            for model in self._manager.modules.values()
            for module, parameters in sharded.fsdp_groups(model)
            if sharded.is_fsdp1(module)
            for p in parameters
        )


def touch_all(tensors: Iterable[Any], what: str) -> None:
    """Fences arriving tensors; raises ``OffloadedError`` for the first that is on the host."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            touch(tensor, what)


def tensors_under(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, gradients and buffers of a module and those in it."""
    yield from module.parameters()
    yield from gradients_under(module)
    yield from module.buffers()


def named_members(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """(name for messages, module) of every module in some models."""
    return [
        (".".join(filter(None, (prefix, name))) or type(module).__name__, module)
        for prefix, model in models.items()
        for name, module in model.named_modules()
    ]


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module itself."""
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def gradients_under(module: nn.Module) -> Iterator[Tensor]:
    """Gradients of a module and those in it."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that a step of an optimizer reads and writes: parameters, gradients and state."""
    yield from stepped_by(optimizer)
    yield from state_of(optimizer)


def stepped_by(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that a step of an optimizer changes, and their gradients."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            yield parameter
            yield parameter.grad


def state_of(optimizer: Any) -> Iterator[Tensor]:
    """All that moves as the state of an optimizer: also its tensors outside of ``state``, and master copies."""
    yield from state_tensors(optimizer)
    yield from filter(_is_state, parameters_of(optimizer))


def _is_state(parameter: Tensor) -> bool:
    """Whether a parameter is a master copy, which is away."""
    return any(holding.group == OPTIMIZER for holding in holdings_of(parameter))


def without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without overrides, and without hooks of this package."""
    found = {name: value for name, value in dict(attributes).items() if not is_ours(value)}
    for name, value in found.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            found[name] = type(value)((key, hook) for key, hook in list(value.items()) if not is_ours(hook))
    return found


def _shards(group: Any) -> list[Tensor]:
    return [p.sharded_param for p in group.fsdp_params]


def _gatherers(module: nn.Module) -> list[Any]:
    """The objects that read FSDP's shards for a module; made at the first forward, or when the model is settled."""
    if sharded.is_fsdp2(module):
        return list(fsdp2_groups(module))
    if sharded.is_fsdp1(module):
        return [fsdp1_handle(module)]
    return []
