"""Which tensors belong to which group, read at every transition: optimizers make their state late."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.optimizers import leaves, named_state, parameters_of
from fxoffload.phases.phase import BUFFERS, BY_PRECEDENCE, EXTRA, GRADS, OPTIMIZER, PARAMS
from fxoffload.sizes import format_bytes
from fxoffload.torch_private.pytree import tree_leaves

log = logging.getLogger(__name__)

NamedTensors = Iterator[tuple[str, Tensor]]


class Inventory:
    """The models, optimizers and other tensors of a ``PhaseManager``.

    Parameters of an optimizer that no model has are master copies, and belong to its state. Where there is no model at
    all, they belong to other code, and are left alone, as are their gradients.

    Attributes:
        models: by name; the name of a single model is "".
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizers: Any,
        extra: Mapping[str, Any] | None,
    ) -> None:
        self.models = _named_models(models)
        self._optimizers = optimizers
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"expected extra as a mapping of names to tensors or modules, found {type(extra).__name__}")
        self._extra = dict(extra or {})
        for name, value in self._extra.items():
            _require_tensors(name, value)
        if not (self.models or leaves(optimizers) or self._extra):
            raise ValueError("expected a model, an optimizer or something extra to move, found none of them")
        self._said: set[str] = set()

    @property
    def optimizers(self) -> list[Any]:
        """Those with state, out of their wrappers; a wrapper may get some later."""
        return leaves(self._optimizers)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The models, then the modules in ``extra``, by name. A module that is both is named once."""
        return self.walk().modules

    def walk(self) -> Walk:
        """A look at everything as it is now."""
        return Walk(self.models, self.optimizers, self._extra)

    def collect(self, group: str) -> list[tuple[str, Tensor]]:
        """(name, tensor) of a group; a tensor may be named twice, and may be without memory."""
        return self.walk().collect(group)

    def immovable(self, device_types: Collection[str]) -> list[tuple[str, int]]:
        """(name, bytes) of storages on these devices that cannot be emptied, and of tensors that cannot be taken apart.

        torch does not own memory that is shared with another process or allocated by another library.
        """
        found: dict[int, tuple[str, int]] = {}
        walk = self.walk()
        for group in BY_PRECEDENCE:
            for name, tensor in walk.collect(group):
                with untouched():
                    parts = plain_tensors(tensor)
                    if not parts and tensor.device.type in device_types:
                        found.setdefault(id(tensor), (name, opaque_bytes(tensor)))
                    for plain in parts:
                        storage = plain.untyped_storage()
                        kind = plain.device.type
                        if kind in device_types and storage.nbytes() and not can_be_emptied(storage, kind):
                            found.setdefault(storage._cdata, (name, storage.nbytes()))
        return list(found.values())

    def warn_of_immovable(self, device_types: Collection[str]) -> None:
        """Logs the tensors that stay on the device because they cannot be emptied, once for each total size."""
        found = self.immovable(device_types)
        nbytes = sum(size for _, size in found)
        if not nbytes:
            return
        names = [name for name, _ in found]
        more = f" and {len(names) - 4} others" if len(names) > 4 else ""
        self._warn_once(
            f"{nbytes} immovable",
            "%s in %d storages stay on the device, expected storages that torch can empty, found memory that is "
            "shared, that NumPy, torch.load or another library has allocated, or that is in a sparse tensor or a "
            "subclass without __tensor_flatten__: %s%s. Clone them to let them leave",
            format_bytes(nbytes),
            len(found),
            ", ".join(names[:4]),
            more,
        )

    def warn_of_fsdp(self, num_kept: int) -> None:
        """Logs once how many parameters FSDP keeps on the CPU, if it does."""
        if num_kept:
            self._warn_once(
                "fsdp",
                "FSDP keeps %d parameters on the CPU itself (CPUOffloadPolicy, CPUOffload): they, their gradients and "
                "their optimizer state are left there",
                num_kept,
            )

    def warn_of_elsewhere(
        self,
        groups: Collection[str],
        present: Mapping[str, bool],
        elsewhere: Mapping[str, Counter[torch.device]],
        device_types: Collection[str],
    ) -> None:
        """Logs once that nothing moves, because everything is on other devices.

        Args:
            groups: that should move.
            present: whether a group has tensors on one of the device types.
            elsewhere: how many it has on other devices.
        """
        # Parameters alone first: in a rehearsal step counts may be on the device where the model is not.
        for some in ((PARAMS,), groups):
            found = sum((elsewhere.get(group, Counter()) for group in some), Counter[torch.device]())
            if found and not any(present.get(group) for group in some):
                wanted, places = " or ".join(sorted(device_types)), ", ".join(sorted({str(one) for one in found}))
                self._warn_once(
                    "elsewhere",
                    "%s: nothing of it moves. Expected tensors on %s, found %d on %s. %s; or, for a rehearsal on the "
                    "CPU, pass device_types=('cpu',) or set FXOFFLOAD_PHASES_DEVICE_TYPES=cpu",
                    ", ".join(group for group in some if elsewhere.get(group)),
                    wanted,
                    found.total(),
                    places,
                    "Move the model there (model.to(...)) before its optimizer and its PhaseManager are made"
                    if PARAMS in some
                    else "Move there what was loaded to another device",
                )

    def warn_of_most_elsewhere(self, elsewhere_bytes: int, present_bytes: int) -> None:
        """Logs once that the larger part of the parameters is on other devices."""
        if 0 < present_bytes < elsewhere_bytes:
            self._warn_once(
                "elsewhere",
                "params: %s of them move, and %s stay on other devices. Move the model to one device (model.to(...)) "
                "before its optimizer and its PhaseManager are made",
                format_bytes(present_bytes),
                format_bytes(elsewhere_bytes),
            )

    def warn_of_absent(self, groups: Collection[str]) -> None:
        """Logs once, for each choice of groups, that there is nothing that could be in them."""
        may_have = {OPTIMIZER: bool(self.optimizers), EXTRA: bool(self._extra)}
        if groups and not any(may_have.get(group, bool(self.models)) for group in groups):
            key = " and ".join(groups)
            self._warn_once(
                key,
                "nothing moves for %s: expected a PhaseManager that has some, found one that was made without. Pass "
                "the model, the optimizer or extra to it",
                key,
            )

    def _warn_once(self, key: str, message: str, *args: Any) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning(message, *args)


class Walk:
    """One look at all tensors, which asks the modules once for facts that several groups need.

    To be used at once and thrown away: modules and optimizers change.
    """

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Sequence[Any], extra: Mapping[str, Any]) -> None:
        self._models, self._optimizers, self._extra = models, optimizers, extra

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """See ``Inventory.modules``."""
        found = dict(self._models)
        extras = [(name, leaf) for name, leaf in self._extra_leaves if isinstance(leaf, nn.Module)]
        known = {id(module) for model in self._models.values() for module in model.modules()} if extras else set()
        for name, module in extras:
            if id(module) not in known:
                known.add(id(module))
                found[_free_name(name, found)] = module
        return found

    @functools.cached_property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of all models, tied ones once, in the models' order."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self._members("parameters"):
            found.setdefault(id(parameter), (name, parameter))
        return list(found.values())

    def _members(self, kind: str) -> Iterator[tuple[str, Any]]:
        """The "parameters" or "buffers" of all models, in the models' order."""
        for prefix, model in self._models.items():
            named = f"named_{kind}"
            if getattr(type(model), named) is not getattr(nn.Module, named):  # FSDP1 has its own names
                yield from ((_join(prefix, name), tensor) for name, tensor in getattr(model, named)())
                continue
            for path, module in self._submodules[prefix]:
                for name, tensor in getattr(module, f"_{kind}").items():
                    if tensor is not None:
                        yield _join(prefix, _join(path, name)), tensor

    @functools.cached_property
    def _submodules(self) -> dict[str, list[tuple[str, nn.Module]]]:
        """Of each model, itself first: looked for once, as that takes as long as all that is asked of them."""
        return {prefix: list(model.named_modules()) for prefix, model in self._models.items()}

    @functools.cached_property
    def kept_by_fsdp(self) -> frozenset[int]:
        """Ids of parameters that FSDP keeps on the CPU by itself; they, their gradients and state are left alone."""
        return frozenset(id(p) for _, module in self._fsdp for p in sharded.kept_on_cpu(module))

    def collect(self, group: str) -> list[tuple[str, Tensor]]:
        """See ``Inventory.collect``."""
        walks = {
            PARAMS: self._params,
            BUFFERS: self._buffers,
            GRADS: self._grads,
            OPTIMIZER: self._optimizer,
            EXTRA: self._extras,
        }
        return list(walks[group]())

    def gradient_owners(self) -> NamedTensors:
        """Tensors that may have a ``.grad``: the models' parameters and master copies."""
        seen = set()
        for name, parameter in self.parameters:
            seen.add(id(parameter))
            yield name, parameter
        if not self._models:
            return
        for i, optimizer in enumerate(self._optimizers):
            for parameter in parameters_of(optimizer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"optimizer{i}", parameter

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """Of parameters by id, also of shards that a gathered FSDP2 module does not show."""
        fsdp2 = ((name, module) for name, module in self._fsdp if sharded.is_fsdp2(module))
        shards = {id(p): f"{name}.{i}" for name, module in fsdp2 for i, p in enumerate(sharded.parameters_of(module))}
        return shards | {id(parameter): name for name, parameter in self.parameters}

    @functools.cached_property
    def _fsdp(self) -> list[tuple[str, nn.Module]]:
        known = {id(model): self._submodules[prefix] for prefix, model in self._models.items()}
        return [
            found for module in self.modules.values() for found in sharded.fsdp_modules(module, known.get(id(module)))
        ]

    def _params(self) -> NamedTensors:
        yield from ((name, p) for name, p in self.parameters if id(p) not in self.kept_by_fsdp)

    def _buffers(self) -> NamedTensors:
        return self._members("buffers")

    def _grads(self) -> NamedTensors:
        for name, parameter in self.gradient_owners():
            if parameter.grad is not None and id(parameter) not in self.kept_by_fsdp:
                yield f"{name}.grad", parameter.grad

    def _optimizer(self) -> NamedTensors:
        for optimizer in self._optimizers:
            yield from named_state(optimizer, self._names, self.kept_by_fsdp, masters=bool(self._models))

    def _extras(self) -> NamedTensors:
        kept = self.kept_by_fsdp
        for name, leaf in self._extra_leaves:
            if isinstance(leaf, Tensor):
                yield name, leaf
            else:
                yield from ((_join(name, inner), p) for inner, p in leaf.named_parameters() if id(p) not in kept)
                yield from ((_join(name, inner), t) for inner, t in leaf.named_buffers())

    @functools.cached_property
    def _extra_leaves(self) -> list[tuple[str, Tensor | nn.Module]]:
        leaves_of_all = []
        for name, value in self._extra.items():
            found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, (Tensor, nn.Module))]
            leaves_of_all += [(name if len(found) == 1 else f"{name}.{i}", leaf) for i, leaf in enumerate(found)]
        return leaves_of_all


def _require_tensors(name: str, value: Any) -> None:
    # Plain data next to tensors (the decay of an EMA) needs no memory on a device; other objects may hold some.
    leaves_in_it = tree_leaves(value)
    is_tree = len(leaves_in_it) != 1 or leaves_in_it[0] is not value
    allowed = (Tensor, nn.Module, type(None), *((bool, int, float, complex, str) if is_tree else ()))
    for leaf in leaves_in_it:
        if not isinstance(leaf, allowed):
            raise TypeError(
                f"expected extra[{name!r}] as a tensor, a module, or a tree (dict, list, tuple) of them, found "
                f"{type(leaf).__name__}{' in it' if is_tree else ''}: its tensors would stay on the device. Pass those "
                f"that it holds, as extra={{{name!r}: [...]}}; a list or dict that changes is looked through every time"
            )


def can_be_emptied(storage: torch.UntypedStorage, device_type: str) -> bool:
    """Whether torch owns the memory of a storage on such a device, so that it may be freed and allocated anew.

    ``resizable()`` is also true of CPU memory that is shared with other processes; resizing it ends the process.
    """
    # The storage could be asked for its device, in Python, which takes ten times as long as all the rest.
    return storage.resizable() and not (device_type == "cpu" and storage.is_shared())


def opaque_bytes(tensor: Tensor) -> int:
    """About how many bytes a tensor has that cannot be taken apart."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.numel() * tensor.element_size()


def find_device(inventory: Inventory, device_types: frozenset[str]) -> torch.device:
    """The device that most of this is about: of the first tensor on one of the types."""
    for group in BY_PRECEDENCE:
        for _, tensor in inventory.collect(group):
            if tensor.device.type in device_types:
                return tensor.device
    if "cuda" in device_types and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _named_models(models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    named: dict[str, Any] = {"": models}
    if isinstance(models, Mapping):
        named = dict(models)
    elif isinstance(models, (list, tuple)):
        named = {str(i): model for i, model in enumerate(models)}
    for model in named.values():
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected an nn.Module, or a sequence or mapping of them, found {type(model).__name__}")
    if len(named) == 1:
        return {"": next(iter(named.values()))}
    return named


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name = f"extra.{name}"
    return name


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
