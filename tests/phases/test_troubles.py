"""Errors in the background are told and undone, and leave nothing behind."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases import OffloadedError, Phase, PhaseManager, Where

from .delayed import DelayedCopies
from .phase_support import batch, differences, make, rehearse, snapshot, train


class Refuses:
    """Stands before one call of a manager's parts, and refuses from the n-th call on."""

    def __init__(self, where: Any, name: str, error: BaseException, after: int = 0) -> None:
        self._original: Callable[..., Any] = getattr(where, name)
        self._error, self._left = error, after
        self.on = True
        setattr(where, name, self)

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self.on and self._left < 0:
            raise self._error
        return self._original(*args)


class TestFailuresInTheBackground:
    def test_the_end_of_a_block_says_it(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        refuses = Refuses(manager.image, "take", MemoryError("no room"))
        with pytest.raises(MemoryError, match="no room"), manager.phase("sync"):
            manager.drain()
        refuses.on = False
        assert manager.where("optimizer") is Where.DEVICE
        assert differences(before, snapshot(model, optimizer)) == []
        manager.enter("rollout")
        assert manager.where("optimizer") is Where.HOST

    def test_the_next_call_says_it_once(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        manager = rehearse(model, optimizer)
        Refuses(manager.image, "take", MemoryError("no room")).on = True
        manager.prepare("rollout")
        manager.drain()
        with pytest.raises(MemoryError):
            manager.enter("logprob")
        manager.enter("logprob").wait()

    def test_who_waits_was_told(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        refuses = Refuses(manager.image, "take", MemoryError("no room"))
        with pytest.raises(MemoryError):
            manager.offload(wait=False).wait()
        refuses.on = False
        manager.enter("rollout")

    def test_no_room_on_the_device_for_the_rest(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        manager.enter("rollout")
        mover = manager._transit.mover
        many = len(manager._transit.ledger.held())
        refuses = Refuses(mover, "allocate", torch.OutOfMemoryError("full"), after=many - 2)
        handle = manager.onload(wait=False)
        with pytest.raises(torch.OutOfMemoryError):
            handle.wait()
        assert manager.where("params") is Where.DEVICE and manager.where("optimizer") is Where.HOST
        with pytest.raises(OffloadedError, match="optimizer"):
            optimizer.step()
        refuses.on = False
        manager.onload()
        assert differences(before, snapshot(model, optimizer)) == []

    def test_room_that_somebody_makes_is_looked_at_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        manager.enter("rollout")
        mover, known = manager._transit.mover, []
        many = len(manager._transit.ledger.held())
        refuses = Refuses(mover, "allocate", torch.OutOfMemoryError("full"), after=many - 2)

        def make_room() -> bool:
            known.append(mover.room)
            refuses.on = False
            return True

        monkeypatch.setattr(manager._transit, "_make_room", make_room)
        manager.onload(wait=False).wait()
        assert [mover.room is room for room in known] == [False]
        assert differences(before, snapshot(model, optimizer)) == []

    @pytest.mark.parametrize("after", [0, 3, 12])
    def test_a_phase_that_cannot_be_entered_is_not_entered(self, after: int) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer, overlap=False)
        manager.enter("rollout")
        refuses = Refuses(manager._transit.mover, "allocate", torch.OutOfMemoryError("full"), after=after)
        with pytest.raises(torch.OutOfMemoryError):
            manager.enter("train")
        assert manager.phase_now is Phase.ROLLOUT
        assert {g: manager.where(g) for g in ("params", "optimizer")} == dict.fromkeys(
            ("params", "optimizer"), Where.HOST
        )
        refuses.on = False
        manager.enter("train")
        assert differences(before, snapshot(model, optimizer)) == []

    def test_dropped_gradients_come_back_when_the_rest_stays(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer, grads="drop")
        Refuses(manager.image, "take", MemoryError("no room"))
        with pytest.raises(MemoryError):
            manager.enter("rollout")
        assert differences(before, snapshot(model, optimizer)) == []

    def test_a_rollback_returns_what_had_left(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        Refuses(manager.image, "take", MemoryError("no room"), after=5)
        with pytest.raises(MemoryError):
            manager.offload()
        assert all(manager.where(group) is Where.DEVICE for group in ("params", "optimizer", "buffers"))
        assert manager._transit.ledger.held() == []
        assert differences(before, snapshot(model, optimizer)) == []


class TestGradientsThatChangeWhileAway:
    def test_nothing_piles_up(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        manager = rehearse(model, optimizer)
        used = []
        for i in range(4):
            model(batch(i)).backward()
            manager.offload("grads")
            used.append(manager.image.in_use_bytes)
            optimizer.zero_grad()
        assert len(set(used)) == 1
        manager.onload("grads")
        assert all(p.grad is None for p in model.parameters())
        assert manager._transit.ledger.held() == []

    def test_a_gradient_that_somebody_kept_returns(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        kept = model.get_parameter("left").grad
        assert kept is not None
        expected = kept.clone()
        manager = rehearse(model, optimizer)
        manager.offload("grads")
        optimizer.zero_grad()
        manager.offload("grads")
        manager.onload("grads")
        assert torch.equal(kept, expected)

    def test_buckets_that_ddp_keeps(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            plain, _ = make(lambda: nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1)))
            model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(2):
                train(lambda x: model(x).square().mean(), optimizer, i, zero=False)
            manager = rehearse(model, optimizer)
            manager.offload()
            manager.onload("params", "buffers", "optimizer")
            optimizer.zero_grad()
            with pytest.raises(OffloadedError, match=r"onload\('grads'\)"):
                model(batch(2)).square().mean().backward()
            manager.onload("grads")
            train(lambda x: model(x).square().mean(), optimizer, 2)
            manager.close()
        finally:
            dist.destroy_process_group()


class TestManagers:
    def test_a_closed_one_pins_nothing(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        manager.close()
        train(model, optimizer, 0)
        assert manager.image.reserved_bytes == 0

    def test_what_fails_while_it_closes_is_not_raised(self) -> None:
        """The offload is under way when the manager asks what failed before."""
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager, may_fail = rehearse(model, optimizer), threading.Event()

        def fails(nbytes: int) -> Any:
            assert may_fail.wait(60)
            raise MemoryError("no room")

        report = manager._transit.report

        def report_before_it_fails() -> None:
            report()
            may_fail.set()
            under_way._over.wait()

        manager.image.take = fails  # type: ignore[method-assign]
        under_way = manager.offload("optimizer", wait=False)
        manager._transit.report = report_before_it_fails  # type: ignore[method-assign]
        threading.Timer(1.0, may_fail.set).start()
        manager.close()
        assert under_way.has_failed() or under_way.is_reported
        assert differences(before, snapshot(model, optimizer)) == []

    def test_one_that_waits_for_a_first_step_is_not_kept(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        watch = weakref.ref(manager)
        del manager
        gc.collect()
        assert watch() is None
        train(model, optimizer, 0)

    def test_the_first_step_makes_room(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        train(model, optimizer, 0)
        manager.offload(wait=False).wait()
        assert manager.image.in_use_bytes <= manager.image.reserved_bytes

    def test_a_storage_of_another_size(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        manager.offload()
        manager.onload()
        model.get_buffer("scale").untyped_storage().resize_(4096)
        manager.offload()
        manager.onload()
        manager.close()
        assert manager.image.in_use_bytes == 0

    def test_phases_inside_phases(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        manager = rehearse(model, optimizer)
        with manager.phase("train"):
            with manager.phase("rollout"), pytest.raises(OffloadedError):
                optimizer.step()
            train(model, optimizer, 1)
            assert manager.phase_now is Phase.TRAIN

    def test_nothing_is_no_default(self) -> None:
        with pytest.raises(ValueError, match="host_limit"):
            PhaseManager(nn.Linear(2, 2), device_types=("cpu",), host_limit=0)


def test_metrics_of_what_is_under_way() -> None:
    copies = DelayedCopies()
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer, copies=copies)
    manager.offload()
    manager.metrics()
    handle = manager.onload(wait=False)
    first = manager.metrics()
    assert first["phases/onload/bytes"] == first["phases/onload/seconds"] == 0.0
    caught_up = threading.Thread(target=lambda: [copies.run_all() for _ in iter(handle.done, True)])
    caught_up.start()
    handle.wait()
    caught_up.join()
    later = manager.metrics()
    assert later["phases/onload/bytes"] > 0 and later["phases/onload/seconds"] > 0
    assert manager.metrics()["phases/onload/bytes"] == 0.0


def test_an_idle_manager_says_where_things_are() -> None:
    seen: list[Tensor] = []
    model, _ = make()
    manager = rehearse(model)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert manager.state == "no phase entered; everything is on the device"
    model(batch(0))
    assert len(seen) == 1
