"""From a tensor's name to its meaning: which block of experts, which expert, which projection, which parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fxoffload.checkpoints.families import PARAMETERS, PROJECTIONS, Family, Projection, Tower

Stored = Literal["gate", "up", "down", "gate_up"]

MERGED_NAMES: dict[str, Stored] = {"gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
# One way to write each: experts.03 would come back from another layout as experts.3. Nine digits at most.
NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_PARAMETER_OF_SUFFIX = {suffix: parameter for parameter, suffix in PARAMETERS.items()}
# Names in GPTQ, AWQ, compressed-tensors, bitsandbytes and MXFP4 of packed weights and of tensors that go with them.
FOUR_BIT = re.compile(
    r"[._](qweight|qzeros|scales|g_idx|blocks|weight_packed|weight_shape|weight_zero_point|weight_g_idx"
    r"|weight_global_scale|weight_scale_2|input_global_scale|absmax|quant_map|nested_\w+|quant_state\..*)$"
)


@dataclass(frozen=True)
class ExpertKey:
    """``block`` is the module that holds the experts, for example ``model.layers.3.mlp.experts``; ``stem`` is its
    beginning, ``model.layers.``.

    ``expert`` is None where all experts share the tensor; ``parameter`` is a key of PARAMETERS, or None where the name
    is not one that this package knows.
    """

    block: str
    stem: str
    tower: Tower
    layer: int
    expert: int | None
    projection: Stored
    parameter: str | None


class KeyReader:
    """Reads the names of one family."""

    def __init__(self, family: Family) -> None:
        # layers., blocks., h.: any list of modules, at any depth.
        stem = r"(?:[^.]+\.)+?" if family.stem is None else re.escape(family.stem)
        head = rf"(?P<prefix>{stem})(?P<layer>{NUMBER})\."
        shared = "|".join(re.escape(module) for module in (family.module, family.other_module) if module)
        names = "|".join(re.escape(name) for name in family.projections)
        self._family = family
        self._projection_of: dict[str, Projection] = dict(zip(family.projections, PROJECTIONS, strict=True))
        self._single = re.compile(
            rf"(?P<block>{head}{re.escape(family.module)})\.(?P<expert>{NUMBER})\.(?P<projection>{names})"
            r"\.(?P<parameter>.+)"
        )
        merged = rf"(?P<projection>{'|'.join(MERGED_NAMES)})(?P<suffix>(?:[._].*)?)"
        self._merged = re.compile(rf"(?P<block>{head}(?:{shared}))\.{merged}")
        # The same with numbers that are not written so: 03, or digits of another script.
        self._any_expert = re.compile(rf"(?P<block>(?P<prefix>{stem})\d+\.(?:{shared}))\.(?:\d+\..+|{merged})")

    def read(self, name: str) -> ExpertKey | None:
        """The meaning of ``name``, or None when it does not belong to an expert."""
        if match := self._single.fullmatch(name):
            parameter = match["parameter"] if match["parameter"] in PARAMETERS else None
            return self._key(match, int(match["expert"]), self._projection_of[match["projection"]], parameter)
        if match := self._merged.fullmatch(name):
            parameter = _PARAMETER_OF_SUFFIX.get(match["suffix"])
            return self._key(match, None, MERGED_NAMES[match["projection"]], parameter)
        if match := self._any_expert.fullmatch(name):
            return self._key(match, None, "gate", None, layer=0)
        return None

    def _key(
        self,
        match: re.Match[str],
        expert: int | None,
        projection: Stored,
        parameter: str | None,
        layer: int | None = None,
    ) -> ExpertKey:
        layer = int(match["layer"]) if layer is None else layer
        tower = next((t for t in self._family.towers if f".{t.prefix}" in f".{match['prefix']}"), Tower(""))
        return ExpertKey(match["block"], match["prefix"], tower, layer, expert, projection, parameter)


def merged_name(block: str, projection: Stored, parameter: str) -> str:
    """The name of a tensor that all experts share."""
    return f"{block}.{projection}_proj{PARAMETERS[parameter]}"
