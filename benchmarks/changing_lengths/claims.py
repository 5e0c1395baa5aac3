"""What the scenario ``fsdp-lengths`` promises, by variant of fxoffload: held or not, with the figures."""

from __future__ import annotations

from typing import Any

from benchmarks.arguments import FXOFFLOAD_KINDS
from benchmarks.schema import Record

MIB = 1 << 20
# What a process may grow by, beyond what it grows by with plain Inductor: on torch 2.11 with cuDNN's attention every
# new length costs it 3.4 MiB.
MOST_GROWN_BYTES = 32 * MIB
MOST_GRAPHS = 4
KINDS_OF_PROCESS = ("resident", "anonymous", "malloc_used")


def check_lengths_claims(records: list[Record]) -> list[dict[str, Any]]:
    """Of one case. Open where no variant of fxoffload was measured, or (of the process) Inductor was not."""
    ours = [r for r in records if r.variant.kind in FXOFFLOAD_KINDS and r.result.changing_lengths is not None]
    return [_reserved(ours), _process(ours, records), _compilations(ours)]


def _reserved(ours: list[Record]) -> dict[str, Any]:
    """The device's memory by the caching allocator, the host's by the arena."""
    steps = min((r.result.num_timed_steps for r in ours), default=0)
    grown: dict[str, dict[str, int]] = {}
    for record in ours:
        run = record.result.changing_lengths
        assert run is not None
        grown[record.variant.label] = {"device": run.most_grown("device_reserved"), "host": run.most_grown("arena")}
    held = all(nbytes <= 0 for kinds in grown.values() for nbytes in kinds.values()) if grown else None
    return _claim(f"{steps} steps of random lengths: reserved memory does not grow", held, {"grown_bytes": grown})


def _process(ours: list[Record], records: list[Record]) -> dict[str, Any]:
    name = f"the process grows by at most {MOST_GROWN_BYTES // MIB} MiB more than Inductor's"
    plain = next((r.result.changing_lengths for r in records if r.variant.kind == "inductor"), None)
    if plain is None or not ours:
        return _claim(name, None, {"missing": "inductor and a variant of fxoffload"})
    grown: dict[str, dict[str, int]] = {}
    held = True
    for record in ours:
        run = record.result.changing_lengths
        assert run is not None
        found = {kind: run.most_grown(kind) for kind in KINDS_OF_PROCESS}
        grown[record.variant.label] = found
        held = held and all(n <= max(plain.most_grown(kind), 0) + MOST_GROWN_BYTES for kind, n in found.items())
    grown["inductor"] = {kind: plain.most_grown(kind) for kind in KINDS_OF_PROCESS}
    return _claim(name, held, {"grown_bytes": grown})


def _compilations(ours: list[Record]) -> dict[str, Any]:
    graphs = {r.variant.label: max(run.graphs_by_rank) for r in ours if (run := r.result.changing_lengths) is not None}
    held = max(graphs.values()) <= MOST_GRAPHS if graphs else None
    return _claim(f"at most {MOST_GRAPHS} graphs are compiled", held, {"graphs": graphs})


def _claim(name: str, held: bool | None, figures: dict[str, Any]) -> dict[str, Any]:
    return {"claim": name, "held": held, "figures": figures}
