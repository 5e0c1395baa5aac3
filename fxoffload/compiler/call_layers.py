"""Recomputation in a graph that a step calls once, chosen layer by layer.

Calls of one graph share its few variants, so each call takes one as a whole. A graph that is called once runs a single
variant, with a choice for each layer. Copies of late layers would be waited for at the loss, so these recompute, and
early layers offload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fxoffload.compiler.choices import Choices
from fxoffload.compiler.variant_maker import PlannedVariant, VariantMaker
from fxoffload.planner.chain import Chain
from fxoffload.planner.chain_problem import of_call
from fxoffload.planner.problem import LayerVariant, ProblemLayer, ProblemStorage
from fxoffload.planner.rates import ProfileRates


class CallLayers:
    """The choices of one call.

    Args:
        variant_maker: of its graph, which has more than one layer and fixed sizes.
        rates: of the machine.
        may_run: whether calls may run a variant.

    Attributes:
        base: the variant that recomputes least, from whose segments the problem is made.
    """

    def __init__(
        self,
        variant_maker: VariantMaker,
        base: PlannedVariant,
        rates: ProfileRates,
        may_run: Callable[[PlannedVariant], bool],
    ) -> None:
        self.base = base
        self._variant_maker, self._may_run = variant_maker, may_run
        self._choices: Choices = variant_maker.choices(base, rates)
        self._made: dict[tuple[int, ...], PlannedVariant | None] = {}

    def variant(self, chosen: Sequence[int]) -> PlannedVariant | None:
        """The variant for the solver's answer for ``problem_layers``; None where no call may run it."""
        key = tuple(chosen)
        if key not in self._made:
            found = self._variant_maker.variant(self._choices.recompute(key))
            self._made[key] = found if found is not None and self._may_run(found) else None
        return self._made[key]

    def problem_layers(self, whole: ProblemLayer, chain: Chain, call: int) -> list[ProblemLayer]:
        """The layers of the graph, in place of ``whole``, which has all of the call.

        ``chain``: that ``whole`` is of; the call runs ``base`` in it.
        """
        names = dict(zip((c.name for c in self.base.step.candidates), chain.candidates[call], strict=True))
        known = {name: None if there is None else of_call(call, there) for name, there in names.items()}
        decided = {storage.name: storage for storage in whole.variants[0].storages}
        *layers, rest = self._choices.problem.layers
        found = [_moved(layer, chain, call, known, decided) for layer in layers]
        outside = [decided[there] for s in rest.variants[0].storages if (there := known.get(s.name)) in decided]
        found.append(replace(whole, variants=(replace(whole.variants[0], storages=tuple(outside)),)))
        return found


def _moved(
    layer: ProblemLayer,
    chain: Chain,
    call: int,
    known: Mapping[str, str | None],
    decided: Mapping[str, ProblemStorage],
) -> ProblemLayer:
    """A layer of a call's graph in the places of the chain.

    Args:
        known: names in the graph of storages that the base variant saves -> in ``decided``; None: it stays.
        decided: storages that may move, as the chain has them.
    """
    down, up = chain.forward[call] + 1, chain.backward[call]

    def storage_at(storage: ProblemStorage) -> ProblemStorage | None:
        if storage.name in known:
            return decided.get(known[storage.name] or "")
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
            {at + up: ms for at, ms in variant.extra_ms.items()},
            {at + up: nbytes for at, nbytes in variant.extra_bytes.items()},
        )

    return ProblemLayer(f"call {call}, {layer.name}", (call, layer.structure), tuple(map(variant_at, layer.variants)))
