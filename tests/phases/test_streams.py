"""The order of copies and kernels: right with all waits, and wrong without any one of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.moving.mover import Mover
from fxoffload.runtime.copies.streams import Wait

from .delayed import LateStreams
from .phase_support import make, rehearse, train

SIZE, COUNT = 64, 5


class Scene:
    """A few parameters on a device whose streams are late, and aliases that kernels use whatever the sentinel says."""

    def __init__(self, left_out: Wait | None) -> None:
        self.streams = LateStreams(left_out)
        self.model = nn.ParameterList(nn.Parameter(torch.full((SIZE,), float(i))) for i in range(COUNT))
        self.raw = [p.detach() for p in self.model]
        streams = self.streams
        self.manager: PhaseManager = PhaseManager(self.model, device_types=("cpu",), make_copies=lambda device: streams)

    def kernel(self, i: int, value: float) -> None:
        """Sets a parameter, late."""
        raw = self.raw[i]
        self.streams.kernel(raw.untyped_storage(), lambda: raw.fill_(value))

    def values(self) -> list[float]:
        self.streams.held_back = False
        self.streams.run_all()
        self.manager.onload()
        self.streams.run_all()
        return [value_of(raw) for raw in self.raw]

    def end(self) -> None:
        self.streams.left_out, self.streams.held_back = None, False
        self.streams.run_all()
        self.manager.close()


def value_of(raw: Tensor) -> float:
    return raw[0].item() if raw.untyped_storage().nbytes() and bool((raw == raw[0]).all()) else float("nan")


EXPECTED = [float(i) for i in range(COUNT)]


@pytest.fixture(params=[False, True], ids=["all", "without"])
def without(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param
    gc.collect()


def check(scene: Scene, expected: list[float], without: bool) -> None:
    assert (scene.values() != expected) is without
    scene.end()


def test_kernels_before_an_offload_are_part_of_it(without: bool) -> None:
    scene = Scene(Wait.SOURCE_READY if without else None)
    scene.kernel(2, 20.0)
    scene.manager.offload()
    check(scene, [0.0, 1.0, 20.0, 3.0, 4.0], without)


def test_a_storage_is_emptied_when_its_bytes_are_on_the_host(without: bool) -> None:
    scene = Scene(Wait.SOURCE_DONE if without else None)
    scene.manager.offload()
    check(scene, EXPECTED, without)
    assert bool(scene.streams.num_lost) is without


def test_what_is_allocated_is_written_after_its_last_owners_kernels(without: bool) -> None:
    scene = Scene(Wait.TARGET_FREE if without else None)
    scene.manager.offload()
    scene.streams.catches_up = False
    scene.kernel(1, -1.0)  # of the one that had the memory before
    scene.streams.held_back = True
    scene.manager.onload("params", wait=False)
    scene.streams.run_stream("reload")
    check(scene, EXPECTED, without)


@pytest.mark.parametrize("how", ["tensor", "fence", "group"])
def test_a_reader_waits_for_its_copy(without: bool, how: str) -> None:
    scene = Scene(Wait.TARGET_READY if without else None)
    scene.manager.offload()
    scene.streams.held_back = True
    scene.manager.onload(wait=False)
    if how == "fence":
        scene.manager.fence([scene.model[2]])
    elif how == "group":
        scene.manager.fence_group("params")
    found = (scene.model[2] + 0)[0].item()
    assert (found != 2.0) is without
    scene.end()


def test_a_block_is_written_after_it_was_read(without: bool) -> None:
    """Read by a copy that stream 1 waited for, and written again on behalf of stream 2."""
    scene = Scene(Wait.HOST_READ if without else None)
    scene.manager.offload()
    scene.streams.catches_up, scene.streams.held_back = False, True
    with scene.streams.on_stream(1):
        scene.manager.onload(wait=False)
        scene.manager.fence_group("params")
    assert scene.manager.where("params") is Where.DEVICE
    with scene.streams.on_stream(2):
        scene.manager.offload()
    check(scene, EXPECTED, without)


def test_streams_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who touches it first waits; see the contract of ``PhaseManager`` for other streams."""
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)
    scene = Scene(None)
    scene.manager.offload()
    scene.streams.held_back = True
    with scene.streams.on_stream(1):
        scene.manager.onload(wait=False)
        assert scene.model[0][0].item() == 0.0
    assert scene.streams.waits == [(1, Wait.TARGET_READY)]
    with scene.streams.on_stream(2):
        assert scene.model[4][0].item() == 4.0
    assert scene.streams.waits == [(1, Wait.TARGET_READY), (2, Wait.TARGET_READY)]
    if not torch.cuda.is_available():
        with scene.streams.on_stream(2):
            assert scene.streams.compute_stream() == 2
    assert scene.values() == EXPECTED
    scene.end()


@pytest.mark.parametrize("overlap", [False, True])
def test_training_between_cycles_is_bit_equal(overlap: bool) -> None:
    model, optimizer = make()
    reference, reference_optimizer = make()
    streams = LateStreams()
    streams.held_back = True
    manager = rehearse(model, optimizer, copies=streams)
    for i in range(4):
        assert train(model, optimizer, i) == train(reference, reference_optimizer, i)
        manager.offload(wait=not overlap)
        manager.onload(wait=False)
    streams.held_back = False
    streams.run_all()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert streams.num_lost == 0
    manager.close()


class TestTheDevice:
    """The stand-in itself."""

    def test_what_nobody_needs_does_not_run(self) -> None:
        streams = LateStreams()
        memory = torch.zeros(1)
        for number, value in ((0, 1.0), (1, 2.0)):
            with streams.on_stream(number):
                streams.kernel(memory.untyped_storage(), lambda value=value: memory.add_(value))
        assert memory.item() == 0.0
        streams.run_stream(1)
        assert memory.item() == 2.0
        streams.run_all()
        streams.run_all()
        assert memory.item() == 3.0

    def test_a_stream_is_in_order_and_waits_for_others(self) -> None:
        streams = LateStreams()
        memory, host, later = torch.zeros(4), torch.zeros(4), torch.zeros(4)
        streams.kernel(memory.untyped_storage(), lambda: memory.fill_(1.0))
        streams.offload_waits_for_compute()
        streams.kernel(memory.untyped_storage(), lambda: memory.fill_(2.0))
        event = streams.offload([(host, memory)])
        assert not event.query()
        event.synchronize()
        assert event.query() and host[0].item() == 1.0
        streams.run_all()
        event = streams.reload([(later, host)])
        assert later[0].isnan() or later[0].item() != 1.0
        streams.compute_waits_for(event, Wait.TARGET_READY)
        assert later[0].item() == 1.0

    def test_copies_of_what_was_emptied(self) -> None:
        streams = LateStreams()
        memory, host = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        streams.offload([(host, memory)])
        streams.reload([(memory, host)])
        memory.untyped_storage().resize_(0)
        streams.run_all()
        assert streams.num_lost == 2 and host.tolist() == [255] * 4


@pytest.mark.parametrize("wait", [True, False])
def test_memory_is_allocated_before_the_copies_wait_for_who_had_it(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread may queue a kernel in between that still uses it: see [Note: Order of copies]."""
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    manager.offload()
    done: list[tuple[str, Any]] = []
    for name in ("allocate", "before_writing", "_start_copies"):
        original = getattr(Mover, name)

        def watched(mover: Mover, what: Any, *more: Any, name: str = name, original: Any = original) -> None:
            done.append((name, what))
            original(mover, what, *more)

        monkeypatch.setattr(Mover, name, watched)
    manager.onload(wait=wait).wait()
    copies = [(i, holding) for i, (name, part) in enumerate(done) if name == "_start_copies" for holding in part]
    assert len(copies) > 10
    for i, holding in copies:
        allocated = done.index(("allocate", holding))
        assert ("before_writing", holding.device) in done[allocated:i]
