"""The CUDA measurement against a link whose rates are known; the real one is in test_measure_on_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fxoffload.errors import ProfileError
from fxoffload.machine import clocks, copies
from fxoffload.machine.clocks import CudaClock
from fxoffload.machine.copies import cuda_curves
from fxoffload.machine.curve import CopyCurve
from tests.machine.virtual_link import VirtualLink, installed

CPU = torch.device("cpu")
KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB)
LATENCY_MS = 0.004


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLink]:
    link = VirtualLink(LATENCY_MS, down=55e6, up=50e6, duplex_down=40e6, duplex_up=30e6)
    monkeypatch.setattr(copies, "CUDA_SIZES", SIZES)
    monkeypatch.setattr(copies, "CudaPinner", lambda device: link)
    monkeypatch.setattr(clocks, "_HOLD_SIZE", 8)
    with installed(link):
        yield link


def measured() -> dict[str, CopyCurve]:
    return cuda_curves(CPU, CudaClock(CPU))


def test_the_curves_are_the_link_s(link: VirtualLink) -> None:
    found = measured()
    for name, rate in (("d2h", 55e6), ("h2d", 50e6), ("duplex_d2h", 40e6), ("duplex_h2d", 30e6)):
        curve = found[name]
        assert curve.sizes_bytes == SIZES
        expected = [LATENCY_MS + size / rate for size in SIZES]
        assert curve.times_ms == pytest.approx(expected, abs=2e-6), name
        assert curve.latency_ms == pytest.approx(LATENCY_MS, abs=1e-4)


def test_both_at_once_are_never_faster_than_one_alone(link: VirtualLink) -> None:
    link.rates["d2h", True] = 60e6  # as noise may have it
    found = measured()
    assert found["duplex_d2h"].times_ms == found["d2h"].times_ms


def test_the_pinned_memory_is_given_back(link: VirtualLink) -> None:
    seen: list[int] = []
    register = link.register
    link.register = lambda address, nbytes: (seen.append(nbytes), register(address, nbytes))[1]  # type: ignore[method-assign]
    measured()
    assert seen == [2 * SIZES[-1]]
    assert not link.registered


def test_also_when_the_measurement_fails(link: VirtualLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(copies, "_round_ms", broken)
    with pytest.raises(RuntimeError, match="the link is down"):
        measured()
    assert not link.registered


def test_memory_that_cannot_be_pinned(link: VirtualLink, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed: 2")

    link.register = refuse  # type: ignore[method-assign]
    with pytest.raises(ProfileError, match="expected 2 MiB of host memory that can be pinned"):
        measured()
    assert "cudaHostRegister of 2097152 bytes failed" in caplog.text


def test_a_round_is_held_until_it_is_queued(link: VirtualLink) -> None:
    clock = CudaClock(CPU)
    before = link.main.now_ms
    clock.hold()
    assert link.main.now_ms - before >= clocks.HOLD_MS
