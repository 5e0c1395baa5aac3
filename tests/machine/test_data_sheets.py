"""Profiles of GPUs that are not here, derived from a measured one and two data sheets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fxoffload.errors import OptionsError
from fxoffload.machine import MachineProfile, load_profile, shelf, shipped_names
from fxoffload.machine.data_sheets import H200, NVLINK_C2C, SHEETS, DataSheet, profile_from
from fxoffload.machine.profile import DATA_SHEET, MEASURED
from fxoffload.machine.shelf import shipped_for
from tests.machine.example import example

LARGE = 256 << 20


def test_the_same_sheet_gives_the_same_rates() -> None:
    """No other GPU would come out right otherwise: only the names differ."""
    measured = load_profile("h200")
    again = profile_from(H200, measured)
    names = ("driver", "torch_version", "notes", "source", "estimate_error")
    assert replace(again, **{name: getattr(measured, name) for name in names}) == measured


def test_rates_grow_with_the_peaks() -> None:
    """Twice the H200 in everything, and half its link; a dtype that it lacks is left out."""
    twice = DataSheet(
        device_name="Twice",
        memory_gib=2 * H200.memory_gib,
        memory_gb_per_s=2 * H200.memory_gb_per_s,
        half=2 * H200.half,
        tf32=2 * H200.tf32,
        float32=3 * H200.float32,
        float8=None,
        link=replace(H200.link, peak_gb_per_s=H200.link.peak_gb_per_s / 2),
    )
    measured = example(
        matmul_tflop_per_s={"bfloat16": 500.0, "bfloat16 grouped": 400.0, "float32": 50.0, "float8": 9.0}
    )
    found = profile_from(twice, measured)
    assert found.matmul_tflop_per_s == {"bfloat16": 1000.0, "bfloat16 grouped": 800.0, "float32": 150.0}
    assert found.attention_forward_tflop_per_s == {"bfloat16": 800.0}
    assert found.memory_gb_per_s == 4000.0 and found.device_memory_bytes == 160 << 30
    # The bytes take twice as long, the latency does not.
    latency = measured.d2h.latency_ms
    assert found.d2h.times_ms == pytest.approx([latency + 2 * (t - latency) for t in measured.d2h.times_ms])
    assert found.launch_overhead_us == measured.launch_overhead_us


def test_a_link_of_which_more_is_known() -> None:
    found = load_profile("gh200")
    for direction, expected in (("d2h", 297), ("h2d", 375)):
        assert LARGE / found.copy_ms(LARGE, direction) / 1e6 == pytest.approx(expected, rel=0.01)  # type: ignore[arg-type]
        both = LARGE / found.copy_ms(LARGE, direction, duplex=True) / 1e6  # type: ignore[arg-type]
        assert both == pytest.approx(243, rel=0.01)
    assert NVLINK_C2C.name in found.notes


@pytest.mark.parametrize("name", SHEETS)
def test_what_is_not_measured_says_so(name: str) -> None:
    found = load_profile(name)
    assert found.title.endswith("(profile from a data sheet, not measured)")
    assert MachineProfile.from_json(found.to_json()) == found
    # On the GPU itself nothing but a measurement will do.
    assert shipped_for(found.device_name) is None


def test_a_measured_file_takes_the_place_of_the_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped").mkdir()
    for name, profile in {"h200": load_profile("h200"), "b200": example(device_name="NVIDIA B200")}.items():
        (tmp_path / "shipped" / f"{name}.json").write_text(profile.to_json())
    monkeypatch.setattr(shelf, "files", lambda package: tmp_path)
    shelf._shipped.cache_clear()
    try:
        assert load_profile("b200").source == MEASURED and load_profile("a100").source == DATA_SHEET
        assert shipped_for("NVIDIA B200") == load_profile("b200")
    finally:
        shelf._shipped.cache_clear()


def test_an_unknown_device_lists_the_known_ones() -> None:
    assert set(SHEETS) < set(shipped_names())
    with pytest.raises(OptionsError, match=r"'a10'.*did you mean 'a100'.*shipped are a100, a100-40gb, b200, gh200, h1"):
        load_profile("a10")


def test_a_source_that_there_is_not() -> None:
    with pytest.raises(OptionsError, match="expected source to be one of measured, data sheet, found 'guessed'"):
        example(source="guessed")
