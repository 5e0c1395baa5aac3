"""Simulated steps under fixed decisions and windows. Nothing is searched for, so the numbers are equal, not better.

Better plans might come from a simulator that leaves something out; here that shows.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from fxoffload.planner import ConstantRates, SegmentStep, StorageInfo, TrainingStep, simulate
from tests.oracle.adapter import Windows

COUNT = 24
NAMES = tuple(f"random step {i}" for i in range(COUNT))
_KB = 1000


def step_of(generator: random.Random) -> TrainingStep:
    """A chain of layers: inputs, values that are saved, streams, views that are saved later, gradients."""
    count = generator.randint(3, 8)
    storages = [StorageInfo("x", 40 * _KB, moved_bytes=40 * _KB, is_input=True)]
    reads: list[list[str]] = [["x"] if i == 0 else [f"stream {i - 1}"] for i in range(count)]
    writes: list[list[str]] = [[f"stream {i}"] for i in range(count)]
    back: list[list[str]] = [[] for _ in range(count)]
    back[-1].append("x")
    for i in range(count):
        storages.append(StorageInfo(f"stream {i}", generator.randint(10, 60) * _KB, is_output=i == count - 1))
        for k in range(generator.randint(0, 3)):
            name, nbytes = f"saved {i} {k}", generator.randint(5, 90) * _KB
            moved = generator.choice([nbytes, nbytes, nbytes // 2, 0])
            storages.append(StorageInfo(name, nbytes, moved_bytes=moved))
            writes[i].append(name)
            if i + 1 < count and generator.random() < 0.3:
                reads[generator.randint(i + 1, count - 1)].append(name)
            back[count - 1 - i if generator.random() < 0.8 else generator.randint(0, count - 1)].append(name)
    storages += [StorageInfo(f"gradient {j}", generator.randint(1, 30) * _KB, is_gradient=True) for j in range(count)]
    storages.append(StorageInfo("tangent", 20 * _KB, is_tangent=True))
    back[0].append("tangent")

    def segment(i: int, ms: float, reads: list[str], writes: list[str]) -> SegmentStep:
        return SegmentStep(
            f"segment {i}", f"layers.{i}", ms, tuple(reads), tuple(writes), generator.choice([0, 15 * _KB, 70 * _KB])
        )

    forward = tuple(segment(i, generator.randint(1, 20) / 8, reads[i], writes[i]) for i in range(count))
    backward = tuple(segment(j, generator.randint(2, 40) / 8, back[j], [f"gradient {j}"]) for j in range(count))
    generator.random()  # without it, later draws would not be those of the golden file
    return TrainingStep(tuple(storages), forward, backward)


def run(name: str) -> dict[str, Any]:
    """The case: its numbers, and a fingerprint of the times and bytes at all segments."""
    number = NAMES.index(name)
    generator = random.Random(1000 + number)
    step = step_of(generator)
    share = generator.choice([0.5, 0.8, 1.0, 1.0])
    decisions = tuple(bool(c.moved_bytes) and generator.random() < share for c in step.candidates)
    up, down = generator.choice([0, 30, 80, 300]) * _KB, generator.choice([0, 30, 80, 300]) * _KB
    windows = Windows(
        tuple(generator.choice([0, up, 2 * up]) for _ in range(len(step.forward) + 1)),
        tuple(generator.choice([0, down, 2 * down]) for _ in range(len(step.backward) + 1)),
    )
    rates = ConstantRates(generator.choice([0.02, 0.05, 0.1]), generator.choice([0.02, 0.05, 0.1]), 0.018, 0.016)
    found = simulate(step, decisions, copies=rates, windows=windows)
    points = [
        (
            b.phase,
            b.segment,
            round(b.begin_ms, 6),
            round(b.end_ms, 6),
            b.live_bytes,
            b.peak_bytes,
            b.saved_bytes,
            b.in_flight_bytes,
            b.ahead_bytes,
        )
        for b in found.boundaries
    ]
    return {
        "name": name,
        "numbers": {
            "forward_ms": round(found.forward_ms, 6),
            "backward_ms": round(found.backward_ms, 6),
            "exposed_ms": round(found.exposed_ms, 6),
            "peak_bytes": found.peak_bytes,
            "peak_without_gradients_bytes": found.peak_without_gradients_bytes,
            "peak_at": f"{found.peak_phase}, {found.peak_segment}",
            "bytes_offloaded": found.bytes_offloaded,
            "bytes_reloaded": found.bytes_reloaded,
            "bytes_reclaimed": found.bytes_reclaimed,
            "num_prefetch_misses": found.num_prefetch_misses,
        },
        "boundaries": hashlib.sha256(repr(points).encode()).hexdigest()[:16],
    }
