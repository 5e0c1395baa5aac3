"""The joint graph as a stack of layers: each one's ops, inputs and readers, and which layers are alike.

Nothing is changed. AOTAutograd merges equal ops before it partitions, also of different layers (a mask or a rotary
embedding that each layer unsqueezes): here they count as merged already.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.argument_key import argument_key, cost_arguments
from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.analysis.op_costs import UNDECLARED_VIEWS, op_name, tensors_of
from fxoffload.analysis.values import extent_bytes
from fxoffload.torch_private.op_schemas import OpOverload, aliased_args, mutated_args
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.symbolic_sizes import hint

# The label of a graph that has no labels: it is one layer.
WHOLE_GRAPH = ""


def behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Everything computed from an incoming gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangent" in str(node.target)
        if is_tangent or (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def layers_of(graph: fx.Graph, behind: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """Label -> the layer's ops that no incoming gradient enters, in graph order. A position of the layer is an index
    of its list. Without labels (a layer compiled on its own) the graph is one layer."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    labelled = any(LAYER_KEY in n.meta for n in ops)
    layers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in ops:
        label = node.meta.get(LAYER_KEY) if labelled else WHOLE_GRAPH
        if label is not None and node not in behind:
            layers[label].append(node)
    return dict(layers)


def is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers (or their seed)."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or "random" in str(target) or "seed" in str(target)


@dataclass
class Layer:
    """One layer of a joint graph, after equal ops are merged.

    Attributes:
        nodes: its ops; see ``layers_of``.
        place: node -> its position: an index of ``nodes``, or -1 - k for the k-th value from outside.
        outside: values that it reads and does not make, by first appearance.
        key: equal for layers of the same structure.
    """

    label: str
    nodes: list[fx.Node]
    place: dict[fx.Node, int]
    outside: list[fx.Node]
    key: tuple[Any, ...] = ()


class Joint:
    """The layers of one joint graph, and the data that they share.

    Args:
        gm: the joint graph, with or without labels.
        num_forward_outputs: leading outputs that are the forward's; None: all that no incoming gradient enters.
        static_inputs: indices of the placeholders that are parameters or buffers.

    Attributes:
        behind: ops computed from an incoming gradient.
        forward: ops that the forward's outputs need. An op in neither set belongs to the backward alone.
        free: values that are there in the backward at no cost: parameters.
        layers: label -> layer, in graph order.
        num_reading: value -> how many layers read it from outside.
        order: node -> its place in the graph.
        backward: label -> the layer's ops that an incoming gradient enters, in graph order.
        returned: values that the graph returns.
        merged: node -> the node that stands for it and its equals.
        inputs: node that stands for its equals -> the values that it reads.
        users: value -> the ops that read it itself, in graph order.
        base: node -> the value whose memory it shows: an op's result, an item of it, or a graph input.
    """

    def __init__(
        self, gm: fx.GraphModule, num_forward_outputs: int | None = None, static_inputs: Collection[int] = ()
    ) -> None:
        graph = gm.graph
        self.behind = behind_tangents(graph)
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.merged = _merge_equal(graph)
        self.inputs = {
            n: list(dict.fromkeys(self.merged[i] for i in n.all_input_nodes))
            for n in graph.nodes
            if self.merged[n] is n
        }
        self._find_bases(graph)
        self._find_outputs(graph, num_forward_outputs)
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, inputs in self.inputs.items():
            if node in self._alive and node.op != "output":
                for value in inputs:
                    self.users[value].append(node)
        placeholders = graph.find_nodes(op="placeholder")
        self.free = {n for i, n in enumerate(placeholders) if i in static_inputs}
        self._labelled = any(LAYER_KEY in n.meta for n in graph.nodes)
        self._find_layers(graph)

    def is_view(self, node: fx.Node) -> bool:
        """Whether ``node`` shows the memory of another value."""
        return self.base[node] is not node

    def maker(self, base: fx.Node) -> fx.Node:
        """The op that makes a value: itself, or the op that it is an item of."""
        while base.target is operator.getitem:
            (base,) = self.inputs[base]
        return base

    def backward_readers(self, node: fx.Node, layer: Layer) -> list[fx.Node]:
        """The backward's ops that read a value which ``layer`` makes, and that belong to this layer.

        An op of another layer's backward belongs to that layer if that layer itself takes the value from outside.
        """
        base = self.base[node]
        returned = self._returned if node in self._given_back else []
        return returned + [
            u
            for u in self.users[node]
            if self._is_backward(u, layer)
            and ((label := self.label_of(u)) in (None, layer.label) or base not in self._taken[label])
        ]

    def backward_readers_of_outside(self, base: fx.Node, layer: Layer) -> list[fx.Node]:
        """The ops of the layer's backward that read a value from outside, or a view of it that another layer makes."""
        return [
            u
            for v in self._views[base]
            if layer.place.get(v, -1) < 0
            for u in self.users[v]
            if self._is_backward(u, layer) and self.label_of(u) == layer.label
        ]

    def leaves(self, base: fx.Node, layer: Layer) -> bool:
        """Whether another layer, or the forward between the layers, reads ``base`` or a view of it."""
        readers = {u for v in self._views[base] for u in self.users[v]} - self.behind
        return any(layer.place.get(u, -1) < 0 and (u in self.forward or self.label_of(u) is not None) for u in readers)

    def label_of(self, node: fx.Node) -> str | None:
        """The layer that ``node`` belongs to."""
        return node.meta.get(LAYER_KEY) if self._labelled else WHOLE_GRAPH

    def _is_backward(self, user: fx.Node, layer: Layer) -> bool:
        return user in self.behind or (user not in self.forward and layer.place.get(user, -1) < 0)

    # -- once per graph ------------------------------------------------------------------------------------------------

    def _find_bases(self, graph: fx.Graph) -> None:
        self.base: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if self.merged[node] is not node:
                self.base[node] = self.base[self.merged[node]]
                continue
            source = self._shown_by(node)
            self.base[node] = node if source is None else self.base[self.merged[source]]
            self._views[self.base[node]].append(node)

    def _shown_by(self, node: fx.Node) -> fx.Node | None:
        """The value whose memory ``node`` shows; None where it is memory of its own."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source = self.merged[node.all_input_nodes[0]]
            return (
                source if isinstance(source.meta.get("val"), torch.Tensor) or self.base[source] is not source else None
            )
        if op_name(node.target) in UNDECLARED_VIEWS:
            return node.all_input_nodes[0]
        sources = aliased_args(node)
        return sources[0] if sources and not mutated_args(node) else None

    def _find_outputs(self, graph: fx.Graph, num_forward: int | None) -> None:
        output = graph.output_node()
        values = tree_leaves(output.args)
        own = range(len(values) if num_forward is None else num_forward)
        forward = [v for i, v in enumerate(values) if i in own and isinstance(v, fx.Node) and v not in self.behind]
        others = [v for i, v in enumerate(values) if i not in own and isinstance(v, fx.Node) and v not in self.behind]
        writes = [n for n in self.inputs if n.op == "call_function" and mutated_args(n) and n not in self.behind]
        self.forward = self._ancestors([self.merged[n] for n in (*forward, *writes)])
        self._alive = self._ancestors([self.merged[i] for i in output.all_input_nodes] + writes)
        self.returned = {self.merged[v] for v in values if isinstance(v, fx.Node)}
        self._given_back = {self.merged[v] for v in others}
        self._returned = [output] if others else []

    def _ancestors(self, nodes: list[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        while nodes:
            node = nodes.pop()
            if node not in found:
                found.add(node)
                nodes += self.inputs[node]
        return found

    def _find_layers(self, graph: fx.Graph) -> None:
        self.layers: dict[str, Layer] = {}
        self._taken: dict[str, set[fx.Node]] = {}
        self.num_reading: dict[fx.Node, int] = defaultdict(int)
        for label, nodes in layers_of(graph, self.behind).items():
            place = {n: i for i, n in enumerate(nodes) if self.merged[n] is n}
            outside: dict[fx.Node, int] = {}
            for node in place:
                for value in self.inputs[node]:
                    if value not in place and tensors_of(value) and value not in self.behind:
                        outside.setdefault(value, -1 - len(outside))
            self.layers[label] = Layer(label, nodes, place | outside, list(outside))
            self._taken[label] = {base for v in outside if place.get(base := self.base[v]) is None}
            for base in self._taken[label]:
                self.num_reading[base] += 1
        self.backward: dict[str, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node in self.behind and node.op == "call_function" and node in self._alive:
                label = self.label_of(node)
                if label is not None:
                    self.backward[label].append(node)
        for layer in self.layers.values():
            layer.key = self._key(layer)

    # -- structure -----------------------------------------------------------------------------------------------------

    def _key(self, layer: Layer) -> tuple[Any, ...]:
        rows: list[Any] = []
        bases: dict[fx.Node, int] = {}
        for value in layer.outside:
            base = self.base[value]
            number = bases.setdefault(base, len(bases))
            readers = tuple(u.target for u in self.backward_readers_of_outside(base, layer))
            price = (base in self.free, self.costs_memory(base) and self.num_reading[base], layout_bytes(base))
            rows.append((_layout(value), number, price, readers))
        for node in layer.nodes:
            if self.merged[node] is not node:
                rows.append(layer.place.get(self.merged[node]))
                continue
            arguments = argument_key(cost_arguments(node), lambda n: self._place(n, layer))
            leaves = self.base[node] is node and self.leaves(node, layer)
            readers = tuple(str(u.target) for u in self.backward_readers(node, layer))
            rows.append(
                (
                    node.target,
                    arguments,
                    _layout(node),
                    node in self.forward,
                    leaves,
                    node.meta.get("recompute"),
                    readers,
                )
            )
        return tuple(rows)

    def _place(self, node: fx.Node, layer: Layer) -> Hashable:
        place = layer.place.get(self.merged[node])
        return ("at", place) if place is not None else ("free", str(_layout(self.merged[node])))

    def costs_memory(self, base: fx.Node) -> bool:
        """Whether a value from outside takes memory when the backward needs it.

        Values that the backward makes itself do not, nor do parameters.
        """
        return base not in self.free and (base.op == "placeholder" or (base in self.forward and base.op != "get_attr"))


def layout_bytes(node: fx.Node) -> int:
    """Bytes of the storage range that a value covers; 0 where a size has no hint."""
    return sum(extent_bytes(t) or 0 for t in tensors_of(node) if t.layout is torch.strided)


def _merge_equal(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Node -> the first node that computes the same from the same."""
    returned = {_storage(n) for n in graph.output_node().all_input_nodes} - {None}
    found: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        found[node] = node
        if node.op != "call_function" or is_random(node) or mutated_args(node) or _storage(node) in returned:
            continue
        key = (node.target, argument_key((node.args, node.kwargs), found.__getitem__))
        found[node] = first.setdefault(key, node)
    return found


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _layout(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        strides = tuple(map(hint, value.stride())) if value.layout is torch.strided else ()
        return (tuple(map(hint, value.shape)), strides, value.dtype)
    return tuple((tuple(map(hint, t.shape)), t.dtype) for t in tensors_of(node))
