"""Which values of a graph cost next to nothing to have twice: arithmetic on other values, element by element.

Inside a compiled piece such a value is in registers only (``silu(gate)`` in float32, between two matrix products of a
bfloat16 model). Where a cut separates it from a reader it would have to be written to memory, and live there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import OTHER_PLACES, aten_names, fused_form, is_wait, op_name, source_of
from fxoffload.analysis.values import Storages, extent_bytes, output_values, tensor_of, written_values
from fxoffload.torch_private.op_schemas import mutated_args

# A value that takes more ops than this is cheaper to read.
MAX_OPS = 24
# Pointwise in form, but they move elements, copy, make several values, or hold garbage.
_NOT_REPEATED = OTHER_PLACES | aten_names(
    "clone copy copy_ lift_fresh_copy split_with_sizes_copy native_dropout empty empty_like empty_strided new_empty"
)
_REPEATED_PRIMS = {"prims.convert_element_type", "prims.iota"}


class Repeatable:
    """The values of one graph, and the values from which each can be recomputed.

    Args:
        moved: name of a graph input -> its bytes, where it is on the device for this graph's sake (a saved value);
            other inputs but tangents are there anyway.

    Attributes:
        base: node -> the op or graph input whose memory it shows.
        cheap: ops that are arithmetic on other values (a view is not: it has no memory of its own).
        views: views of another value's memory, which no op writes to.
        returned: the bases of the values that the graph returns.
    """

    def __init__(self, gm: fx.GraphModule, moved: Mapping[str, int]) -> None:
        self._moved = moved
        nodes = list(gm.graph.nodes)
        self._changed: set[fx.Node] = set()
        if written := written_values(nodes):
            storages = Storages(nodes)
            roots = {storages.root(v) for v in written}
            self._changed = {n for n in nodes if storages.root(n) in roots}
        self.base: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            source = source_of(node)
            self.base[node] = self.base[source] if source is not None else node
        unchanged = [n for n in nodes if n not in self._changed]
        # A wait for a collective, a size or a check looks like a view of its input, and must not run twice.
        self.views = {n for n in unchanged if self._shows(n) and tensor_of(n) is not None and not is_wait(n)}
        self.cheap = {n for n in unchanged if not self._shows(n) and is_arithmetic(n)}
        self._bytes: dict[fx.Node, int] = {}
        self.returned = {self.base[v] for v in output_values(gm.graph) if isinstance(v, fx.Node)}

    def _shows(self, node: fx.Node) -> bool:
        """Whether ``node`` shows the memory of another value."""
        return self.base[node] is not node

    def nbytes(self, node: fx.Node) -> int:
        """Bytes that the graph holds as long as ``node`` is needed."""
        if node not in self._bytes:
            value, nbytes = tensor_of(node), 0
            if value is not None and node.op == "placeholder" and "tangent" not in node.name:
                nbytes = self._moved.get(node.name, 0)
            elif value is not None and node.op in ("placeholder", "call_function"):
                nbytes = extent_bytes(value) or 0
            self._bytes[node] = nbytes
        return self._bytes[node]

    def made_of(self, node: fx.Node, is_there: Callable[[fx.Node], bool]) -> set[fx.Node] | None:
        """The values from which ``node`` can be recomputed; None where that takes too much.

        Args:
            is_there: whether a cheap value need not be recomputed.
        """
        found: set[fx.Node] = set()
        todo, seen = [node], {node}
        while todo:
            for value in todo.pop().all_input_nodes:
                if value in seen:
                    continue
                seen.add(value)
                if value in self.views or (value in self.cheap and not is_there(value)):
                    todo.append(value)
                elif value in self._changed:
                    return None  # later it may be something else
                elif value.op == "call_function" and tensor_of(value) is None:
                    return None  # a size, or an op of several results
                else:
                    found.add(value)
            if len(seen) > MAX_OPS:
                return None
        return found

    def lifetimes(self, place: Mapping[fx.Node, int], end: int) -> tuple[dict[fx.Node, int], set[fx.Node]]:
        """The last place at which each value is there, and the values that are recomputed after their own place.

        A value is recomputed where that keeps fewer bytes of its sources longer than its own size. The choice is made
        in the order of the graph.

        Args:
            place: op -> its place (a position, or a segment), ascending in the order of the graph.
            end: after the last of them; returned values are there until then.
        """
        until: dict[fx.Node, int] = {}
        for node, base in self.base.items():
            if node is base:
                last = max((place[u] for u in self.readers(node)), default=place.get(node, -1))
                until[node] = end if node in self.returned else last
        again: set[fx.Node] = set()
        for node in self.base:
            if node not in self.cheap or node in self.returned or until[node] <= place[node]:
                continue
            last = until[node]
            sources = self.made_of(node, lambda v, last=last: until[v] >= last)
            if sources is None:
                continue
            longer = {b for v in sources if until[b := self.base[v]] < last}
            if sum(self.nbytes(b) for b in longer) < self.nbytes(node):
                again.add(node)
                until[node] = place[node]
                until.update(dict.fromkeys(longer, last))
        return until, again

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Ops that read ``node`` or a view of it."""
        todo, seen = [node], {node}
        while todo:
            for user in todo.pop().users:
                if user not in seen and user.op == "call_function":
                    seen.add(user)
                    yield user
                    if self._shows(user):
                        todo.append(user)


def is_arithmetic(node: fx.Node) -> bool:
    """Whether ``node`` computes a tensor element by element from others, and moves, copies and draws nothing."""
    value = tensor_of(node)
    if node.op != "call_function" or value is None or value.layout is not torch.strided:
        return False
    if fused_form(node) != "pointwise" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    if any(t.device != value.device for i in node.all_input_nodes if (t := tensor_of(i)) is not None):
        return False  # a copy between devices
    name = op_name(node.target)
    if name in _NOT_REPEATED or extent_bytes(value) is None:
        return False
    if name.startswith("prims."):
        return name in _REPEATED_PRIMS
    return name.startswith("aten.") and not mutated_args(node)
