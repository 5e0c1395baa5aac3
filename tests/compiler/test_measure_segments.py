"""How one segment runs on made-up inputs: tensors that are kept alive meanwhile, and those that each run makes anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxoffload.analysis.segmentation import Segment
from fxoffload.compiler.constant_values import ConstantValues
from fxoffload.compiler.distinct_segments import DistinctSegment
from fxoffload.compiler.measure_segments import _prepare
from fxoffload.compiler.measuring import Allowance
from fxoffload.compiler.segments import SegmentCall
from fxoffload.compiler.time_segments import time_segments
from fxoffload.machine.meters import HostMeter, Work
from fxoffload.planner.steps import SegmentStep
from tests.compiler.test_constant_values import backward_of, buckets, forward_with
from tests.compiler.test_made_up import traced


def test_what_dies_in_a_segment_dies_in_the_run_that_tells_its_peak() -> None:
    gm = traced(
        lambda kept, dies, index: (kept + dies)[index],
        torch.zeros(4),
        torch.zeros(4),
        torch.zeros(3, dtype=torch.int64),
    )
    inputs = tuple(gm.graph.find_nodes(op="placeholder"))
    nodes = tuple(n for n in gm.graph.nodes if n.op == "call_function")
    segment = Segment("layers_0", "layers.0", nodes, inputs, nodes[-1:])
    call = SegmentCall(segment)
    held: list[list[bool]] = []

    def fn(args: list[Any]) -> list[Any]:
        assert args[2].tolist() == [0, 1, 2]
        args[2].fill_(10**6)  # as an output would that takes its memory
        memory = [StorageWeakRef(a.untyped_storage()) for a in args]
        args.clear()
        held.append([not m.expired() for m in memory])
        return []

    call.fn = fn
    distinct = DistinctSegment(segment, call, SegmentStep("layers_0"), frozenset({1}), {("forward", "layers_0"): 0})
    allowance = Allowance()
    assert _prepare(distinct, ConstantValues(gm), HostMeter(), allowance) == ""
    assert held == [[True, True, True], [True, False, True]]  # to tune kernels, and for the peak
    del held[:]
    times = time_segments([distinct], HostMeter(), allowance)
    assert times.keys() == {("forward", "layers_0")} and min(times.values()) > 0
    assert held == [[True, False, False]] * 2  # integers, and what dies, are new for each run, in every round


def test_a_segment_alone_has_new_integers_for_each_run() -> None:
    gm = traced(lambda table, index: table[index], torch.zeros(4), torch.zeros(3, dtype=torch.int64))
    inputs = tuple(gm.graph.find_nodes(op="placeholder"))
    nodes = tuple(n for n in gm.graph.nodes if n.op == "call_function")
    segment = Segment("layers_0", "layers.0", nodes, inputs, nodes[-1:])
    call, seen = SegmentCall(segment), []

    def fn(args: list[Any]) -> list[Any]:
        seen.append(args[1].tolist())
        args[1].fill_(10**6)
        return []

    class NoRoom(HostMeter):
        """For more than one segment's inputs."""

        def each_ms(self, works: Sequence[Work]) -> list[float]:
            raise torch.OutOfMemoryError("on purpose")

    call.fn = fn
    distinct = DistinctSegment(segment, call, SegmentStep("layers_0"), frozenset(), {("forward", "layers_0"): 0})
    allowance = Allowance()
    assert _prepare(distinct, ConstantValues(gm), NoRoom(), allowance) == ""
    assert time_segments([distinct], NoRoom(), allowance).keys() == {("forward", "layers_0")}
    assert seen == [[0, 1, 2]] * 5


def test_a_segment_reads_the_true_values_of_what_no_input_decides() -> None:
    forward, index = forward_with(lambda table: buckets(9))
    backward = backward_of(index)
    inputs = tuple(backward.graph.find_nodes(op="placeholder"))
    nodes = tuple(n for n in backward.graph.nodes if n.op == "call_function")
    segment = Segment("layers_0", "layers.0", nodes, inputs, nodes)
    call, seen = SegmentCall(segment), []

    def fn(args: list[Any]) -> list[Any]:
        seen.append(torch.equal(args[1], buckets(9)))
        return []

    call.fn = fn
    distinct = DistinctSegment(segment, call, SegmentStep("layers_0"), frozenset(), {("backward", "layers_0"): 0})
    allowance = Allowance()
    assert _prepare(distinct, ConstantValues(forward), HostMeter(), allowance) == ""
    assert time_segments([distinct], HostMeter(), allowance)
    assert len(seen) > 2 and all(seen)
