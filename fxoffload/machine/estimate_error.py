"""How far estimates of a step were off on a machine, as data in its profile."""

from __future__ import annotations

from dataclasses import dataclass

from fxoffload.machine import checks


@dataclass(frozen=True, slots=True)
class EstimateError:
    """The largest errors of predictions that were made without measuring, on stock models (benchmark ``stock``).

    step_time, peak: relative to the measured values (0.2 is 20 %). num_cases: number of models.

    Raises OptionsError (a ValueError) for impossible values.
    """

    step_time: float
    peak: float
    num_cases: int

    def __post_init__(self) -> None:
        for name in ("step_time", "peak"):
            object.__setattr__(self, name, checks.not_negative(name, getattr(self, name)))
        checks.positive_int("num_cases", self.num_cases)


def describe_error(error: EstimateError | None) -> str:
    """A clause. None: it has not been measured."""
    if error is None:
        return "how far such estimates are off on stock models is not known yet"
    return (
        f"on {error.num_cases} stock models such estimates were off by up to {100 * error.step_time:.0f} % in time and "
        f"{100 * error.peak:.0f} % in peak"
    )
