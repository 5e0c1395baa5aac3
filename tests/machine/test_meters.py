"""What the meter of a GPU works out from the allocator's counters, and the meter of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from unittest import mock

import pytest
import torch

from fxoffload.machine import meters
from fxoffload.machine.meters import HostMeter, _Bytes, _Cached

GPU = torch.device("cuda", 0)
MIB = 1 << 20
FREE = 1000 * MIB


class Device:
    """Counters of a caching allocator that has nothing but these blocks to give."""

    def __init__(
        self,
        now: _Bytes,
        large: tuple[int, ...] = (),
        small: tuple[int, ...] = (),
        others: tuple[_Cached, ...] = (),
    ) -> None:
        self.now = now
        blocks = {"large": [*large, *others], "small": list(small)}
        self.blocks = {k: [b if isinstance(b, _Cached) else _Cached(b) for b in found] for k, found in blocks.items()}
        self.resets = 0

    def reset(self, device: torch.device) -> None:
        self.resets += 1
        self.now = _Bytes(self.now.allocated, self.now.allocated, self.now.reserved, self.now.reserved)

    def empty(self, nbytes: int, **_: object) -> None:
        """Held until the end of a test."""
        allocated = self.now.allocated + nbytes
        self.now = self.now._replace(allocated=allocated, most_allocated=max(self.now.most_allocated, allocated))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    found: Device = copy.deepcopy(request.param)
    with (
        mock.patch.object(meters, "_bytes", lambda device: found.now),
        mock.patch.object(meters, "_cached_blocks", lambda device, kind: found.blocks[kind]),
        mock.patch.object(torch.cuda, "mem_get_info", lambda device: (FREE, 0)),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", found.reset),
        mock.patch.object(torch, "empty", found.empty),
    ):
        yield found


LEVEL = _Bytes(100 * MIB, 100 * MIB, 120 * MIB, 120 * MIB)
HIGHER = _Bytes(100 * MIB, 110 * MIB, 120 * MIB, 120 * MIB)
GIVEN_BACK = _Bytes(100 * MIB, 500 * MIB, 120 * MIB, 520 * MIB)


@pytest.mark.parametrize(
    ("device", "room"),
    [
        (Device(LEVEL), FREE),
        (Device(HIGHER, large=(10 * MIB, 50 * MIB)), FREE),
        (Device(HIGHER, large=(12 * MIB,)), FREE),
        (Device(HIGHER, large=(4 * MIB, 6 * MIB)), FREE),
        (Device(HIGHER, large=(4 * MIB, 2 * MIB, 50 * MIB)), FREE),
        (Device(HIGHER, large=(9 * MIB + 512,), small=(1 * MIB,)), FREE),
        # All of the first block would be taken.
        (Device(HIGHER, large=(10 * MIB + 512, 50 * MIB)), 0),
        (Device(HIGHER, large=(9 * MIB,), small=(512,)), 0),
        # Gradients of norms, between the optimizer's moments.
        (Device(HIGHER, large=(9 * MIB,), small=(512 * 1024, 300 * 1024, 300 * 1024)), FREE),
        # Of a large block; a small one would serve that size.
        (Device(HIGHER, large=(9 * MIB, 500 * 1024), small=(13 * 1024, 512 * 1024)), 0),
        (Device(HIGHER, large=(6 * MIB + 512 * 1024, 3 * MIB, 5 * MIB), small=(512,)), FREE),
        (Device(LEVEL._replace(most_allocated=100 * MIB + 1024), small=(4096,)), FREE),
        # Blocks cached for other streams: FSDP gathers parameters on one of them.
        (Device(HIGHER, large=(4 * MIB,), others=(_Cached(6 * MIB, 7),)), FREE),
        (Device(HIGHER, large=(10 * MIB + 512,), others=(_Cached(12 * MIB, 7),)), FREE),
        (Device(HIGHER, others=(_Cached(10 * MIB + 512, 7), _Cached(12 * MIB, 7))), 0),
        (Device(LEVEL._replace(most_allocated=100 * MIB + 1024), large=(4 * MIB,)), 0),
        # After a reset the peak of reserved memory could not be raised again: no higher than before.
        (Device(GIVEN_BACK, large=(400 * MIB,)), 400 * MIB - 256 * MIB),
    ],
    indirect=["device"],
)
def test_only_what_leaves_the_peaks_as_they_were_has_room(device: Device, room: int) -> None:
    assert meters._room(GPU, device.now) == room


def served(requests: list[_Cached], large: list[_Cached], small: list[_Cached]) -> int:
    """Bytes that the caching allocator counts as allocated."""
    pools, total = {False: list(large), True: list(small)}, 0
    for request in requests:
        is_small = request.size <= MIB
        pool = pools[is_small]
        block = min((b for b in pool if b.stream == request.stream and b.size >= request.size), key=lambda b: b.size)
        pool.remove(block)
        left = block.size - request.size
        if left > (0 if is_small else MIB):
            pool.append(_Cached(left, block.stream))
            left = 0
        total += request.size + left
    return total


def test_allocations_that_lift_the_peak_are_served_from_what_is_cached() -> None:
    random, num_found = Random(0), 0
    for _ in range(2000):
        sizes = [[512 * random.randint(1, most) for _ in range(random.randint(0, 6))] for most in (12000, 3000)]
        large, small = ([_Cached(size, random.choice((None, 7))) for size in pool] for pool in sizes)
        nbytes = 512 * random.randint(1, sum(map(sum, sizes)) // 512 + 1)
        with mock.patch.object(meters, "_cached_blocks", lambda device, kind: large if kind == "large" else small):  # noqa: B023
            found = meters._lifting_sizes(GPU, nbytes)
        if found is not None:
            num_found += 1
            assert served(found, large, small) == nbytes
    assert num_found > 1000


@pytest.mark.parametrize(
    "device", [Device(LEVEL), Device(HIGHER, large=(4 * MIB, 6 * MIB)), Device(GIVEN_BACK)], indirect=True
)
@pytest.mark.parametrize("taken", [0, 900 * MIB])
def test_peaks_are_put_back(device: Device, taken: int, caplog: pytest.LogCaptureFixture) -> None:
    before = device.now
    device.now = before._replace(
        most_allocated=max(before.most_allocated, taken), most_reserved=max(before.most_reserved, taken)
    )
    meters._restore_peaks(GPU, before)
    is_back = device.now[1:] == before[1:]
    assert is_back == (before != GIVEN_BACK or taken == 0)
    assert device.resets == (taken > 0)
    assert ("measuring left max_memory_allocated" in caplog.text) == (not is_back)


def test_the_cpu_is_measured_in_wall_time() -> None:
    meter = HostMeter()
    calls: list[int] = []
    with meter.undisturbed():
        assert meter.why_not() == ""
        assert 0 < meter.ms(lambda: calls.append(1)) < 1
        assert meter.once_ms(lambda: calls.append(2)) > 0
        assert meter.peak_bytes(lambda: calls.append(3)) is None
    assert calls[-2:] == [2, 3]
    assert meter.room_bytes() > 0
