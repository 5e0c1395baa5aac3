from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.errors import OptionsError
from fxoffload.machine import CopyCurve, MachineProfile, MachineRates, load_profile, shipped_names
from tests.machine.example import CURVE, MIB, example

DIRECTIONS: tuple[Literal["d2h", "h2d"], ...] = ("d2h", "h2d")
TERABYTE = 1 << 40
numbers = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def curves(draw: st.DrawFn) -> CopyCurve:
    sizes = sorted(draw(st.sets(st.integers(1, 1 << 32), min_size=1, max_size=12)))
    times = sorted(draw(st.lists(numbers, min_size=len(sizes), max_size=len(sizes))))
    latency = draw(st.floats(0, times[0]))
    return CopyCurve(latency_ms=latency, sizes_bytes=tuple(sizes), times_ms=tuple(times))


@st.composite
def profiles(draw: st.DrawFn) -> MachineProfile:
    rates = st.dictionaries(st.text(min_size=1).filter(str.strip), numbers, min_size=1)
    tables = ("matmul_tflop_per_s", "attention_forward_tflop_per_s", "attention_backward_tflop_per_s")
    return example(
        **{name: draw(curves()) for name in ("d2h", "h2d", "duplex_d2h", "duplex_h2d")},
        **{name: draw(rates) for name in tables},
        memory_gb_per_s=draw(numbers),
        notes=draw(st.text()),
    )


@pytest.fixture
def float32_precision() -> Iterator[Callable[[str], None]]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield lambda value: setattr(settings, "fp32_precision", value)
    settings.fp32_precision = before


class TestCopies:
    @pytest.mark.slow
    @given(curves(), st.lists(st.integers(0, TERABYTE), min_size=2, max_size=20))
    def test_time_never_falls_with_the_size(self, curve: CopyCurve, sizes: list[int]) -> None:
        times = [curve.ms(size) for size in sorted(sizes)]
        assert times[0] >= 0
        assert times == sorted(times)

    @given(curves(), st.integers(-2, 2), st.data())
    def test_nor_around_the_measured_sizes(self, curve: CopyCurve, step: int, data: st.DataObject) -> None:
        size = data.draw(st.sampled_from(curve.sizes_bytes))
        near = max(0, size + step)
        low, high = min(size, near), max(size, near)
        assert curve.ms(low) <= curve.ms(high)

    @given(curves())
    def test_measured_sizes_take_what_was_measured(self, curve: CopyCurve) -> None:
        assert [curve.ms(size) for size in curve.sizes_bytes] == pytest.approx(curve.times_ms, rel=1e-12)

    @given(curves(), st.integers(1, TERABYTE))
    def test_some_bytes_take_at_least_the_latency(self, curve: CopyCurve, size: int) -> None:
        assert curve.ms(size) >= curve.latency_ms
        assert curve.ms(0) == 0.0

    def test_values_between_below_and_above(self) -> None:
        profile = example()
        assert profile.copy_ms(3 * MIB, "d2h") == pytest.approx(0.075)
        assert profile.copy_ms(MIB // 2, "d2h") == pytest.approx(0.02)
        # Above, at the rate of the largest size.
        assert profile.copy_ms(40 * MIB, "d2h") == pytest.approx(1.0)

    def test_each_direction_and_duplex_has_its_own_curve(self) -> None:
        profile = example()
        found = [profile.copy_ms(2 * MIB, way, duplex=duplex) for duplex in (False, True) for way in DIRECTIONS]
        assert found == [0.05, 0.04, 0.08, 0.09]

    def test_bandwidth(self) -> None:
        assert CURVE.gb_per_s() == pytest.approx((34.95, 41.94, 41.94), rel=1e-3)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(OptionsError, match="expected direction to be one of d2h, h2d, found 'up'"):
            example().copy_ms(1, "up")  # type: ignore[arg-type]
        with pytest.raises(OptionsError, match="expected nbytes to be a finite number of at least 0, found -1"):
            example().copy_ms(-1, "h2d")


class TestCompute:
    def test_units(self) -> None:
        profile = example()
        assert profile.matmul_ms(1e12, torch.bfloat16) == pytest.approx(2.0)
        assert profile.matmul_ms(1e12, "bfloat16") == pytest.approx(2.0)
        assert profile.attention_ms(1e12, torch.bfloat16, backward=False) == pytest.approx(2.5)
        assert profile.attention_ms(1e12, torch.bfloat16, backward=True) == pytest.approx(5.0)
        assert profile.memory_ms(2_000_000_000) == pytest.approx(1.0)
        assert profile.memory_ms(0) == profile.matmul_ms(0, torch.bfloat16) == 0.0

    @given(numbers, st.floats(0, 1e18), st.floats(0, 1e18))
    def test_times_grow_with_the_work(self, rate: float, a: float, b: float) -> None:
        profile = example(matmul_tflop_per_s={"float16": rate}, memory_gb_per_s=rate)
        low, high = sorted((a, b))
        assert 0 <= profile.matmul_ms(low, torch.float16) <= profile.matmul_ms(high, torch.float16)
        assert 0 <= profile.memory_ms(int(low)) <= profile.memory_ms(int(high))

    def test_float32_is_taken_as_it_is_set(self, float32_precision: Callable[[str], None]) -> None:
        float32_precision("ieee")
        assert example().matmul_ms(1e12, torch.float32) == pytest.approx(20.0)
        assert example().matmul_ms(1e12, "tf32") == pytest.approx(4.0)
        float32_precision("tf32")
        assert example().matmul_ms(1e12, torch.float32) == pytest.approx(4.0)
        # The CPU knows no TensorFloat-32.
        without = example(matmul_tflop_per_s={"float32": 50.0})
        assert without.matmul_ms(1e12, torch.float32) == pytest.approx(20.0)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_every_8_bit_float_has_one_rate(self, dtype: torch.dtype) -> None:
        assert example().matmul_ms(1e12, dtype) == pytest.approx(1.0)

    def test_a_dtype_that_was_not_measured(self) -> None:
        with pytest.raises(OptionsError) as caught:
            example().matmul_ms(1.0, torch.float64)
        assert "Example GPU has (bfloat16, float32, tf32, float8), found float64" in str(caught.value)
        with pytest.raises(OptionsError, match=r"attention_backward_tflop_per_s of Example GPU has \(bfloat16\)"):
            example().attention_ms(1.0, torch.float16, backward=True)

    def test_negative_work(self) -> None:
        with pytest.raises(ValueError, match="expected flops to be a finite number of at least 0, found -1"):
            example().matmul_ms(-1, torch.bfloat16)
        with pytest.raises(ValueError, match="expected nbytes"):
            example().memory_ms(-1)


class TestJson:
    @pytest.mark.slow
    @given(profiles())
    def test_round_trip(self, profile: MachineProfile) -> None:
        again = MachineProfile.from_json(profile.to_json())
        assert again == profile
        assert hash(again) == hash(profile)
        assert again.to_json() == profile.to_json()

    def test_copies(self) -> None:
        profile = example()
        for again in (copy.deepcopy(profile), pickle.loads(pickle.dumps(profile)), dataclasses.replace(profile)):
            assert again == profile
        assert dataclasses.replace(profile, driver="4") != profile

    @pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000])
    def test_no_json(self, text: str) -> None:
        with pytest.raises(OptionsError, match=r"file\.json: expected JSON, found"):
            MachineProfile.from_json(text, "file.json")

    @pytest.mark.parametrize("schema", [None, 0, 2, "1", True])
    def test_another_schema(self, schema: object) -> None:
        with pytest.raises(OptionsError, match=r"expected schema 1, found .*fxoffload profile measure --out"):
            MachineProfile.from_json(changed(schema=schema))

    def test_no_object(self) -> None:
        with pytest.raises(OptionsError, match="expected a JSON object, found a list"):
            MachineProfile.from_json("[]")
        with pytest.raises(OptionsError, match="d2h: expected a JSON object, found 3"):
            MachineProfile.from_json(changed(d2h=3))

    def test_names_of_fields(self) -> None:
        found = json.loads(example().to_json())
        del found["driver"]
        with pytest.raises(OptionsError, match="found speed besides them and missed driver"):
            MachineProfile.from_json(json.dumps({**found, "speed": 1}))
        del found["d2h"]["times_ms"]
        with pytest.raises(OptionsError, match=r"d2h: expected the fields latency_ms, .* missed times_ms"):
            MachineProfile.from_json(json.dumps({**found, "driver": "1"}))

    def test_notes_may_be_left_out(self) -> None:
        found = json.loads(example().to_json())
        del found["notes"]
        assert MachineProfile.from_json(json.dumps(found)).notes == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_name": " "}, "expected device_name to be a string that is not empty, found ' '"),
        ({"driver": None}, "expected driver to be a string"),
        ({"device_type": "tpu"}, "expected device_type to be one of cuda, cpu, found 'tpu'"),
        ({"device_memory_bytes": 1.5}, "expected device_memory_bytes to be an integer above 0, found 1.5"),
        ({"device_memory_bytes": True}, "expected device_memory_bytes to be an integer"),
        ({"memory_gb_per_s": 0}, "expected memory_gb_per_s to be a finite number above 0, found 0"),
        ({"memory_gb_per_s": float("nan")}, "expected memory_gb_per_s"),
        ({"launch_overhead_us": float("inf")}, "expected launch_overhead_us"),
        ({"kernel_floor_us": 10**400}, "expected kernel_floor_us"),
        ({"d2h": [1, 2]}, "expected d2h to be a CopyCurve, found"),
        ({"matmul_tflop_per_s": {}}, "matmul_tflop_per_s: expected rates as a mapping such as"),
        ({"matmul_tflop_per_s": 800.0}, "matmul_tflop_per_s: expected rates as a mapping such as"),
        ({"attention_forward_tflop_per_s": {"bfloat16": -1}}, "expected the rate of bfloat16 to be a finite number"),
        ({"attention_backward_tflop_per_s": {torch.bfloat16: 1}}, "expected a rate's name to be a string"),
        ({"notes": 3}, "expected notes to be a string, found 3"),
    ],
)
def test_a_profile_of_no_machine(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        example(**changes)
    assert isinstance(caught.value, OptionsError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes_bytes": ()}, "expected as many times_ms as sizes_bytes, and at least one, found 3 and 0"),
        ({"times_ms": (1.0, 2.0)}, "expected as many times_ms as sizes_bytes, and at least one, found 2 and 3"),
        ({"sizes_bytes": (MIB, MIB, 4 * MIB)}, "expected sizes_bytes to grow, found .*; sort them"),
        ({"sizes_bytes": (0, 1, 2)}, "expected each of sizes_bytes to be an integer above 0, found 0"),
        ({"sizes_bytes": 4096}, "expected sizes_bytes to be a list of numbers, found 4096"),
        ({"times_ms": "123"}, "expected times_ms to be a list of numbers, found '123'"),
        ({"times_ms": (0.03, 0.02, 0.1)}, "expected times_ms not to fall as the size grows"),
        ({"times_ms": (0.0, 0.02, 0.1)}, "expected each of times_ms to be a finite number above 0, found 0.0"),
        ({"latency_ms": 0.04}, r"expected latency_ms to be at most the time of the smallest copy \(0.03\), found 0.04"),
        ({"latency_ms": -0.01}, "expected latency_ms to be a finite number of at least 0"),
    ],
)
def test_a_curve_of_no_link(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CURVE, **changes)


def test_a_profile_cannot_be_changed() -> None:
    given_rates = {"bfloat16": 500.0}
    profile = example(matmul_tflop_per_s=given_rates)
    given_rates["bfloat16"] = 1.0
    assert profile.matmul_tflop_per_s == {"bfloat16": 500.0}
    with pytest.raises(TypeError):
        profile.matmul_tflop_per_s["bfloat16"] = 1.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.driver = "2"  # type: ignore[misc]


def test_rates_are_equal_whatever_their_order() -> None:
    a, b = MachineRates({"x": 1.0, "y": 2.0}), MachineRates({"y": 2.0, "x": 1.0})
    assert a == b
    assert hash(a) == hash(b)
    assert a != MachineRates({"x": 1.0})


class TestShipped:
    @pytest.mark.parametrize("name", shipped_names())
    def test_it_says_where_it_comes_from(self, name: str) -> None:
        profile = load_profile(name)
        assert "easured" in profile.notes
        for way in DIRECTIONS:
            for size in (4096, 3 * MIB, 1 << 30):
                assert profile.copy_ms(size, way, duplex=True) >= profile.copy_ms(size, way)

    def test_h200(self) -> None:
        profile = load_profile("H200")
        assert profile.device_name == "NVIDIA H200"
        largest = 256 * MIB
        rates = [
            largest / profile.copy_ms(largest, way, duplex=both) / 1e6 for both in (False, True) for way in DIRECTIONS
        ]
        # benchmarks/results/2026-11-21-h200-activations.json, and room for another machine of the kind.
        assert rates == pytest.approx([55.4, 55.5, 50.8, 51.8], rel=0.05)
        # Under sustained load, see [Note: Sustained rates] in fxoffload/machine/clocks.py; for 100 ms it is 785.
        assert profile.matmul_tflop_per_s["bfloat16"] == pytest.approx(675, rel=0.05)
        assert {"float16", "float32", "tf32", "float8"} < set(profile.matmul_tflop_per_s)


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(example().to_json()), **changes})
