"""The labels that ``AnnotateLayers`` writes on nodes, and the module paths that Dynamo left there."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

import torch.fx as fx

LAYER_KEY = "fxoffload_layer"
MODULE_KEY = "fxoffload_module"
_COMPONENT = re.compile(r"\['?([^'\]]+)'?\]|([A-Za-z0-9_]+)")
# ``L['args'][0]``: the model's ``forward`` is decorated (``forward(*args, **kwargs)``; transformers 5.24).
_DECORATED = ("args", "0")
# A compiled module without a ``forward`` of its own (``nn.Sequential``) has this name in Dynamo's wrapper. Labels are
# chosen with it, since an index is one of a container; names leave it out.
_WRAPPED = "L['fn']"
# Wrappers that add a path component without being part of the model.
_WRAPPERS = {"_modules", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "L", "self"}


@dataclass
class ModulePath:
    """A module path with the class of each module on it. ``is_wrapped``: its first part is Dynamo's."""

    parts: tuple[str, ...]
    classes: dict[tuple[str, ...], str] = field(default_factory=dict)
    is_wrapped: bool = False

    def name(self, parts: tuple[str, ...] | None = None) -> str:
        """The model's own name of the module, or of one above it with these ``parts``."""
        return ".".join((self.parts if parts is None else parts)[int(self.is_wrapped) :])

    def below(self, prefix: tuple[str, ...]) -> ModulePath:
        """The same path seen from a module on it."""
        start = len(prefix)
        classes = {parts[start:]: name for parts, name in self.classes.items() if parts[:start] == prefix}
        return ModulePath(self.parts[start:], classes)

    def labels(self) -> list[tuple[str, ...]]:
        """Prefixes that end in an index of a container, outermost first; never inside a list of experts."""
        found = []
        for i, part in enumerate(self.parts):
            if "expert" in part.lower():
                break
            if part.isdigit() and i > 0:
                found.append(self.parts[: i + 1])
        return found


@functools.lru_cache(maxsize=4096)
def _parse(path: str) -> tuple[str, ...]:
    parts = [a or b for a, b in _COMPONENT.findall(path)]
    return tuple(p for p in parts if p not in _WRAPPERS)


def path_of(node: fx.Node) -> ModulePath | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    classes = {}
    deepest: tuple[str, ...] = ()
    for name, cls in stack.values():
        parts = _parse(str(name))
        classes[parts] = cls if isinstance(cls, str) else getattr(cls, "__name__", str(cls))
        if len(parts) >= len(deepest):
            deepest = parts
    return ModulePath(deepest, classes, str(next(iter(stack.values()))[0]).startswith(_WRAPPED))


def module_path(node: fx.Node) -> str:
    """The module that a node was traced in, "model.layers.3.mlp.gate_proj"; "" where Dynamo says nothing."""
    found = node.meta.get(MODULE_KEY)
    if found is None:
        path = path_of(node)
        found = "" if path is None else path.name()
    return found


# Outer node -> name of the class of values that share memory with it in the inner graph.
STORAGE_KEY = "fxoffload_storage"


# Offload node -> the candidates that it moves; their values are the op's sources, in order.
CANDIDATES_KEY = "fxoffload_candidates"
