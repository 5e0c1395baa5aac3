"""The command that measures a report again: as it was called, with the protocol that was a default then written out."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from benchmarks import moe_convert
from benchmarks.activations.kinds import CHECKOUTS
from benchmarks.machine import RECORDED_VARIABLES
from benchmarks.scenarios import COLLECTIVES, FSDP, FSDP_LENGTHS, current_name, find_scenario
from benchmarks.schema import Protocol, Report

# Arguments about the place and time of a run, not about the measurement.
OF_ONE_RUN = ("--deadline-s", "--resume", "--out")
# As of the place and the time: how long a variant may take, and where compile caches lie.
NOT_MEASURED = ("timeout_s", "caches", "folder")

STEPS = ("warmup", "steps", "calibration_steps")
CYCLES = ("steps", "cycles_s", "logprob_s")
# Arguments that a scenario's figures depend on are always written out; others where they differ from the default.
OF_SCENARIO: dict[str, tuple[str, ...]] = {
    "activations": STEPS,
    "compile-time": ("warmup", "steps", "warm"),
    FSDP: ("ranks", *STEPS),
    FSDP_LENGTHS: ("ranks", "shortest", *STEPS),
    COLLECTIVES: ("ranks", "warmup", "steps"),
    "plan": (*STEPS, "long_steps", "memory_fraction"),
    "budget-sweep": STEPS,
    "overhead": ("warmup", "steps"),
    "max-seq": ("probes", "probe_steps"),
    "pinning": ("pin_gib",),
    "phases": (*CYCLES, "endurance", "bucket"),
    "weight-sync": (*CYCLES, "bucket"),
    "rl-step": ("warmup", *CYCLES, "bucket", "rollout_s", "kv_fraction"),
    moe_convert.NAME: ("bytes", "rounds", "warmup", "scale"),
}


def reproduce(report: Report | moe_convert.MoeReport) -> str:
    """The command of a run, without the arguments of a single call."""
    environment = report.environment
    words = iter(shlex.split(str(environment["command"])))
    kept: list[str] = []
    for word in words:
        if word in OF_ONE_RUN:
            next(words, None)
        else:
            name, is_setting, _ = word.partition("=")
            kept.append(f"{name}=PATH" if is_setting and name in CHECKOUTS else word)
    names = [name for name in RECORDED_VARIABLES if name != "CUDA_VISIBLE_DEVICES"]
    variables = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    return " ".join([*variables, shlex.join(_with_settings(kept, _settings(report, kept))), "--out DIR"])


def _settings(report: Report | moe_convert.MoeReport, words: list[str]) -> list[str]:
    """``name=value`` of the report's protocol, of what the command does not set."""
    given = {word.partition("=")[0] for word in _given(words)}
    scenario = current_name(report.scenario)
    always = OF_SCENARIO.get(scenario, ())
    default: dict[str, Any] = dataclasses.asdict(_default(scenario))
    found: dict[str, Any] = dataclasses.asdict(report.protocol)
    wanted = [name for name in always if name in found]
    wanted += [name for name in found if name not in (*always, *NOT_MEASURED) and found[name] != default[name]]
    return [f"{name}={_text(found[name])}" for name in wanted if name not in given]


def _default(scenario: str) -> Protocol | moe_convert.Protocol:
    """The protocol of a command that sets nothing, today."""
    if scenario == moe_convert.NAME:
        return moe_convert.Protocol()
    return Protocol(**find_scenario(scenario).protocol_defaults)


def _text(value: Any) -> str:
    """As ``--set`` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _given(words: list[str]) -> list[str]:
    """The settings among the words of a command."""
    start, end = _range(words)
    return words[start:end]


def _with_settings(words: list[str], settings: list[str]) -> list[str]:
    start, end = _range(words)
    option = [] if start < end or not settings else ["--set"]
    return [*words[:end], *option, *settings, *words[end:]]


def _range(words: list[str]) -> tuple[int, int]:
    """Where the settings of the one ``--set`` begin and end; both the end of the words where there is none."""
    if "--set" not in words:
        return len(words), len(words)
    start = words.index("--set") + 1
    end = start
    while end < len(words) and "=" in words[end] and not words[end].startswith("-"):
        end += 1
    return start, end
