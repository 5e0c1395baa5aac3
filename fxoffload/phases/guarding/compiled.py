"""Functions that were compiled around a model or an optimizer: their tensors arrive before Dynamo looks at them.

[Note: Compiled functions]
``torch.compile(model)`` has a gate. ``torch.compile(lambda x: loss(model(x)))`` and a compiled training step have none:
their guards would see away classes and overrides, and they would be compiled once more for those. Dynamo calls the
``enter_exit_hooks`` of such a function before it looks at the guards. So while a tensor is away there is a hook that
fences arriving tensors. It does not raise for tensors on the host: a function that can reach the model need not use it.
A function that does is traced as far as the first away tensor, which raises.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fxoffload.phases.guarding.overrides import references_of, walk
from fxoffload.phases.guarding.sentinel import fence_arriving
from fxoffload.phases.optimizers import parameters_of, state_tensors
from fxoffload.torch_private.compiled_code import compiled_functions, num_graphs_compiled


class CompiledFunctions:
    """The fences of all functions that reach some modules or optimizers; see [Note: Compiled functions]."""

    def __init__(self) -> None:
        self._compiled_before: tuple[int, int] | None = None
        self._found: list[tuple[list[Any], Callable[[], Any]]] = []
        self._installed = False

    def install(self, modules: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
        """Puts the fences in place. Nothing happens where they already are."""
        if self._installed:
            return
        self._installed = True
        compiled = num_graphs_compiled()
        if compiled is not None and compiled != self._compiled_before:
            # Only when something was compiled since: looking for it takes a pass over all Python objects.
            targets = {id(inner): inner for module in modules for inner in module.modules()}
            targets |= {id(optimizer): optimizer for optimizer in optimizers}
            found: list[tuple[list[Any], Callable[[], Any]]] = []
            for function, hooks in compiled_functions():
                if used := list(reached(function, targets)):
                    found.append((hooks, functools.partial(_fence, used)))
            self._found = found
            self._compiled_before = compiled
        for hooks, fence in self._found:
            hooks.append(fence)  # at the end: a fence may take itself away while Dynamo walks through the list

    def remove(self) -> None:
        """Takes the fences away."""
        self._installed = False
        for hooks, fence in self._found:
            if fence in hooks:
                hooks.remove(fence)


def reached(function: Any, targets: dict[int, Any]) -> Iterator[Any]:
    """Those of the targets (by id) that a function can reach.

    It looks in the function's closure, globals that it names, its arguments' defaults and the object it is bound to. It
    also looks in the attributes and items of all these.
    """

    def references(thing: Any) -> list[Any]:
        if id(thing) in targets:
            return []
        found = references_of(thing)
        if isinstance(thing, types.FunctionType):
            names = set(_names(thing.__code__))
            found += [thing.__globals__[name] for name in names if name in thing.__globals__]
        return found

    return (thing for thing in walk(function, references) if id(thing) in targets)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _fence(used: list[Any]) -> Callable[[], None]:
    for thing in used:
        fence_arriving(_tensors_of(thing), "a compiled function")
    return _nothing


def _tensors_of(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, nn.Module):
        parameters = list(thing.parameters())
        yield from thing.buffers()
    else:
        parameters = list(parameters_of(thing))
        yield from state_tensors(thing)
    yield from parameters
    yield from (p.grad for p in parameters if p.grad is not None)


def _nothing() -> None:
    pass
