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

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from fxoffload.analysis.labels import _DECORATED, LAYER_KEY, MODULE_KEY, ModulePath, path_of
from fxoffload.analysis.values import tensor_of

# A layer that holds more than this share of all labelled nodes may be a stage that contains the real blocks.
_STAGE_SHARE = 1 / 3
# A repeated run of ops counts as a stack of layers from here on.
_MIN_REPEATS, _MIN_PERIOD, _MIN_COVERAGE = 3, 12, 0.5


@dataclass(frozen=True)
class LayerReport:
    """What ``AnnotateLayers`` found: layer labels in order of execution, and where they came from."""

    layers: tuple[str, ...] = ()
    source: str = "none"  # "modules" | "repeats" | "none"


class AnnotateLayers:
    """Write ``meta["fxoffload_layer"]`` on the nodes of a joint graph. See the module docstring."""

    def __call__(self, gm: fx.GraphModule) -> LayerReport:
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        paths = {n: p for n in nodes if (p := path_of(n)) is not None}
        if all(path.parts[: len(_DECORATED)] == _DECORATED for path in paths.values()):
            paths = {n: path.below(_DECORATED) for n, path in paths.items()}
        for node, path in paths.items():
            node.meta[MODULE_KEY] = path.name()  # every partitioning asks for it
        labels = _labels_from_modules(paths)
        source = "modules"
        if len(set(labels.values())) < 2:
            labels, source = _labels_from_repeats(nodes), "repeats"
        if len(set(labels.values())) < 2:
            return LayerReport()
        _spread_to_backward(nodes, labels)
        for node, label in labels.items():
            node.meta[LAYER_KEY] = label
        ordered = tuple(dict.fromkeys(labels[n] for n in nodes if n in labels))
        return LayerReport(ordered, source)


def _labels_from_modules(paths: dict[fx.Node, ModulePath]) -> dict[fx.Node, str]:
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
