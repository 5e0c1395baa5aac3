"""The user's options, validated once and frozen."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fxoffload.environment import check_device_types, check_pieces, distinct_names, suggestion
from fxoffload.errors import OptionsError, UnsupportedError
from fxoffload.machine.shelf import load_profile
from fxoffload.sizes import parse_budget, parse_bytes
from fxoffload.tell import warn

Policy = Literal["auto", "offload_all", "keep_all"]
Recompute = Literal["auto", "default", "cheap"]
Checkpoints = Literal["plan", "obey"]
OnError = Literal["raise", "fallback"]
Inner = Literal["inductor", "aot_eager"]

# Larger slowdowns are taken for percent.
_MOST_SLOWDOWN = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, init=False)
class Options:
    """The options of ``torch.compile(model, backend="fxoffload", options={...})``.

    policy: ``"auto"`` plans which values to keep, to offload and to recompute, for the budget or the slowdown below.
        ``"offload_all"`` offloads every candidate. ``"keep_all"`` offloads nothing. A graph without layers (a layer
        compiled on its own) has nothing to choose from: there ``"auto"`` offloads every candidate until the step is
        planned.
    activation_budget: the least step time whose peak stays within this many bytes. They are the bytes that the compiled
        graph adds to those allocated on the device when the step began: saved activations, working set, copies under
        way, gradients that the backward returns. A budget that cannot be met raises BudgetError, with the smallest that
        can. On a GPU, a budget that the plan misses by a little is tried, and a warning says if its steps exceed it.
        ``"auto"``: the room on the device when the first training graph is compiled. That is 90 % of its memory, less
        the memory in use, less gradients and optimizer state that are not there yet. ``"80%"``: of that.
    max_slowdown: the least peak for at most this slowdown over plain Inductor (0.02: two percent, the default where
        there is no budget). With both, the budget is met first, and a slowdown beyond this bound warns. Where several
        processes of one machine train, 0.006 less is aimed at: they wait for each other.
    profile: rates to plan with, in place of this machine's: a shipped profile's name (``"h200"``) or a file that
        ``fxoffload profile measure --out FILE`` wrote.
    recompute: ``"auto"`` leaves the choice to the plan (with another policy: ``"default"``). ``"default"`` saves the
        values that AOTAutograd saves. ``"cheap"`` recomputes everything in the layers that is no contraction, random
        number, collective or sort: fewer bytes to keep or offload, for little time.
    checkpoints: the meaning of activation checkpointing in compiled code (``gradient_checkpointing=True``,
        ``torch.utils.checkpoint.checkpoint``) for a plan. ``"plan"``: a wish for less memory. The plan keeps, offloads
        or recomputes the values that checkpointing covers. Without a budget and a slowdown it is the fastest plan that
        takes no more than checkpointing's own predicted peak, without zeros for outputs that nothing uses. ``"obey"``:
        all of it is recomputed. Policies of selective checkpointing (``context_fn``) are obeyed in any case. So is all
        checkpointing where nothing is planned: another ``policy`` or ``recompute`` than ``"auto"``, a step of one
        layer, a nested compile region.
    on_error: ``"raise"``, or ``"fallback"`` to compile a graph that fxoffload cannot handle with
        plain Inductor.
    min_bytes: smallest storage worth a copy, in bytes; 0 takes every storage.
    host_budget: most pinned host memory to reserve, in bytes; None decides from the memory of the
        machine or of its cgroup.
    in_flight_budget: most bytes on their way to the host at a time; they still use device memory. None: as many as the
        largest segment moves, which keeps the link busy with the least memory.
    prefetch_budget: most bytes reloaded ahead of their use; they already use device memory. None: half as much again.
    inner: ``"inductor"``, or ``"aot_eager"`` to run the segments uncompiled (for debugging).
    inductor: Inductor options as in ``torch.compile(options=...)``, for every segment. Given as a
        mapping, stored as pairs sorted by name; ``inductor_config()`` is a fresh dict of them.
    device_types: devices whose activations are offloaded, out of ``"cuda"`` and ``"cpu"``.
    disable: pieces to switch off, out of ``fxoffload.environment.PIECES``.

    Sizes are given as bytes or as strings such as ``"1.5GB"``, ``"12G"`` or ``"512 MiB"`` and stored as bytes.
    Raises OptionsError (a ValueError) for a value that is not accepted, UnsupportedError (a
    NotImplementedError) for CUDA graphs.
    """

    policy: Policy
    activation_budget: int | str | None
    max_slowdown: float | None
    profile: str | None
    recompute: Recompute
    checkpoints: Checkpoints
    on_error: OnError
    min_bytes: int
    host_budget: int | None
    in_flight_budget: int | None
    prefetch_budget: int | None
    inner: Inner
    inductor: tuple[tuple[str, Any], ...]
    device_types: tuple[str, ...]
    disable: tuple[str, ...]

    # Written out because accepted values (sizes as strings, a mapping) differ from stored ones.
    def __init__(
        self,
        *,
        policy: Policy = "auto",
        activation_budget: int | str | None = None,
        max_slowdown: float | None = None,
        profile: str | None = None,
        recompute: Recompute = "auto",
        checkpoints: Checkpoints = "plan",
        on_error: OnError = "raise",
        min_bytes: int | str = "1MiB",
        host_budget: int | str | None = None,
        in_flight_budget: int | str | None = None,
        prefetch_budget: int | str | None = None,
        inner: Inner = "inductor",
        inductor: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        device_types: Iterable[str] = ("cuda",),
        disable: Iterable[str] = (),
    ) -> None:
        values = {
            "policy": _one_of("policy", policy, get_args(Policy)),
            "activation_budget": None
            if activation_budget is None
            else parse_budget(activation_budget, "activation_budget"),
            "max_slowdown": _check_slowdown(max_slowdown),
            "profile": _check_profile(profile),
            "recompute": _one_of("recompute", recompute, get_args(Recompute)),
            "checkpoints": _one_of("checkpoints", checkpoints, get_args(Checkpoints)),
            "on_error": _one_of("on_error", on_error, get_args(OnError)),
            "min_bytes": parse_bytes(min_bytes, "min_bytes", allow_zero=True),
            "host_budget": _bytes_or_none(host_budget, "host_budget"),
            "in_flight_budget": _bytes_or_none(in_flight_budget, "in_flight_budget"),
            "prefetch_budget": _bytes_or_none(prefetch_budget, "prefetch_budget"),
            "inner": _one_of("inner", inner, get_args(Inner)),
            "inductor": _check_inductor(inductor),
            "device_types": check_device_types(device_types),
            "disable": _check_disable(disable),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for name in ("activation_budget", "max_slowdown"):
            if self.policy != "auto" and getattr(self, name) is not None:
                raise OptionsError(
                    f"{name} is set and policy is {policy!r}, which plans nothing; use policy 'auto', or remove {name}"
                )
        if self.inner == "aot_eager" and self.inductor:
            warn(
                "inner='aot_eager' runs segments uncompiled: of the Inductor options only those that act on the joint "
                "graph (its passes and its partitioner) have an effect. For all of them use inner='inductor'"
            )

    def __hash__(self) -> int:
        return hash(self.cache_key())

    @staticmethod
    def from_torch_compile(mode: str | None, options: Mapping[str, Any] | Options | None) -> Options:
        """The options from torch.compile's arguments for a backend: ``mode`` and ``options``.

        An option in ``options["inductor"]`` outweighs the one that the mode implies. Raises
        OptionsError (a ValueError) for an unknown mode, option or value, UnsupportedError (a
        NotImplementedError) for a mode that uses CUDA graphs.
        """
        if options is None or isinstance(options, Mapping):
            result = Options(**_check_names(options or {}))
        elif isinstance(options, Options):
            result = options
        else:
            raise OptionsError(
                f"options is a {type(options).__name__}; expected a mapping such as "
                "{'policy': 'offload_all'}, or fxoffload.Options"
            )
        implied = _mode_options(mode)
        if not implied:
            return result
        return dataclasses.replace(result, inductor={**implied, **result.inductor_config()})

    @property
    def budget_bytes(self) -> int | None:
        """``activation_budget``, once it is in bytes: see ``fxoffload.auto_budget``."""
        if isinstance(self.activation_budget, str):
            raise AssertionError(f"expected a budget in bytes, found {self.activation_budget!r}")
        return self.activation_budget

    def inductor_config(self) -> dict[str, Any]:
        """A fresh dict of the Inductor options, the caller's to change."""
        return {name: _copy(value) for name, value in self.inductor}

    def cache_key(self) -> str:
        """A hash of every field.

        Equal for equal options in every process, except that a function or object without a
        ``uuid()`` method among the Inductor options is told apart by identity.
        """
        fields = (f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return hashlib.sha256("\n".join(fields).encode()).hexdigest()


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> object:
    if isinstance(value, str) and value in allowed:
        return value
    hint = suggestion(value, allowed) if isinstance(value, str) else ""
    raise OptionsError(f"{name} is {value!r}{hint}; expected one of {', '.join(allowed)}")


def _bytes_or_none(value: int | str | None, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name)


def _check_slowdown(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        if value > _MOST_SLOWDOWN:
            warn(
                f"max_slowdown is {value:g}: a step may take {1 + value:g} times as long. It is a fraction; for "
                f"{value:g} % write {value / 100:g}"
            )
        return float(value)
    raise OptionsError(f"max_slowdown is {value!r}; expected a fraction of the step time such as 0.02, or None")


def _check_profile(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionsError(f"profile is {value!r}; expected a shipped profile's name such as 'h200', or a file")
    name = str(os.fspath(value))
    load_profile(name)  # raises OptionsError, now rather than in the middle of a compile
    return name


def _check_names(options: Mapping[str, Any]) -> dict[str, Any]:
    valid = [f.name for f in dataclasses.fields(Options)]
    for name in options:
        if name not in valid:
            raise OptionsError(
                f"unknown option {name!r}{suggestion(str(name), valid)}; the options are "
                f"{', '.join(valid)}. Inductor's own options go under 'inductor', for example "
                "{'inductor': {'max_autotune': True}}"
            )
    return dict(options)


def _check_disable(disable: Iterable[str]) -> tuple[str, ...]:
    found = distinct_names("disable", disable, "('prefetch',)")
    check_pieces(found, "disable")
    return found


def _check_inductor(inductor: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    try:
        given = dict(inductor)
    except (TypeError, ValueError):
        raise OptionsError(
            f"inductor is {inductor!r}; expected a mapping of Inductor options, for example {{'max_autotune': True}}"
        ) from None
    if not given:
        return ()
    # Imported here: it takes a second that most users need not spend before the first compile.
    from torch._inductor import config

    known = config.get_config_copy()
    checked = {}
    for name, value in given.items():
        key = str(name).replace("-", "_")  # torch.compile accepts both spellings
        if key not in known:
            raise OptionsError(
                f"inductor names unknown option {name!r}{suggestion(key, known)}; "
                "torch._inductor.list_options() lists the valid ones"
            )
        _check_inductor_type(key, value, config.get_type(key))  # type: ignore[attr-defined]
        checked[key] = _copy(value)
    if checked.get("triton.cudagraphs"):
        raise _cuda_graphs_error("the Inductor option triton.cudagraphs", "remove it")
    return tuple(sorted(checked.items()))


def _check_inductor_type(name: str, value: object, expected: Any) -> None:
    # Only plain classes can be checked; annotations such as list[str] pass unchecked.
    if isinstance(expected, type) and not get_args(expected) and not isinstance(value, expected):
        raise OptionsError(
            f"inductor option {name} is {value!r}, a {type(value).__name__}; expected {expected.__name__}"
        )


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, Any]] = list_mode_options()
    if mode not in modes:
        valid = [name for name, implied in modes.items() if not implied.get("triton.cudagraphs")]
        raise OptionsError(
            f"unknown mode {mode!r}{suggestion(str(mode), valid)}; the modes that fxoffload "
            f"accepts are {', '.join(valid)}"
        )
    if modes[mode].get("triton.cudagraphs"):
        raise _cuda_graphs_error(f"mode {mode!r}", "use mode 'max-autotune-no-cudagraphs' or no mode")
    return dict(modes[mode])


def _cuda_graphs_error(what: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} uses CUDA graphs, which replay fixed addresses and cannot free and reload "
        f"activations between segments; {instead}"
    )


def _copy(value: Any) -> Any:
    """``value`` with containers copied, so that no caller can change a frozen option."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _text(value: Any) -> str:
    """A text that differs for different values and is the same in every process where it can be."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, dict):
        items = sorted(f"{_text(key)}:{_text(item)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(_text(item) for item in value)})"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    uuid = getattr(value, "uuid", None)
    if callable(uuid):
        return f"<{kind} {uuid()!r}>"
    return f"<{kind} at {id(value):x}>"
