"""Pass 6: build the outer graphs, in which segments are calls, with ``fxoffload`` ops between them.

Forward, before (the partitioned graph) and after::

    %mm   = mm(%x, %w)                          %layers_0   = call_module[layers_0](%x, %w)
    %silu = silu(%mm)                           %silu, %mm  = getitems
    ...                                  ->     %copies     = fxoffload.offload([%mm])
    return (%out, %mm)                          %copy       = %copies[0]
                                                %layers_1   = call_module[layers_1](%silu, ...)
                                                fxoffload.release([%copy])
                                                return (%out, %copy)

Backward::

    %grad = mm(%tangent, %mm)                   %reloads    = fxoffload.reload([%mm], device)
    ...                                         fxoffload.prefetch()
    return (%grad,)                      ->     %values     = fxoffload.wait_reload(%reloads)
                                                %layers_0   = call_module[layers_0](%tangent, %values[0])
                                                fxoffload.release([])
                                                return (%grad,)

An offload stands right after the segment that finishes its storage; the copies of saved graph inputs start at entry
and are waited for before the graph returns, since the caller may write to them. All reloads are asked for at the top of
the backward, in the order of first use; how early each one starts is decided at run time, by the prefetch budget.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.analysis.labels import CANDIDATES_KEY, STORAGE_KEY
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import Storages, output_values
from fxoffload.passes.find_candidates import Candidate
from fxoffload.torch_private.graphs import graph_module

# Placeholder of a backward -> it may hold a copy instead of the value.
COPY_KEY = "fxoffload_copy"
# Placeholder of a backward -> a segment may overwrite it after its last use (saved for this backward alone).
DONATABLE_KEY = "fxoffload_donatable"


class _OuterGraph:
    """An outer graph under construction."""

    def __init__(self, gm: fx.GraphModule, modules: Mapping[str, torch.nn.Module]) -> None:
        self.inner = gm
        self.modules = modules
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}
        storages = Storages(gm.graph.nodes)
        self.storage = {n: storages.root(n).name for n in gm.graph.nodes if "val" in n.meta}

    def bind(self, inner: fx.Node, outer: fx.Node) -> fx.Node:
        """``outer`` stands for ``inner`` from now on."""
        for key in ("val", "desc"):
            if key in inner.meta:
                outer.meta[key] = inner.meta[key]
        if inner in self.storage:
            outer.meta[STORAGE_KEY] = self.storage[inner]
        self.env[inner] = outer
        return outer

    def heads(self) -> None:
        """Placeholders, and constants that some segment takes as an input."""
        for node in self.inner.graph.find_nodes(op="placeholder"):
            self.bind(node, self.graph.placeholder(node.name))
        for node in self.inner.graph.find_nodes(op="get_attr"):
            path = str(node.target)
            value = operator.attrgetter(path)(self.inner)
            if not isinstance(value, torch.nn.Module):
                self.attributes[path] = value
                self.bind(node, self.graph.get_attr(path))

    def call(self, op: Any, *args: Any, name: str | None = None) -> fx.Node:
        return self.graph.create_node("call_function", op, args, name=name)

    def unpack(self, packed: fx.Node, names: Sequence[str]) -> list[fx.Node]:
        return [
            self.graph.create_node("call_function", operator.getitem, (packed, i), name=name)
            for i, name in enumerate(names)
        ]

    def segment(self, segment: Segment) -> None:
        call = self.graph.create_node(
            "call_module", segment.name, tuple(self.env[i] for i in segment.inputs), name=segment.name
        )
        call.meta["layer"] = segment.layer
        for inner, outer in zip(segment.outputs, self.unpack(call, [n.name for n in segment.outputs]), strict=True):
            self.bind(inner, outer)

    def finish(self, values: Sequence[object]) -> fx.GraphModule:
        self.graph.output(tuple(values))  # type: ignore[arg-type]
        return graph_module({**self.attributes, **self.modules}, self.graph)


class InsertOffloads:
    """The forward half. ``modules`` maps segment names to the modules that the outer graph calls."""

    def __init__(
        self, segmentation: Segmentation, candidates: Sequence[Candidate], modules: Mapping[str, torch.nn.Module]
    ) -> None:
        self.segments = segmentation.segments
        self.candidates = candidates
        self.modules = modules

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        outer = _OuterGraph(gm, self.modules)
        outer.heads()
        made_in = {n: i for i, s in enumerate(self.segments) for n in s.outputs}
        # By storage: a later segment may read a saved value through a view of it that is not saved itself.
        last_read: dict[str | None, int] = {}
        for i, segment in enumerate(self.segments):
            last_read.update(dict.fromkeys(map(outer.storage.get, segment.inputs), i))

        due: dict[int, list[Candidate]] = {}
        for candidate in self.candidates:
            due.setdefault(max(made_in.get(n, -1) for n in candidate.nodes), []).append(candidate)

        copies: dict[fx.Node, fx.Node] = {}
        releases: dict[int, list[fx.Node]] = {}
        returned_to_caller: list[fx.Node] = []
        for i in range(-1, len(self.segments)):
            if i >= 0:
                outer.segment(self.segments[i])
            # Storages of the caller apart from ours: only those are waited for before the graph returns.
            for is_input in (True, False):
                group = [c for c in due.get(i, ()) if c.is_input is is_input]
                if not group:
                    continue
                nodes = [n for c in group for n in c.nodes]
                packed = outer.call(ops.offload, [outer.env[n] for n in nodes])
                packed.meta[CANDIDATES_KEY] = tuple(group)
                copied = outer.unpack(packed, [f"{n.name}_copy" for n in nodes])
                copies.update(zip(nodes, copied, strict=True))
                releases.setdefault(max([i, *(last_read.get(outer.storage.get(n), i) for n in nodes)]), []).extend(
                    copied
                )
                if is_input:
                    returned_to_caller.extend(copied)
            if i in releases:
                outer.call(ops.release, releases[i])
        if returned_to_caller:
            outer.call(ops.wait_offload, returned_to_caller)
        values = [copies.get(v, outer.env.get(v)) if isinstance(v, fx.Node) else v for v in output_values(gm.graph)]
        return outer.finish(values)


class InsertReloads:
    """The backward half.

    Args:
        copies: names of the placeholders that may hold a copy.
        donatable: names of the placeholders that belong to this backward alone.
        modules: segment names -> modules that the outer graph calls.
    """

    def __init__(
        self,
        segmentation: Segmentation,
        copies: frozenset[str],
        donatable: frozenset[str],
        device: torch.device,
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        self.segments = segmentation.segments
        self.copies = copies
        self.donatable = donatable
        self.device = device
        self.modules = modules

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        outer = _OuterGraph(gm, self.modules)
        outer.heads()
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in self.copies:
                outer.env[node].meta[COPY_KEY] = True
            if node.name in self.donatable:
                outer.env[node].meta[DONATABLE_KEY] = True
        needed = self._needed(gm)
        reloads = {}
        for i, nodes in needed.items():
            reloads[i] = outer.call(ops.reload, [outer.env[n] for n in nodes], self.device)
        if reloads:
            outer.call(ops.prefetch)
        for i, segment in enumerate(self.segments):
            self._wait(outer, reloads.get(i), needed.get(i, ()))
            # Before the call, not after it: the reload stream waits for all work that the compute stream has been given
            # so far, and these copies are to overlap this segment.
            outer.call(ops.prefetch)
            outer.segment(segment)
            if i == 0 and reloads:
                # The forward's last copies have had this segment's time to finish.
                outer.call(ops.release, [])
        end = len(self.segments)
        self._wait(outer, reloads.get(end), needed.get(end, ()))
        values = [outer.env[v] if isinstance(v, fx.Node) else v for v in output_values(gm.graph)]
        return outer.finish(values)

    def _needed(self, gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
        """Segment -> the copies it is the first to read; copies that are only returned come after the last segment."""
        first: dict[fx.Node, int] = {}
        for i, segment in enumerate(self.segments):
            for value in segment.inputs:
                first.setdefault(value, i)
        for value in output_values(gm.graph):
            if isinstance(value, fx.Node):
                first.setdefault(value, len(self.segments))
        needed: dict[int, list[fx.Node]] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in self.copies and node in first:
                needed.setdefault(first[node], []).append(node)
        return dict(sorted(needed.items()))

    @staticmethod
    def _wait(outer: _OuterGraph, reloads: fx.Node | None, nodes: Sequence[fx.Node]) -> None:
        if reloads is None:
            return
        packed = outer.call(ops.wait_reload, reloads)
        for inner, value in zip(nodes, outer.unpack(packed, [f"{n.name}_value" for n in nodes]), strict=True):
            outer.bind(inner, value)
