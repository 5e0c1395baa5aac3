"""Which family a checkpoint is of: by its config, or by a pattern that the user gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fxoffload.checkpoints.config_values import counts_experts
from fxoffload.checkpoints.errors import CheckpointError, UnknownFamilyError, shortened, some
from fxoffload.checkpoints.families import FAMILIES, Family, Tower

# Where multimodal configs keep their language model, outermost first.
SECTIONS = ("", "text_config", "thinker_config.text_config", "thinker_config", "language_config", "llm_config")
EXAMPLE = "model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight"


def find_family(
    config: Mapping[str, Any] | None, keys: Iterable[str], pattern: str | None = None
) -> tuple[Family, str]:
    """The family, and the dotted path of the config's section that counts its experts ("" is the whole config).

    Raises UnknownFamilyError, which lists the known ones and keys that look like experts.
    """
    if pattern is not None:
        return parse_pattern(pattern), _counting_section(config or {})
    known = {model_type: family for family in FAMILIES for model_type in family.model_types}
    seen = []
    for section in SECTIONS:
        found = section_of(config or {}, section).get("model_type")
        if isinstance(found, str) and found in known:
            return known[found], _counting_section(config or {}, section)
        if found is not None:
            seen.append(shortened(found))
    keys = list(keys)
    experts = [key for key in keys if "expert" in key] or keys
    raise UnknownFamilyError(
        f"expected config.json to have one of the model types {', '.join(known)}, found {', '.join(seen) or 'none'}; "
        f"keys: {some(experts)}. Describe the experts with --pattern '{EXAMPLE}'"
    )


def _counting_section(config: Mapping[str, Any], named: str = "") -> str:
    """Multimodal configs say the model type outside, in the section ``named``, and the number of experts inside."""
    inside = (section for section in SECTIONS if section.startswith(named))
    return next((section for section in inside if counts_experts(section_of(config, section))), named)


def section_of(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The part of a config at a dotted path; empty where there is none."""
    for name in filter(None, path.split(".")):
        value = config.get(name)
        config = value if isinstance(value, Mapping) else {}
    return config


def tower_config(config: Mapping[str, Any] | None, section: str, tower: Tower) -> Mapping[str, Any]:
    """The part of ``config`` that describes ``tower``; ``section`` is the one that counts the model's experts."""
    return section_of(config or {}, section if tower.section is None else tower.section)


def quantization_of(config: Mapping[str, Any] | None, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """``quantization_config`` of a section of ``config``, else of the whole; empty where there is none."""
    return section_of(section, "quantization_config") or section_of(config or {}, "quantization_config")


def parse_pattern(pattern: str) -> Family:
    """A family from a key with ``{layer}``, ``{expert}`` and the names of the projections, ``{gate|up|down}``."""
    match = re.fullmatch(
        r"(?P<stem>[^{}]*)\{layer\}\.(?P<module>[^{}]+)\.\{expert\}\.\{(?P<names>[^{}|]+\|[^{}|]+\|[^{}|]+)\}\.weight",
        pattern,
    )
    if match is None:
        raise CheckpointError(f"expected a pattern such as {EXAMPLE!r}, found {pattern!r}; write an expert's key so")
    gate, up, down = match["names"].split("|")
    if len({gate, up, down}) < 3:
        raise CheckpointError(
            f"expected three different names for gate, up and down, found {match['names']!r}; write {EXAMPLE!r} so"
        )
    return Family(
        name="pattern",
        model_types=(),
        layers="unchecked",
        module=match["module"],
        projections=(gate, up, down),
        towers=(Tower(""),),
        stem=match["stem"],
    )
