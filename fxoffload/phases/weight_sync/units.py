"""Units of a weight sync: the names of a state dict that it hands out, and where the bytes of each lie.

[Note: Names]
Names in memory are those of ``model.state_dict()`` without the prefixes of wrappers (torch.compile, FSDP1, DDP,
activation checkpointing), in its order, with persistent buffers. They are handed out, but for models of transformers,
which have others in checkpoints; see [Note: As saved]. There are three exceptions.

- A tensor with several names (tied weights) is copied once; its other names follow the first one directly.

- The parameters in an FSDP1 flat parameter come together, where its module comes.

- A wrapper subclass that is no DTensor (a quantized weight) is handed out as the plain tensors inside, called
  ``<name>.<attribute>``. They are not cast: only the quantizer knows their meaning.

LoRA weights have the adapter's names: merge first if you want merged weights.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxoffload.errors import UnsupportedError
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.weight_sync.buckets import Load
from fxoffload.phases.weight_sync.cuts import TensorCut, region
from fxoffload.torch_private.dtensors import is_dtensor, mesh_dims_in_order_of_cuts
from fxoffload.torch_private.fsdp1 import FlatParameterInfo, flat_parameter_of
from fxoffload.torch_private.modules import non_persistent_buffers
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass

_TRANSPARENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Named:
    """A named tensor inside a unit: ``numel(shape)`` elements from ``start``."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """A tensor that is copied and gathered as a whole.

    Attributes:
        named: the tensors that are handed out of it.
        local: the plain tensor on this rank; perhaps away. May have padding at its end.
        aliases: other tensors on its storage, by one of which the manager may know it.
        shape: of the whole.
        cuts: how the whole is cut over ranks; none where nothing is gathered.
        dtype: that is handed out.
    """

    named: tuple[Named, ...]
    local: Tensor
    aliases: tuple[Tensor, ...]
    shape: tuple[int, ...]
    cuts: tuple[TensorCut, ...]
    dtype: torch.dtype

    @functools.cached_property
    def source_dtype(self) -> torch.dtype:
        """Of the bytes on the host."""
        return self.local.dtype

    @functools.cached_property
    def wire_dtype(self) -> torch.dtype:
        """That is gathered: the smaller one of the source's and the wanted one."""
        source = self.source_dtype
        return self.dtype if self.dtype.itemsize < source.itemsize else source

    @functools.cached_property
    def landed_dtype(self) -> torch.dtype:
        """That the landing buffer holds."""
        return self.wire_dtype if self.cuts else self.source_dtype

    @functools.cached_property
    def numel(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    @property
    def regions(self) -> dict[tuple[int, tuple[int, ...]], list[str]]:
        """(first element, shape) of a part that is handed out -> its names."""
        found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for one in self.named:
            found.setdefault((one.start, one.shape), []).append(one.name)
        return found

    @functools.cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return region(self.shape, self.cuts, [cut.rank for cut in self.cuts])[1]

    @functools.cached_property
    def own_bytes(self) -> int:
        """Bytes that this rank copies from its own memory."""
        return math.prod(self.own_shape) * self.source_dtype.itemsize

    def without_tensors(self) -> Unit:
        """The same without tensors, to be reused for tensors that are like these."""
        _ = self.load, self.landed_dtype, self.own_bytes, self.numel
        return self.with_tensors(None, ())  # type: ignore[arg-type]

    def with_tensors(self, local: Tensor, aliases: tuple[Tensor, ...]) -> Unit:
        """The same of other tensors."""
        other = object.__new__(Unit)
        other.__dict__.update(self.__dict__, local=local, aliases=aliases)
        return other

    @functools.cached_property
    def load(self) -> Load:
        """Its needs in a bucket; the same on all ranks."""
        return Load(
            name=self.named[0].name,
            lane=tuple(id(cut.group) for cut in self.cuts) or None,
            ranks=math.prod(cut.size for cut in self.cuts),
            elements=math.prod(region(self.shape, self.cuts, [0] * len(self.cuts))[1]),
            source_item=self.source_dtype.itemsize,
            wire_item=self.wire_dtype.itemsize,
            out_bytes=self.numel * self.dtype.itemsize,
        )


# Of a mesh and placements, within one call: asking a mesh takes 0.1 ms.
_KnownCuts = dict[tuple[int, tuple[Any, ...]], tuple[TensorCut, ...]]


# Every module of a model under every clean name; see ``clean_modules``.
Modules = Sequence[tuple[str, nn.Module]]


# All names of a tensor, or the module's name of a flat parameter.
Entry = tuple[list[str], Tensor | FlatParameterInfo]


def units_of(entries: Sequence[Entry], *, full: bool = True, dtype: torch.dtype | None = None) -> list[Unit]:
    """Everything that is handed out of these.

    Raises:
        UnsupportedError: a tensor that cannot be read in pieces.
        ValueError: a ``dtype`` that is not floating.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"expected a floating dtype to cast weights to, found {dtype}")
    with untouched():
        units: list[Unit] = []
        known: _KnownCuts = {}
        for names_of_one, found in entries:
            if isinstance(found, Tensor):
                units += _tensor_units(names_of_one, found, full, dtype, known)
            else:
                units.append(_flat_unit(names_of_one[0], found, full, dtype))
    return units


def named_tensors(modules: Modules) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their clean names, tied ones under every name.

    Raises:
        UnsupportedError: FSDP1 flattened parameters.
    """
    entries = entries_of(modules)
    weights = {name: found for names, found in entries if isinstance(found, Tensor) for name in names}
    if len(weights) < sum(len(names) for names, _ in entries):
        raise UnsupportedError("FSDP1 keeps parts of flattened parameters only: use stream_weights() for whole ones")
    return weights


def entries_of(modules: Modules) -> list[Entry]:
    """Everything with a name, in the order of first names; see [Note: Names]."""
    with untouched():
        flats = {id(m): flat for _, m in modules if (flat := flat_parameter_of(m)) is not None}
        inside = {(id(owner), attribute) for flat in flats.values() for owner, attribute in flat.members}
        found: dict[int, Entry] = {}
        for prefix, module in modules:
            if id(module) in flats:
                found.setdefault(id(module), ([prefix], flats[id(module)]))
            for attribute, tensor in _own_tensors(module):
                if (id(module), attribute) not in inside:
                    found.setdefault(id(tensor), ([], tensor))[0].append(_join(prefix, attribute))
        return list(found.values())


def clean_modules(model: nn.Module) -> Modules:
    """Every module, repeated under every name, in the order of the state dict. A wrapper has the name of its module."""
    found = []
    clean: dict[str, tuple[str, bool]] = {}
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, leaf = path.rpartition(".")
        above, above_is_parallel = clean[parent] if path else ("", False)
        hidden = not path or leaf in _TRANSPARENT or (above_is_parallel and leaf == "module")
        name = above if hidden else _join(above, leaf)
        clean[path] = name, isinstance(module, parallel)
        found.append((name, module))
    return found


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if module._parameters:
        yield from module.named_parameters(recurse=False, remove_duplicate=False)
    if module._buffers:
        left_out = non_persistent_buffers(module)
        for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if attribute not in left_out:
                yield attribute, tensor


def _tensor_units(
    names: list[str], tensor: Tensor, full: bool, dtype: torch.dtype | None, known: _KnownCuts
) -> Iterator[Unit]:
    if tensor.is_meta or is_lazy(tensor):
        raise UnsupportedError(f"{names[0]!r} has no values yet ({type(tensor).__name__} on {tensor.device})")
    if is_dtensor(tensor):
        yield _dtensor_unit(names, tensor, full, dtype, known)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, attribute)
            if isinstance(inner, Tensor):
                yield from _tensor_units([f"{name}.{attribute}" for name in names], inner, full, None, known)
    elif tensor.layout is not torch.strided:
        raise UnsupportedError(f"{names[0]!r} has the layout {tensor.layout}; only strided tensors can be streamed")
    else:
        yield _unit(names, tensor, (), tuple(tensor.shape), (), dtype)


def _dtensor_unit(names: list[str], tensor: Any, full: bool, dtype: torch.dtype | None, known: _KnownCuts) -> Unit:
    inner = list(plain_tensors(tensor))
    if len(inner) != 1:
        raise UnsupportedError(f"{names[0]!r} is a DTensor of {len(inner)} tensors; expected one plain local tensor")
    if not full:
        return _unit(names, inner[0], (tensor,), tuple(inner[0].shape), (), dtype)
    key = (id(tensor.device_mesh), tuple(tensor.placements))
    if key not in known:
        known[key] = cuts_of(names[0], tensor.device_mesh, tensor.placements)
    cuts = known[key]
    return _unit(names, inner[0], (tensor,), tuple(tensor.shape), cuts, dtype)


def cuts_of(name: str, mesh: Any, placements: Sequence[Any]) -> tuple[TensorCut, ...]:
    """How a DTensor is cut, first cut first.

    Raises:
        UnsupportedError: it is not cut into parts that lie in the whole as they are.
    """
    order = mesh_dims_in_order_of_cuts(placements, tuple(mesh.shape))
    if order is None or any(p.is_partial() for p in placements):
        raise UnsupportedError(f"{name!r} is placed as {tuple(placements)}; expected Shard and Replicate placements")
    if len({placements[mesh_dim].dim for mesh_dim in order}) == len(order):
        # Cuts of different dimensions may change places: one order for all tensors gathered over the same groups.
        order = sorted(order, reverse=True)
    ranks = mesh.mesh
    cuts = []
    for mesh_dim in order:
        if mesh.size(mesh_dim) == 1:
            continue
        if bool((ranks.diff(dim=mesh_dim) <= 0).any()):
            raise UnsupportedError(f"{name!r} is on {mesh}; expected ranks that increase along each dimension")
        group = mesh.get_group(mesh_dim)
        cuts.append(TensorCut(placements[mesh_dim].dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), group))
    return tuple(cuts)


def _unit(
    names: list[str],
    local: Tensor,
    aliases: tuple[Tensor, ...],
    shape: tuple[int, ...],
    cuts: tuple[TensorCut, ...],
    dtype: torch.dtype | None,
) -> Unit:
    named = tuple(Named(name, 0, shape) for name in names)
    return Unit(named, local, aliases, shape, cuts, _out_dtype(local, dtype))


def _flat_unit(prefix: str, flat: FlatParameterInfo, full: bool, dtype: torch.dtype | None) -> Unit:
    if flat.extended:
        raise UnsupportedError(
            f"the flat parameter of {prefix or 'the root module'!r} holds parameters of another parallelism, which "
            "only FSDP1 can put together: onload() and use FSDP.summon_full_params, or use fully_shard (FSDP2)"
        )
    size, rank = (flat.group.size(), flat.group.rank()) if flat.group is not None else (1, 0)
    whole = full or size == 1
    named = [
        Named(_clean(_join(prefix, name)), view.start, view.shape)
        if whole
        else Named(_clean(_join(prefix, name)), view.local_start, (view.local_numel,))
        for view in flat.views
        for name in view.names
    ]
    shape = (flat.numel,) if whole else (flat.local.numel(),)
    cuts = (TensorCut(0, size, rank, flat.group),) if whole and size > 1 else ()
    return Unit(tuple(named), flat.local, flat.aliases, shape, cuts, _out_dtype(flat.local, dtype))


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def _out_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def check_names(names: Collection[str], known: Collection[str], hint: str = "") -> set[str]:
    """The names as a set.

    Args:
        hint: ends the message.

    Raises:
        ValueError: one is not known.
    """
    wanted = {names} if isinstance(names, str) else set(names)
    unknown = sorted(wanted.difference(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.3) or list(known)[:3]
        raise ValueError(
            f"expected names out of the {len(known)} that are streamed, found {unknown[0]!r}"
            f"{f' and {len(unknown) - 1} others' if len(unknown) > 1 else ''}; there are {', '.join(map(repr, near))}"
            f"{hint}"
        )
    return wanted


def only(unit: Unit, names: Collection[str]) -> Unit | None:
    """A unit that hands out these names alone; None where it has none of them."""
    kept = tuple(one for one in unit.named if one.name in names)
    if len(kept) == len(unit.named):
        return unit
    return replace(unit, named=kept) if kept else None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
