"""The words of ``--variants`` for the scenarios of phases. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from benchmarks.schema import Variant

SCENARIOS = ("pinning", "phases", "weight-sync", "rl-step")
STRATEGIES = ("fxoffload", "verl", "verl_checkout", "pageable", "packed", "module_to", "torch_memory_saver", "none")
KINDS: dict[str, tuple[str, ...]] = {
    "pinning": ("huge", "small", "staged", "resize", "room", "give_back", "small_copies"),
    "phases": STRATEGIES[:-1],
    "weight-sync": ("stream", "stream_resident", "load_all", "per_parameter"),
    "rl-step": STRATEGIES,
}
WITH_OPTIONS = ("fxoffload", "stream", "stream_resident", "load_all", "verl_checkout")


def parse_variants(scenario: str, text: str, verl: str = "") -> list[Variant]:
    """``fxoffload@pin=false,verl``, ``stream@bucket_bytes=512MiB``: options go to ``PhaseManager`` or
    ``stream_weights``.

    Args:
        verl: a checkout, for ``verl_checkout``.

    Raises:
        ValueError: an unknown variant, an option of a variant that takes none.
    """
    return [_variant(scenario, label.strip(), verl) for label in text.split(",") if label.strip()]


def _variant(scenario: str, label: str, verl: str) -> Variant:
    kind, *words = label.split("@")
    known = KINDS[scenario]
    if kind not in known:
        raise ValueError(f"unknown variant {kind!r} of {scenario}; known: {', '.join(known)}")
    if words and kind not in WITH_OPTIONS:
        raise ValueError(f"{label!r}: only {', '.join(WITH_OPTIONS)} take options")
    options: dict[str, Any] = {"path": verl} if kind == "verl_checkout" and verl else {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{label!r}: expected option=value after @, found {word!r}")
        options[name] = {"true": True, "false": False}.get(value, value)
    return Variant(label, kind, options)
