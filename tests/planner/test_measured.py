"""Against the committed measurement of one H200: 16 layers, everything offloaded, and nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxoffload.planner import ConstantRates, SegmentStep, StorageInfo, TrainingStep, simulate
from fxoffload.planner.windows import no_windows
from tests.planner.chains import everywhere

RESULTS = Path(__file__).parents[2] / "benchmarks/results/2026-11-21-h200-activations.json"
LAYERS = 16
COPIES_PER_HALF = 8  # 272 copies in 31 half layers


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def result(measured: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = [
        r["result"] for r in measured["records"] if (r["case"]["name"], r["variant"]["label"]) == ("stack", label)
    ]
    return found


def chain(measured: dict[str, Any]) -> TrainingStep:
    """Two segments per layer of equal time. The turn, which was not offloaded, kept a second half's bytes; the rest of
    the offloaded bytes are the first halves'."""
    kept = result(measured, "keep_all")
    stats = result(measured, "offload_all")["stats_per_step"]
    second = int(stats["bytes_kept_for_backward"])
    first = (int(stats["bytes_offloaded"]) - (LAYERS - 1) * second) // LAYERS
    gradients = kept["traced_peak"]["returned_gradients_bytes"]
    storages: list[StorageInfo] = []
    forward: list[SegmentStep] = []
    backward: list[SegmentStep] = []
    count = 2 * LAYERS
    for k in range(count):
        nbytes = (second if k % 2 else first) // COPIES_PER_HALF
        names = tuple(f"saved_{k}_{i}" for i in range(COPIES_PER_HALF))
        storages += [StorageInfo(n, nbytes, moved_bytes=nbytes) for n in names]
        storages.append(StorageInfo(f"gradient_{k}", gradients // count, is_gradient=True))
        name, layer = f"layers_{k // 2}_{k % 2}", f"layers.{k // 2}"
        stream = forward[-1].writes[-1:] if forward else ()
        forward.append(SegmentStep(name, layer, kept["forward_ms"]["median"] / count, stream, names))
        backward.append(
            SegmentStep(name, layer, kept["backward_ms"]["median"] / count, (*names, *stream), (f"gradient_{k}",))
        )
    return TrainingStep(tuple(storages), tuple(forward), tuple(reversed(backward)))


def link(measured: dict[str, Any]) -> ConstantRates:
    found = measured["link"]
    return ConstantRates(
        found["d2h_gb_per_s"], found["h2d_gb_per_s"], found["duplex_d2h_gb_per_s"], found["duplex_h2d_gb_per_s"]
    )


def test_offloading_everything(measured: dict[str, Any]) -> None:
    step, real = chain(measured), result(measured, "offload_all")
    turn = set(step.forward[-1].writes)
    # It ran without a plan: windows held the largest segment, and values that were taken back came on top.
    nbytes = [c.moved_bytes or 0 for c in step.candidates]
    most = max(sum(nbytes[at : at + COPIES_PER_HALF]) for at in range(0, len(nbytes), COPIES_PER_HALF))
    windows = everywhere(step, most, most * 3 // 2)
    windows = replace(windows, ahead=(most * 7 // 2, *windows.ahead[1:]))
    simulation = simulate(step, [c.name not in turn for c in step.candidates], copies=link(measured), windows=windows)
    assert simulation.bytes_offloaded == pytest.approx(real["copies"]["d2h_bytes"], rel=1e-6)
    assert simulation.bytes_reloaded == pytest.approx(real["copies"]["h2d_bytes"], rel=0.01)
    assert simulation.forward_ms == pytest.approx(real["forward_ms"]["median"], rel=0.03)
    assert simulation.backward_ms == pytest.approx(real["backward_ms"]["median"], rel=0.03)
    assert simulation.step_ms == pytest.approx(real["step_ms"]["median"], rel=0.03)


def test_keeping_everything(measured: dict[str, Any]) -> None:
    step, real = chain(measured), result(measured, "keep_all")
    simulation = simulate(step, (False,) * len(step.candidates), copies=link(measured), windows=no_windows(step))
    assert simulation.step_ms == pytest.approx(real["forward_ms"]["median"] + real["backward_ms"]["median"])
    # No working memory is known here, and no residual stream: the saved values, a little less than the whole.
    assert 0.97 <= simulation.peak_bytes / real["memory"]["peak_bytes"] <= 1.0
