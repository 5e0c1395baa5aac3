"""What the scenario ``fsdp-lengths`` promises, by variant of fxoffload: held or not, with the figures."""

from __future__ import annotations

from typing import Any

from benchmarks.arguments import FXOFFLOAD_KINDS
from benchmarks.changing_lengths.records import LengthsRun
from benchmarks.schema import Record

MIB = 1 << 20
# Growth of a process that is allowed beyond plain Inductor's: on torch 2.11 with cuDNN's attention every new length
# costs it 3.4 MiB.
MOST_GROWN_BYTES = 32 * MIB
# And while lengths that it has seen come once more.
MOST_GROWN_AGAIN_BYTES = 4 * MIB
MOST_GRAPHS = 4
KINDS_OF_PROCESS = ("resident", "anonymous", "malloc_used")


def check_lengths_claims(records: list[Record]) -> list[dict[str, Any]]:
    """Of one case. Open where no variant of fxoffload was measured, or (but for the arena and the graphs) Inductor was
    not."""
    ours = [r for r in records if r.variant.kind in FXOFFLOAD_KINDS and r.result.changing_lengths is not None]
    plain = next((r.result.changing_lengths for r in records if r.variant.kind == "inductor"), None)
    return [_arena(ours), _device(ours, plain), _process(ours, plain), _again(ours, plain), _compilations(ours)]


def _arena(ours: list[Record]) -> dict[str, Any]:
    steps = min((r.result.num_timed_steps for r in ours), default=0)
    grown = _grown(ours, "arena")
    held = max(grown.values()) <= 0 if grown else None
    return _claim(f"{steps} steps of random lengths: the arena does not grow", held, {"grown_bytes": grown})


def _device(ours: list[Record], plain: LengthsRun | None) -> dict[str, Any]:
    """By the caching allocator, which may not find room for a length among what others left."""
    name = "reserved memory of the device grows no more than Inductor's"
    grown = _grown(ours, "device_reserved")
    if plain is None or not grown:
        return _claim(name, None, {"missing": "inductor and a variant of fxoffload"})
    most = plain.most_grown("device_reserved")
    return _claim(name, max(grown.values()) <= max(most, 0), {"grown_bytes": grown | {"inductor": most}})


def _grown(ours: list[Record], kind: str) -> dict[str, int]:
    """By variant."""
    return {r.variant.label: run.most_grown(kind) for r in ours if (run := r.result.changing_lengths) is not None}


def _process(ours: list[Record], plain: LengthsRun | None) -> dict[str, Any]:
    name = f"the process grows by at most {MOST_GROWN_BYTES // MIB} MiB more than Inductor's"
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


def _again(ours: list[Record], plain: LengthsRun | None) -> dict[str, Any]:
    """What grows with the steps, not with the lengths, would grow without end."""
    name = (
        f"lengths seen before: the device no more than Inductor's, the process {MOST_GROWN_AGAIN_BYTES // MIB} MiB more"
    )
    runs = {r.variant.label: run for r in ours if (run := r.result.changing_lengths) is not None}
    if plain is not None:
        runs["inductor"] = plain
    grown = {label: found for label, run in runs.items() if (found := _grown_again(run)) is not None}
    if "inductor" not in grown or len(grown) < 2:
        return _claim(name, None, {"missing": "inductor and a variant of fxoffload"})
    most = {kind: max(nbytes, 0) + MOST_GROWN_AGAIN_BYTES for kind, nbytes in grown["inductor"].items()}
    most["device_reserved"] -= MOST_GROWN_AGAIN_BYTES
    held = all(found[kind] <= most[kind] for found in grown.values() for kind in most)
    return _claim(name, held, {"grown_bytes": grown})


def _grown_again(run: LengthsRun) -> dict[str, int] | None:
    found = {kind: run.most_grown_again(kind) for kind in ("device_reserved", *KINDS_OF_PROCESS)}
    return {kind: nbytes for kind, nbytes in found.items() if nbytes is not None} or None


def _compilations(ours: list[Record]) -> dict[str, Any]:
    graphs = {r.variant.label: max(run.graphs_by_rank) for r in ours if (run := r.result.changing_lengths) is not None}
    held = max(graphs.values()) <= MOST_GRAPHS if graphs else None
    return _claim(f"at most {MOST_GRAPHS} graphs are compiled", held, {"graphs": graphs})


def _claim(name: str, held: bool | None, figures: dict[str, Any]) -> dict[str, Any]:
    return {"claim": name, "held": held, "figures": figures}
