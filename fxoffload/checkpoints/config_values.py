"""Values of config.json, or an error that says which are expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxoffload.checkpoints.errors import BrokenCheckpointError, shortened
from fxoffload.checkpoints.families import NUM_EXPERTS


def whole_number(config: Mapping[str, Any], name: str) -> int | None:
    """A number from 0 up; None where the config has none, or null.

    Raises BrokenCheckpointError for anything else: "4" or 4.0 taken for absent would be a check that is not made.
    """
    value = config.get(name)
    if value is not None and not _is_whole(value):
        raise _wrong(name, "a whole number", value)
    return value


def counts_experts(config: Mapping[str, Any]) -> bool:
    """Whether the config says, under any of its names, how many experts a layer has."""
    return any(config.get(name) is not None for name in NUM_EXPERTS)


def num_experts(config: Mapping[str, Any]) -> int | None:
    """How many experts a layer has; None where the config does not say.

    Raises BrokenCheckpointError as ``whole_number`` does, and for two names with different numbers.
    """
    said = {name: number for name in NUM_EXPERTS if (number := whole_number(config, name)) is not None}
    if len(set(said.values())) > 1:
        found = ", ".join(f"{name} {number}" for name, number in said.items())
        raise BrokenCheckpointError(
            f"config.json: expected one number of experts, found {found}; remove those that are wrong"
        )
    return next(iter(said.values()), None)


def whole_numbers(config: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of numbers from 0 up; None where the config has none, or null. Raises as ``whole_number`` does."""
    value = config.get(name)
    if value is not None and not (isinstance(value, list) and all(map(_is_whole, value))):
        raise _wrong(name, "a list of whole numbers", value)
    return value


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """``weight_block_size`` of a quantization_config, [rows, columns]; None for scales of another kind."""
    value = whole_numbers(config, "weight_block_size")
    if value is None:
        return None
    if len(value) != 2 or 0 in value:
        raise _wrong("weight_block_size", "two numbers above 0", value)
    return value[0], value[1]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(name: str, expected: str, value: object) -> BrokenCheckpointError:
    return BrokenCheckpointError(
        f"config.json: expected {name} to be {expected}, found {shortened(value)}; mend the config"
    )
