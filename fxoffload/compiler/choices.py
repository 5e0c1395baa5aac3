"""The solver's problem before the graph is partitioned: per layer, the points of its frontier.

Times, working sets and everything that is no candidate come from a partitioning, plain Inductor's. The values that a
layer saves and recomputes come from ``FindFrontier``. Layers of one class share their variants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch.fx as fx

from fxoffload.analysis.find_frontier import LayerClass, RecomputePoint
from fxoffload.compiler.partitioning import Partitioning
from fxoffload.passes.rematerialize import REPEATS_KEY
from fxoffload.planner.formulate import problem_of, storages_of
from fxoffload.planner.problem import LayerVariant, Problem, ProblemLayer, ProblemStorage
from fxoffload.planner.rates import ProfileRates

# Values outside the layers are kept or offloaded; there is no other choice.
_OUTSIDE = "outside the layers"


class Choices:
    """The variants to choose from, layer by layer.

    Args:
        joint: labelled, not tagged.
        base: the partitioning without tags.
        classes: the layers of ``joint``.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        base: Partitioning,
        classes: tuple[LayerClass, ...],
        rates: ProfileRates,
        *,
        host_bytes: int | None = None,
    ) -> None:
        assert base.step is not None and base.backward_state is not None
        state = base.forward_state
        self.classes = classes
        self._nodes = {n.name: n for n in joint.graph.nodes}
        self._step = base.step
        self._min_bytes = max(state.min_bytes, 1)
        self._down = _Places(base.step.forward, state.segmentation.segments)
        self._up = _Places(base.step.backward, base.backward_state.segmentation.segments)
        self._forward_names = {n.name for n in joint.graph.nodes} & set(self._down.of)
        self._taken_in = {
            c.name_at(label, s.position)
            for c in self.classes
            for label in c.layers
            for p in c.points
            for s in p.saved
            if s.position < 0
        }
        layers = [self._layer(c, label) for c in self.classes for label in c.layers]
        claimed = {i.name for la in layers for a in la.variants for i in a.storages}
        own = self._within_layers()
        rest = [i for i in storages_of(base.step) if i.name not in claimed and i.name not in own]
        layers.append(ProblemLayer(_OUTSIDE, _OUTSIDE, (LayerVariant("as partitioned", tuple(rest), {}, {}),)))
        self._labels = [label for c in self.classes for label in c.layers]
        self._points = [c.points for c in self.classes for _ in c.layers]
        # A frontier's first point computes the same as plain Inductor, so its times are those of the partitioning.
        self.problem: Problem = problem_of(base.step, rates, layers=layers, host_bytes=host_bytes)

    def recompute(self, variants: Sequence[int]) -> Mapping[str, RecomputePoint]:
        """Layer -> point, for the solver's answer."""
        pairs = zip(self._labels, self._points, variants, strict=False)
        return {label: points[chosen] for label, points, chosen in pairs}

    # -- one layer -----------------------------------------------------------------------------------------------------

    def _layer(self, kind: LayerClass, label: str) -> ProblemLayer:
        segments = self._up.segments_of(n for n in kind.names[label])
        variants = [self._variant_of_point(kind, label, i, p, segments) for i, p in enumerate(kind.points)]
        return ProblemLayer(label, kind.layers[0], tuple(variants))

    def _variant_of_point(
        self, kind: LayerClass, label: str, number: int, point: RecomputePoint, own: list[int]
    ) -> LayerVariant:
        computed = {kind.name_at(label, p) for p in point.recomputed}
        storages: list[ProblemStorage] = []
        at: list[int] = []
        for storage in point.saved:
            name = kind.name_at(label, storage.position)
            if storage.num_layers > 1 or name not in self._forward_names:
                continue  # values of several layers count with those outside of layers; graph inputs are the caller's
            if storage.position >= 0 and name in self._taken_in:
                continue  # the next layer saves it too, under every point
            readers = self._readers(self._nodes[name], computed)
            if not readers:
                continue
            made = self._down.of[name]
            storages.append(
                ProblemStorage(
                    name,
                    held_bytes=storage.nbytes,
                    moved_bytes=storage.nbytes if storage.nbytes >= self._min_bytes else 0,
                    made_at=made,
                    copy_after=made,
                    freed_after=max([made, *self._down.readers(self._nodes[name])]),
                    needed_at=min(readers),
                    dies_at=max(readers),
                    fixed=True if storage.position in kind.must_offload else None,
                )
            )
            at.extend(readers)
        where = sorted(set(at)) or own
        first = where[0] if where else 0
        spread = {i: point.extra_bytes for i in where}
        return LayerVariant(f"{label}, point {number}", tuple(storages), {first: point.extra_ms}, spread)

    def _readers(self, node: fx.Node, computed: set[str]) -> list[int]:
        """Backward segments that read ``node``: themselves, through views, or through recomputed values."""
        found: set[int] = set()
        seen = {node}
        wanted = list(node.users)
        while wanted:
            user = wanted.pop()
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user.name in computed or user.name not in self._up.of:
                if user.name in computed or user.name not in self._forward_names:
                    wanted.extend(user.users)
            elif user.name not in self._forward_names:
                found.update(self._up.all_of(user.name))
        return sorted(found)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _within_layers(self) -> set[str]:
        """Names of the partitioning's own candidates that the points decide about."""
        inside = {n for c in self.classes for names in c.names.values() for n in names}
        own = set()
        for candidate in self._step.candidates:
            node = self._nodes.get(candidate.name)
            if candidate.name in inside and node is not None:
                own.add(candidate.name)
        return own


class _Places:
    """Where in one graph of the partitioning the joint graph's nodes ended up."""

    def __init__(self, steps: Sequence[object], segments: Sequence[object]) -> None:
        self.of: dict[str, int] = {}
        self._repeats: dict[str, list[int]] = defaultdict(list)
        for i, segment in enumerate(segments):
            for node in segment.nodes:  # type: ignore[attr-defined]
                self.of.setdefault(node.name, i)
                if REPEATS_KEY in node.meta:
                    self._repeats[node.meta[REPEATS_KEY]].append(i)
        for name, places in self._repeats.items():
            self.of.setdefault(name, places[0])  # its own place has no reader
        assert len(steps) == len(segments)

    def all_of(self, name: str) -> list[int]:
        """The segment of a node, and those that repeat it."""
        return [self.of[name], *self._repeats.get(name, ())]

    def segments_of(self, names: Iterable[str]) -> list[int]:
        """Segments that hold one of these."""
        return sorted({self.of[n] for n in names if n in self.of})

    def readers(self, node: fx.Node) -> list[int]:
        """Segments that read ``node`` itself or a view of it that is not there as a node of its own."""
        return [i for u in node.users if u.name in self.of for i in self.all_of(u.name)]
