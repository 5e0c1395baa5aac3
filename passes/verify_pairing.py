"""Pass 9, on the backward's outer graph with the forward's at hand: prove that the two agree on what may be a copy.

Forward and backward are built apart and meet in what autograd saves::

    forward:   return (%out,  %x, %mm_copy, %view_copy)          saves x, mm, view; the last two may be tokens
    backward:  (%x, %mm, %view, %tangents_1): reload([%mm]), ... expects tokens for mm and view, and for nothing else

The rules:

``pair-missing``   A value that the forward may return as a copy, the backward takes as one (and reloads, or never
                   reads). A value that the backward takes as a copy, the forward offloads. The caller never sees
                   a copy.
``pair-order``     Both list the saved values in the same order, with the same shapes and dtypes.
``pair-donated``   Copies that share a transfer share a storage in the backward too, or none of them is overwritten:
                   they come back as views of one buffer.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.analysis.labels import STORAGE_KEY
from fxoffload.analysis.values import output_values, tensor_of
from fxoffload.errors import VerificationError
from fxoffload.ops import is_op
from fxoffload.passes.insert_transfers import COPY_KEY

RULES = ("pair-missing", "pair-order", "pair-donated")


class VerifyPairing:
    """Raises ``VerificationError`` (an AssertionError: a bug of ours) where a backward does not fit its forward.

    Args:
        outer: the forward's outer graph, verified.
        num_user_outputs: leading outputs that the caller sees.
    """

    name = "verify_pairing"

    def __init__(self, inner: fx.GraphModule, outer: fx.GraphModule, num_user_outputs: int) -> None:
        self.inner = inner
        self.outer = outer
        self.num_user_outputs = num_user_outputs

    def __call__(self, backward: fx.GraphModule) -> fx.GraphModule:
        returned = output_values(self.outer.graph)
        for place, value in enumerate(returned[: self.num_user_outputs]):
            if _is_copy(value):
                raise _error("pair-missing", value, f"is a copy and the caller's output {place}")
        saved: dict[str, fx.Node] = {}  # name in the inner graphs -> the value that the outer forward returns for it
        for value, inner in zip(returned, output_values(self.inner.graph), strict=True):
            if isinstance(inner, fx.Node) and isinstance(value, fx.Node) and tensor_of(inner) is not None:
                saved.setdefault(inner.name, value)
        copies = {name: value for name, value in saved.items() if _is_copy(value)}
        inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
        self._check_copies(copies, inputs)
        self._check_order(inputs)
        self._check_donated(backward, copies, inputs)
        return backward

    @staticmethod
    def _check_copies(copies: dict[str, fx.Node], inputs: dict[str, fx.Node]) -> None:
        for name, copy in copies.items():
            if name not in inputs:
                raise _error("pair-missing", copy, f"stands for {name}, which is no input of the backward")
            if not inputs[name].meta.get(COPY_KEY):
                raise _error(
                    "pair-missing", inputs[name], f"is taken as a value, and the forward returns {copy} for it"
                )
        for name, node in inputs.items():
            if node.meta.get(COPY_KEY) and name not in copies:
                raise _error("pair-missing", node, "is taken as a copy, and the forward offloads no such value")

    def _check_order(self, inputs: dict[str, fx.Node]) -> None:
        behind = output_values(self.inner.graph)[self.num_user_outputs :]
        wanted = [v for v in behind if isinstance(v, fx.Node) and v.name in inputs and tensor_of(v) is not None]
        names = {v.name for v in wanted}
        found = [n for n in inputs.values() if n.name in names]
        for mine, theirs in zip(found, wanted, strict=True):
            if mine.name != theirs.name:
                raise _error("pair-order", mine, f"stands where the forward saves {theirs}")
            if _form(mine) != _form(theirs):
                raise _error("pair-order", mine, f"is {_form(mine)}, and the forward saves {_form(theirs)}")

    @staticmethod
    def _check_donated(backward: fx.GraphModule, copies: dict[str, fx.Node], inputs: dict[str, fx.Node]) -> None:
        shared: dict[object, set[object]] = defaultdict(set)  # storage in the forward -> storages in the backward
        for name, copy in copies.items():
            source = copy.args[0].args[0][copy.args[1]]  # type: ignore[union-attr,index]
            shared[source.meta.get(STORAGE_KEY)].add(inputs[name].meta.get(STORAGE_KEY))  # type: ignore[union-attr]
        split = {storage for found in shared.values() if len(found) > 1 for storage in found}
        for node in backward.graph.find_nodes(op="call_module"):
            for i in getattr(backward.get_submodule(str(node.target)), "donates", ()):
                value = node.args[i]
                if isinstance(value, fx.Node) and value.meta.get(STORAGE_KEY) in split:
                    raise _error(
                        "pair-donated", node, f"may overwrite {value}, which shares its copy with another value"
                    )


def _is_copy(value: object) -> bool:
    if not isinstance(value, fx.Node) or not value.args:
        return False
    packed = value.args[0]
    return isinstance(packed, fx.Node) and is_op(packed, ops.offload)


def _form(node: fx.Node) -> tuple[list[str], torch.dtype]:
    value = tensor_of(node)
    assert value is not None
    return [str(s) for s in value.shape], value.dtype


def _error(rule: str, node: object, what: str) -> VerificationError:
    return VerificationError(f"{rule}: {node} {what}", VerifyPairing.name)
