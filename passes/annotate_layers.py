"""Pass 1, on the joint graph: which layer does each node belong to?

Before (Dynamo's metadata, one path per module on the way down)::

    %mm   = mm(%view, %permute)     nn_module_stack: model -> model.layers.0 -> model.layers.0.self_attn
    %mm_9 = mm(%grad, %permute_3)   fwd_nn_module_stack: ... model.layers.0.self_attn

After::

    %mm   = mm(%view, %permute)     fxoffload_layer: "model.layers.0"   fxoffload_module: "model.layers.0.self_attn"
    %mm_9 = mm(%grad, %permute_3)   fxoffload_layer: "model.layers.0"   ... the same

A label is a module path, never a bare integer: an encoder's and a decoder's ``block.0`` are two layers. Its depth is
chosen once for forward and backward. Where modules say nothing (one block called in a loop, a fragment after a graph
break) the longest repeated run of ops is the stack, and its repeats are the layers.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch.fx as fx

from fxoffload.analysis.values import tensor_of

LAYER_KEY = "fxoffload_layer"
_MODULE_KEY = "fxoffload_module"

_COMPONENT = re.compile(r"\['?([^'\]]+)'?\]|([A-Za-z0-9_]+)")
# ``L['args'][0]``: the model's ``forward`` is decorated (``forward(*args, **kwargs)``; transformers 5.24).
_DECORATED = ("args", "0")
# A compiled module without a ``forward`` of its own (``nn.Sequential``) has this name in Dynamo's wrapper. Labels are
# chosen with it, since an index is one of a container; names leave it out.
_WRAPPED = "L['fn']"
# Wrappers that add a path component without being part of the model.
_WRAPPERS = {"_modules", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "L", "self"}

# A layer that holds more than this share of all labelled nodes may be a stage that contains the real blocks.
_STAGE_SHARE = 1 / 3
# A repeated run of ops counts as a stack of layers from here on.
_MIN_REPEATS, _MIN_PERIOD, _MIN_COVERAGE = 3, 12, 0.5


@dataclass(frozen=True)
class LayerReport:
    """What ``AnnotateLayers`` found: layer labels in order of execution, and where they came from."""

    layers: tuple[str, ...] = ()
    source: str = "none"  # "modules" | "repeats" | "none"
    num_labelled: int = 0
    num_nodes: int = 0


@dataclass
class _Path:
    """A module path with the class of each module on it. ``is_wrapped``: its first part is Dynamo's."""

    parts: tuple[str, ...]
    classes: dict[tuple[str, ...], str] = field(default_factory=dict)
    is_wrapped: bool = False

    def name(self, parts: tuple[str, ...] | None = None) -> str:
        """The model's own name of the module, or of one above it with these ``parts``."""
        return ".".join((self.parts if parts is None else parts)[int(self.is_wrapped) :])

    def below(self, prefix: tuple[str, ...]) -> _Path:
        """The same path seen from a module on it."""
        start = len(prefix)
        classes = {parts[start:]: name for parts, name in self.classes.items() if parts[:start] == prefix}
        return _Path(self.parts[start:], classes)

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


def _path_of(node: fx.Node) -> _Path | None:
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
    return _Path(deepest, classes, str(next(iter(stack.values()))[0]).startswith(_WRAPPED))


def module_path(node: fx.Node) -> str:
    """The module that a node was traced in, "model.layers.3.mlp.gate_proj"; "" where Dynamo says nothing."""
    found = node.meta.get(_MODULE_KEY)
    if found is None:
        path = _path_of(node)
        found = "" if path is None else path.name()
    return found


class AnnotateLayers:
    """Write ``meta["fxoffload_layer"]`` on the nodes of a joint graph. See the module docstring."""

    name = "annotate_layers"

    def __call__(self, gm: fx.GraphModule) -> LayerReport:
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        paths = {n: p for n in nodes if (p := _path_of(n)) is not None}
        if all(path.parts[: len(_DECORATED)] == _DECORATED for path in paths.values()):
            paths = {n: path.below(_DECORATED) for n, path in paths.items()}
        for node, path in paths.items():
            node.meta[_MODULE_KEY] = path.name()  # every draft asks for it
        labels = _labels_from_modules(paths)
        source = "modules"
        if len(set(labels.values())) < 2:
            labels, source = _labels_from_repeats(nodes), "repeats"
        if len(set(labels.values())) < 2:
            return LayerReport(num_nodes=len(nodes))
        _spread_to_backward(nodes, labels)
        for node, label in labels.items():
            node.meta[LAYER_KEY] = label
        ordered = tuple(dict.fromkeys(labels[n] for n in nodes if n in labels))
        return LayerReport(ordered, source, len(labels), len(nodes))


def _labels_from_modules(paths: dict[fx.Node, _Path]) -> dict[fx.Node, str]:
    candidates = {n: labels for n, p in paths.items() if (labels := p.labels())}
    if not candidates:
        return {}
    classes: dict[tuple[str, ...], str] = {}
    for path in paths.values():
        classes.update(path.classes)

    depth = 1
    while True:
        chosen = {n: labels[min(depth, len(labels)) - 1] for n, labels in candidates.items()}
        heavy, count = Counter(chosen.values()).most_common(1)[0]
        if count <= _STAGE_SHARE * len(chosen):
            break
        nested = {labels[depth] for n, labels in candidates.items() if chosen[n] == heavy and len(labels) > depth}
        kinds = {classes.get(label, str(label)) for label in nested}
        if len(nested) < 2 or len(kinds) != 1:
            break
        depth += 1
    # The label that holds every layer is the model (``nn.Sequential(model)``). Its own ops stand around them: a label
    # of theirs would span all others.
    model = set.intersection(*(set(labels) for labels in candidates.values()))
    return {n: paths[n].name(label) for n, label in chosen.items() if label not in model}


def _labels_from_repeats(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """Label the longest tandem repeat of (op, shape, dtype) in the forward."""
    forward = [n for n in nodes if not _is_backward(n)]
    ids: dict[object, int] = {}
    sequence = np.array([ids.setdefault(_signature(n), len(ids)) for n in forward], dtype=np.int64)
    best: tuple[int, int, int, int] | None = None  # covered nodes, -period, start, period
    for period in range(_MIN_PERIOD, len(sequence) // _MIN_REPEATS + 1):
        equal = sequence[period:] == sequence[:-period]
        start, length = _longest_run(equal)
        repeats = (length + period) // period
        if repeats >= _MIN_REPEATS:
            found = (repeats * period, -period, start, period)
            best = max(best, found) if best else found
    if best is None or best[0] < _MIN_COVERAGE * len(sequence):
        return {}
    covered, _, start, period = best
    return {forward[start + i]: f"repeat.{i // period}" for i in range(covered)}


def _signature(node: fx.Node) -> tuple[object, ...]:
    value = tensor_of(node)
    shape = (tuple(map(str, value.shape)), value.dtype) if value is not None else ()
    index = node.args[1] if node.target is operator.getitem else None
    return (node.target, shape, index)


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_nn_module_stack" in node.meta


def _spread_to_backward(nodes: list[fx.Node], labels: dict[fx.Node, str]) -> None:
    """A backward node without a module path takes the label of the forward op whose autograd node made it.

    Sums of gradients are made by no autograd node: they carry the number of whatever came last in the forward. Labelled
    by it, the residual stream's sums would spread the last layer over the whole backward, and the cuts would collapse.
    """
    by_seq: dict[int, set[str]] = defaultdict(set)
    for node, label in labels.items():
        if not _is_backward(node) and "seq_nr" in node.meta:
            by_seq[node.meta["seq_nr"]].add(label)
    for node in nodes:
        if node not in labels and _is_backward(node) and not node.meta.get("is_gradient_acc"):
            known = by_seq.get(node.meta.get("seq_nr", -1), set())
            if len(known) == 1:
                labels[node] = next(iter(known))
