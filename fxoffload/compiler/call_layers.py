"""Recomputation in a graph that a step calls once, chosen layer by layer.

Calls of one graph share its few variants, so each call takes one as a whole. A graph that is called once runs a single
variant, with a choice for each layer. Copies of late layers would be waited for at the loss, so these recompute, and
early layers offload.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fxoffload.compiler.choices import Choices
from fxoffload.compiler.variant_maker import PlannedVariant, VariantMaker
from fxoffload.planner.chain import Chain
from fxoffload.planner.chain_problem import of_call
from fxoffload.planner.problem import LayerVariant, ProblemLayer, ProblemStorage
from fxoffload.planner.steps import SegmentStep


class CallLayers:
    """The choices of one call.

    Args:
        variant_maker: of its graph, which has more than one layer and fixed sizes.
        base: the variant of its first point, from whose segments the problem is made.
        is_plain: whether the graph as compiled recomputes what plain Inductor does, as ``base``.
        may_run: whether calls may run a variant.
    """

    def __init__(
        self,
        variant_maker: VariantMaker,
        base: PlannedVariant,
        is_plain: bool,
        may_run: Callable[[PlannedVariant], bool],
    ) -> None:
        self.base = base
        self._variant_maker, self._may_run = variant_maker, may_run
        self._choices: Choices = variant_maker.choices(base)
        self._made: dict[tuple[int, ...], PlannedVariant | None] = {}
        self._is_plain = is_plain

    @property
    def num_choices(self) -> int:
        """How many points its layers have to choose from, all together."""
        return sum(len(layer.variants) for layer in self._choices.problem.layers)

    def is_as_compiled(self, chosen: Sequence[int]) -> bool:
        """Whether the graph as compiled recomputes what the solver chose."""
        return self._is_plain and not any(chosen)

    def variant(self, chosen: Sequence[int]) -> PlannedVariant | None:
        """The variant for the solver's answer for ``problem_layers``; None where no call may run it."""
        key = tuple(chosen)
        if key not in self._made:
            found = self._variant_maker.variant(self._choices.recompute(key))
            self._made[key] = found if found is not None and self._may_run(found) else None
        return self._made[key]

    def problem_layers(self, whole: ProblemLayer, chain: Chain, call: int) -> list[ProblemLayer]:
        """The layers of the graph, in place of ``whole``, which has all of the call. The last one has what no layer
        decides about.

        ``chain``: that ``whole`` is of; the call runs ``base`` in it.
        """
        names = zip((c.name for c in self.base.step.candidates), chain.candidates[call], strict=True)
        known = {name: None if there is None else of_call(call, there) for name, there in names}
        known.update((skipped.name, None) for skipped in self.base.saved.skipped)
        decided = {storage.name: storage for storage in whole.variants[0].storages}
        scale = _slower(self.base.step.backward, chain.segments_of_calls("backward")[call])
        layers = self._choices.problem.layers[:-1]
        found = [_moved(layer, chain, call, known, decided, scale) for layer in layers]
        claimed = {storage.name for layer in found for variant in layer.variants for storage in variant.storages}
        outside = tuple(storage for name, storage in decided.items() if name not in claimed)
        found.append(replace(whole, variants=(replace(whole.variants[0], storages=outside),)))
        return found


def _slower(estimated: Sequence[SegmentStep], found: Sequence[SegmentStep]) -> float:
    """By which factor layers take longer than estimated: the median, since one may have an op that takes far longer, as
    the gradient of T5's position bias. No recomputation takes longer for that."""
    ratios = [b.ms / a.ms for a, b in zip(estimated, found, strict=True) if a.layer and a.ms]
    return statistics.median(ratios) if ratios else 1.0


def _moved(
    layer: ProblemLayer,
    chain: Chain,
    call: int,
    known: Mapping[str, str | None],
    decided: Mapping[str, ProblemStorage],
    scale: float,
) -> ProblemLayer:
    """A layer of a call's graph in the places of the chain.

    Args:
        known: names in the graph of storages that the base variant saves -> in ``decided``; None: it stays.
        decided: storages that may move, as the chain has them.
        scale: factor for estimated times of recomputation.
    """
    down, up = chain.forward[call] + 1, chain.backward[call]

    def storage_at(storage: ProblemStorage) -> ProblemStorage | None:
        if storage.name in known:
            there = decided.get(known[storage.name] or "")
            if there is None:
                return None
            # Values that are recomputed from it may need it earlier, and later, than its other readers.
            needed_at, dies_at = min(there.needed_at, storage.needed_at + up), max(there.dies_at, storage.dies_at + up)
            return replace(there, needed_at=needed_at, dies_at=dies_at)
        return replace(
            storage,
            name=of_call(call, f"call {call}/{storage.name}"),
            made_at=storage.made_at + down,
            copy_after=storage.copy_after + down,
            freed_after=storage.freed_after + down,
            needed_at=storage.needed_at + up,
            dies_at=storage.dies_at + up,
        )

    def variant_at(variant: LayerVariant) -> LayerVariant:
        return LayerVariant(
            f"call {call}, {variant.name}",
            tuple(s for s in map(storage_at, variant.storages) if s is not None),
            {at + up: ms * scale for at, ms in variant.extra_ms.items()},
            {at + up: nbytes for at, nbytes in variant.extra_bytes.items()},
        )

    return ProblemLayer(f"call {call}, {layer.name}", (call, layer.structure), tuple(map(variant_at, layer.variants)))
