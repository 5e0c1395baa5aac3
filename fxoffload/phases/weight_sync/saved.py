"""The weights of transformers models as ``save_pretrained`` writes them.

[Note: As saved]
An inference engine's loader knows the names and shapes of checkpoints. Models of transformers have others in memory:
the experts of a layer in one tensor, ``mlp`` for Mixtral's ``block_sparse_moe``, other prefixes in vision models. So
weights are handed out as the outermost transformers models would be saved: tied ones once, under the name that is
saved. Weights outside of such models keep their names. So do models with adapters or a quantizer, which are saved in
another way.

The question goes to a twin of the model: the same classes and configs without wrappers (torch.compile, FSDP, DDP,
activation checkpointing). Nor has it the classes that ``fully_shard`` makes, which transformers' mappings do not know.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.errors import UnsupportedError
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.weight_sync.recorded import Derivation, NotRecorded, OpRecorder, derivation_of_input
from fxoffload.phases.weight_sync.units import Modules, Unit
from fxoffload.runtime.switches import aside
from fxoffload.torch_private import transformers
from fxoffload.torch_private.modules import class_before_sharding
from fxoffload.torch_private.storages import storage_key


@dataclass(frozen=True)
class SaveStep:
    """An output that can be made; ``done``: inputs that are not needed after it."""

    output: str
    derivation: Derivation
    done: tuple[str, ...]
    is_input: bool

    @property
    def new_bytes(self) -> int:
        """Bytes that it takes in addition to its inputs."""
        return 0 if self.is_input else self.derivation.new_bytes


class Saved:
    """Which weights are handed out, and how they are made of those in memory.

    Args:
        derivations: by name, in the order of a checkpoint.
        shapes: of the weights in memory, in the order in which they come.

    Attributes:
        steps: outputs that can be made when a weight in memory has come, by its name. No other weights are needed.
    """

    def __init__(self, derivations: Mapping[str, Derivation], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.derivations = dict(derivations)
        self._shapes = shapes
        at = {name: i for i, name in enumerate(shapes)}
        ready: dict[str, list[str]] = {name: [] for name in shapes}
        needed: dict[str, str] = {}  # the last output that needs an input
        for name, derivation in derivations.items():
            ready[max(derivation.inputs, key=at.__getitem__)].append(name)
        for name in (name for names in ready.values() for name in names):
            needed |= dict.fromkeys(derivations[name].inputs, name)
        self.steps = {name: [self._step(output, needed) for output in ready[name]] for name in shapes if name in needed}

    def _step(self, output: str, needed: Mapping[str, str]) -> SaveStep:
        derivation = self.derivations[output]
        done = tuple(name for name in derivation.inputs if needed[name] == output)
        is_input = bool(done) and derivation.is_input(self._shapes[done[0]])
        return SaveStep(output, derivation, done, is_input)

    def only(self, names: Iterable[str]) -> Saved:
        """The same with these outputs alone."""
        wanted = set(names)
        return Saved(
            {name: derivation for name, derivation in self.derivations.items() if name in wanted}, self._shapes
        )

    def kept_bytes(self, name: str) -> int:
        """That several outputs share which are made when a weight in memory has come."""
        return sum(call.new_bytes for call in {call for step in self.steps[name] for call in step.derivation.kept})


def saved_models(modules: Modules) -> list[tuple[str, nn.Module]]:
    """The outermost models that transformers can be asked about, by their prefixes.

    Args:
        modules: in the order of ``named_modules``; a wrapper has the name of the module that it wraps, and comes first.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        if transformers.is_pretrained_model(module) and not any(_is_below(name, prefix) for prefix, _ in found):
            found.append((name, module))
    found = [(prefix, model) for prefix, model in found if _is_saved_whole(prefix, model, modules)]
    return found if found and transformers.knows_what_is_saved() else []


def facts_of(model: nn.Module) -> tuple[Any, ...]:
    """The facts that decide how a model is saved, in addition to its weights."""
    return type(model), getattr(model, "config", None), transformers.conversions_of(model)


@dataclass(frozen=True)
class Weight:
    """A weight in memory; ``memory`` tells where: that of tied ones is equal."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: Hashable


def weights_of(units: Sequence[Unit]) -> dict[str, Weight]:
    """By name, in the order in which they come."""
    return {
        name: Weight(shape, unit.dtype, (memory_of(unit.local), start, shape))
        for unit in units
        for (start, shape), names in unit.regions.items()
        for name in names
    }


def memory_of(tensor: Tensor) -> Hashable:
    """Tells the memory of a plain tensor from that of others."""
    return storage_key(tensor), int(tensor.storage_offset()), tuple(tensor.stride())


def saved_of(models: Modules, modules: Modules, weights: Mapping[str, Weight]) -> Saved | None:
    """How weights are handed out; None: as they are.

    Args:
        models: of ``saved_models(modules)``.
        weights: in the order in which they come.

    Raises:
        UnsupportedError: transformers cannot say how a model would be saved.
    """
    if not models:
        return None
    derivations: dict[str, Derivation] = {}
    left = dict(weights)
    for prefix, model in models:
        below = {name: left.pop(name) for name in list(left) if _is_below(name, prefix)}
        derivations |= _derivations_of(prefix, model, modules, below)
    derivations |= {name: derivation_of_input(name, weight.shape, weight.dtype) for name, weight in left.items()}
    return Saved(derivations, {name: weight.shape for name, weight in weights.items()})


def extra_bytes(units: Sequence[Unit], saved: Saved | None) -> int:
    """The most that a stream holds in addition to its buckets: the largest tensor, with the outputs made of it.

    Where outputs are made of several tensors, those that came before are waiting too.
    """
    waiting: dict[str, int] = {}
    most = 0
    for unit in units:
        whole = unit.numel * unit.dtype.itemsize
        most = max(most, sum(waiting.values()) + whole)
        for (_, shape), names in unit.regions.items():
            nbytes = math.prod(shape) * unit.dtype.itemsize
            own = nbytes if nbytes != whole else 0  # a part of a tensor that FSDP1 flattened is copied
            for name in names:
                steps = saved.steps[name] if saved is not None else []
                kept = saved.kept_bytes(name) if saved is not None else 0
                waiting[name] = 0  # is in ``whole`` or ``own``
                for step in steps:
                    most = max(most, sum(waiting.values()) + whole + own + kept + step.new_bytes)
                    for done in step.done:
                        waiting.pop(done, None)
                most = max(most, sum(waiting.values()) + whole + own)
                if saved is None:
                    del waiting[name]
                elif name in waiting:
                    waiting[name] = nbytes
    return most


def _derivations_of(
    prefix: str, model: nn.Module, modules: Modules, weights: Mapping[str, Weight]
) -> dict[str, Derivation]:
    """Of one model, by the names in its checkpoint after ``prefix``."""
    try:
        # In a thread of its own the caller's modes do not hold: inference mode runs other operators.
        return aside(lambda: _record(prefix, modules, weights))
    except Exception as error:
        raise UnsupportedError(
            f"expected transformers to say how it saves {type(model).__name__}, found {type(error).__name__}: {error}. "
            "Give as_saved=False for names and shapes as they are in memory"
        ) from error


def _record(prefix: str, modules: Modules, weights: Mapping[str, Weight]) -> dict[str, Derivation]:
    with untouched(), torch.no_grad():
        start, tensors = _dotted(prefix), _meta_tensors(weights)
        twin, parts = _twin(prefix, modules, tensors)
        with OpRecorder(tensors) as recorder:
            outputs = transformers.as_saved(twin, {name.removeprefix(start): t for name, t in tensors.items()})
        derivations = {start + name: derivation for name, derivation in recorder.derivations(outputs).items()}
    for name, derivation in derivations.items():
        if not parts.isdisjoint(derivation.inputs) and not derivation.is_input(weights[derivation.inputs[0]].shape):
            raise NotRecorded(f"{name!r} is made of what is inside a tensor subclass")
    return derivations


def _meta_tensors(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    made: dict[Any, Tensor] = {}
    for weight in weights.values():
        if weight.memory not in made:
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            made[weight.memory] = nn.Parameter(empty, requires_grad=False)
    return {name: made[weight.memory] for name, weight in weights.items()}


def _twin(prefix: str, modules: Modules, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, set[str]]:
    """A model over other tensors, without wrappers, and the names of tensors that are not of a module.

    See [Note: As saved].
    """
    # The last of one name is the module that the wrappers wrap.
    inner = {name: module for name, module in modules if name == prefix or _is_below(name, prefix)}
    made: dict[int, nn.Module] = {}
    twins: dict[str, nn.Module] = {}
    for name, module in inner.items():
        if id(module) not in made:
            made[id(module)] = _empty_twin(module)
        twins[name] = made[id(module)]
        if name != prefix:
            parent, _, leaf = name.rpartition(".")
            twins[parent]._modules[leaf] = twins[name]
    parts: set[str] = set()
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        if parent not in twins:  # the name of a tensor subclass
            parts.add(name)
            above, _, attribute = parent.rpartition(".")
            twins[parent] = twins[above]._modules[attribute] = nn.Module()
        elif parent not in inner:
            parts.add(name)
        twins[parent]._parameters[leaf] = tensor  # type: ignore[assignment]
    return twins[prefix], parts


def _empty_twin(module: nn.Module) -> nn.Module:
    if not transformers.is_pretrained_model(module):
        return nn.Module()
    twin = object.__new__(class_before_sharding(module))
    twin.__dict__.update(module.__dict__, _modules={}, _parameters={}, _buffers={})
    return twin


def _is_saved_whole(prefix: str, model: nn.Module, modules: Modules) -> bool:
    if transformers.is_saved_in_another_way(model):
        return False
    return not any(transformers.is_adapter_layer(module) for name, module in modules if _is_below(name, prefix))


def _is_below(name: str, prefix: str) -> bool:
    return name.startswith(_dotted(prefix))


def _dotted(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
