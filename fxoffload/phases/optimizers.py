"""The torch optimizers inside whatever a framework calls an optimizer, and the tensors they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.torch_private.pytree import tree_flatten_with_path

# Attributes under which wrappers keep the optimizers they wrap: verl's and VeOmni's MultiOptimizer, Megatron's chained
# optimizers, and the many that wrap one (torch's ZeroRedundancyOptimizer: ``optim``).
_MANY = ("optimizers_dict", "chained_optimizers", "optimizers")
_ONE = ("optimizer", "_optimizer", "inner_optimizer", "base_optimizer", "_base_optimizer", "optim")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4  # of objects within objects of an optimizer's state


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that hold state, each once, in order. A wrapper is one too if it has state of its own (Lookahead's
    slow weights); it comes after the optimizers that it wraps.

    Args:
        optimizer: a torch optimizer, a wrapper of one (accelerate's, DeepSpeed's), a MultiOptimizer
            (``_is_multi_optimizer``, ``optimizers_dict``), chained optimizers (``chained_optimizers``), or a sequence
            or mapping of any of them.

    Raises:
        TypeError: it is none of these.
    """
    found: dict[int, Any] = {}
    _descend(optimizer, found, set())
    return list(found.values())


def _descend(optimizer: Any, found: dict[int, Any], seen: set[int]) -> None:
    if optimizer is None or id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    if isinstance(optimizer, Mapping):
        inner: Iterable[Any] = optimizer.values()
    elif isinstance(optimizer, (list, tuple)):
        inner = optimizer
    elif type(optimizer).__module__.startswith("torch.optim") and isinstance(optimizer, torch.optim.Optimizer):
        found[id(optimizer)] = optimizer
        return
    else:
        wrapped = _wrapped(optimizer)
        if wrapped is None:
            if not hasattr(optimizer, "param_groups"):
                raise TypeError(
                    "expected an optimizer, or a list, mapping or wrapper of optimizers, found "
                    f"{type(optimizer).__name__}: it has neither param_groups nor {', '.join(_MANY + _ONE)}. Pass its "
                    "tensors as extra={name: tensor}"
                )
            found[id(optimizer)] = optimizer
            return
        inner = wrapped
    for one in inner:
        _descend(one, found, seen)
    if _has_own_state(optimizer, found.values()):
        found[id(optimizer)] = optimizer


def _has_own_state(optimizer: Any, inner: Iterable[Any]) -> bool:
    """Whether a wrapper has entries that are not just those of its inner optimizers."""
    state = getattr(optimizer, "__dict__", {}).get("state")
    return isinstance(state, Mapping) and bool(state) and not any(state is getattr(one, "state", None) for one in inner)


def _wrapped(optimizer: Any) -> Iterable[Any] | None:
    attributes = getattr(optimizer, "__dict__", {})
    for name in _MANY:
        many = attributes.get(name)
        if isinstance(many, Mapping) and many:
            return list(many.values())
        if isinstance(many, (list, tuple)) and many and all(hasattr(one, "step") for one in many):
            return list(many)
    for name in _ONE:
        one = attributes.get(name)
        if one is not None and hasattr(one, "step"):
            return [one]
    return None


def named_state(
    optimizer: Any, names: Mapping[int, str], kept: Collection[int] = (), *, masters: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an optimizer's state: state entries, also within objects, tensors among the settings of a group
    (a learning rate), and tensors in attributes of its own (master weights). Reads only: a defaultdict gets no new
    entry.

    Args:
        optimizer: one of ``leaves``.
        names: names of parameters by id.
        kept: ids of parameters whose state is not to be found.
        masters: whether parameters that have no name are master copies, and so state. Give False without the model:
            then they may be the model's.
    """
    state = _all_state(optimizer, names, kept)
    if masters:
        return state
    others = {id(parameter) for parameter in parameters_of(optimizer)}
    return ((name, tensor) for name, tensor in state if id(tensor) not in others)


def _all_state(optimizer: Any, names: Mapping[int, str], kept: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    state = getattr(optimizer, "state", None)
    for key, entries in list(state.items()) if isinstance(state, Mapping) else ():
        if id(key) not in kept:
            name = names.get(id(key), "parameter") if isinstance(key, Tensor) else str(key)
            yield from _tensors(name, entries, _DEPTH, set())
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", ()))
    for i, group in enumerate(groups):
        yield from _tensors(f"group{i}", {k: v for k, v in group.items() if k != "params"})
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in names:  # a master copy that the model does not know
                yield f"group{i}.{j}", parameter
    for key, value in dict(getattr(optimizer, "__dict__", {})).items():
        if key not in ("state", "param_groups", "defaults", *_MANY, *_ONE) and not callable(value):
            yield from _tensors(key, value)


def state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """The tensors of ``named_state``, but for master copies."""
    return (tensor for _, tensor in named_state(optimizer, {}, masters=False))


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """The parameters in the groups of one of ``leaves``; of a wrapper also in those of its inner optimizers."""
    for one in (optimizer, *(_wrapped(optimizer) or ())):
        for group in getattr(one, "param_groups", ()):
            yield from group["params"]


def _tensors(name: str, tree: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Of a tree and, down to ``depth``, of the objects in it; ``seen`` are objects that were walked through."""
    if type(tree) is dict and all(type(key) is str and isinstance(value, Tensor) for key, value in tree.items()):
        yield from ((f"{name}[{key!r}]", value) for key, value in tree.items())  # nearly always: ten times faster
        return
    if isinstance(tree, _PLAIN) or (type(tree) in (list, tuple) and all(isinstance(leaf, _PLAIN) for leaf in tree)):
        return  # 200,000 numbers in a list are no reason to be late for a step
    leaves_with_path: Any = tree_flatten_with_path(tree)[0]
    for path, leaf in leaves_with_path:
        if isinstance(leaf, Tensor):
            yield name + _written(path), leaf
        elif depth and seen is not None and id(leaf) not in seen and (inside := _attributes(leaf)):
            seen.add(id(leaf))
            for attribute, value in inside.items():
                yield from _tensors(f"{name}{_written(path)}.{attribute}", value, depth - 1, seen)


def _written(path: Iterable[Any]) -> str:
    # A parameter may be a key: its values are no name, and take long to print.
    return "".join("[parameter]" if isinstance(getattr(key, "key", None), Tensor) else str(key) for key in path)


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object, if it may be a part of some state: torch's own objects (a DeviceMesh) are not."""
    kind = type(thing)
    if (
        isinstance(thing, (type, nn.Module))
        or callable(thing)
        or kind.__module__.split(".")[0] in ("torch", "builtins")
    ):
        return {}
    names = [*getattr(thing, "__dict__", ())]
    if dataclasses.is_dataclass(thing):
        names += [field.name for field in dataclasses.fields(thing)]
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return {name: getattr(thing, name) for name in dict.fromkeys(names) if hasattr(thing, name)}
