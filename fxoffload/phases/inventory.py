"""Which tensors belong to which group, read again at every transition: optimizers make their state late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxoffload.phases import sharded
from fxoffload.phases.optimizers import leaves, named_state
from fxoffload.phases.phase import BUFFERS, EXTRA, GRADS, GROUPS, OPTIMIZER, PARAMS
from fxoffload.phases.storages import plain_tensors as plain_tensors

NamedTensors = Iterator[tuple[str, Tensor]]


class Inventory:
    """The models, optimizers and other tensors of a ``PhaseManager``.

    Attributes:
        models: by name; the name of a single model is "".
        optimizers: those with state, out of their wrappers.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizers: Any,
        extra: Mapping[str, Any] | None,
    ) -> None:
        self.models = _named_models(models)
        self.optimizers = leaves(optimizers)
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"expected extra as a mapping of names to tensors or modules, found {type(extra).__name__}")
        self._extra = dict(extra or {})

    def collect(self, group: str) -> list[tuple[str, Tensor]]:
        """(name, tensor) of a group; a tensor may be named twice, and may be without memory."""
        walks = {
            PARAMS: self._params,
            BUFFERS: self._buffers,
            GRADS: self._grads,
            OPTIMIZER: self._optimizer,
            EXTRA: self._extras,
        }
        return list(walks[group]())

    def order(self, groups: Sequence[str]) -> list[str]:
        """The groups in the order in which a storage that lies in several is given to one of them."""
        return sorted(groups, key=(PARAMS, BUFFERS, GRADS, OPTIMIZER, EXTRA).index)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all models, tied ones once, in the models' order."""
        seen = set()
        for prefix, model in self.models.items():
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _join(prefix, name), parameter

    def gradient_owners(self) -> Iterator[tuple[str, Tensor]]:
        """Whatever may have a ``.grad``: the models' parameters and what optimizers hold beside them."""
        seen = set()
        for name, parameter in self.parameters():
            seen.add(id(parameter))
            yield name, parameter
        for i, optimizer in enumerate(self.optimizers):
            for group in getattr(optimizer, "param_groups", ()):
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"optimizer{i}", parameter

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module whose tensors are ours, by name."""
        return self.models

    def kept_by_fsdp(self) -> set[int]:
        """Ids of parameters that FSDP keeps on the CPU by itself; they, their gradients and state are left alone."""
        return {id(p) for model in self.models.values() for p in sharded.cpu_offloaded_parameters(model)}

    def _params(self) -> NamedTensors:
        kept = self.kept_by_fsdp()
        yield from ((name, parameter) for name, parameter in self.parameters() if id(parameter) not in kept)

    def _buffers(self) -> NamedTensors:
        for prefix, model in self.models.items():
            for name, buffer in model.named_buffers():
                yield _join(prefix, name), buffer

    def _grads(self) -> NamedTensors:
        kept = self.kept_by_fsdp()
        for name, parameter in self.gradient_owners():
            if parameter.grad is not None and id(parameter) not in kept:
                yield f"{name}.grad", parameter.grad

    def _optimizer(self) -> NamedTensors:
        names = {id(parameter): name for name, parameter in self.parameters()}
        kept = self.kept_by_fsdp()
        for optimizer in self.optimizers:
            yield from named_state(optimizer, names, kept)

    def _extras(self) -> NamedTensors:
        for name, value in self._extra.items():
            if isinstance(value, nn.Module):
                yield from ((_join(name, inner), t) for inner, t in value.named_parameters())
                yield from ((_join(name, inner), t) for inner, t in value.named_buffers())
            else:
                found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                yield from ((name if len(found) == 1 else f"{name}.{i}", t) for i, t in enumerate(found))


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


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


assert set(GROUPS) == {PARAMS, BUFFERS, GRADS, OPTIMIZER, EXTRA}
