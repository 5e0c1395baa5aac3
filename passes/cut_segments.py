"""Pass 4, on the forward and the backward graph: cut the existing order of nodes into segments, one per layer.

::

    add, pow, ..., mm, | pow, ..., mm, | ..., mm, mean        (labels: none, 0 0 0 0, 1 1 1, none)
    [ prologue       ] [ layers.0    ] [ layers.1 ] [epilogue]

Segments are contiguous ranges. Each cut is where the fewest bytes of intermediates live near the change of label
(assigning node by node instead pulled intermediates into late segments and doubled the backward's memory). No cut
separates a node from the one it was glued to by ``settle_nodes``. A layer that moves more than 512 MiB is cut again,
where few bytes live near equal shares of what moves (a Qwen3-8B layer at 16k tokens: between attention and MLP). It
stays whole where any such cut would part a kernel that has much to write and to read (T5's softmax and dropout of
scores: 4 % of the step, by estimate).

A layer that was compiled on its own has no labels. Its forward is cut where it moves more than 1 GiB, so that copies of
its first half overlap the second. Its backward stays whole: cut, it took more memory and time (two H200s).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.analysis.op_costs import fused_form, op_name, runs_alone
from fxoffload.analysis.repeatable import MAX_OPS, Repeatable
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import output_values
from fxoffload.passes.settle_nodes import GLUE_KEY
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.symbolic_sizes import symbols_of

# The share of a layer's nodes at each end that the search for the best cut may look at.
_MARGIN = 0.05
# Bytes that one segment should move at most, about. A layer is cut in two from half of that on; below, smaller copy
# windows are not worth twice the code to compile. Then: the most pieces of a layer, and how far from even shares.
MAX_MOVED_BYTES = 1 << 30
_MAX_PIECES = 4
_SPLIT_MARGIN = 0.6
# What such a cut may make kernels write and read, as a part of what the layer moves.
_MOST_PARTED = 0.25
# A label starts (ends) where at least half of this many labelled nodes after (before) it carry it too.
_NEIGHBOURS = 8
_SEED_LOOKUP = "prims.inductor_lookup_seed"


class CutSegments:
    """Cut a graph at its layers, and a layer that moves much in two or more.

    A segment's values start to leave when it ends, and have all returned before it begins. So the copy windows have to
    hold all bytes that it moves, and its last reload cannot overlap with its own time.

    Args:
        moved: name of a saved value -> bytes that move for it (the values that share a storage carry them once).
        max_moved: bytes that one segment should move at most, about.
        whole: make one segment (the switch ``segments``).
        single: a graph without layers is one layer that was compiled on its own: cut it where it moves that much.
    """

    def __init__(
        self,
        *,
        moved: Mapping[str, int] | None = None,
        max_moved: int = MAX_MOVED_BYTES,
        whole: bool = False,
        single: bool = False,
    ) -> None:
        self.moved = moved or {}
        self.max_moved = max_moved
        self.whole = whole
        self.single = single

    def __call__(self, gm: fx.GraphModule) -> Segmentation:
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        cuts: list[int] = []
        layered = len({_label(n) for n in nodes} - {None}) > 1
        if not self.whole and (layered or self._is_heavy(nodes)):
            values = Repeatable(gm, self.moved)
            first_reads = _first_reads(nodes, values)
            until, again = values.lifetimes({n: i for i, n in enumerate(nodes)}, len(nodes))
            live = _live_bytes(nodes, values, first_reads, until, again)
            cuts = _find_cuts(nodes, live) if layered else []
            if cuts or not layered:
                parted = _parted_bytes(nodes, values, again)
                cuts = self._split(nodes, cuts, live, parted, _moved_by(nodes, self.moved, first_reads))
        ranges = [nodes[a:b] for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True) if a < b]
        return segments_of(gm, ranges)

    def _is_heavy(self, nodes: list[fx.Node]) -> bool:
        """Whether a layer that was compiled on its own is cut. The tokens that order effects cannot cross a cut."""
        effects = any(n.target is torch.ops.higher_order.with_effects for n in nodes)
        return self.single and not effects and sum(self.moved.values()) > self.max_moved

    def _split(
        self, nodes: list[fx.Node], cuts: list[int], live: list[int], parted: list[int], weights: list[int]
    ) -> list[int]:
        """``cuts``, and others inside the layers that move more than ``max_moved``. Without any, all is one layer."""
        inner: list[int] = []
        for start, end in itertools.pairwise([0, *cuts, len(nodes)]):
            total = sum(weights[start:end])
            if 2 * total <= self.max_moved or (cuts and not _main_label(nodes[start:end])):
                continue
            pieces = min(max(round(total / self.max_moved), 2), _MAX_PIECES)
            passed = list(itertools.accumulate(weights[start:end]))
            for piece in range(1, pieces):
                share = piece / pieces
                window = [
                    i
                    for i in range(start + 1, end)
                    if abs(passed[i - start - 1] / total - share) <= _SPLIT_MARGIN / pieces
                    and not nodes[i].meta.get(GLUE_KEY)
                    and parted[i] <= _MOST_PARTED * total
                ]
                if window:
                    inner.append(
                        # Bytes that cross the cut are written and read; the windows have to hold the uneven bytes.
                        min(window, key=lambda i, s=start, w=share: 2 * live[i] + abs(passed[i - s - 1] - w * total))
                    )
        return sorted({*cuts, *inner})


def segments_of(
    gm: fx.GraphModule, ranges: Sequence[list[fx.Node]], known: Sequence[Segment] | None = None
) -> Segmentation:
    """The segments that these runs of ops make; ``known``: those that they were, whose names and layers they keep."""
    returned = {v for v in output_values(gm.graph) if isinstance(v, fx.Node)}
    sizes = _symbol_nodes(gm.graph)
    taken: set[str] = set()
    found = [_make_segment(gm, r, returned, sizes, taken) for r in ranges]
    if known is not None:
        found = [replace(s, name=old.name, layer=old.layer) for s, old in zip(found, known, strict=True)]
    return Segmentation(tuple(found))


def _moved_by(nodes: list[fx.Node], moved: Mapping[str, int], first_read: Mapping[fx.Node, int]) -> list[int]:
    """Bytes that each op adds to what moves: saved values that it computes, or inputs that it is the first to read."""
    weights = [moved.get(n.name, 0) for n in nodes]
    for value, at in first_read.items():
        weights[at] += moved.get(value.name, 0)
    return weights


def _first_reads(nodes: list[fx.Node], values: Repeatable) -> dict[fx.Node, int]:
    """Graph input -> the first op that reads it.

    An input that only deferrable arithmetic reads counts with the op that needs the result of that arithmetic.
    """
    found: dict[fx.Node, int] = {}
    deferred: dict[fx.Node, dict[fx.Node, None]] = {}
    for at, node in enumerate(nodes):
        inputs: dict[fx.Node, None] = {}
        for value in node.all_input_nodes:
            new = (value,) if value.op == "placeholder" else deferred.get(value, ())
            inputs.update((v, None) for v in new if v not in found)
        cheap = (node in values.cheap or node in values.views) and node not in values.returned
        if cheap and len(inputs) <= MAX_OPS:
            deferred[node] = inputs
        else:
            found.update(dict.fromkeys(inputs, at))
    return found


def _label(node: fx.Node) -> str | None:
    # Seeds of dropout stand together, in front of all layers.
    return None if op_name(node.target) == _SEED_LOOKUP else node.meta.get(LAYER_KEY)


def _find_cuts(nodes: list[fx.Node], live: list[int]) -> list[int]:
    labels = [_label(n) for n in nodes]
    places: dict[str, list[int]] = defaultdict(list)
    for i, label in enumerate(labels):
        if label is not None:
            places[label].append(i)
    order = sorted(places, key=lambda name: places[name][len(places[name]) // 2])
    glued = [bool(n.meta.get(GLUE_KEY)) for n in nodes]

    cuts = [_start_of(order[0], places, labels)]
    for before, after in itertools.pairwise(order):
        end, change = _end_of(before, places, labels), _start_of(after, places, labels)
        first = min(end, change) - int((len(places[before]) - 1) * _MARGIN)
        last = min(max(end, change) + int((len(places[after]) - 1) * _MARGIN), len(nodes) - 1)
        window = [i for i in range(max(first, cuts[-1] + 1), last + 1) if not glued[i]]
        if window:
            cuts.append(min(window, key=lambda i: (live[i], abs(i - change))))
    end = _end_of(order[-1], places, labels)
    if end > cuts[-1]:
        cuts.append(end)
    return sorted({_unglue(c, glued) for c in cuts if 0 < c < len(nodes)} - {0})


def _start_of(label: str, places: dict[str, list[int]], labels: list[str | None]) -> int:
    for i in places[label]:
        ahead = [x for x in labels[i : i + 4 * _NEIGHBOURS] if x is not None][:_NEIGHBOURS]
        if 2 * ahead.count(label) >= min(_NEIGHBOURS, len(places[label])):
            return i
    return places[label][0]


def _end_of(label: str, places: dict[str, list[int]], labels: list[str | None]) -> int:
    for i in reversed(places[label]):
        behind = [x for x in labels[max(0, i + 1 - 4 * _NEIGHBOURS) : i + 1] if x is not None][-_NEIGHBOURS:]
        if 2 * behind.count(label) >= min(_NEIGHBOURS, len(places[label])):
            return i + 1
    return places[label][-1] + 1


def _unglue(cut: int, glued: list[bool]) -> int:
    while cut > 0 and glued[cut]:
        cut -= 1
    return cut


def _live_bytes(
    nodes: list[fx.Node],
    values: Repeatable,
    first_reads: Mapping[fx.Node, int],
    until: Mapping[fx.Node, int],
    again: Collection[fx.Node],
) -> list[int]:
    """Bytes that cross the gap before each node: of intermediates, and of saved values that are read on both sides.

    Returned values live on whatever the cut is. A value that ``Rematerialize`` will recompute does not cross; its
    sources do, for as long.
    """
    delta = [0] * (len(nodes) + 2)
    for at, node in enumerate(nodes):
        if node in until and node not in values.returned and node not in again:
            size = values.nbytes(node)
            delta[at + 1] += size
            delta[until[node] + 1] -= size
    for node, first in first_reads.items():
        size = values.nbytes(node)
        delta[first + 1] += size
        delta[max(until[node], first) + 1] -= size
    return list(itertools.accumulate(delta[:-1]))


def _parted_bytes(nodes: list[fx.Node], values: Repeatable, again: Collection[fx.Node]) -> list[int]:
    """Bytes that a cut before each node makes kernels write and read: of values that ops on both sides make or read
    which could be one kernel. Where a value is recomputed after a cut, its sources are read."""
    position, depth = {n: i for i, n in enumerate(nodes)}, _depths(nodes)
    delta = [0] * (len(nodes) + 1)
    for node, base in values.base.items():
        if node is not base or node in again or not (size := values.nbytes(node)):
            continue
        kernels: dict[int, list[int]] = defaultdict(list)  # places of ops, by depth
        ops = [u for u in (node, *_readers(node, values, again)) if u in position]
        for op in ops:
            if fused_form(op) is not None:
                kernels[depth[op]].append(position[op])
        is_one = len(kernels) == 1 and sum(map(len, kernels.values())) == len(ops) and node in position
        cost = size if node in values.returned or not is_one else 2 * size
        for places in kernels.values():
            delta[min(places) + 1] += cost
            delta[max(places) + 1] -= cost
    return list(itertools.accumulate(delta))


def _depths(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """How many ops that run alone (products of matrices, say) each op has to wait for, one after the other. Ops of
    different depths are in different kernels."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        found[node] = max((found[i] + runs_alone(i) for i in node.all_input_nodes if i in found), default=0)
    return found


def _readers(node: fx.Node, values: Repeatable, again: Collection[fx.Node]) -> list[fx.Node]:
    """Ops that read ``node`` itself, or recompute something from it."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        new = [u for u in values.readers(todo.pop()) if u not in values.views and u not in found]
        found.update(dict.fromkeys(new))
        todo += [u for u in new if u in again]
    return list(found)


def _make_segment(
    gm: fx.GraphModule, nodes: list[fx.Node], returned: set[fx.Node], sizes: dict[Any, fx.Node], taken: set[str]
) -> Segment:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            if value not in inside and not is_submodule(gm, value):
                inputs.setdefault(value)
    for value in _missing_sizes(nodes, list(inputs), sizes):
        if value not in inside:
            inputs.setdefault(value)
    outputs = [n for n in nodes if n in returned or any(u not in inside for u in n.users)]
    layer = _main_label(nodes)
    return Segment(_unique_name(layer, taken), layer, tuple(nodes), tuple(inputs), tuple(outputs))


def is_submodule(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ``node`` fetches a subgraph (flex attention's score function), which belongs inside its segment."""
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(gm), torch.nn.Module)


def _symbol_nodes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Symbol -> the value that is just this symbol."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and len(symbols_of(value)) == 1:
            expression = value.node.expr
            if expression.is_Symbol:
                found.setdefault(expression, node)
    return found


def _missing_sizes(nodes: list[fx.Node], inputs: list[fx.Node], sizes: dict[Any, fx.Node]) -> list[fx.Node]:
    """Sizes that the segment's shapes mention and that cannot be read off one of its inputs."""
    if not sizes:
        return []
    known: set[Any] = set()
    for node in inputs:
        value = node.meta.get("val")
        parts = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        known.update(p.node.expr for p in parts if isinstance(p, torch.SymInt))
    mentioned: set[Any] = set()
    for node in (*nodes, *inputs):
        for leaf in tree_leaves(node.meta.get("val")):
            mentioned |= symbols_of(leaf)
    return [sizes[s] for s in sorted(mentioned - known, key=str) if s in sizes]


def _main_label(nodes: list[fx.Node]) -> str:
    best, count = Counter(_label(n) or "" for n in nodes).most_common(1)[0]
    return best if 2 * count >= len(nodes) else ""


def _unique_name(layer: str, taken: set[str]) -> str:
    base = "".join(c if c.isalnum() else "_" for c in layer) or "segment"
    if base[0].isdigit():  # a layer of nn.Sequential
        base = f"layer_{base}"
    name, i = base, 0
    while name in taken:
        i += 1
        name = f"{base}_{i}"
    taken.add(name)
    return name
