"""The solver's problem about the variants that the calls of a chain run, and what its answers mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxoffload.compiler.call_layers import CallLayers
from fxoffload.compiler.variant_maker import PlannedVariant
from fxoffload.planner.problem import Problem, Solution

# Per call, its variant; None: the graph as compiled.
CallVariants = tuple[PlannedVariant | None, ...]


@dataclass(frozen=True)
class VariantProblem:
    """A problem about the variants of calls.

    Attributes:
        kinds: per call, its graph.
        variants: per kind, those to choose from; the first is the graph as compiled.
        layers: calls whose layers are chosen for one by one -> their choices, and how many layers the problem has of
            them.
    """

    problem: Problem
    kinds: Sequence[int]
    variants: Mapping[int, Sequence[PlannedVariant | None]]
    layers: Mapping[int, tuple[CallLayers, int]]

    def chosen(self, solution: Solution) -> Iterator[tuple[int, Sequence[int]]]:
        """The numbers that the solver chose, for each call."""
        at = 0
        for call in range(len(self.kinds)):
            count = self.layers[call][1] if call in self.layers else 1
            yield call, solution.variants[at : at + count]
            at += count

    def call_variants(self, solution: Solution) -> tuple[CallVariants, set[int]]:
        """The solver's answer, and the calls that may not run their part of it."""
        found: list[PlannedVariant | None] = []
        refused: set[int] = set()
        for call, numbers in self.chosen(solution):
            if call not in self.layers:
                found.append(self.variants[self.kinds[call]][numbers[0]])
            elif self.layers[call][0].is_as_compiled(numbers):
                found.append(None)
            else:
                found.append(self.layers[call][0].variant(numbers))
                if found[-1] is None:
                    refused.add(call)
        return tuple(found), refused
