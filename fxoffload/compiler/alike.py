"""Segments that are alike are estimated once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.fx as fx

from fxoffload.analysis.argument_key import argument_key, cost_arguments
from fxoffload.analysis.segmentation import Segment
from fxoffload.torch_private.storages import storage_key
from fxoffload.torch_private.symbolic_sizes import hint

T = TypeVar("T")


class Alike(Generic[T]):
    """Remembers a segment's estimate, for the next segment of the same ops on the same shapes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, T] = {}

    def get(
        self, segment: Segment, work_out: Callable[[], T], *, marked: Collection[str] = (), also: Hashable = None
    ) -> T:
        """What ``work_out`` gives for ``segment``. ``marked``: names of values that make a difference.
        ``also``: any other difference."""
        key = (_signature(segment, marked), also)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = work_out()
        return found


def _signature(segment: Segment, marked: Collection[str]) -> Hashable:
    number: dict[fx.Node, Hashable] = {n: i for i, n in enumerate((*segment.inputs, *segment.nodes))}
    inside = set(segment.nodes)
    places: dict[int, int] = {}
    values = tuple((_shape(n), _storage(n, places), n.name in marked) for n in segment.inputs)
    ops = tuple(
        (
            n.target,
            argument_key(cost_arguments(n), lambda value: number.get(value, value.name)),
            _shape(n),
            n.name in marked,
            # Who reads it outside decides whether it is written at all.
            tuple(sorted({str(u.target) for u in n.users if u not in inside})),
        )
        for n in segment.nodes
    )
    return values, ops


def _storage(node: fx.Node, places: dict[int, int]) -> Hashable:
    """Bytes of the memory that an input is in, and the first input that is in the same. ``places``: those so far."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return places.setdefault(storage_key(value), len(places)), hint(value.untyped_storage().nbytes())


def _shape(node: fx.Node) -> Hashable:
    return _value(node.meta.get("val"))


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        strides = tuple(map(hint, value.stride())) if value.layout is torch.strided else ()
        return (tuple(map(hint, value.shape)), strides, value.dtype, value.device.type)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    if isinstance(value, torch.SymInt):
        return ("size", hint(value))
    return str(type(value))
