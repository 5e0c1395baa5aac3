"""What the issue asks of phases, answered from the rows: held, not held, or open where it was not measured.

With several ranks the worst counts. Thresholds are those of the issue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.derived import case_label
from benchmarks.rl.records import Endurance, Exposed, Streamed, Switching
from benchmarks.schema import Record, Report

MIB = 1 << 20
Claim = dict[str, Any]

STEADY_OF_LINK = 0.95
FIRST_GB_PER_S = 10.0
HOST_VS_DEVICE = 1.02
EXPOSED_VS_SERIAL, LOGPROB_S = 0.10, 0.5
FIRST_FORWARD = 0.15
RESIDUE_BYTES = 300 * MIB
STREAM_OF_LINK = 0.90
EQUAL = ("bit_equal", "endured")
CYCLES, RSS_GROWTH_BYTES = 100, 64 * MIB


def check_phase_claims(report: Report) -> list[Claim]:
    """All claims of all rows that are fxoffload's."""
    claims: list[Claim] = []
    for record in report.records:
        for claim in _claims(report, record):
            if record.case.device != "cuda" and claim["held"] is not None:
                # The rehearsal has no link: only errors of every device count.
                wrong = claim["figures"].get("bit_equal") is False or "why" in claim["figures"]
                claim = {**claim, "held": False if wrong else None, "figures": claim["figures"] | {"missing": "a GPU"}}
            claims.append({"case": case_label(record.case), "variant": record.variant.label, **claim})
    return claims


def _claims(report: Report, record: Record) -> list[Claim]:
    rl = record.result.rl
    if report.scenario == "weight-sync" and record.variant.kind == "stream":
        return [_streamed(rl.stream if rl is not None else None)]
    if report.scenario != "phases" or record.variant.kind != "fxoffload":
        return []
    found = (rl.switching if rl is not None else None) or Switching()
    ranks = report.protocol.ranks
    return [
        _least("steady offload, of the link", _worst(found, "offload_of_link", min), STEADY_OF_LINK),
        _least("steady onload, of the link", _worst(found, "onload_of_link", min), STEADY_OF_LINK),
        _least("first offload, GB/s", _worst(found, "first_offload_gb_per_s", min), FIRST_GB_PER_S),
        _most("host bytes over device bytes", _worst(found, "host_vs_device", max), HOST_VS_DEVICE),
        _exposed(found),
        _most("first forward, of loading everything", _worst(found, "first_forward_fraction", max), FIRST_FORWARD),
        _residue(found),
        _ranks(found, ranks),
        _streamed(found.stream),
        _endured(found),
    ]


def _exposed(found: Switching) -> Claim:
    worst = _worst(found, "exposed_vs_serial", max)
    claim = _most("optimizer around log-probs, exposed of serial", worst, EXPOSED_VS_SERIAL)
    exposed: Exposed | None = found.exposed
    if exposed is not None:
        claim["figures"] |= {"logprob_s": exposed.logprob_s, "serial_s": exposed.serial_s}
        if claim["held"] and exposed.logprob_s < LOGPROB_S:
            claim["held"] = None
            claim["figures"]["missing"] = f"a log-prob phase of at least {LOGPROB_S} s"
    return claim


def _residue(found: Switching) -> Claim:
    """After the first cycle and at the end: both have to be small."""
    values = [_worst(found, name, max) for name in ("residue_bytes", "residue_later_bytes")]
    known = [value for value in values if value is not None]
    claim = _most("not free in rollout, bytes", max(known, default=None), RESIDUE_BYTES)
    if claim["held"] and len(known) < len(values):
        claim["held"] = None
        claim["figures"]["missing"] = "one of the two moments"
    return claim


def _ranks(found: Switching, ranks: int) -> Claim:
    """What holds for one GPU holds for each of several at once."""
    name = f"each of {ranks} GPUs at once, of its link" if ranks > 1 else "each of several GPUs at once, of its link"
    values = [row.get(way) for row in found.by_rank for way in ("offload_of_link", "onload_of_link")]
    known = [value for value in values if value is not None]
    if ranks < 2 or not known or len(known) < len(values):
        return {"claim": name, "held": None, "figures": {"missing": "--set ranks=2 or ranks=4"}}
    return _least(name, min(known), STEADY_OF_LINK)


def _streamed(stream: Streamed | None) -> Claim:
    claim = _least("stream_weights, of the link", stream.of_link if stream is not None else None, STREAM_OF_LINK)
    if stream is None:
        return claim
    claim["figures"] |= {"peak_bytes": stream.peak_bytes, "promised_bytes": stream.promised_bytes}
    if stream.equal is False:
        return {**claim, "held": False, "figures": claim["figures"] | {"why": "weights differ"}}
    if stream.peak_bytes is None or stream.promised_bytes is None:
        return {**claim, "held": None if claim["held"] else claim["held"]}
    if stream.peak_bytes > stream.promised_bytes:
        return {**claim, "held": False, "figures": claim["figures"] | {"why": "the peak is above the promise"}}
    return claim


def _endured(found: Switching) -> Claim:
    name = f"{CYCLES} cycles: bit-equal, no growth"
    endurance: Endurance | None = found.endurance
    bit_equal = found.bit_equal and all(row.get(which) != 0.0 for row in found.by_rank for which in EQUAL)
    if endurance is None:
        held = False if bit_equal is False else None
        return {"claim": name, "held": held, "figures": {"bit_equal": bit_equal, "missing": f"endurance={CYCLES}"}}
    grown = {
        "rss": endurance.rss_growth_bytes,
        "host": endurance.host_reserved_growth_bytes,
        "device_reserved": endurance.device_reserved_growth_bytes,
        "device_used": endurance.device_free_growth_bytes,
    }
    allowed = {"rss": RSS_GROWTH_BYTES, "host": 0, "device_reserved": 0, "device_used": 0}
    within = all(value is None or value <= allowed[which] for which, value in grown.items())
    held: bool | None = endurance.bit_equal and bit_equal is not False and within
    figures: dict[str, Any] = {"bit_equal": endurance.bit_equal, "cycles": endurance.cycles, "growth_bytes": grown}
    if held and (endurance.cycles < CYCLES or None in grown.values()):
        held = None
        figures["missing"] = f"{CYCLES} cycles on a GPU"
    return {"claim": name, "held": held, "figures": figures}


def _worst(found: Switching, name: str, worse: Callable[..., float]) -> float | None:
    values = [row.get(name) for row in found.by_rank]
    known = [value for value in values if value is not None]
    return worse(known) if known and len(known) == len(values) else None


def _least(name: str, value: float | None, limit: float) -> Claim:
    held = None if value is None else value >= limit
    return {"claim": f"{name}: at least {limit:g}", "held": held, "figures": {"value": value}}


def _most(name: str, value: float | None, limit: float) -> Claim:
    held = None if value is None else value <= limit
    return {"claim": f"{name}: at most {limit:g}", "held": held, "figures": {"value": value}}
