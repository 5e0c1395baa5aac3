"""Command-line words to cases, variants and a protocol. Nothing here imports torch, so mistakes are told at once."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.activations.kinds import CHECKOUTS, PATH, PEERS
from benchmarks.budgets import check_budget
from benchmarks.hf_models import HF_MODELS
from benchmarks.scenarios import COLLECTIVES_BESIDE, STOCK, STOCK_FSDP, STOCK_SCENARIOS
from benchmarks.schema import PROCESS_GROUPS, Case, Protocol, Variant
from benchmarks.stock.models import SHARDED, SHARDED_CASES, STOCK_CASES, WHOLE_CASES, is_stock

KINDS = ("eager", "inductor", "checkpoint", "keep_all", "offload_all", "auto", "torch_budget", *PEERS)
FXOFFLOAD_KINDS = ("keep_all", "offload_all", "auto")
TUPLE_OPTIONS = ("device_types", "disable")
# Options that `--set` may give to every fxoffload variant at once. After `@`, any option goes: the backend validates.
# What a plan is asked for goes after `@` only: it differs from variant to variant, and policies refuse it.
SHARED_OPTIONS = (
    "inner",
    "device_types",
    "disable",
    "min_bytes",
    "recompute",
    "checkpoints",
    "host_budget",
    "in_flight_budget",
    "prefetch_budget",
    "on_error",
    "profile",
)
VOCABULARY = 151_936
CASES = {
    "stack": Case(),
    "stack65k": Case(layers=10, seq=65_536),
    "causal_lm": Case(name="causal_lm", layers=8, seq=8192, vocab=VOCABULARY),
    # The shape of Qwen3-30B-A3B: `ffn` is one expert's. 24 of its 48 layers, see README.md.
    "moe": Case(
        name="moe",
        layers=24,
        seq=8192,
        hidden=2048,
        ffn=768,
        heads=32,
        kv_heads=4,
        experts=128,
        experts_per_token=8,
    ),
    # 3.2e9 parameters: 6.4 GB, and 12.9 GB of AdamW's state in bfloat16.
    "rl": Case(name="causal_lm", layers=16, seq=4096, vocab=16_384, compile="no", parallel="fsdp2", micro_batches=2),
    "qwen3_8b": Case(name="causal_lm", layers=36, seq=8192, vocab=VOCABULARY),
    **{name: model.case for name, model in HF_MODELS.items()},
}
MEMORY_FRACTIONS = ("no", "steps", "whole")
CASE_FIELDS = {item.name: item for item in dataclasses.fields(Case)}
PROTOCOL_FIELDS = {item.name: item for item in dataclasses.fields(Protocol)}


def expand_set(words: list[str]) -> list[str]:
    """``--set a=1 b=2`` becomes ``--set a=1 --set b=2``, which click understands."""
    expanded: list[str] = []
    inside = False
    for word in words:
        if word.startswith("-"):
            inside = word == "--set"
            expanded.append(word)
        elif inside and "=" in word:
            expanded += [word] if expanded[-1] == "--set" else ["--set", word]
        else:
            inside = False
            expanded.append(word)
    return expanded


def split_settings(settings: Iterable[str]) -> dict[str, list[str]]:
    """``layers=16,36`` is a sweep: one list of values per name. A later setting of the same name wins."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not name or not text:
            raise ValueError(f"expected name=value, found {setting!r}")
        values[name] = [str(Path(text).expanduser().resolve())] if name in CHECKOUTS else text.split(",")
    known = ["case", *CASE_FIELDS, *PROTOCOL_FIELDS, *SHARED_OPTIONS, *CHECKOUTS]
    unknown = sorted(set(values) - set(known) | ({"name", "form"} & set(values)))
    if unknown:
        settable = ", ".join(n for n in known if n not in ("name", "form"))
        raise ValueError(f"unknown setting {', '.join(unknown)}; known: {settable}")
    return values


def parse_cases(values: dict[str, list[str]], defaults: dict[str, list[str]]) -> list[Case]:
    """The product of the swept values. ``defaults`` are the scenario's own; the user's settings win."""
    merged = {**defaults, **values}
    names = [name for name in merged if name in CASE_FIELDS]
    cases = []
    for label in merged.get("case", ["stack"]):
        if label not in CASES and label not in STOCK_CASES:
            raise ValueError(f"unknown case {label!r}; known: {', '.join([*CASES, *STOCK_CASES])}")
        for point in itertools.product(*(merged[name] for name in names)):
            changes = {name: _cast(text, CASE_FIELDS[name].type) for name, text in zip(names, point, strict=True)}
            cases.append(dataclasses.replace(CASES.get(label) or STOCK_CASES[label], **changes))
    return cases


def check_stock_cases(scenario: str, cases: Iterable[Case]) -> None:
    """Stock models have scenarios of their own, which run nothing else.

    Raises:
        ValueError: a case of the other kind.
    """
    for case in cases:
        of = (STOCK_FSDP if case.form == SHARDED else STOCK) if is_stock(case) else ""
        if of != (scenario if scenario in STOCK_SCENARIOS else ""):
            known = {STOCK: WHOLE_CASES, STOCK_FSDP: SHARDED_CASES}.get(scenario, list(CASES))
            found = f"{case.name}-{case.form}" if case.form else case.name
            raise ValueError(f"{scenario} expects one of the cases {', '.join(known)}; found {found}")


def parse_protocol(values: dict[str, list[str]], defaults: dict[str, Any]) -> Protocol:
    """The protocol of all variants of a run: it cannot be swept."""
    changes = dict(defaults)
    for name in values:
        if name == "lengths":
            changes[name] = _lengths(values[name])
        elif name in PROTOCOL_FIELDS:
            if len(values[name]) != 1:
                raise ValueError(f"{name} is the same for the whole run; found {len(values[name])} values")
            changes[name] = _cast(values[name][0], PROTOCOL_FIELDS[name].type)
    protocol = Protocol(**changes)
    if protocol.steps < 5:
        raise ValueError(f"medians are taken over at least 5 timed steps; found steps={protocol.steps}")
    if protocol.memory_fraction not in MEMORY_FRACTIONS:
        raise ValueError(
            f"expected memory_fraction to be one of {', '.join(MEMORY_FRACTIONS)}, found {protocol.memory_fraction!r}"
        )
    if protocol.process_group not in PROCESS_GROUPS:
        raise ValueError(
            f"expected process_group to be one of {', '.join(filter(None, PROCESS_GROUPS))}, or unset,"
            f" found {protocol.process_group!r}"
        )
    return protocol


def parse_variants(text: str, values: dict[str, list[str]]) -> list[Variant]:
    """``offload_all@in_flight_budget=1GiB@disable=a+b`` and friends, separated by commas."""
    shared = {name: parse_option(name, ",".join(values[name])) for name in SHARED_OPTIONS if name in values}
    checkouts = {name: ",".join(values[name]) for name in CHECKOUTS if name in values}
    return [_variant(label.strip(), shared, checkouts) for label in text.split(",") if label.strip()]


def _variant(label: str, shared: dict[str, Any], checkouts: dict[str, str]) -> Variant:
    kind, *words = label.split("@")
    if kind not in KINDS:
        raise ValueError(f"unknown variant {kind!r}; known: {', '.join(KINDS)}")
    lengths = [word for word in words if word.startswith("lengths=")]
    words = [word for word in words if word not in lengths]
    found = _lengths(lengths[0].removeprefix("lengths=").split("+")) if lengths else []
    if kind == "torch_budget":
        return Variant(label, kind, {"activation_memory_budget": _torch_budget(label, words)}, found)
    if kind in PEERS:
        return Variant(label, kind, _peer_options(label, kind, words, checkouts), found)
    if kind not in FXOFFLOAD_KINDS:
        if words:
            raise ValueError(f"{label!r}: only fxoffload's variants, torch_budget and peers take options, not {kind}")
        return Variant(label, kind, {}, found)
    options: dict[str, Any] = {"policy": kind, **shared, **_options(label, words)}
    check_budget(options.get("activation_budget"))
    return Variant(label, kind, options, found)


def parse_beside(text: str) -> list[Variant]:
    """``idle,matmul``: the work during the collectives of the scenario ``collectives``.

    Raises:
        ValueError: an unknown variant.
    """
    labels = [label.strip() for label in text.split(",") if label.strip()]
    for label in labels:
        if label not in COLLECTIVES_BESIDE:
            raise ValueError(f"unknown variant {label!r} of collectives; known: {', '.join(COLLECTIVES_BESIDE)}")
    return [Variant(label, label) for label in labels]


def _options(label: str, words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{label!r}: expected option=value after @, found {word!r}")
        options[name] = str(Path(value).expanduser().resolve()) if name == PATH else parse_option(name, value)
    return options


def _peer_options(label: str, kind: str, words: list[str], checkouts: dict[str, str]) -> dict[str, Any]:
    """A peer's own options, and the checkout that ``--set`` gives to all variants of that peer."""
    peer = PEERS[kind]
    options = {PATH: checkouts[peer.checkout]} if peer.checkout in checkouts else {}
    options |= _options(label, words)
    unknown = sorted(set(options) - set(peer.options))
    if unknown:
        known = ", ".join(peer.options) or "none"
        raise ValueError(f"{label!r}: unknown option {', '.join(unknown)} of {kind}; known: {known}")
    return options


def _torch_budget(label: str, words: list[str]) -> float:
    """The one word of ``torch_budget@0.5``: torch's own activation_memory_budget."""
    try:
        (word,) = words
        fraction = float(word)
    except ValueError:
        raise ValueError(f"{label!r}: expected one number after @, as in torch_budget@0.5") from None
    if not 0 <= fraction <= 1:
        raise ValueError(f"{label!r}: expected a fraction of at most 1, found {fraction}")
    return fraction


def _lengths(words: list[str]) -> list[int]:
    lengths = [int(word) for word in words]
    if lengths != sorted(set(lengths)):
        raise ValueError(f"expected lengths in ascending order, found {lengths}")
    return lengths


def parse_option(name: str, text: str) -> Any:
    """An fxoffload option: ``a+b`` for tuples, numbers as numbers, sizes ("1GiB") as text."""
    if name in TUPLE_OPTIONS:
        return [word for word in text.replace(",", "+").split("+") if word]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _cast(text: str, kind: Any) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, found {text!r}")
        return text == "true"
    return kind(text)
