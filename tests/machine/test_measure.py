from __future__ import annotations

import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fxoffload
from fxoffload.errors import ProfileError
from fxoffload.machine import MachineProfile, compute, measure
from fxoffload.machine.clocks import CpuClock
from fxoffload.machine.copies import make_curve
from fxoffload.machine.devices import identify, memory_bytes
from fxoffload.runtime.host_memory import limits as host_limits

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def cpu_profile() -> MachineProfile:
    return measure.measure(CPU)


def test_the_cpu_for_real(cpu_profile: MachineProfile) -> None:
    assert cpu_profile.device_type == "cpu"
    assert identify(CPU).device_name == cpu_profile.device_name
    assert cpu_profile.device_memory_bytes == memory_bytes(CPU)
    # Between a very slow and a very fast processor: catches a wrong unit.
    assert 0.05 < cpu_profile.copy_ms(16 * MIB, "d2h") < 500
    assert 1e-4 < cpu_profile.matmul_tflop_per_s["float32"] < 100
    assert 1e-4 < cpu_profile.attention_forward_tflop_per_s["float32"] < 100
    assert 1e-4 < cpu_profile.attention_backward_tflop_per_s["float32"] < 100
    assert 0.1 < cpu_profile.memory_gb_per_s < 5000
    assert 0.05 < cpu_profile.launch_overhead_us < 1000
    assert MachineProfile.from_json(cpu_profile.to_json()) == cpu_profile


def test_copies_of_a_rehearsal_take_turns(cpu_profile: MachineProfile) -> None:
    for size in cpu_profile.d2h.sizes_bytes:
        alone = cpu_profile.copy_ms(size, "h2d")
        assert cpu_profile.copy_ms(size, "d2h", duplex=True) == pytest.approx(2 * alone, rel=1e-3)


@pytest.mark.slow
def test_the_public_entry_measures_the_cpu() -> None:
    """Measured again, rates would differ in their last digits."""
    began = time.process_time()
    first = fxoffload.profile("cpu")
    assert time.process_time() - began < 40  # about one second on each core
    assert fxoffload.profile("cpu") == first


@pytest.mark.slow
def test_the_caller_s_settings_neither_count_nor_change() -> None:
    """A compile may ask for a profile in the middle of AOTAutograd, whose fake tensors would stand for the buffers."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    settings = torch.backends.cuda.matmul.fp32_precision
    with FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        found = measure.measure(CPU)
    assert found.matmul_tflop_per_s["float32"] > 1e-4
    assert found.attention_backward_tflop_per_s["float32"] > 1e-4
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.backends.cuda.matmul.fp32_precision == settings
    assert not [t for t in threading.enumerate() if t.name.startswith("fxoffload-measure")]


def test_short_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compute, "_random", full)
    with pytest.raises(ProfileError, match=r"call fxoffload.profile\(\) before the model is loaded"):
        measure.measure(CPU)


def test_a_dtype_that_the_device_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compute._random

    def refuse(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return real(device, dtype, *shape)

    monkeypatch.setattr(compute, "_random", refuse)
    assert set(compute.matmul_rates(CPU, CpuClock(0.1))) == {"float32", "float16"}


def test_rates_count_what_was_computed() -> None:
    """A clock that says one millisecond for everything: only the counting is left."""
    size, (heads, length, width) = compute.CPU.matmul[torch.float32], compute.CPU.attention[torch.float32]
    clock = FixedClock()
    assert compute.matmul_rates(CPU, clock)["float32"] == pytest.approx(2 * size**3 / 1e9, rel=1e-3)
    forward, backward = compute.attention_rates(CPU, clock)
    assert forward["float32"] == pytest.approx(2 * heads * length**2 * width / 1e9, rel=1e-3)
    assert backward["float32"] == pytest.approx(2.5 * forward["float32"], rel=1e-3)
    # What draws power is timed as in a long step, see [Note: Sustained rates] in clocks.py.
    assert clock.num_sustained == len(compute.CPU.matmul) + 2 * len(compute.CPU.attention)
    assert compute.memory_rate(CPU, clock) == pytest.approx(2 * compute.CPU.stream_bytes / 1e6, rel=1e-3)
    assert compute.launch_overhead_us(CPU, clock) == compute.kernel_floor_us(CPU, clock) == 1000.0


class FixedClock:
    """Also counts the work that was timed under sustained load."""

    def __init__(self) -> None:
        self.num_sustained = 0

    def ms(self, work: object, *, sustained: bool = False) -> float:
        self.num_sustained += sustained
        return 1.0

    def host_ms(self, work: object, calls: int) -> float:
        return 1.0


def test_a_copy_slower_than_a_larger_one_is_noise() -> None:
    curve = make_curve(0.5, (1, 2, 3, 4), (0.2, 9.0, 0.3, 0.4))
    assert curve.times_ms == (0.2, 0.3, 0.3, 0.4)
    assert curve.latency_ms == 0.2
    assert make_curve(0.0, (1,), (1e-9,)).times_ms == (1e-6,)


def test_the_cgroup_limits_a_cpu_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxoffload.machine import devices

    assert devices.cgroup_limit_bytes is host_limits.cgroup_limit_bytes
    monkeypatch.setattr(devices, "cgroup_limit_bytes", lambda: MIB)
    assert memory_bytes(CPU) == MIB
