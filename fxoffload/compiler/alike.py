"""Segments that are alike are estimated once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.fx as fx

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
    number = {n: i for i, n in enumerate((*segment.inputs, *segment.nodes))}
    inside = set(segment.nodes)
    places: dict[int, int] = {}
    values = tuple((_shape(n), _storage(n, places), n.name in marked) for n in segment.inputs)
    ops = tuple(
        (
            n.target,
            _argument(n.args, number),
            _argument(n.kwargs, number),
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


def _argument(value: Any, number: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", number.get(value, value.name))
    if isinstance(value, (tuple, list)):
        return tuple(_argument(v, number) for v in value)
    if isinstance(value, dict):
        return tuple((k, _argument(v, number)) for k, v in value.items())
    if isinstance(value, slice):
        return ("slice", str(value))
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, torch.SymInt):
        return ("size", hint(value))
    return str(value)
