"""Fences in front of modules, while their parameters are away.

[Note: Gates]
Away classes fence single tensors when Python touches them. They do not see code that reads memory without asking
Python: FSDP's all-gather (of its own flat shards), DDP's broadcast of buffers, and extensions that take a raw tensor.
Nor do they suit Dynamo, whose guards would see another class and compile anew.

So while tensors of a model are away, some modules have a gate: every module that owns tensors, every FSDP and DDP
module and every compiled one. A gate is a forward pre-hook, or a wrapper around the compiled call. It lets the current
stream wait for the tensors that its module reads, or raises. DDP around a model that we were given without it has one
too: see [Note: DDP]. When everything is back all gates are gone: Dynamo traces the hooks it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.data_parallel import forwards
from fxoffload.phases.guarding.guards import named_members, own_tensors
from fxoffload.phases.guarding.overrides import remove_hook
from fxoffload.torch_private.compiled_code import optimized_modules_of


class Gates:
    """Installed and removed as a whole; see [Note: Gates].

    Args:
        passed: called with the tensors that a module is about to read, and a description of that use.
    """

    def __init__(self, models: Mapping[str, nn.Module], passed: Callable[[list[Tensor], str], object]) -> None:
        self._models = models
        self._passed = passed
        self._undo: list[Callable[[], None]] = []  # each may be called twice, and before the action that it undoes
        self._is_whole = True
        self._callers: list[nn.Module] | None = None
        self._members: set[int] = set()

    def install(self) -> None:
        """Puts a gate in front of every module that reads something. Nothing happens where they are already there."""
        if self._undo and self._is_whole:
            return
        self.remove()
        self._is_whole = False
        if self._callers is None:
            # Once: the search for compiled wrappers of a model takes a pass over all Python objects.
            self._callers = [caller for model in self._models.values() for caller in optimized_modules_of(model)]
        for caller in self._callers:
            self._gate(caller, _tensors_under(caller), "the forward of the compiled model")
        self._members = {id(module) for model in self._models.values() for module in model.modules()}
        self._undo.append(lambda: forwards.ignore(self._pass_wrapper))
        forwards.watch(self._pass_wrapper)
        groups = {module: read for model in self._models.values() for module, read in sharded.fsdp_groups(model)}
        for name, module in named_members(self._models):
            what = f"the forward of {name}"
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None:
                self._wrap(module, compiled, _tensors_under(module), what)
            if module in groups:
                read = [module, *sharded.prefetched_by(module)]
                self._gate(module, [t for one in read for t in groups.get(one, ())], what)
            elif isinstance(module, (DistributedDataParallel, torch.jit.ScriptModule)):
                self._gate(module, _tensors_under(module), what)
            else:
                self._gate(module, own_tensors(module), what)
        self._is_whole = True

    def remove(self) -> None:
        """Takes all of them away."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def mend(self) -> None:
        """After an exception in between: takes away gates that were put up in part."""
        if not self._is_whole:
            self.remove()
            self._is_whole = True

    def _pass_wrapper(self, ddp: DistributedDataParallel) -> None:
        modules = list(ddp.modules())
        if any(id(module) in self._members for module in modules):
            buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
            self._passed(buffers, f"the forward of {type(ddp).__name__}, which sends buffers to other ranks,")

    def _gate(self, module: nn.Module, tensors: list[Tensor], what: str) -> None:
        if not tensors:
            return

        def gate(module: nn.Module, args: Any) -> None:
            self._passed(tensors, what)

        hook: Any = torch.compiler.disable(gate)
        self._undo.append(lambda: remove_hook(module._forward_pre_hooks, hook))
        module.register_forward_pre_hook(hook, prepend=True)

    def _wrap(self, module: nn.Module, compiled: Callable[..., Any], tensors: list[Tensor], what: str) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._passed(tensors, what)
            return compiled(*args, **kwargs)

        def undo() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        self._undo.append(undo)
        module._compiled_call_impl = call


def _tensors_under(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
