"""Environment variables, read and validated in one place at the time of the call.

``FXOFFLOAD_DISABLE``
    ``1`` or ``true``: plain Inductor, nothing of fxoffload. A comma-separated list of PIECES: those
    pieces only, as with the option ``disable``. Unset, empty, ``0`` or ``false``: nothing.

``FXOFFLOAD_PHASES_DEVICE_TYPES``
    Comma-separated device types whose tensors the integrations of ``fxoffload.phases`` move: ``cpu`` is a rehearsal, in
    which CPU tensors leave "the device" for the host image. Unset or empty: ``cuda``.

``FXOFFLOAD_MEASURED_DEVICE_TYPES``
    Comma-separated device types on which operators and segments are timed for a plan: ``cuda``, or ``cpu`` for a
    rehearsal. Unset or empty: ``cuda``.

``FXOFFLOAD_PROGRESS``
    ``0`` or ``false``: no line about work that takes longer than two seconds. Anything else, or unset: such lines.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from fxoffload.errors import OptionsError

DISABLE_VARIABLE = "FXOFFLOAD_DISABLE"
PHASES_DEVICE_TYPES_VARIABLE = "FXOFFLOAD_PHASES_DEVICE_TYPES"
MEASURED_DEVICE_TYPES_VARIABLE = "FXOFFLOAD_MEASURED_DEVICE_TYPES"
PROGRESS_VARIABLE = "FXOFFLOAD_PROGRESS"

PIECES = (
    "segments",  # Off: the graph is compiled in one piece.
    "planner",  # Off: policy "auto" offloads all candidates but those of the last layer and of the ops after it.
    "measured_costs",  # Off: plans know estimated times only before the first step; no made-up inputs are run.
    "calibration",  # Off: a plan stays as it is, whatever its steps turn out to take.
    "tape_plan",  # Off: a step of several graphs without plans of their own is not planned as a whole.
    "tape_recompute",  # Off: a plan for such a step keeps and offloads, and changes no recompute choice.
    "pacing",  # Off: the host runs ahead of the device as far as it gets, also where copies are slower for it.
    "allocator_record",  # Off: the allocator does not record allocations between the graphs of such a step.
    "host_trim",  # Off: host memory that only the steps before such a plan needed is not given back.
    "offload",  # Off: every saved activation stays on the device.
    "prefetch",  # Off: an activation is reloaded when it is needed.
    "cross_graph_prefetch",  # Off: a backward prefetches for its own graph only.
    "donation",  # Off: no segment reuses the memory of its inputs.
    "segment_reuse",  # Off: each of several equal segments is compiled.
    "kernel_overlap",  # Off: each segment waits for its own kernels before the next one is compiled.
    "verify",  # Off: the finished graphs are not checked.
)

# Devices that values can move from: streams and the driver's free memory are asked of these only.
DEVICE_TYPES = ("cuda", "cpu")

_ON = ("1", "true")
_OFF = ("", "0", "false")


def everything_disabled() -> bool:
    """Whether FXOFFLOAD_DISABLE asks for plain Inductor. Never raises."""
    return _disable_value() in _ON


def disabled_pieces() -> frozenset[str]:
    """The pieces that FXOFFLOAD_DISABLE switches off; all of them for ``1`` or ``true``.

    Raises OptionsError (a ValueError) for an unknown piece.
    """
    value = _disable_value()
    if value in _ON:
        return frozenset(PIECES)
    if value in _OFF:
        return frozenset()
    names = [name.strip() for name in value.split(",")]
    return check_pieces([name for name in names if name], DISABLE_VARIABLE)


def phases_device_types() -> tuple[str, ...]:
    """The device types that FXOFFLOAD_PHASES_DEVICE_TYPES asks for; ``("cuda",)`` where it is not set.

    Raises OptionsError (a ValueError) for an unknown one.
    """
    return _device_types(PHASES_DEVICE_TYPES_VARIABLE)


def measured_device_types() -> tuple[str, ...]:
    """The same, of FXOFFLOAD_MEASURED_DEVICE_TYPES."""
    return _device_types(MEASURED_DEVICE_TYPES_VARIABLE)


def shows_progress() -> bool:
    """Whether there are lines about work that takes long. Never raises."""
    return os.environ.get(PROGRESS_VARIABLE, "").strip().lower() not in _OFF[1:]


def _device_types(variable: str) -> tuple[str, ...]:
    value = os.environ.get(variable, "")
    names = tuple(dict.fromkeys(name for name in (part.strip().lower() for part in value.split(",")) if name))
    for name in names:
        if name not in DEVICE_TYPES:
            raise OptionsError(
                f"{variable} names the unknown device type {name!r}"
                f"{suggestion(name, DEVICE_TYPES)}; the types are {', '.join(DEVICE_TYPES)}"
            )
    return names or ("cuda",)


def check_device_types(device_types: object) -> tuple[str, ...]:
    """Device types as sorted distinct names.

    Raises:
        OptionsError: ``device_types`` is no tuple of names, is empty, or has one that is unknown.
    """
    found = distinct_names("device_types", device_types, "('cuda',)")
    if not found or not set(found) <= set(DEVICE_TYPES):
        raise OptionsError(f"device_types is {device_types!r}; expected one or more of {', '.join(DEVICE_TYPES)}")
    return found


def distinct_names(name: str, value: object, example: str) -> tuple[str, ...]:
    """``value`` as sorted distinct names; a bare string would be taken apart into letters.

    Raises:
        OptionsError: it is none; ``name`` says where it was given, ``example`` shows an accepted one.
    """
    if not isinstance(value, str) and isinstance(value, Iterable):
        items = list(value)
        if all(isinstance(item, str) for item in items):
            return tuple(sorted(set(items)))
    raise OptionsError(f"{name} is {value!r}; expected a tuple of names, for example {example}")


def check_pieces(names: Iterable[str], source: str) -> frozenset[str]:
    """``names`` as a set. Raises OptionsError when one is no piece; ``source`` is who named it."""
    found = frozenset(names)
    unknown = sorted(str(name) for name in found.difference(PIECES))
    if unknown:
        raise OptionsError(
            f"{source} names unknown pieces: {', '.join(unknown)}{suggestion(unknown[0], PIECES)}; "
            f"the pieces are {', '.join(PIECES)}"
        )
    return found


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _disable_value() -> str:
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower()
