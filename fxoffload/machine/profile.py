"""The rates of one machine, in the numbers that a plan is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch

from fxoffload.environment import suggestion
from fxoffload.errors import OptionsError
from fxoffload.machine import checks
from fxoffload.machine.curve import CopyCurve
from fxoffload.machine.estimate_error import EstimateError
from fxoffload.machine.rates import MachineRates

T = TypeVar("T")
Direction = Literal["d2h", "h2d"]

# Of the JSON form. A file of another version is refused: its numbers may mean something else.
SCHEMA = 1
DEVICE_TYPES = ("cuda", "cpu")
MEASURED, DATA_SHEET = "measured", "data sheet"
TF32, FLOAT8 = "tf32", "float8"

_CURVES = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")
_TABLES = ("matmul_tflop_per_s", "attention_forward_tflop_per_s", "attention_backward_tflop_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """The rates of one machine and device. What a time from it leaves out, the caller adds (kernel launches, overlap).

    device_name: as the driver calls the device, for example ``"NVIDIA H200"``.
    device_type: ``"cuda"``, or ``"cpu"`` for the rehearsal.
    driver: version of the device's driver.
    torch_version: version of torch that was measured with.
    device_memory_bytes: all memory of the device, in bytes.
    d2h, h2d: copies between device and pinned host memory while the other direction is idle.
    duplex_d2h, duplex_h2d: the same, while the other direction copies as well.
    matmul_tflop_per_s: 10^12 FLOPs per second of large matmuls, by dtype. ``"float32"`` without and ``"tf32"`` with
        TensorFloat-32, ``"float8"`` for every 8-bit float.
    attention_forward_tflop_per_s, attention_backward_tflop_per_s: the same for causal
        ``scaled_dot_product_attention``. The FLOPs are of the half of the scores that causal attention needs.
    memory_gb_per_s: 10^9 bytes per second that a kernel reads and writes in device memory, together.
    launch_overhead_us: microseconds of host time to launch one small kernel from Python.
    kernel_floor_us: microseconds of device time of the smallest kernel in a queue of kernels.
    notes: where the numbers come from.
    estimate_error: how far steps were off that were predicted from this profile alone; None: not measured yet.
    source: ``"measured"``, or ``"data sheet"``: derived from another device's by ``machine/data_sheets.py``.

    Raises OptionsError (a ValueError) for a field that no machine can have.
    """

    device_name: str
    device_type: str
    driver: str
    torch_version: str
    device_memory_bytes: int
    d2h: CopyCurve
    h2d: CopyCurve
    duplex_d2h: CopyCurve
    duplex_h2d: CopyCurve
    matmul_tflop_per_s: Mapping[str, float]
    attention_forward_tflop_per_s: Mapping[str, float]
    attention_backward_tflop_per_s: Mapping[str, float]
    memory_gb_per_s: float
    launch_overhead_us: float
    kernel_floor_us: float
    notes: str = ""
    estimate_error: EstimateError | None = None
    source: str = MEASURED

    def __post_init__(self) -> None:
        for name in ("device_name", "driver", "torch_version"):
            checks.text(name, getattr(self, name))
        if self.device_type not in DEVICE_TYPES:
            raise OptionsError(
                f"expected device_type to be one of {', '.join(DEVICE_TYPES)}, found {self.device_type!r}"
            )
        if self.source not in (MEASURED, DATA_SHEET):
            raise OptionsError(f"expected source to be one of {MEASURED}, {DATA_SHEET}, found {self.source!r}")
        if not isinstance(self.notes, str):
            raise OptionsError(f"expected notes to be a string, found {self.notes!r}")
        checks.positive_int("device_memory_bytes", self.device_memory_bytes)
        for name in ("memory_gb_per_s", "launch_overhead_us", "kernel_floor_us"):
            object.__setattr__(self, name, checks.positive(name, getattr(self, name)))
        for name in _CURVES:
            if not isinstance(getattr(self, name), CopyCurve):
                raise OptionsError(f"expected {name} to be a CopyCurve, found {getattr(self, name)!r}")
        if self.estimate_error is not None and not isinstance(self.estimate_error, EstimateError):
            raise OptionsError(f"expected estimate_error to be an EstimateError, found {self.estimate_error!r}")
        for name in _TABLES:
            object.__setattr__(self, name, _within(name, lambda name=name: MachineRates(getattr(self, name))))

    @property
    def title(self) -> str:
        """The device's name, and where it was not measured, that."""
        return self.device_name + ("" if self.source == MEASURED else f" (profile from a {self.source}, not measured)")

    def copy_ms(self, nbytes: int, direction: Direction, duplex: bool = False) -> float:
        """Milliseconds of one copy of ``nbytes`` bytes; never less for more bytes.

        ``direction``: ``"d2h"`` or ``"h2d"``. ``duplex``: the other direction copies at the same time.
        Raises OptionsError (a ValueError) for another direction or a negative size.
        """
        if direction not in get_args(Direction):
            raise OptionsError(f"expected direction to be one of {', '.join(get_args(Direction))}, found {direction!r}")
        curve: CopyCurve = getattr(self, f"duplex_{direction}" if duplex else direction)
        return curve.ms(nbytes)

    def matmul_ms(self, flops: float, dtype: torch.dtype | str) -> float:
        """Milliseconds of a large matmul of ``flops`` FLOPs (a multiply and an add are two), without its launch.

        float32 is taken as this process is set now, with TensorFloat-32 or without; ``"tf32"`` always with.
        Raises OptionsError (a ValueError) for a dtype that was not measured, or negative ``flops``.
        """
        name = dtype_name(dtype)
        if name == "float32" and TF32 in self.matmul_tflop_per_s and _tf32_is_on():
            name = TF32
        return self._flops_ms(flops, name, "matmul_tflop_per_s")

    def attention_ms(self, flops: float, dtype: torch.dtype | str, backward: bool) -> float:
        """Milliseconds of attention, without its launch.

        ``flops``: of this forward or this backward alone; a backward has 2.5 times its forward's (five matmuls to two).
        Causal attention counts half of its square of scores, which ``torch.utils.flop_counter`` counts in full.
        Raises OptionsError (a ValueError) for a dtype that was not measured, or negative ``flops``.
        """
        table = "attention_backward_tflop_per_s" if backward else "attention_forward_tflop_per_s"
        return self._flops_ms(flops, dtype_name(dtype), table)

    def memory_ms(self, nbytes: int) -> float:
        """Milliseconds of a kernel that reads and writes ``nbytes`` bytes of device memory in all, without its launch.

        Raises OptionsError (a ValueError) for a negative size.
        """
        return checks.not_negative("nbytes", nbytes) / (self.memory_gb_per_s * 1e6)

    def to_json(self) -> str:
        """The profile as JSON text; ``from_json`` gives an equal one."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {name: _plain(value) for name, value in fields.items()}
        return json.dumps({"schema": SCHEMA, **plain}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "the profile") -> MachineProfile:
        """The profile that ``to_json`` wrote. ``source`` names it in messages.

        Raises OptionsError (a ValueError) for text that is no profile, of another schema, or with impossible values.
        """
        return _within(source, lambda: _parse(text))

    def _flops_ms(self, flops: float, name: str, table: str) -> float:
        rates: Mapping[str, float] = getattr(self, table)
        if name not in rates:
            raise OptionsError(
                f"expected a dtype that {table} of {self.device_name} has ({', '.join(rates)}), "
                f"found {name}{suggestion(name, rates)}; pass the one that the work is closest to"
            )
        return checks.not_negative("flops", flops) / (rates[name] * 1e9)


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype in a profile's tables: torch's own, and ``"float8"`` for every 8-bit float."""
    name = str(dtype).removeprefix("torch.")
    return FLOAT8 if name.startswith("float8") else name


def grouped_name(dtype: torch.dtype | str) -> str:
    """The name, among the rates of matmuls, of many small ones at once (a layer of experts)."""
    return f"{dtype_name(dtype)} grouped"


def _tf32_is_on() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _plain(value: Any) -> Any:
    if isinstance(value, (CopyCurve, EstimateError)):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def _parse(text: str) -> MachineProfile:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"expected JSON, found {text[:40]!r} ({error})") from None
    if not isinstance(found, dict):
        raise OptionsError(f"expected a JSON object, found a {type(found).__name__}")
    schema = found.pop("schema", None)
    if schema != SCHEMA or isinstance(schema, bool):
        raise OptionsError(
            f"expected schema {SCHEMA}, found {schema!r}; measure it again with: fxoffload profile measure --out FILE"
        )
    _check_names(found, MachineProfile)
    parts = {name: _within(name, lambda name=name: _parse_part(found[name], CopyCurve)) for name in _CURVES}
    if found.get("estimate_error") is not None:
        name = "estimate_error"
        parts[name] = _within(name, lambda: _parse_part(found[name], EstimateError))
    return MachineProfile(**{**found, **parts})


def _parse_part(found: Any, kind: Any) -> Any:
    if not isinstance(found, dict):
        raise OptionsError(f"expected a JSON object, found {found!r}")
    _check_names(found, kind)
    return kind(**found)


def _check_names(found: dict[str, Any], kind: Any) -> None:
    fields = dataclasses.fields(kind)
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    missing, unknown = sorted(required - found.keys()), sorted(found.keys() - {f.name for f in fields})
    if missing or unknown:
        raise OptionsError(
            f"expected the fields {', '.join(f.name for f in fields)}, "
            f"found {', '.join(unknown) or 'none'} besides them and missed {', '.join(missing) or 'none'}"
        )


def _within(source: str, make: Callable[[], T]) -> T:
    """``make()``, with ``source`` in front of the message of an OptionsError."""
    try:
        return make()
    except OptionsError as error:
        raise OptionsError(f"{source}: {error}") from None
