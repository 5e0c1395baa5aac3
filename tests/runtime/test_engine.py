"""The copy engine on the CPU rehearsal: sources in flight, reloads ahead, and their order."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload import ModifiedInputError
from fxoffload.runtime import engine as engine_module
from fxoffload.runtime.copies.streams import HostCopies, Wait
from fxoffload.runtime.engine import Budgets, CopyEngine, engine_for
from fxoffload.runtime.host_memory.arena import HeapMemory, HostArena, HostBlock
from fxoffload.runtime.host_memory.free_list import Fence, Span
from fxoffload.runtime.transfer import Group, Transfer, Watch
from fxoffload.torch_private.storages import StorageRef

CPU = torch.device("cpu")
NBYTES = 1024  # of each value in this file
ROOM = 1 << 24


class Recorder(HostCopies):
    """Copies at once, and writes down what a GPU would be told: events are numbers."""

    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []
        self._count = 0
        self.stream = "main"
        self.waits = False
        self.gave_way: list[bool] = []

    def compute_stream(self) -> str:  # type: ignore[override]
        return self.stream

    def offload_waits_for_compute(self) -> None:
        self.said.append(("offload waits for compute", None))

    def offload_waits_for(self, event: object, wait: Wait) -> None:
        self.said.append((f"offload waits: {wait.name}", event))

    def reload_waits_for_compute(self) -> None:
        self.said.append(("reload waits for compute", None))

    def compute_waits_for(self, event: object, wait: Wait, stream: object = None) -> None:
        self.said.append((f"compute waits: {wait.name}", event))

    def offload(self, pieces, *, gives_way=True):  # type: ignore[no-untyped-def]
        self.gave_way.append(gives_way)
        return self._copy("offload", pieces)

    def reload(self, pieces, *, gives_way=True):  # type: ignore[no-untyped-def]
        self.gave_way.append(gives_way)
        return self._copy("reload", pieces)

    def host_waits(self) -> bool:
        return self.waits

    def _copy(self, what: str, pieces) -> int:  # type: ignore[no-untyped-def]
        super().offload(pieces)
        self._count += 1
        self.said.append((what, self._count))
        return self._count

    def names(self) -> list[str]:
        return [name for name, _ in self.said]


class Bench:
    """An engine of its own, and the values that were offloaded through it."""

    def __init__(self, streams: HostCopies | None = None, host: int = ROOM) -> None:
        self.streams = streams or HostCopies()
        self.engine = CopyEngine(CPU, self.streams, HostArena(HeapMemory(), ROOM))
        self.budgets = Budgets(host, 0, 0)
        self.alive: list[weakref.ref[Tensor]] = []
        self.engine.on_drop = self._drop
        self.dropped: list[float] = []

    def _drop(self, source: Tensor) -> None:
        self.dropped.append(float(source.view(torch.float32)[0]))

    def save(self, *values: float, reclaimable: bool = True, push: bool = True) -> Group:
        """One forward: a group with one storage for each value, filled with it, needed in reverse order."""
        group = Group(self.engine.streams.compute_stream())
        for rank, value in enumerate(values):
            tensor = torch.full((NBYTES // 4,), value, dtype=torch.float32)
            (transfer,) = self.engine.offload([[tensor]], self.budgets, reclaimable=reclaimable)
            assert transfer is not None
            group.add(len(values) - rank, transfer)
        if push:
            self.engine.save_order.push(group)
        return group

    def request(self, group: Group, *, keeps_graph: bool = False, prefetch: bool = True, across: bool = True) -> None:
        self.engine.request(group, keeps_graph=keeps_graph, prefetch=prefetch, across_graphs=across)

    def take(self, transfers: Sequence[Transfer]) -> list[float]:
        found = []
        for transfer, buffer in zip(transfers, self.engine.take(transfers), strict=True):
            value = transfer.views[0].on(buffer)
            assert bool((value == value[0]).all())
            found.append(float(value[0]))
        return found

    def held(self) -> int:
        return self.engine._in_flight_bytes

    def ahead(self) -> int:
        return self.engine._ahead_bytes


class Lent:
    """A forward's group with one watched input, which the caller holds too."""

    def __init__(self, bench: Bench) -> None:
        self.tensor = torch.ones(NBYTES // 4, requires_grad=True) * 1.0
        self.group = Group(bench.engine.streams.compute_stream())
        watch = Watch.of(self.tensor)
        assert watch is not None
        # Of a view that a graph saves, Inductor makes a tensor with a version counter of its own.
        saved = self.tensor.detach().data
        (found,) = bench.engine.offload([[saved]], bench.budgets, reclaimable=False, watches=[watch])
        assert found is not None
        self.transfer = found
        self.group.add(0, found)
        bench.engine.save_order.push(self.group)

    def write(self) -> None:
        with torch.no_grad():
            self.tensor[1:].mul_(2.0)  # through a view


def reloaded(group: Group) -> list[bool]:
    return [t.there is not None for t in group.in_need_order()]


# -- to the host -----------------------------------------------------------------------------------------------------


def test_release_keeps_what_the_budget_allows_and_drops_the_oldest_first() -> None:
    bench = Bench()
    group = bench.save(1, 2, 3, 4, 5)
    assert bench.held() == 5 * NBYTES
    bench.engine.release(3 * NBYTES)
    assert (bench.held(), bench.dropped) == (3 * NBYTES, [1, 2])
    bench.engine.release(3 * NBYTES)
    bench.engine.release(2 * NBYTES + 1)
    assert (bench.held(), bench.dropped) == (2 * NBYTES, [1, 2, 3])
    bench.engine.release(0)
    assert (bench.held(), bench.dropped) == (0, [1, 2, 3, 4, 5])
    assert len(group) == 5


def test_nobody_waits_for_a_watched_input_and_it_may_be_taken_back() -> None:
    streams = Recorder()
    bench = Bench(streams)
    lent = Lent(bench)
    streams.said.clear()
    bench.engine.wait_offload([lent.transfer])
    assert not streams.said
    bench.request(lent.group)
    assert bench.take([lent.transfer]) == [1]
    assert bench.dropped == [] and bench.held() == 0


@pytest.mark.parametrize("when", ["at once", "released", "taken back", "given up"])
def test_a_watched_input_that_is_written_to_before_its_backward_is_an_error(when: str) -> None:
    """Whatever became of its source meanwhile."""
    bench = Bench()
    lent = Lent(bench)
    if when == "released":
        bench.engine.release(0)
    if when in ("taken back", "given up"):
        bench.request(lent.group, keeps_graph=True)
    lent.write()
    if when == "given up":
        bench.request(bench.save(7), across=False)
    if when != "taken back":
        bench.request(lent.group)
    with pytest.raises(ModifiedInputError, match=r"torch.float32 input of shape \[\d+\].*modified by an in-place"):
        bench.take([lent.transfer])
    del lent
    gc.collect()
    assert bench.engine.host_bytes_in_use() == 0
    assert (bench.held(), bench.ahead()) == (0, 0)


def test_a_watch_holds_no_memory_and_no_graph() -> None:
    leaf, factor = torch.ones(NBYTES // 4, requires_grad=True), torch.ones(NBYTES // 4)
    made = leaf * factor
    graph, memory = StorageRef(factor), StorageRef(made)  # what the graph of ``made`` saves, and itself
    watch = Watch.of(made)
    assert watch is not None and not watch.is_broken()
    del factor, made
    assert graph.is_expired() and memory.is_expired()
    assert not watch.is_broken()


def test_only_what_autograd_made_is_watched() -> None:
    """The memory of a leaf, or of a view of one, may be a parameter's: others empty it and fill it again."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    made = parameter * 2
    assert Watch.of(made) is not None
    assert Watch.of(made.t()) is not None
    assert Watch.of(made.view(-1)[2:]) is not None
    with torch.inference_mode():
        inference = torch.ones(4)
    for other in (parameter, parameter.t(), parameter.detach(), torch.ones(4), torch.ones(4, 4)[1:], inference):
        assert Watch.of(other) is None


def test_the_source_is_held_until_its_release_and_no_longer() -> None:
    bench = Bench()
    tensor = torch.ones(256)
    storage = weakref.ref(tensor.untyped_storage())
    address = tensor.data_ptr()
    (transfer,) = bench.engine.offload([[tensor]], bench.budgets, reclaimable=True)
    del tensor
    assert bench.engine._in_flight[0].source.data_ptr() == address
    bench.engine.release(0)
    assert not bench.engine._in_flight
    gc.collect()
    assert storage() is None
    assert transfer is not None


def test_the_compute_stream_waits_before_a_source_is_dropped() -> None:
    streams = Recorder()
    bench = Bench(streams)
    bench.save(1, 2, 3)
    streams.said.clear()

    def check(source: Tensor) -> None:
        assert streams.names() == ["compute waits: SOURCE_DONE"]

    bench.engine.on_drop = check
    bench.engine.release(NBYTES)
    # One wait for the youngest copy covers those before it.
    assert streams.said == [("compute waits: SOURCE_DONE", 2)]
    streams.said.clear()
    bench.engine.release(NBYTES)
    assert streams.said == []


def test_each_compute_stream_waits_for_its_own_sources() -> None:
    streams = Recorder()
    bench = Bench(streams)
    first = bench.save(1)
    streams.stream = "side"
    second = bench.save(2)
    streams.said.clear()
    bench.engine.on_drop = None
    bench.engine.release(0)
    del first, second
    assert streams.said == [("compute waits: SOURCE_DONE", 1), ("compute waits: SOURCE_DONE", 2)]


def test_a_copy_waits_for_the_compute_stream_before_it_reads() -> None:
    streams = Recorder()
    Bench(streams).save(1)
    assert streams.names() == ["offload waits for compute", "offload"]


@pytest.mark.parametrize(("waits", "fsdp2", "gives_way"), [(0, 0, [0, 0]), (1, 0, [1, 1]), (1, 1, [0, 1])])
def test_copies_give_way_where_the_host_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, waits: bool, fsdp2: bool, gives_way: list[int]
) -> None:
    """Under FSDP2 a host may be late, and look so: copies to the host do not."""
    monkeypatch.setattr(engine_module, "fsdp2_is_used", lambda: bool(fsdp2))
    streams = Recorder()
    streams.waits = bool(waits)
    bench = Bench(streams)
    group = bench.save(1)
    bench.engine.release(0)
    bench.request(group)
    bench.take(group.in_need_order())
    assert streams.names().count("reload") == 1
    assert streams.gave_way == gives_way


@pytest.mark.parametrize(
    ("limit", "is_used", "gives_way"), [(0, True, True), (0, False, False), (1 << 20, True, False)]
)
def test_a_long_queue_of_reloads_lets_tables_of_fsdp_pass(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_used: bool, gives_way: bool
) -> None:
    monkeypatch.setattr(engine_module, "LONG_QUEUE_BYTES", limit)
    monkeypatch.setattr(engine_module, "fsdp2_is_used", lambda: is_used)
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(2)
    bench.engine.release(0)
    streams.gave_way.clear()
    bench.request(group)
    bench.take(group.in_need_order())
    assert streams.gave_way == [gives_way]


def test_a_block_that_was_read_from_is_not_written_before() -> None:
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(1)
    bench.engine.release(0)
    bench.take(group.in_need_order())
    reload_event = streams.said[-2][1]
    assert streams.said[-2][0] == "reload"
    del group
    streams.said.clear()
    bench.save(2)
    assert streams.said == [
        ("offload waits for compute", None),
        ("offload waits: HOST_READ", reload_event),
        ("offload", 3),
    ]


def test_wait_offload_waits_for_the_last() -> None:
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(1, 2, 3)
    streams.said.clear()
    bench.engine.wait_offload([])
    assert not streams.said
    bench.engine.wait_offload(group.in_need_order()[::-1])
    assert streams.said == [("compute waits: SOURCE_DONE", 3)]


def test_a_full_host_keeps_says_so_once_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(host=4096)
    transfers = bench.engine.offload([[torch.ones(768)] for _ in range(3)], bench.budgets, reclaimable=True)
    assert [t is not None for t in transfers] == [True, False, False]
    assert fxoffload.stats().bytes_kept_host_full == 2 * 3072
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(messages) == 1
    assert "host budget of 0.00 GiB is used up" in messages[0]
    assert "raise host_budget or offload less" in messages[0]


# -- back to the device ----------------------------------------------------------------------------------------------


def test_values_come_back() -> None:
    bench = Bench()
    group = bench.save(1, 2, 3)
    bench.engine.release(0)
    bench.request(group)
    bench.engine.prefetch(ROOM)
    assert bench.take(group.in_need_order()) == [3, 2, 1]
    found = fxoffload.stats()
    assert (found.bytes_offloaded, found.bytes_reloaded, found.num_copies) == (3 * NBYTES, 3 * NBYTES, 6)
    assert (found.num_prefetch_misses, found.bytes_reclaimed) == (0, 0)


@pytest.mark.parametrize(("budget", "count"), [(0, 1), (NBYTES - 1, 1), (NBYTES, 1), (2 * NBYTES, 2), (ROOM, 4)])
def test_prefetch_is_bounded_in_bytes_and_always_starts_one(budget: int, count: int) -> None:
    bench = Bench()
    group = bench.save(1, 2, 3, 4)
    bench.engine.release(0)
    bench.request(group)
    bench.engine.prefetch(budget)
    assert reloaded(group) == [i < count for i in range(4)]
    assert bench.ahead() == count * NBYTES
    bench.engine.prefetch(budget)
    assert bench.ahead() == count * NBYTES
    bench.take(group.in_need_order()[:1])
    assert bench.ahead() == (count - 1) * NBYTES
    bench.engine.prefetch(budget)  # and the next one moves up
    assert bench.ahead() == min(count, 3) * NBYTES


def test_what_was_not_prefetched_is_reloaded_when_needed_and_counted() -> None:
    bench = Bench()
    group = bench.save(1, 2, 3)
    bench.engine.release(0)
    bench.request(group, prefetch=False)
    bench.engine.prefetch(ROOM)
    assert reloaded(group) == [False] * 3
    assert bench.take(group.in_need_order()[:2]) == [3, 2]
    assert fxoffload.stats().num_prefetch_misses == 2


def test_what_was_late_is_not_reloaded_again_by_the_queue() -> None:
    bench = Bench()
    group = bench.save(1, 2)
    bench.engine.release(0)
    bench.request(group)
    assert bench.take(group.in_need_order()) == [2, 1]
    bench.engine.prefetch(ROOM)
    assert bench.ahead() == 0
    assert fxoffload.stats().bytes_reloaded == 2 * NBYTES


def test_a_reload_waits_for_the_compute_stream_and_the_reader_for_the_reload() -> None:
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(1, 2)
    bench.engine.release(0)
    bench.request(group)
    streams.said.clear()
    bench.engine.prefetch(ROOM)
    assert streams.said == [("reload waits for compute", None), ("reload", 3), ("reload", 4)]
    streams.said.clear()
    bench.take(group.in_need_order())
    assert streams.said == [("compute waits: TARGET_READY", 4)]  # the youngest of both


def test_a_second_backward_reloads_again() -> None:
    bench = Bench()
    group = bench.save(1, 2)
    bench.engine.release(0)
    for _ in range(2):
        bench.request(group, keeps_graph=True)
        bench.engine.prefetch(ROOM)
        assert bench.take(group.in_need_order()) == [2, 1]
        assert bench.ahead() == 0
    assert len(bench.engine.save_order) == 1
    bench.request(group)
    assert len(bench.engine.save_order) == 0
    assert bench.take(group.in_need_order()) == [2, 1]


# -- reclaim ---------------------------------------------------------------------------------------------------------


def test_a_source_that_is_still_held_is_taken_back() -> None:
    bench = Bench()
    group = bench.save(1, 2, 3)
    bench.engine.release(2 * NBYTES)  # the first is gone
    addresses = [item.source.data_ptr() for item in bench.engine._in_flight]
    bench.request(group)
    transfers = group.in_need_order()
    assert bench.held() == 0
    assert bench.ahead() == 0  # it holds no bytes beyond those it held already
    assert [b.data_ptr() for b in bench.engine.take(transfers[:2])] == addresses[::-1]
    assert bench.take(transfers[2:]) == [1]
    found = fxoffload.stats()
    assert (found.bytes_reclaimed, found.bytes_reloaded) == (2 * NBYTES, NBYTES)


def test_a_source_that_was_not_asked_for_is_taken_back_too() -> None:
    """Neither the newest nor the oldest."""
    bench = Bench()
    transfers = bench.save(1, 2, 3).in_need_order()
    assert bench.take([transfers[1]]) == [2]
    found = fxoffload.stats()
    assert (found.bytes_reclaimed, found.bytes_reloaded) == (NBYTES, 0)


def test_the_reader_of_a_reclaimed_source_waits_for_the_copy_that_reads_it() -> None:
    """The segment may overwrite it."""
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(1)
    bench.request(group)
    streams.said.clear()
    bench.take(group.in_need_order())
    assert streams.said == [("compute waits: SOURCE_DONE", 1)]


def test_what_the_caller_may_have_written_to_is_never_taken_back() -> None:
    bench = Bench()
    tensor = torch.full((NBYTES // 4,), 5.0)
    (transfer,) = bench.engine.offload([[tensor]], bench.budgets, reclaimable=False)
    assert transfer is not None
    group = Group(bench.streams.compute_stream())
    group.add(0, transfer)
    tensor.fill_(9)
    bench.request(group)
    bench.engine.prefetch(ROOM)
    assert bench.take([transfer]) == [5]
    assert fxoffload.stats().bytes_reclaimed == 0


@pytest.mark.parametrize(("share", "expected"), [(-1, 1), (0, 2), (1, 4)])
def test_what_was_taken_back_counts_for_the_window(share: int, expected: int) -> None:
    """Two values are taken back, the window has room for two. Among the layers it grows by them: a backward begins with
    such values, and no reload would hide behind their readers. Under the head it has to hold them."""
    bench = Bench()
    group = bench.save(1, 2, 3, 4, 5, 6)
    bench.engine.release(2 * NBYTES)  # 5 and 6 are still held, and needed first
    bench.request(group)
    bench.engine.prefetch(2 * NBYTES, reclaimed_share=share)
    assert bench.ahead() == expected * NBYTES
    transfers = group.in_need_order()
    bench.take(transfers[:2])
    bench.engine.prefetch(2 * NBYTES, reclaimed_share=share)
    assert bench.ahead() == max(expected, 2) * NBYTES
    assert bench.take(transfers[2:]) == [4, 3, 2, 1]
    assert bench.engine._reclaimed_bytes == bench.ahead() == 0


def test_the_window_without_a_budget_is_what_a_segment_needs_and_half_as_much_more() -> None:
    bench = Bench()
    found = [bench.save(*values).prefetch_window_bytes() for values in ((), (1,), (1, 2), (1, 2, 3))]
    assert found == [0, NBYTES, NBYTES * 3 // 2, NBYTES * 3 // 2]


def test_what_was_taken_back_and_never_read_leaves_no_trace_in_the_budget() -> None:
    bench = Bench()
    group = bench.save(1, 2)
    bench.request(group)
    assert bench.engine._reclaimed_bytes == 2 * NBYTES
    del group
    assert bench.engine.host_bytes_in_use() == 0
    assert bench.engine._reclaimed_bytes == 0


def test_a_reclaimed_source_can_be_had_again() -> None:
    """retain_graph: the copy on the host was made all the same."""
    bench = Bench()
    group = bench.save(1)
    bench.request(group, keeps_graph=True)
    (first,) = bench.engine.take(group.in_need_order())
    first.zero_()
    del first
    bench.request(group)
    assert bench.take(group.in_need_order()) == [1]


# -- across graphs ---------------------------------------------------------------------------------------------------


def test_the_groups_below_are_prefetched_in_reverse() -> None:
    bench = Bench()
    groups = [bench.save(10 * i, 10 * i + 1) for i in range(3)]
    bench.engine.release(0)
    bench.request(groups[2])
    bench.engine.prefetch(3 * NBYTES)
    assert [reloaded(g) for g in groups] == [[False, False], [True, False], [True, True]]
    assert bench.take(groups[2].in_need_order()) == [21, 20]
    bench.request(groups[1])
    bench.engine.prefetch(3 * NBYTES)
    assert [reloaded(g) for g in groups[:2]] == [[True, False], [True, True]]
    assert bench.take(groups[1].in_need_order()) == [11, 10]
    assert bench.take(groups[0].in_need_order()) == [1, 0]
    assert fxoffload.stats().num_prefetch_misses == 1  # the last request of group 0 was never made


def test_another_graph_is_left_alone_where_that_is_switched_off() -> None:
    bench = Bench()
    below, group = bench.save(1), bench.save(2)
    bench.engine.release(0)
    bench.request(group, across=False)
    bench.engine.prefetch(ROOM)
    assert (reloaded(below), reloaded(group)) == ([False], [True])


def test_groups_of_another_compute_stream_are_not_prefetched() -> None:
    streams = Recorder()
    bench = Bench(streams)
    streams.stream = "side"
    below = bench.save(1)
    streams.stream = "main"
    group = bench.save(2)
    bench.engine.release(0)
    bench.request(group)
    bench.engine.prefetch(ROOM)
    assert (reloaded(below), reloaded(group)) == ([False], [True])


def test_a_wrong_guess_is_given_up() -> None:
    """The backward of another group begins: reloads prefetched for the first one go, after a wait for its copy."""
    streams = Recorder()
    bench = Bench(streams)
    first = bench.save(1, 2)
    second = bench.save(3, push=False)  # not predicted
    bench.engine.release(0)
    bench.request(first)
    bench.engine.prefetch(ROOM)
    assert bench.ahead() == 2 * NBYTES
    streams.said.clear()
    bench.request(second)
    assert reloaded(first) == [False, False]
    assert bench.ahead() == 0
    assert streams.names() == ["compute waits: TARGET_READY"] * 2
    assert bench.take(second.in_need_order()) == [3]
    assert bench.take(first.in_need_order()) == [2, 1]  # and costs time only


def test_what_dies_prefetched_gives_its_bytes_back() -> None:
    """An exception, or a graph that was dropped."""
    streams = Recorder()
    bench = Bench(streams)
    group = bench.save(1, 2)
    bench.engine.release(0)
    bench.request(group)
    bench.engine.prefetch(ROOM)
    assert (bench.ahead(), bench.engine.host_bytes_in_use()) == (2 * NBYTES, 2 * NBYTES)
    del group
    streams.said.clear()
    assert bench.engine.host_bytes_in_use() == 0
    assert bench.ahead() == 0
    assert streams.names() == ["compute waits: TARGET_READY"] * 2
    bench.engine.prefetch(ROOM)  # the queue holds dead transfers
    assert bench.ahead() == 0


def test_a_group_that_dies_in_flight_leaves_its_block_and_its_source() -> None:
    bench = Bench()
    group = bench.save(1)
    del group
    assert bench.held() == NBYTES  # a finalizer may run anywhere: the engine cleans up when it is used next
    assert bench.engine.host_bytes_in_use() == 0
    assert bench.held() == 0
    assert bench.dropped == [1]


# -- the rest --------------------------------------------------------------------------------------------------------


def test_release_host_memory() -> None:
    bench = Bench()
    group = bench.save(1)
    with pytest.raises(RuntimeError, match="1024 bytes in use"):
        bench.engine.release_host_memory()
    del group
    assert bench.engine.release_host_memory() == 2 << 20
    assert bench.held() == 0


def test_one_engine_for_each_device() -> None:
    assert engine_for(CPU) is engine_for(torch.device("cpu"))
    assert engine_for(CPU).device == CPU


def test_the_default_host_budget_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Bench().engine
    monkeypatch.setattr("fxoffload.runtime.engine.default_host_budget_bytes", lambda: 11)
    monkeypatch.setattr("fxoffload.runtime.engine.engines", lambda: [engine])
    assert engine.host_budget_bytes(Budgets(7, 0, 0)) == 7
    assert engine.host_budget_bytes(Budgets(None, 0, 0)) == 11


def test_by_default_an_engine_leaves_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = Bench(), Bench()
    other.save(1.0)
    monkeypatch.setattr("fxoffload.runtime.engine.default_host_budget_bytes", lambda: 10 << 20)
    monkeypatch.setattr("fxoffload.runtime.engine.engines", lambda: [mine.engine, other.engine])
    assert mine.engine.host_budget_bytes(Budgets(None, 0, 0)) == (10 << 20) - other.engine.arena.reserved_bytes


class StreamRecorder(Recorder):
    """Writes down which stream waits, too."""

    def compute_waits_for(self, event: object, wait: Wait, stream: object = None) -> None:
        self.said.append((f"{stream or self.stream} waits: {wait.name}", event))


def test_given_up_buffers_wait_on_the_stream_that_allocated_them() -> None:
    streams = StreamRecorder()
    bench = Bench(streams)
    streams.stream = "first"
    lower = bench.save(1.0)
    upper = bench.save(2.0)
    bench.engine.release(0)
    bench.engine.request(upper, keeps_graph=False, prefetch=True, across_graphs=True)
    bench.engine.prefetch(ROOM)  # reloads lower ahead, on the first stream
    streams.stream = "second"
    other = bench.save(3.0)
    streams.said.clear()
    bench.engine.request(other, keeps_graph=False, prefetch=True, across_graphs=True)
    assert "first waits: TARGET_READY" in streams.names()
    assert "second waits: TARGET_READY" not in streams.names()
    del lower, upper


def test_buffers_of_dead_groups_wait_on_the_stream_that_allocated_them() -> None:
    streams = StreamRecorder()
    bench = Bench(streams)
    streams.stream = "first"
    group = bench.save(1.0)
    bench.engine.release(0)
    bench.engine.request(group, keeps_graph=False, prefetch=True, across_graphs=True)
    bench.engine.prefetch(ROOM)
    streams.said.clear()
    streams.stream = "second"
    del group
    gc.collect()
    bench.engine.host_bytes_in_use()
    assert streams.names() == ["first waits: TARGET_READY"]


def test_a_dropped_graph_gives_up_the_sources_of_its_copies() -> None:
    bench = Bench()
    group = bench.save(1.0, 2.0)  # still held: nothing released them
    assert bench.engine._in_flight_bytes == 2 * NBYTES
    del group
    gc.collect()
    assert bench.engine.host_bytes_in_use() == 0
    assert bench.engine._in_flight_bytes == 0
    assert not bench.engine._in_flight


def test_what_was_reclaimed_for_nothing_is_given_up() -> None:
    bench = Bench()
    failed = bench.save(1.0)
    bench.engine.request(failed, keeps_graph=True, prefetch=True, across_graphs=True)  # takes the source back
    assert bench.engine._reclaimed_bytes == NBYTES
    other = bench.save(2.0)
    bench.engine.save_order.begin_backward(failed, keeps_graph=False)
    bench.engine.request(other, keeps_graph=False, prefetch=True, across_graphs=False)
    assert bench.engine._reclaimed_bytes == NBYTES  # other's own source; failed's is gone
    assert failed.in_need_order()[0].there is None


def test_the_host_budget_bounds_what_is_in_use_even_where_more_is_reserved() -> None:
    bench = Bench()
    bench.engine.arena.reserve(4 << 20, ROOM)
    kept = bench.save(1.0)
    small = Budgets(NBYTES, 0, 0)
    found = bench.engine.offload([[torch.ones(1 << 20)]], small, reclaimable=True)
    assert found == [None]
    del kept


@pytest.mark.parametrize("values", [(), (3.0,)], ids=["moved nothing", "moved"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_call_of_a_chain_takes_back_what_calls_below_have_on_the_device(values: tuple[float], chained: bool) -> None:
    """Also one that moved nothing itself: it is not in the save order, and all that is lies below it."""
    bench = Bench()
    below = bench.save(1, 2)
    mine = bench.save(*values, push=bool(values))
    mine.takes_below = chained
    bench.request(mine)
    assert [t.there is not None and t.there.reclaimed for t in below.in_need_order()] == [chained, chained]
    assert all(t.there is not None and t.there.reclaimed for t in mine.in_need_order())
    assert bench.held() == (0 if chained else 2 * NBYTES)
    assert bench.take(below.in_need_order()) == [2, 1]


def test_the_copies_of_a_burst_wait_for_the_youngest_reload_out_of_their_host_memory() -> None:
    """Copies of one direction come in order, so it stands for all."""
    bench, waited = Bench(), []
    fences = [Fence(1, "early"), Fence(3, "late"), None, Fence(2, "between")]
    blocks = [HostBlock(Span(i, i + 1, fence), "an arena") for i, fence in enumerate(fences)]
    with mock.patch.object(bench.engine.streams, "offload_waits_for", lambda *what: waited.append(what)):
        for _ in range(2):  # no more once they have waited
            bench.engine._wait_for_reads(blocks)
    assert waited == [("late", Wait.HOST_READ)]


# -- the order of backwards --------------------------------------------------------------------------------------------


def test_what_was_reloaded_for_another_backward_makes_room_and_is_counted() -> None:
    """A forward runs in between, and goes backward first: the room ahead is its."""
    bench = Bench()
    oldest, first = bench.save(1), bench.save(2)
    bench.engine.release(0)
    bench.request(first)
    bench.engine.prefetch(2 * NBYTES)
    assert bench.take(first.in_need_order()) == [2]
    assert (reloaded(oldest), bench.ahead()) == ([True], NBYTES)
    between = bench.save(3, push=False)
    bench.engine.save_order.push(between)
    bench.engine.release(0)
    bench.request(between)
    bench.engine.prefetch(NBYTES)
    assert (reloaded(between), reloaded(oldest), bench.ahead()) == ([True], [False], NBYTES)
    assert bench.take(between.in_need_order()) == [3]
    stats = fxoffload.stats()
    assert (stats.num_wrong_predictions, stats.num_prefetch_misses) == (1, 0)


def test_what_was_taken_back_for_another_backward_stays() -> None:
    """It takes no room of the budget."""
    bench = Bench()
    oldest, first = bench.save(1), bench.save(2)
    first.takes_below = True
    bench.request(first)
    assert [t.there is not None and t.there.reclaimed for t in oldest.in_need_order()] == [True]
    between = bench.save(3, push=False)
    bench.engine.save_order.push(between)
    bench.request(between)
    assert [t.there is not None and t.there.reclaimed for t in oldest.in_need_order()] == [True]
    assert fxoffload.stats().num_wrong_predictions == 1


@pytest.mark.parametrize("why", ["dropped", "empty", "not across", "no prefetch", "right"])
def test_what_is_no_wrong_prediction(why: str) -> None:
    bench = Bench()
    oldest, first = bench.save(1), bench.save(2)
    bench.engine.release(0)
    bench.request(first, across=why != "not across", prefetch=why != "no prefetch")
    if why == "dropped":
        del oldest
    if why == "empty":
        bench.request(Group(bench.engine.streams.compute_stream()))
    bench.request(bench.save(3) if why not in ("empty", "right") else oldest)
    assert fxoffload.stats().num_wrong_predictions == 0


def test_a_plan_says_which_groups_follow() -> None:
    """Whatever the save order expects: here nothing comes before the next forward, or the youngest but one alone."""
    bench = Bench()
    oldest, second, youngest = (bench.save(i) for i in range(3))
    youngest.takes_below, youngest.following = True, ()
    bench.request(youngest)
    bench.engine.prefetch(10 * NBYTES)
    assert [t.there is None for g in (oldest, second) for t in g.in_need_order()] == [True, True]
    assert bench.take(youngest.in_need_order()) == [2]
    bench.engine.release(0)
    second.following = ()
    oldest.following = (weakref.ref(second),)
    bench.request(oldest)
    bench.engine.prefetch(10 * NBYTES)
    assert (reloaded(oldest), reloaded(second)) == ([True], [True])
    assert bench.take(oldest.in_need_order()) == [0]
    bench.request(second)
    assert bench.take(second.in_need_order()) == [1]
    stats = fxoffload.stats()
    assert (stats.num_wrong_predictions, stats.num_prefetch_misses) == (0, 0)


# -- no room on the device ---------------------------------------------------------------------------------------------


class NoRoom:
    """Stands for ``torch`` in the engine: one allocation of a target fails."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, size: int, **kwargs: Any) -> Tensor:
        self.left -= size > 0
        if not self.left and size:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return torch.empty(size, **kwargs)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("retained", [False, True])
def test_a_target_that_cannot_be_had_leaves_nothing_that_passes_for_reloaded(
    at: int, prefetches: bool, retained: bool
) -> None:
    """Targets allocated before it hold no values. Tried again, the backward gets the right ones; given up, everything
    returns and other steps go on."""
    bench = Bench(Recorder())
    engine = bench.engine
    group = bench.save(1, 2, 3, 4, 5)
    engine.release(0)
    if retained:
        bench.request(group, keeps_graph=True, prefetch=False)
        assert bench.take(group.in_need_order()) == [5, 4, 3, 2, 1]
    for again in (False, True):
        bench.request(group, keeps_graph=True)
        with mock.patch("fxoffload.runtime.engine.torch", NoRoom(at)), pytest.raises(torch.OutOfMemoryError):
            if prefetches:
                engine.prefetch(1 << 20)
            else:
                engine.take(group.in_need_order())
        assert reloaded(group) == [False] * 5 and bench.ahead() == 0
        if not again:
            bench.request(group, keeps_graph=True)
            assert bench.take(group.in_need_order()) == [5, 4, 3, 2, 1]
    del group
    gc.collect()
    assert engine.host_bytes_in_use() == 0
    other = bench.save(6, 7)
    engine.release(0)
    bench.request(other)
    assert bench.take(other.in_need_order()) == [7, 6]


def test_a_view_into_a_storage_comes_back_as_it_was() -> None:
    """Its bytes alone are copied, which begin somewhere in the storage."""
    bench, storage = Bench(), torch.arange(400.0)
    views = [storage[310:330].view(4, 5).t(), storage[312:320:2]]
    (transfer,) = bench.engine.offload([views], bench.budgets, reclaimable=False)
    assert transfer is not None and 20 * 4 <= transfer.nbytes < 60 * 4
    (buffer,) = bench.engine.take([transfer])
    for view, expected in zip(transfer.views, views, strict=True):
        found = view.on(buffer)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
