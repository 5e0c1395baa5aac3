"""Compares digested gradients across processes; needs no torch."""

import math
from collections.abc import Iterable

from benchmarks.schema import Digest


def max_relative_difference(mine: dict[str, Digest], reference: dict[str, Digest]) -> float:
    """The worst parameter's difference, relative to the reference gradient's norm.

    The projection moves by about ``norm(mine - reference)`` for a random difference, so this is close to a relative
    error of the gradient itself, not of its sum.
    """
    if set(mine) != set(reference):
        missing = sorted(set(mine) ^ set(reference))
        raise ValueError(f"the gradients have different names: {', '.join(missing[:4])}")
    return max(_differences(mine, reference), default=0.0)


def _differences(mine: dict[str, Digest], reference: dict[str, Digest]) -> Iterable[float]:
    for name, theirs in reference.items():
        ours = mine[name]
        scale = max(theirs.norm, 1e-30)
        worst = max(abs(ours.norm - theirs.norm), abs(ours.probe - theirs.probe)) / scale
        # NaN compares with nothing: it would get lost in a maximum.
        yield worst if math.isfinite(ours.norm + ours.probe + worst) else math.inf
