"""A graph's values: bytes, storages they share, and who mutates them. Shared by all passes."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import is_wait, shape_of
from fxoffload.errors import in_brief
from fxoffload.torch_private.fake_tensors import run_on_fakes
from fxoffload.torch_private.op_schemas import aliased_args, mutated_args
from fxoffload.torch_private.symbolic_sizes import hint

log = logging.getLogger(__name__)


# On a node whose compiled segment lays its result out otherwise: its value as it was traced.
TRACED_KEY = "fxoffload_traced"


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that ``node`` produces, or None where it produces something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def has_fixed_sizes(value: torch.Tensor) -> bool:
    """Whether ``value`` is strided and of the same sizes in every call."""
    return value.layout is torch.strided and all(type(size) is int for size in value.shape)


def extent_bytes(value: torch.Tensor) -> int | None:
    """Bytes from the first to one past the last element of a strided tensor; None where a size has no hint.

    For a dense tensor in any order of dimensions this is its size; for an expanded or sliced one, the range of its
    storage that it covers.
    """
    sizes = [hint(s) for s in value.shape]
    strides = [hint(s) for s in value.stride()]
    if None in sizes or None in strides:
        return None
    if 0 in sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))  # type: ignore[operator]
    return (last + 1) * value.element_size()


def is_large(node: fx.Node) -> bool:
    """Whether ``node`` is a tensor of the same sizes in every call, and of 1 MiB or more."""
    value = tensor_of(node)
    return value is not None and has_fixed_sizes(value) and (extent_bytes(value) or 0) >= 1 << 20


def covered_range(values: Iterable[torch.Tensor]) -> tuple[int, int] | None:
    """The first byte, and one past the last, that views of one storage cover of it; None where a size has no hint."""
    starts, ends = [], []
    for value in values:
        size, offset = extent_bytes(value), hint(value.storage_offset())
        if size is None or offset is None:
            return None
        starts.append(offset * value.element_size())
        ends.append(starts[-1] + size)
    return min(starts), max(ends)


def element_bytes(value: torch.Tensor) -> int:
    """Bytes of its elements, expanded ones too; 0 where a size has no hint."""
    shape = shape_of(value)
    return math.prod(shape) * value.element_size() if shape is not None else 0


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the allocation that a value lies in; 0 where a size has no hint."""
    if value.layout is not torch.strided:
        return element_bytes(value)
    return max(hint(value.untyped_storage().nbytes()) or 0, extent_bytes(value) or 0)


def lies_otherwise(node: fx.Node) -> bool:
    """Whether the result of ``node`` would lie otherwise in memory than its value says, now that it has other
    arguments; also where that is not known."""
    before = tensor_of(node)
    try:
        after = run_on_fakes(node)
    except Exception as error:
        log.debug("%s keeps its arguments: %s", node.name, in_brief(error))
        return True
    return before is None or after.stride() != before.stride()


class Storages:
    """Which values of one graph share memory.

    Two values share a class when their fake tensors share a storage, or when a view op leads from one to the other.
    The storages alone are not enough: pattern-replaced nodes can carry fresh fake tensors. The result of a wait for a
    collective is in the collective's class. Parameters stay in the class of their own placeholder.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        by_storage: dict[int, fx.Node] = {}
        for node in nodes:
            self._parent.setdefault(node, node)
            value = tensor_of(node)
            if value is None:
                continue
            if value.layout is torch.strided:
                key = value.untyped_storage()._cdata
                self._union(node, by_storage.setdefault(key, node))
            if node.op == "call_function":
                for source in (*aliased_args(node), *(node.all_input_nodes if is_wait(node) else ())):
                    if tensor_of(source) is not None and source in self._parent:
                        self._union(node, source)
        self._members: dict[fx.Node, list[fx.Node]] | None = None

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of ``node``'s class."""
        path = []
        while self._parent[node] is not node:
            path.append(node)
            node = self._parent[node]
        for item in path:
            self._parent[item] = node
        return node

    def members(self, node: fx.Node) -> list[fx.Node]:
        """All values that share memory with ``node``, in graph order."""
        if self._members is None:
            grouped: dict[fx.Node, list[fx.Node]] = defaultdict(list)
            for item in self._parent:
                grouped[self.root(item)].append(item)
            self._members = dict(grouped)
        return self._members[self.root(node)]

    def _union(self, a: fx.Node, b: fx.Node) -> None:
        ra, rb = self.root(a), self.root(b)
        if ra is not rb:
            self._parent[ra] = rb


def output_values(graph: fx.Graph) -> list[object]:
    """The flat list that the graph returns (nodes and constants)."""
    (values,) = graph.output_node().args
    return list(values)  # type: ignore[arg-type]


def written_values(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Value -> the ops that write it in place, in graph order."""
    writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.op == "call_function":
            for value in mutated_args(node):
                writers[value].append(node)
    return dict(writers)
