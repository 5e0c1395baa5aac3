"""What the collectives of a step took, from those of all ranks and of several steps."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.schema import Collective


def once_all_there(by_rank: Sequence[Mapping[str, Collective]]) -> dict[str, list[float]]:
    """The time of each collective once all ranks had come to it, by kind: on the rank that came last and did not wait,
    where it was shortest. All ranks make the same ones; kinds of which a rank saw another number are left out."""
    found = {}
    for kind, mine in by_rank[0].items():
        peers = [ours[kind] for ours in by_rank if kind in ours]
        if mine.count and len(peers) == len(by_rank) and len({len(peer.each_ms) for peer in peers}) == 1:
            found[kind] = list(map(min, zip(*(peer.each_ms for peer in peers), strict=True)))
    return found


def usual_sum(each_ms: Sequence[float], count: float) -> float | None:
    """Of the collectives of a step: each place in the step counts with its median over the steps. None: the steps did
    not have the same number of them, or none is known.

    Args:
        each_ms: of all steps, one after the other.
        count: in a step.
    """
    if count != int(count) or not count or not each_ms or len(each_ms) % int(count):
        return None
    return sum(statistics.median(each_ms[place :: int(count)]) for place in range(int(count)))
