"""How long a copy of a given size takes."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from fxoffload.errors import OptionsError
from fxoffload.machine import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyCurve:
    """Copy times at a few sizes; between them the time grows linearly.

    latency_ms: time that a copy takes besides moving its bytes, in milliseconds.
    sizes_bytes: sizes that were timed, in bytes, growing.
    times_ms: milliseconds of one copy of each size, as part of a queue of copies; never falling with the size.

    Raises OptionsError (a ValueError) for values that no link can have.
    """

    latency_ms: float
    sizes_bytes: tuple[int, ...]
    times_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("sizes_bytes", "times_ms"):
            if not isinstance(getattr(self, name), (list, tuple)):
                raise OptionsError(f"expected {name} to be a list of numbers, found {getattr(self, name)!r}")
        sizes = tuple(checks.positive_int("each of sizes_bytes", size) for size in self.sizes_bytes)
        times = tuple(checks.positive("each of times_ms", time) for time in self.times_ms)
        latency = checks.not_negative("latency_ms", self.latency_ms)
        if not sizes or len(sizes) != len(times):
            raise OptionsError(
                f"expected as many times_ms as sizes_bytes, and at least one, found {len(times)} and {len(sizes)}"
            )
        if any(a >= b for a, b in itertools.pairwise(sizes)):
            raise OptionsError(f"expected sizes_bytes to grow, found {list(sizes)}; sort them and drop repeated ones")
        if any(a > b for a, b in itertools.pairwise(times)):
            raise OptionsError(
                f"expected times_ms not to fall as the size grows, found {list(times)}; "
                "raise each time to the largest before it"
            )
        if latency > times[0]:
            raise OptionsError(
                f"expected latency_ms to be at most the time of the smallest copy ({times[0]}), found {latency}"
            )
        for name, value in (("sizes_bytes", sizes), ("times_ms", times), ("latency_ms", latency)):
            object.__setattr__(self, name, value)

    def ms(self, nbytes: int) -> float:
        """Milliseconds of one copy of ``nbytes`` bytes; never less for more bytes, and 0 for no bytes.

        Below the smallest size the time falls to the latency, above the largest it grows at that size's rate.
        Raises OptionsError (a ValueError) where ``nbytes`` is negative.
        """
        if checks.not_negative("nbytes", nbytes) == 0:
            return 0.0
        above = bisect.bisect_left(self.sizes_bytes, nbytes)
        if above == len(self.sizes_bytes):
            rest = nbytes - self.sizes_bytes[-1]
            return self.times_ms[-1] + rest * (self.times_ms[-1] / self.sizes_bytes[-1])
        size, time = (self.sizes_bytes[above - 1], self.times_ms[above - 1]) if above else (0, self.latency_ms)
        next_size, next_time = self.sizes_bytes[above], self.times_ms[above]
        # min(): rounding may lift the sum above the time of the next size.
        return min(time + (next_time - time) * ((nbytes - size) / (next_size - size)), next_time)

    def gb_per_s(self) -> tuple[float, ...]:
        """Gigabytes (10^9 bytes) per second at each of ``sizes_bytes``."""
        return tuple(size / time / 1e6 for size, time in zip(self.sizes_bytes, self.times_ms, strict=True))
