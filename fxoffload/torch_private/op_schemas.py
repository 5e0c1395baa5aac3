"""Private torch APIs of ops: their classes, and the arguments that they share memory with or write."""

from __future__ import annotations

import functools
from typing import Any

import torch.fx as fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload


def aliased_args(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of ``node`` may share, by its schema (``copy_``: the target only).

    Needed by torch 2.11 to 2.14: ``OpOverload._schema``.
    """
    return _args_at(node, _places_of(node.target)[0])


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments that ``node`` writes in place, by its schema.

    ``inductor::resize_storage_bytes_`` (FSDP2 in a graph) frees its argument and does not say so.

    Needed by torch 2.11 to 2.14: ``OpOverload._schema``.
    """
    return _args_at(node, _places_of(node.target)[1])


_Places = tuple[tuple[int, str], ...]  # of arguments: position and name


@functools.cache
def _places_of(target: Any) -> tuple[_Places, _Places]:
    """The arguments whose memory a result of the op may share, and those that it writes."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return (), ()
    found = [(i, a.name, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    shares = any(r.alias_info is not None for r in schema.returns)
    aliased = tuple((i, name) for i, name, _ in found) if shares else ()
    if schema.name == "inductor::resize_storage_bytes_":
        return aliased, ((0, schema.arguments[0].name),)
    written = tuple((i, name) for i, name, alias in found if alias.is_write) if schema.is_mutable else ()
    return aliased, written


def _args_at(node: fx.Node, places: _Places) -> list[fx.Node]:
    found: list[fx.Node] = []
    for position, name in places:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        fx.map_arg(value, found.append)
    return found
