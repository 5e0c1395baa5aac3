"""What a weight stream is made of, remembered from one stream to the next.

[Note: Remembered plans]
A rollout engine gets the same weights after every step. To find out what there is and to pack it takes the host 8 ms
for 355 sharded tensors (a CPU rehearsal), in which nothing is copied; a stream of 6.3 GB takes 0.13 s (an H200). All of
that follows from what a ``Look`` has, which is compared in 2 ms. No tensor is held: those that are streamed are the
ones that were looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxoffload import _torch_private as private
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.weight_sync.buckets import Plan, plan_buckets
from fxoffload.phases.weight_sync.units import Entry, Unit, entries_of, units_of

_MOST = 8  # a manager's models, by different arguments


@dataclass(eq=False, slots=True)
class Look:
    """All of an entry that its unit depends on, and the tensors that it is about.

    Attributes:
        told: names, dtype, shape of the whole and of the local tensor, which are compared by value.
        cut_by: of a DTensor: its mesh, that one's process groups, and how the tensor is placed there. All are compared
            as objects: an equal mesh has other groups, the same mesh has others when they were made anew, and a
            ``_StridedShard`` may say that it equals a ``Shard``.
        local, aliases: see ``Unit``.
    """

    told: tuple[Any, ...]
    cut_by: tuple[Any, ...]
    local: Tensor
    aliases: tuple[Tensor, ...] = ()


class _Remembered:
    """Of a plan: looks without their tensors, and units without theirs."""

    def __init__(self, looks: Sequence[Look], units: Sequence[Unit], plan: Plan) -> None:
        self._told = [look.told for look in looks]
        self._cut_by = [look.cut_by for look in looks]
        self._units = [unit.without_tensors() for unit in units]
        self.plan = plan

    def units_of(self, looks: Sequence[Look]) -> list[Unit]:
        """The units, of the tensors that were looked at."""
        return [unit.with_tensors(look.local, look.aliases) for unit, look in zip(self._units, looks, strict=True)]

    def fits(self, looks: Sequence[Look]) -> bool:
        """Whether planning these would come to the same."""
        return self._told == [look.told for look in looks] and all(
            _are_the_same(mine.cut_by, others) for mine, others in zip(looks, self._cut_by, strict=True)
        )


class WeightPlans:
    """See [Note: Remembered plans]. One for each manager."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Remembered] = {}

    def plan(
        self,
        model: nn.Module,
        bucket_bytes: int,
        *,
        full: bool = True,
        dtype: torch.dtype | None = None,
        names: Collection[str] | None = None,
    ) -> tuple[list[Unit], Plan]:
        """What is handed out, and its buckets.

        Raises:
            UnsupportedError: a tensor that cannot be read in pieces.
            ValueError: an unknown name, a ``dtype`` that is not floating, ``bucket_bytes`` too small.
        """
        with untouched():
            entries = entries_of(model)
            looks = None if names is not None else _looks(entries)
            key = (id(model), bucket_bytes, full, dtype)
            known = self._known.get(key)
            if known is not None and looks is not None and known.fits(looks):
                return known.units_of(looks), known.plan
            units = units_of(entries, full=full, dtype=dtype, names=names)
            plan = plan_buckets([unit.load for unit in units], bucket_bytes)
            if looks is not None and len(units) == len(looks):
                self._known.pop(key, None)
                while len(self._known) >= _MOST:
                    self._known.pop(next(iter(self._known)), None)
                self._known[key] = _Remembered(looks, units, plan)
            return units, plan


def _looks(entries: Sequence[Entry]) -> list[Look] | None:
    """None where one is no plain tensor and no DTensor of one: they are rare, and looked at anew every time."""
    found = []
    known: dict[int, tuple[Any, ...]] = {}  # of a mesh: asking one takes 0.1 ms
    for names, tensor in entries:
        if not isinstance(tensor, Tensor) or tensor.is_meta or is_lazy(tensor):
            return None
        if private.is_dtensor(tensor):
            inner = plain_tensors(tensor)
            if len(inner) != 1:
                return None
            local = inner[0]
            mesh, placements = private.mesh_and_placements(tensor)
            if id(mesh) not in known:
                known[id(mesh)] = (mesh, *(mesh.get_group(i) for i, size in enumerate(mesh.shape) if size > 1))
            cut_by = (*known[id(mesh)], *placements)
            found.append(Look((names, local.dtype, tensor.shape, local.shape), cut_by, local, (tensor,)))
        elif is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return None
        else:
            found.append(Look((names, tensor.dtype, tensor.shape, tensor.shape), (), tensor))
    return found


def _are_the_same(mine: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return mine is others or (len(mine) == len(others) and all(map(operator.is_, mine, others)))
