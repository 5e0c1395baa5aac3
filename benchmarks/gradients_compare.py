"""Compares digested gradients across processes; needs no torch."""

import base64
import math
import struct

from benchmarks.schema import Digest

# The more parts, the surer the estimate of a difference's norm: of two estimates from 32 parts each, one is beyond
# twice the other in one of ten thousand pairs; of two from a single projection, in three of ten.
NUM_PARTS = 32
_FORMAT = f"<{NUM_PARTS}f"
_LARGEST = 3e38  # beyond that float32 is infinite


def pack_parts(parts: list[float]) -> str:
    """As text: float32, base64. A list of numbers would make most of a report."""
    limited = [math.copysign(math.inf, part) if abs(part) > _LARGEST else part for part in parts]
    return base64.b64encode(struct.pack(_FORMAT, *limited)).decode()


def unpack_parts(text: str) -> tuple[float, ...]:
    return struct.unpack(_FORMAT, base64.b64decode(text))


def has_parts(digests: dict[str, Digest]) -> bool:
    """Whether each parameter can be judged by itself; reports of before have one projection only."""
    return all(digest.parts for digest in digests.values())


def max_relative_difference(mine: dict[str, Digest], reference: dict[str, Digest]) -> float:
    """The worst parameter's; see ``relative_differences``."""
    return max(relative_differences(mine, reference).values(), default=0.0)


def relative_differences(mine: dict[str, Digest], reference: dict[str, Digest]) -> dict[str, float]:
    """``norm(mine - reference)`` by parameter, as the projections estimate it, relative to the reference's norm.

    Raises:
        ValueError: they are not gradients of the same parameters.
    """
    if set(mine) != set(reference):
        missing = sorted(set(mine) ^ set(reference))
        raise ValueError(f"the gradients have different names: {', '.join(missing[:4])}")
    return {name: _difference(mine[name], theirs) for name, theirs in reference.items()}


def _difference(ours: Digest, theirs: Digest) -> float:
    """A part's projection moves by about the norm of its difference, so the root of the sum of squares of all of them
    is an estimate of the whole difference's norm. A single projection would be a poor one."""
    if ours.parts and theirs.parts:
        pairs = zip(unpack_parts(ours.parts), unpack_parts(theirs.parts), strict=True)
        moved = math.hypot(*(a - b for a, b in pairs))
    else:
        moved = abs(ours.probe - theirs.probe)
    worst = max(abs(ours.norm - theirs.norm), moved) / max(theirs.norm, 1e-30)
    # NaN compares with nothing: it would get lost in a maximum.
    return worst if math.isfinite(ours.norm + ours.probe + worst) else math.inf
