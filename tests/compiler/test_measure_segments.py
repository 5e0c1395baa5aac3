"""How one segment runs on made-up inputs: what is held while it does, and what is new in each run."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxoffload.compiler.measure_segments import _Distinct, _measure
from fxoffload.compiler.measuring import Allowance
from fxoffload.compiler.segments import SegmentCall
from fxoffload.machine.meters import HostMeter
from fxoffload.passes.cut_segments import Segment
from fxoffload.planner.steps import SegmentStep
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
    distinct = _Distinct(segment, call, SegmentStep("layers_0"), frozenset({1}))
    found = _measure(distinct, HostMeter(), Allowance())
    assert isinstance(found, tuple) and found[0] > 0 and found[1] is None
    assert held[:-1] == [[True, True, False]] * 4  # integers are new for each run
    assert held[-1] == [True, False, True]
