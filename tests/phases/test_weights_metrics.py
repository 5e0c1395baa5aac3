"""What a weight stream says about itself: bytes, and how long its consumer stood still."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager
from fxoffload.phases.stand_still import StandStill
from fxoffload.runtime.copies.streams import HostCopies

WIDTH = 32
LAYER = 4 * (WIDTH * WIDTH + WIDTH)


class Slow(HostCopies):
    """Each copy to the device takes a while."""

    seconds = 0.0

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        pieces = list(pieces)
        if pieces:
            time.sleep(self.seconds)
        return super().reload(pieces)


def streamed(**options: Any) -> tuple[PhaseManager, Slow]:
    copies = Slow()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return PhaseManager(model, device_types=("cpu",), make_copies=lambda device: copies, **options), copies


@pytest.mark.parametrize("away", [False, True])
def test_bytes_are_those_that_were_handed_out(away: bool) -> None:
    manager, _ = streamed()
    if away:
        manager.offload()
    stream = manager.stream_weights(LAYER)
    assert (stream.nbytes, stream.delivered_bytes) == (6 * LAYER, 0)
    next(stream)
    assert stream.delivered_bytes == 4 * WIDTH * WIDTH
    next(stream)
    assert stream.delivered_bytes == LAYER
    stream.close()
    assert (stream.nbytes, stream.delivered_bytes) == (6 * LAYER, LAYER)
    whole = manager.stream_weights(2 * LAYER)
    for _ in whole:
        pass
    assert whole.delivered_bytes == whole.nbytes == 6 * LAYER
    manager.close()


def test_a_tied_weight_is_delivered_once_and_a_large_one_when_it_is_whole() -> None:
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH, bias=False), "tied": nn.Linear(WIDTH, WIDTH, bias=False)})
    model["tied"].weight = model["first"].weight
    stream = PhaseManager(model, device_types=("cpu",)).stream_weights(WIDTH * WIDTH)
    assert len(stream.plan.buckets) > 2
    for _ in stream:
        assert stream.delivered_bytes == stream.nbytes == 4 * WIDTH * WIDTH


def test_copies_that_the_thread_makes_are_exposed_and_the_consumer_is_not() -> None:
    manager, copies = streamed()
    manager.offload()
    copies.seconds = 0.02
    stream = manager.stream_weights(LAYER)
    began = time.perf_counter()
    for _ in stream:
        time.sleep(0.01)
    wall = time.perf_counter() - began
    assert 6 * 0.02 <= stream.exposed_seconds <= wall - 12 * 0.01
    copies.seconds = 0.0
    fast = manager.stream_weights(LAYER)
    for _ in fast:
        time.sleep(0.01)
    assert 0.0 < fast.exposed_seconds < stream.exposed_seconds / 1.5
    manager.close()


def test_a_wait_for_what_is_leaving_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = streamed()
    go = threading.Event()
    take = manager.image.take
    monkeypatch.setattr(manager.image, "take", lambda nbytes: go.wait() and take(nbytes))
    manager.offload("params", wait=False)
    threading.Timer(0.1, go.set).start()
    began = time.perf_counter()
    stream = manager.stream_weights(LAYER)
    next(stream)
    waited = time.perf_counter() - began
    assert 0.08 < stream.exposed_seconds <= waited
    stream.close()
    manager.close()


def test_blocks_within_blocks_count_once() -> None:
    still = StandStill(torch.device("cpu"))
    began = time.perf_counter()
    with still.copying(), still.on_host(), still.waiting():
        time.sleep(0.05)
    assert 0.05 <= still.seconds <= time.perf_counter() - began
    with pytest.raises(KeyError), still.waiting():
        raise KeyError
    assert not still._inside


def test_each_bucket_has_its_range_in_a_profile() -> None:
    manager, _ = streamed()
    stream = manager.stream_weights(LAYER)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in stream:
            torch.ones(2).sqrt()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["fxoffload::stream_weights"] == len(stream.plan.buckets) > 3
    ranges = [e.time_range for e in profile.events() or () if e.name == "fxoffload::stream_weights"]
    (first, *_) = [e.time_range for e in profile.events() or () if e.name == "aten::sqrt"]
    assert not any(r.start <= first.start <= r.end for r in ranges), "the consumer's work is not in it"
