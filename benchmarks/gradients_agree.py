"""Do a variant's gradients agree with the reference's, within what rounding and atomics leave open? Needs no torch.

The reference is ``eager`` for eager variants and ``inductor`` for compiled ones, or the other where that is missing.
Every parameter is judged by its own noise in the comparison, the largest of

- the difference of either of the two in that parameter when it repeats its own step (kernels with atomics);
- where not both run eagerly, so that the kernels are others: the effect of another fusion of the same arithmetic. That
  is the difference of ``eager`` and ``inductor`` in that parameter in this run. Where one of them is missing, it is eps
  of the case's dtype times (1 + layers);
- half an eps, as much as rounding once may change. On an H200 in bfloat16 the last layer's gradients have the same bits
  in all eager peers, down to its attention's backward, whose atomics come first. 16 layers earlier they differ by 2 %.

Gradients agree when no parameter differs by more than ``ALLOWED`` times its noise, which is a sample of a random
quantity. That finds wrong gradients, not slightly inexact ones. Beyond noise that was only estimated from eps, or that
no repeated step has measured, ``gradients_agree`` is None: run ``eager`` and ``inductor`` as well.

On a CPU (bfloat16, 6 layers) the difference of compiled variants was 1.0 times that of ``eager`` and ``inductor`` for
the median parameter and 1.5 times for the worst, where whole gradients were compared. On an H200, taken together over
all layers of one projection, it was at most 1.7 times.

Older reports have one projection for each parameter, which says too little of any one of them, and one number for the
repeated step: there the noise of all is that of the worst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.activations.kinds import runs_eagerly
from benchmarks.gradients_compare import has_parts, relative_differences
from benchmarks.schema import Record, Result

ALLOWED = 3.0
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# A digest's sums may be added up in another order, and it keeps its projections in float32.
DIGEST_NOISE = 2.0**-24


@dataclass
class Noise:
    """What a comparison leaves open, by parameter; ``measured``: not only estimated."""

    of: dict[str, float]
    measured: bool


def compare_gradients(record: Record, references: Mapping[str, Record]) -> dict[str, Any]:
    """``{gradients_compared_with, gradients_agree, gradient_worst, gradient_ratio, gradient_difference,
    gradient_noise}``, the last three of the parameter ``gradient_worst``: the one farthest beyond its noise.

    Empty without a reference.

    Args:
        references: records of the same case by kind; only ``eager`` and ``inductor`` are looked at.
    """
    found = {kind: references[kind] for kind in ("eager", "inductor") if kind in references}
    found = {kind: other for kind, other in found.items() if other.result.gradients}
    order = ("eager", "inductor") if runs_eagerly(record.variant.kind) else ("inductor", "eager")
    kind = next((kind for kind in order if kind in found and found[kind] is not record), None)
    if kind is None or not record.result.gradients:
        return {}
    reference = found[kind]
    try:
        differences = relative_differences(record.result.gradients, reference.result.gradients)
    except ValueError as error:
        return {"gradients_compared_with": kind, "gradients_agree": False, "gradient_names": str(error)}
    noise = _noise(record, kind, found)
    ratios = {name: _ratio(difference, noise.of[name]) for name, difference in differences.items()}
    worst = max(ratios, key=ratios.__getitem__)
    agree = ratios[worst] <= ALLOWED
    return {
        "gradients_compared_with": kind,
        "gradients_agree": agree if agree or noise.measured else None,
        "gradient_worst": worst,
        "gradient_ratio": ratios[worst],
        "gradient_difference": differences[worst],
        "gradient_noise": noise.of[worst],
    }


def _ratio(difference: float, noise: float) -> float:
    """A value that is not finite agrees with nothing, not even with itself."""
    return difference / noise if math.isfinite(noise) else math.inf


def _noise(record: Record, kind: str, found: Mapping[str, Record]) -> Noise:
    results = [record.result, found[kind].result]
    names = list(record.result.gradients)
    by_parameter = all(has_parts(result.gradients) for result in results)
    floor = max(EPS.get(record.case.dtype, 0.0) / 2 if by_parameter else 0.0, DIGEST_NOISE)
    sources = [dict.fromkeys(names, floor), *(_repeats(result, by_parameter) for result in results)]
    if runs_eagerly(record.variant.kind) and kind == "eager":
        measured = all(result.gradient_repeat_difference is not None for result in results)
    else:
        rounding, measured = _rounding(record, found, by_parameter)
        sources.append(rounding)
    return Noise({name: max(source.get(name, 0.0) for source in sources) for name in names}, measured)


def _repeats(result: Result, by_parameter: bool) -> dict[str, float]:
    if by_parameter:
        return result.gradient_repeat_differences
    return dict.fromkeys(result.gradients, result.gradient_repeat_difference or 0.0)


def _rounding(record: Record, found: Mapping[str, Record], by_parameter: bool) -> tuple[dict[str, float], bool]:
    """What other kernels change, and whether that was measured."""
    if record.variant.kind in found or len(found) < 2:
        eps = EPS.get(record.case.dtype, 0.0) * (1 + record.case.layers)
        return dict.fromkeys(record.result.gradients, eps), False
    differences = relative_differences(found["inductor"].result.gradients, found["eager"].result.gradients)
    if not by_parameter:
        differences = dict.fromkeys(differences, max(differences.values(), default=0.0))
    return differences, True


def claim_gradients_agree(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every variant of one case that was compared: {claim, held, figures}; ``held`` is None where none was.

    Args:
        rows: derived rows, each with what ``compare_gradients`` said.
    """
    compared = {row["variant"]: row for row in rows if "gradients_agree" in row}
    figures: dict[str, Any] = {
        "differences": {label: row.get("gradient_difference") for label, row in compared.items()},
        "noise": {label: row.get("gradient_noise") for label, row in compared.items()},
        "ratios": {label: row.get("gradient_ratio") for label, row in compared.items()},
        "parameters": {label: row.get("gradient_worst") for label, row in compared.items()},
        "disagree": [label for label, row in compared.items() if row["gradients_agree"] is False],
        "undecided": [label for label, row in compared.items() if row["gradients_agree"] is None],
    }
    ratios = {label: ratio for label, ratio in figures["ratios"].items() if ratio is not None}
    if ratios:
        label = max(ratios, key=ratios.__getitem__)
        figures["farthest"] = f"{ratios[label]:.2g}x in {figures['parameters'][label]} of {label}"
    if not compared:
        figures["missing"] = "eager or inductor, and another variant, with gradients"
    held = None if not compared or figures["undecided"] else True
    held = False if figures["disagree"] else held
    return {"claim": f"gradients agree within {ALLOWED:g}x the noise", "held": held, "figures": figures}
