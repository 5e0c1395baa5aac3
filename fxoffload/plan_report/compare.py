"""Do the plans of several ranks fit together?

Recompute choices have to be the same everywhere: they make the graphs, and the collectives in them. Keep and offload
may differ. Plans for a step over several graphs may differ in recompute choices, too: only graphs without collectives
have variants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.table import gib, layer_ranges, number_ranges
from fxoffload.planner.plan import Decision

ABSENT = "absent"

OfRank = Plan | str | Sequence[Plan | str]


@dataclass(frozen=True)
class Difference:
    """A candidate that ranks treat differently.

    Attributes:
        position: which of a rank's plans.
        layers: labels of the layers in which it is so; () outside the layers.
        name: the candidate's name in the first of them.
        producer: the op that computes it.
        nbytes: bytes of one layer's storage, on the first rank that has it.
        actions: one per rank, "absent" where its plan has no such candidate.
    """

    position: int
    layers: tuple[str, ...]
    name: str
    producer: str
    nbytes: int
    actions: tuple[str, ...]

    def __str__(self) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, action in enumerate(self.actions):
            ranks.setdefault(action, []).append(rank)
        who = "; ".join(f"{action} on rank {number_ranges(numbers)}" for action, numbers in ranks.items())
        what = f"{self.name} of {self.producer}, {gib(self.nbytes)} GiB"
        return f"plan {self.position}, {layer_ranges(self.layers)}: {what}: {who}"


@dataclass(frozen=True)
class Comparison:
    """How the plans of several ranks differ.

    Attributes:
        num_ranks: how many ranks were compared.
        num_plans: how many plans each rank has.
        conflicts: differences where there must be none: recomputed on some ranks only, or no candidate on some.
        residencies: allowed differences: kept on some ranks and offloaded on others; in a step over several graphs also
            recomputed.
    """

    num_ranks: int
    num_plans: tuple[int, ...]
    conflicts: tuple[Difference, ...] = ()
    residencies: tuple[Difference, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the ranks may run these plans together."""
        return not self.conflicts and len(set(self.num_plans)) <= 1

    def __str__(self) -> str:
        lines = [f"{self.num_ranks} ranks {'fit together' if self.agrees else 'do NOT fit together'}"]
        if len(set(self.num_plans)) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(self.num_plans))
            lines.append(f"they have different numbers of plans: {counts}")
        for title, found in (
            ("has to be the same, and is not (give every rank the same options, profile and shapes):", self.conflicts),
            ("differs, as it may:", self.residencies),
        ):
            if found:
                lines += [title, *(f"- {difference}" for difference in found)]
        return "\n".join(lines)


def compare_plans(plans: Iterable[OfRank]) -> Comparison:
    """Compare the actions of several ranks on the same candidates.

    Args:
        plans: for each rank its plan, as a ``Plan`` or as JSON text, or all its plans in order of compilation.

    Raises:
        ValueError: a text is no plan.
    """
    ranks = [_plans_of(rank, given) for rank, given in enumerate(plans)]
    counts = tuple(len(of_rank) for of_rank in ranks)
    conflicts: list[Difference] = []
    residencies: list[Difference] = []
    for position in range(min(counts, default=0)):
        for difference in _differences(position, [of_rank[position] for of_rank in ranks]):
            of_one_graph = not any(of_rank[position].label for of_rank in ranks)
            serious = of_one_graph and ("recompute" in difference.actions or ABSENT in difference.actions)
            (conflicts if serious else residencies).append(difference)
    return Comparison(len(ranks), counts, tuple(conflicts), tuple(residencies))


def _plans_of(rank: int, given: OfRank) -> list[Plan]:
    try:
        every = [given] if isinstance(given, (Plan, str)) else given
        return [Plan.from_json(plan) if isinstance(plan, str) else plan for plan in every]
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


class _Key(NamedTuple):
    """One candidate of one layer. Where names are not known in every layer: the n-th that the producer makes there."""

    layer: str
    what: str
    number: int


class _PairEntry(NamedTuple):
    name: str
    row: int
    decision: Decision


def _differences(position: int, plans: Sequence[Plan]) -> list[Difference]:
    named = all(len(d.names or (d.name,)) == max(len(d.layers), 1) for plan in plans for d in plan.decisions)
    entries = [dict(_entries(plan, named)) for plan in plans]
    # Layers in which the ranks do the same different things share one difference, as far as they share a decision.
    found: dict[tuple[int, int, tuple[str, ...]], list[tuple[str, _PairEntry]]] = {}
    for key in dict.fromkeys(key for of_rank in entries for key in of_rank):
        actions = tuple(of_rank[key].decision.action if key in of_rank else ABSENT for of_rank in entries)
        # What stays is computed once whatever it is called; names of random states, for one, differ.
        if len(set(actions)) > 1 and not set(actions) <= {"stay", ABSENT}:
            first = next(rank for rank, of_rank in enumerate(entries) if key in of_rank)
            entry = entries[first][key]
            found.setdefault((first, entry.row, actions), []).append((key.layer, entry))
    differences = []
    for (_, _, actions), same in found.items():
        layers, (_, entry) = tuple(layer for layer, _ in same if layer), same[0]
        decision = entry.decision
        differences.append(Difference(position, layers, entry.name, decision.producer, decision.nbytes, actions))
    return differences


def _entries(plan: Plan, named: bool) -> Iterator[tuple[_Key, _PairEntry]]:
    seen: Counter[tuple[str, str]] = Counter()
    for row, decision in enumerate(plan.decisions):
        for i, layer in enumerate(decision.layers or ("",)):
            name = decision.names[i] if named and decision.names else decision.name
            what = name if named else decision.producer
            yield _Key(layer, what, seen[layer, what]), _PairEntry(name, row, decision)
            seen[layer, what] += 1
