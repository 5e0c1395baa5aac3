from __future__ import annotations

import dataclasses
import resource
import time

import pytest
import torch

import fxoffload
from fxoffload.machine import MachineProfile, profile_for
from fxoffload.machine.measure import measure
from fxoffload.machine.shelf import shipped_for

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def profile(device: torch.device) -> MachineProfile:
    return measure(device)


def test_it_takes_seconds_and_leaves_nothing(device: torch.device) -> None:
    measure(device)  # libraries and cuBLAS's workspace
    torch.cuda.synchronize(device)
    torch.cuda.manual_seed(5)
    random_state = torch.cuda.get_rng_state(device)
    on_device, pinned = torch.cuda.memory_allocated(device), torch.cuda.host_memory_stats()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    measure(device)
    assert time.perf_counter() - began < 20
    # cuBLAS may keep a workspace for each thread that used it.
    assert torch.cuda.memory_allocated(device) - on_device <= 64 * MIB
    assert torch.cuda.host_memory_stats() == pinned
    # The second measurement's host memory is no more than what the first one gave back (KiB).
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 256 * 1024
    assert torch.equal(torch.cuda.get_rng_state(device), random_state)


def test_every_rate_is_there_and_of_this_world(profile: MachineProfile, device: torch.device) -> None:
    properties = torch.cuda.get_device_properties(device)
    assert profile.device_name == properties.name
    assert profile.device_memory_bytes == properties.total_memory
    assert profile.driver != "unknown"
    assert {"float16", "float32", "tf32"} <= set(profile.matmul_tflop_per_s)
    assert ("float8" in profile.matmul_tflop_per_s) == (torch.cuda.get_device_capability(device) >= (8, 9))
    grouped, dense = (profile.matmul_tflop_per_s[name] for name in ("bfloat16 grouped", "bfloat16"))
    assert 0.1 * dense < grouped < dense
    assert {"bfloat16", "float16", "float32"} == set(profile.attention_forward_tflop_per_s)
    assert set(profile.attention_backward_tflop_per_s) == set(profile.attention_forward_tflop_per_s)
    assert profile.matmul_tflop_per_s["float16"] > profile.matmul_tflop_per_s["float32"]
    assert 0.5 < profile.kernel_floor_us < 50
    assert 0.5 < profile.launch_overhead_us < 100
    assert 50 < profile.memory_gb_per_s < 50_000
    for curve in (profile.d2h, profile.h2d, profile.duplex_d2h, profile.duplex_h2d):
        assert 1 < curve.gb_per_s()[-1] < 1000
        assert curve.latency_ms < 0.1


def test_it_agrees_with_the_shipped_profile(profile: MachineProfile) -> None:
    """What the shipped file says was measured; the rest of it is replaced sooner or later."""
    expected = shipped_for(profile.device_name)
    if expected is None:
        pytest.skip(f"no measured profile of {profile.device_name} is shipped")
    largest = 256 * MIB
    for direction in ("d2h", "h2d"):
        assert profile.copy_ms(largest, direction) == pytest.approx(expected.copy_ms(largest, direction), rel=0.1)
        found = profile.copy_ms(largest, direction, duplex=True)
        # Both ways at once, machines of one kind differ by up to a fifth (2026-11-22).
        assert found == pytest.approx(expected.copy_ms(largest, direction, duplex=True), rel=0.25)
    rates = (profile.matmul_tflop_per_s["bfloat16"], expected.matmul_tflop_per_s["bfloat16"])
    assert rates[0] == pytest.approx(rates[1], rel=0.15)


def test_the_public_entry_keeps_it(device: torch.device) -> None:
    first = fxoffload.profile()
    assert fxoffload.profile(device) == profile_for("cuda", allow_measure=False) == first
    assert dataclasses.replace(first) == first
