"""Pass 3, on the forward graph: which saved values may leave the device?

Before, with the saved values listed after the caller's outputs::

    return (loss,  primals_3, view, permute, getitem_2, full_default)
            user   saved for the backward ...

After, as data (the graph is not touched)::

    candidates: [{view, permute} one storage, 134217728 B, written by layers.0], [{getitem_2} ...]
    skipped:    primals_3 (parameter), full_default (smaller than min_bytes)

A candidate is a *storage*: saved values that share memory move once. Graph inputs that are not parameters are
candidates (under per-layer compile they are the residual stream). Four things are never candidates: parameters and
buffers; values computed from them alone (under autocast, a third of the saved bytes are weight casts); storages that
the caller sees; values that the graph itself writes in place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.fx as fx

from fxoffload.analysis.value_names import ValueNames
from fxoffload.analysis.values import Storages, covered_range, output_values, tensor_of, written_values
from fxoffload.torch_private.partitioner import is_rng_state
from fxoffload.torch_private.symbolic_sizes import symbols_of

SMALL = "smaller than min_bytes"


@dataclass(frozen=True)
class Candidate:
    """One storage that the backward needs and that may be kept or offloaded.

    Attributes:
        name: the first saved value's name.
        nodes: the saved values that share the storage, in output order.
        nbytes: bytes of the storage range that the saved values cover; None where a size has no hint.
        is_input: whether the storage belongs to a graph input, so that the caller may write to it later.
        producer: the op that computes the last of the saved values ("placeholder" for a graph input).
        label: what a person calls it: module path, shape and dtype (see ``fxoffload.analysis.value_names``).
    """

    name: str
    nodes: tuple[fx.Node, ...]
    nbytes: int | None
    is_input: bool
    producer: str
    label: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether several saved values show the storage: a segment of the backward may overwrite none of them."""
        return len(self.nodes) > 1


@dataclass(frozen=True)
class Skipped:
    """A saved storage that stays on the device, and why. ``label``: as of a candidate."""

    name: str
    nbytes: int | None
    reason: str
    label: str = ""


@dataclass(frozen=True)
class SavedValues:
    """Everything that one forward graph saves: candidates, and values that may not move."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]

    @property
    def candidate_bytes(self) -> int:
        """Bytes of all candidates whose size has a hint."""
        return sum(c.nbytes or 0 for c in self.candidates)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Name of a saved value -> bytes of its storage, counted at the first of the values that share it."""
        return {c.name: c.nbytes or 0 for c in self.candidates}


class FindCandidates:
    """See the module docstring.

    Args:
        num_user_outputs: leading outputs of the forward graph that the caller sees.
        static_inputs: indices of the placeholders that are parameters or buffers.
        min_bytes: smaller storages stay.
        device: the device that values may leave.
    """

    def __init__(
        self, *, num_user_outputs: int, static_inputs: Collection[int], min_bytes: int, device: torch.device
    ) -> None:
        self.num_user_outputs = num_user_outputs
        self.static_inputs = frozenset(static_inputs)
        self.min_bytes = min_bytes
        self.device = device

    def __call__(self, gm: fx.GraphModule) -> SavedValues:
        graph = gm.graph
        storages = Storages(graph.nodes)
        outputs = output_values(graph)
        placeholders = graph.find_nodes(op="placeholder")
        parameters = {n for i, n in enumerate(placeholders) if i in self.static_inputs}
        constant = _computed_from(graph, parameters)
        reasons: dict[fx.Node, str] = {}
        for value in outputs[: self.num_user_outputs]:
            if isinstance(value, fx.Node):
                reasons[storages.root(value)] = "the caller sees it"
        for value in written_values(graph.nodes):
            reasons[storages.root(value)] = "the graph writes it in place"
        for node in constant:
            reasons[storages.root(node)] = "parameter, buffer, or computed from them alone"
        inputs = {storages.root(n) for n in placeholders}

        groups: dict[fx.Node, list[fx.Node]] = {}
        for value in outputs[self.num_user_outputs :]:
            if isinstance(value, fx.Node) and tensor_of(value) is not None:
                members = groups.setdefault(storages.root(value), [])
                if value not in members:
                    members.append(value)

        candidates, skipped, names = [], [], ValueNames(graph, storages)
        for root, nodes in groups.items():
            covered = covered_range(n.meta["val"] for n in nodes)
            size = None if covered is None else covered[1] - covered[0]
            reason = reasons.get(root) or self._unfit(nodes, size)
            if reason:
                skipped.append(Skipped(nodes[0].name, size, reason, names.of(nodes[0])))
                continue
            last = nodes[-1]
            candidates.append(
                Candidate(
                    name=nodes[0].name,
                    nodes=tuple(nodes),
                    nbytes=size,
                    is_input=root in inputs,
                    producer="placeholder" if last.op == "placeholder" else str(last.target),
                    label=names.of(nodes[0]),
                )
            )
        return SavedValues(tuple(candidates), tuple(skipped))

    def _unfit(self, nodes: list[fx.Node], size: int | None) -> str:
        for node in nodes:
            value = tensor_of(node)
            assert value is not None
            if value.device != self.device:
                return f"on {value.device}, not on the device that is offloaded"
            if value.layout is not torch.strided or value.is_quantized:
                return "not a strided tensor"
            if value.is_conj() or value.is_neg():
                return "a lazy conjugate or negation"
            if is_rng_state(node):
                # The backward knows it by another name; on a GPU machine it is on the CPU anyway.
                return "the state of a random generator"
        # Where sizes change from call to call, the call decides.
        fixed = not any(symbols_of(tensor_of(n)) for n in nodes)
        if fixed and size is not None and size < max(self.min_bytes, 1):
            return SMALL
        return ""


def _computed_from(graph: fx.Graph, parameters: set[fx.Node]) -> set[fx.Node]:
    """Parameters and every op whose tensor inputs are all computed from them."""
    found = set(parameters)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        tensors = [i for i in node.all_input_nodes if tensor_of(i) is not None]
        if tensors and all(i in found for i in tensors):
            found.add(node)
    return found
