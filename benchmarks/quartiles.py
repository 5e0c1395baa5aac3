"""Medians with quartiles, the only statistics the tables show."""

import statistics
from collections.abc import Sequence

from benchmarks.schema import Summary


def summarize(values: Sequence[float]) -> Summary:
    """Median and quartiles (inclusive method: the extremes of a small sample are observations, not estimates)."""
    if not values:
        raise ValueError("expected at least one measured value, found none")
    ordered = sorted(values)
    if len(ordered) == 1:
        q1 = q3 = ordered[0]
    else:
        q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    return Summary(statistics.median(ordered), q1, q3, ordered[0], ordered[-1], list(values))
