"""Rates by name, for example TFLOP/s by dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxoffload.errors import OptionsError
from fxoffload.machine import checks


class MachineRates(Mapping[str, float]):
    """A read-only mapping from a name to a rate above zero; unlike a dict it can be hashed.

    Raises:
        OptionsError: a ValueError; a name is no string, a rate is not above zero, or there is none.
    """

    __slots__ = ("_pairs",)

    def __init__(self, rates: Mapping[str, float]) -> None:
        if not isinstance(rates, Mapping) or not rates:
            raise OptionsError(f"expected rates as a mapping such as {{'bfloat16': 800.0}}, found {rates!r}")
        self._pairs = {
            checks.text("a rate's name", k): checks.positive(f"the rate of {k}", v) for k, v in rates.items()
        }

    def __getitem__(self, name: str) -> float:
        return self._pairs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self._pairs.items()))

    def __repr__(self) -> str:
        return f"MachineRates({self._pairs})"
