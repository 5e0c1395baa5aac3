"""Plans of a weight stream, remembered from one stream to the next.

[Note: Remembered plans]
A rollout engine gets the same weights after every step. Finding and packing 355 sharded tensors takes the host 8 ms (a
CPU rehearsal), in which nothing is copied; a stream of 6.3 GB takes 0.13 s (an H200). All of that follows from the
contents of a ``Look``, which is compared in 2 ms. No tensor is held: the streamed tensors are those that were looked
at. The way in which transformers saves a model is remembered with it, for the same class, config and conversions.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.weight_sync.buckets import BucketPlan, plan_buckets
from fxoffload.phases.weight_sync.saved import Saved, extra_bytes, facts_of, saved_models, saved_of, weights_of
from fxoffload.phases.weight_sync.units import Entry, Unit, check_names, clean_modules, entries_of, only, units_of
from fxoffload.torch_private.dtensors import is_dtensor, mesh_and_placements
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass

_MOST = 8  # a manager's models, by different arguments


@dataclass(eq=False, slots=True)
class Look:
    """All of an entry that its unit depends on, and the tensors that it is about.

    Attributes:
        told: names, dtype, shape of the whole and of the local tensor, which are compared by value.
        cut_by: of a DTensor: its mesh, that one's process groups, and how the tensor is placed there. All are compared
            as objects. An equal mesh has other groups. The same mesh has others when they were made anew. A
            ``_StridedShard`` may say that it equals a ``Shard``.
        local, aliases: see ``Unit``.
    """

    told: tuple[Any, ...]
    cut_by: tuple[Any, ...]
    local: Tensor
    aliases: tuple[Tensor, ...] = ()


class Planned(NamedTuple):
    """Units and buckets. ``saved``: how outputs are made of the units, None where none is made."""

    units: list[Unit]
    plan: BucketPlan
    saved: Saved | None


class _Remembered:
    """Of all weights: looks without their tensors, and units without theirs.

    Args:
        asked: the facts that transformers answered from.

    Attributes:
        saved: how the weights are made that are handed out.
        plan: of all of them, once it was made.
    """

    def __init__(self, looks: Sequence[Look], units: Sequence[Unit], saved: Saved | None, asked: Sequence[Any]) -> None:
        self._told = [look.told for look in looks]
        self._cut_by = [look.cut_by for look in looks]
        self._units = [unit.without_tensors() for unit in units]
        self._asked = tuple(asked)
        self.saved = saved
        self.plan: BucketPlan | None = None

    def units_of(self, looks: Sequence[Look]) -> list[Unit]:
        """The units, of the tensors that were looked at."""
        return [unit.with_tensors(look.local, look.aliases) for unit, look in zip(self._units, looks, strict=True)]

    def fits(self, looks: Sequence[Look], asked: Sequence[Any]) -> bool:
        """Whether planning these would come to the same."""
        return (
            self._told == [look.told for look in looks]
            and all(_are_the_same(mine.cut_by, others) for mine, others in zip(looks, self._cut_by, strict=True))
            and _are_the_same(tuple(asked), self._asked)
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
        as_saved: bool = True,
    ) -> Planned:
        """The units that are handed out, and their buckets.

        Raises:
            UnsupportedError: a tensor that cannot be read in pieces, or a model that cannot be handed out as saved.
            ValueError: an unknown name, a ``dtype`` that is not floating, ``bucket_bytes`` too small.
        """
        with untouched():
            modules = clean_modules(model)
            entries = entries_of(modules)
            models = saved_models(modules) if as_saved else []
            asked = [fact for _, one in models for fact in facts_of(one)]
            looks = _looks(entries)
            key = (id(model), bucket_bytes, full, dtype, as_saved)
            known = self._known.get(key)
            if known is not None and looks is not None and known.fits(looks, asked):
                units = known.units_of(looks)
            else:
                units = units_of(entries, full=full, dtype=dtype)
                known = _Remembered(looks or (), units, saved_of(models, modules, weights_of(units)), asked)
                if looks is not None and len(units) == len(looks):
                    self._remember(key, known)
            units, saved = _chosen(units, known.saved, names)
            plan = known.plan if names is None else None
            if plan is None:
                plan = plan_buckets([unit.load for unit in units], bucket_bytes, extra_bytes(units, saved))
            if names is None:
                known.plan = plan
            return Planned(units, plan, saved)

    def _remember(self, key: Hashable, known: _Remembered) -> None:
        self._known.pop(key, None)
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = known


def _chosen(
    units: Sequence[Unit], saved: Saved | None, names: Collection[str] | None
) -> tuple[list[Unit], Saved | None]:
    """The units that are needed for some names, or for all."""
    needed: Collection[str]
    if saved is not None:
        if names is not None:
            hint = "; give as_saved=False for names as they are in memory"
            saved = saved.only(check_names(names, saved.derivations, hint))
        needed = saved.steps
    elif names is not None:
        needed = check_names(names, [named.name for unit in units for named in unit.named])
    else:
        return list(units), None
    chosen = (only(unit, needed) for unit in units)
    return [unit for unit in chosen if unit is not None], saved


def _looks(entries: Sequence[Entry]) -> list[Look] | None:
    """None where one is no plain tensor and no DTensor of one: they are rare, and looked at anew every time."""
    found = []
    known: dict[int, tuple[Any, ...]] = {}  # of a mesh: asking one takes 0.1 ms
    for names, tensor in entries:
        if not isinstance(tensor, Tensor) or tensor.is_meta or is_lazy(tensor):
            return None
        if is_dtensor(tensor):
            inner = plain_tensors(tensor)
            if len(inner) != 1:
                return None
            local = inner[0]
            mesh, placements = mesh_and_placements(tensor)
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
