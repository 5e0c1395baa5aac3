"""What the values of a graph are called to a person: by module path, shape and dtype.

``mm_4`` is ``layers.3.mlp.gate_proj [16384, 12288] bf16``. Where the module of a value computes several values, the op
tells which: ``layers.3.self_attn (mul)``, and its place among alike ones: ``layers.3.self_attn (mul 2)``. Without a
module, as in a loss in eager code, the node's name stands there, and the module that its first operand leads back to:
``from lm_head (amax_1)``. Where there is none either, the op and the node's name: ``aten.mm mm_4``. Names depend on the
graph alone, never on a plan.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
import torch.fx as fx

from fxoffload.analysis.labels import module_path
from fxoffload.analysis.op_costs import op_name
from fxoffload.analysis.values import Storages, tensor_of

# In the metadata of a joint graph's input: what the user calls it.
INPUT_NAME = "fxoffload_input_name"

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


class ValueNames:
    """Names of the values of one forward graph.

    Args:
        graph: with Dynamo's module paths in its metadata, as far as there are any.
        storages: of the graph; made here where they are not given.
    """

    def __init__(self, graph: fx.Graph, storages: Storages | None = None) -> None:
        self._storages = storages or Storages(graph.nodes)
        self._made: dict[str, list[fx.Node]] = defaultdict(list)  # module path -> values computed in it, in order
        for node in graph.nodes:
            is_computed = node.op == "call_function" and tensor_of(node) is not None
            if is_computed and self._storages.members(node)[0] is node and (path := module_path(node)):
                self._made[path].append(node)

    def of(self, node: fx.Node) -> str:
        """The name of a value: of the memory that it is a view of, with the value's own shape and dtype."""
        made = self._storages.members(node)[0]
        return f"{self._place(made)} {shape_and_dtype(node)}".rstrip()

    def _place(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return f"input {node.meta.get(INPUT_NAME) or node.name}"
        path, op = module_path(node), _op_of(node)
        beside = self._made[path]
        if not path or node not in beside:
            origin = self._origin(node)
            return f"from {origin} ({node.name})" if origin else f"{op} {node.name}"
        if len(beside) == 1:
            return path
        kind = (op, shape_and_dtype(node))
        alike = [n for n in beside if (_op_of(n), shape_and_dtype(n)) == kind]
        short = op.rpartition(".")[2].strip("_")
        return f"{path} ({short})" if len(alike) == 1 else f"{path} ({short} {alike.index(node) + 1})"

    def _origin(self, node: fx.Node) -> str:
        """The module, or the input, of the value that a node's first operands lead back to; "" without one."""
        while node.all_input_nodes:
            node = node.all_input_nodes[0]
            if path := module_path(node):
                return path
        return node.meta.get(INPUT_NAME, "")


def shape_and_dtype(node: fx.Node) -> str:
    """ "[16384, 12288] bf16"; "" without a tensor."""
    value = tensor_of(node)
    if value is None:
        return ""
    sizes = ", ".join(str(size) for size in value.shape)
    return f"[{sizes}] {_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}"


def _op_of(node: fx.Node) -> str:
    """ "aten.mm"; of an entry of what an op returns, that op."""
    if node.target is operator.getitem:
        return _op_of(node.all_input_nodes[0])
    return op_name(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
