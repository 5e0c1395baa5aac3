"""Do a variant's gradients agree with the reference's, within what rounding and atomics leave open? Needs no torch.

The reference is ``eager`` for what runs eagerly and ``inductor`` for what is compiled, or the other where that is
missing. What the comparison leaves open (``noise``) is the largest of

- what either of the two differs by when it repeats its own step (kernels with atomics),
- where both run eagerly: nothing more, as they run the same kernels;
- else what another fusion of the same arithmetic changes: the difference of ``eager`` and ``inductor`` in this run, or,
  where one of them is missing, eps of the case's dtype times (1 + layers). Runs on an H200 in bfloat16 had 0.04 with 4
  layers, 0.07 to 0.12 with 16 and 0.2 with 36 between compiled variants, the worst of all parameters.

Gradients agree when they differ by at most ``ALLOWED`` times the noise: it is one sample of a random quantity. That
finds what is wrong, not what is slightly off. Beyond noise that was only estimated from eps, ``gradients_agree`` is
None: run ``eager`` and ``inductor`` beside it. Eager peers are held to the same bits, but for atomics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.activations.kinds import runs_eagerly
from benchmarks.gradients_compare import max_relative_difference
from benchmarks.schema import Record

ALLOWED = 3.0
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# Sums of the same bits may be added up in another order by the digest itself (float64).
DIGEST_NOISE = 1e-12


def compare_gradients(record: Record, references: Mapping[str, Record]) -> dict[str, Any]:
    """``{gradients_compared_with, gradient_difference, gradient_noise, gradients_agree}``; empty without a reference.

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
        difference = max_relative_difference(record.result.gradients, reference.result.gradients)
    except ValueError as error:
        return {"gradients_compared_with": kind, "gradients_agree": False, "gradient_names": str(error)}
    repeats = [r.result.gradient_repeat_difference or 0.0 for r in (record, reference)]
    rounding, measured = _rounding(record, kind, found)
    noise = max(*repeats, rounding, DIGEST_NOISE)
    agree = difference <= ALLOWED * noise
    return {
        "gradients_compared_with": kind,
        "gradient_difference": difference,
        "gradient_noise": noise,
        "gradients_agree": agree if agree or measured else None,
    }


def _rounding(record: Record, kind: str, found: Mapping[str, Record]) -> tuple[float, bool]:
    """What other kernels change, and whether that was measured."""
    if runs_eagerly(record.variant.kind) and kind == "eager":
        return 0.0, True
    eps = EPS.get(record.case.dtype, 0.0) * (1 + record.case.layers)
    if record.variant.kind not in found and len(found) == 2:
        return max_relative_difference(found["inductor"].result.gradients, found["eager"].result.gradients), True
    return eps, False


def claim_gradients_agree(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every variant of one case that was compared: {claim, held, figures}; ``held`` is None where none was.

    Args:
        rows: derived rows, each with what ``compare_gradients`` said.
    """
    compared = {row["variant"]: row for row in rows if "gradients_agree" in row}
    figures: dict[str, Any] = {
        "differences": {label: row.get("gradient_difference") for label, row in compared.items()},
        "noise": {label: row.get("gradient_noise") for label, row in compared.items()},
        "disagree": [label for label, row in compared.items() if row["gradients_agree"] is False],
        "undecided": [label for label, row in compared.items() if row["gradients_agree"] is None],
    }
    if not compared:
        figures["missing"] = "eager or inductor, and another variant, with gradients"
    held = None if not compared or figures["undecided"] else True
    held = False if figures["disagree"] else held
    return {"claim": f"gradients agree within {ALLOWED:g}x the noise", "held": held, "figures": figures}
