"""Calls joined to one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.planner import ConstantRates, SegmentStep, StorageInfo, TrainingStep, simulate
from fxoffload.planner.chain import Chain, concatenate
from fxoffload.planner.steps import edges_of, from_graphs
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.step.edges import EdgeMemory, Moment
from fxoffload.step.offload_candidate import OffloadCandidate
from tests.capture import Block, capture, example_input
from tests.marks import examples
from tests.planner.chains import training_steps

RATES = ConstantRates(50.0, 50.0)


def layer(nbytes: int = 10, ms: float = 1.0) -> TrainingStep:
    """One segment each way: reads x (saved) and makes y, saves h; its backward makes dx and dw."""
    return TrainingStep(
        storages=(
            StorageInfo("x", nbytes, moved_bytes=nbytes, is_input=True),
            StorageInfo("h", 3 * nbytes, moved_bytes=3 * nbytes),
            StorageInfo("y", nbytes, is_output=True),
            StorageInfo("dy", nbytes, is_tangent=True),
            StorageInfo("dx", nbytes, is_gradient=True),
            StorageInfo("dw", 1, is_gradient=True),
        ),
        forward=(SegmentStep("f", ms=ms, reads=("x",), writes=("h", "y")),),
        backward=(SegmentStep("b", ms=ms, reads=("dy", "x", "h"), writes=("dx", "dw")),),
    )


def passed(count: int) -> list[EdgeMemory]:
    """Observations of layers that run one after the other and whose weights' gradients stay."""
    found = [EdgeMemory(((0, "x"),), None)]
    for k in range(count - 1):
        found.append(EdgeMemory(((k, "y"), (k + 1, "x")), Moment("forward", k + 1)))
    found.append(EdgeMemory(((count - 1, "y"),), Moment("forward", count - 1)))
    for k in range(count - 1, 0, -1):
        found.append(EdgeMemory(((k, "dx"), (k - 1, "dy")), Moment("backward", k - 1)))
    return found


def chain_of(count: int) -> Chain:
    return concatenate([layer()] * count, passed(count))


def live(chain: Chain, *offloaded: str) -> dict[str, int]:
    """Bytes before each segment that is no entry, with nothing under way."""
    decisions = chain.step.decide(dict.fromkeys(offloaded, True))
    found = simulate(chain.step, decisions, copies=RATES, windows=no_windows(chain.step))
    return {f"{b.phase[0]}{b.segment[5]}": b.live_bytes for b in found.boundaries if not b.segment.endswith("entry")}


def test_bytes_are_neither_counted_twice_nor_missed() -> None:
    """x of the first call is the caller's; y of each is x of the next; dx of each is dy of the one before."""
    kept = live(chain_of(3))
    #  before f1: h y; f2: h h y y; b2: h h h y y and dy, which eager code makes; b1: h h y, dx=dy, dw; b0: h, dx, 2 dw
    assert kept == {"f0": 0, "f1": 40, "f2": 80, "b2": 120, "b1": 81, "b0": 42}


def test_offloaded_values_leave() -> None:
    chain = chain_of(3)
    moved = live(chain, "call 0/h", "call 0/y", "call 1/h")
    # y of call 0 is x of call 1, whose caller holds it while that runs; after it y of call 1 and h of call 2 stay
    assert moved == {"f0": 0, "f1": 10, "f2": 10, "b2": 50, "b1": 11 + 40, "b0": 42}


def test_candidates_of_each_call() -> None:
    chain = chain_of(3)
    assert chain.candidates == (("call 0/x", "call 0/h"), ("call 0/y", "call 1/h"), ("call 1/y", "call 2/h"))
    offload = chain.step.decide({"call 0/y": True, "call 2/h": True})
    assert [chain.offload_of(k, offload) for k in range(3)] == [(False, False), (True, False), (False, True)]
    assert [c.name for c in chain.step.candidates if c.is_input] == ["call 0/x"]


def test_what_others_hold_stays() -> None:
    """An output that two calls save, one that its own backward reads, and one that the caller keeps."""
    steps = [layer()] * 3
    both = [EdgeMemory(((0, "y"), (1, "x"), (2, "x")), Moment("forward", 2))]
    assert concatenate(steps, both).candidates[1:] == ((None, "call 1/h"), (None, "call 2/h"))
    for until in (None, Moment("backward", 2)):
        edge_memory = [EdgeMemory(((0, "y"), (1, "x")), until)]
        assert concatenate(steps, edge_memory).candidates[1] == (None, "call 1/h")
    read = replace(layer(), backward=(SegmentStep("b", reads=("dy", "x", "h", "y"), writes=("dx", "dw")),))
    edge_memory = [EdgeMemory(((0, "y"), (1, "x")), Moment("forward", 1))]
    assert concatenate([read, layer()], edge_memory).candidates[1] == (None, "call 1/h")
    assert concatenate([layer(), layer()], edge_memory).candidates[1] == ("call 0/y", "call 1/h")


def test_what_eager_code_makes_counts_from_the_entry_if_an_offload_frees_it() -> None:
    steps = [layer()] * 2
    freed = concatenate(steps, [EdgeMemory(((1, "x"),), Moment("forward", 1))])
    assert freed.candidates[1] == ("call 1/x", "call 1/h")
    entry = freed.step.forward[freed.forward[1]]
    assert entry.writes == ("call 1/x",)
    assert not next(c for c in freed.step.candidates if c.name == "call 1/x").is_input
    stays = concatenate(steps, [EdgeMemory(((1, "x"),), None)])
    assert live(freed)["f1"] == live(stays)["f1"] + 10


def test_gradients_that_die() -> None:
    """Those that a hook takes away, as FSDP's does, are there until it runs."""
    steps = [layer()] * 2
    stays = live(concatenate(steps, [*passed(2)]))
    dies = live(concatenate(steps, [*passed(2), EdgeMemory(((1, "dw"),), Moment("backward", 1))]))
    assert stays["b0"] - dies["b0"] == 1


def test_errors() -> None:
    with pytest.raises(ValueError, match="segments both ways"):
        concatenate([])
    with pytest.raises(ValueError, match="segments both ways"):
        concatenate([replace(layer(), backward=())])
    with pytest.raises(ValueError, match="found nothing"):
        concatenate([layer()], [EdgeMemory(((0, "nothing"),), None)])


def test_moments() -> None:
    """Forwards in order, then backwards in reverse."""
    order = [Moment("forward", 0), Moment("forward", 1), Moment("backward", 1), Moment("backward", 0)]
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            assert a.is_before(b) is (i < j)


@settings(max_examples=examples(60), deadline=None)
@given(training_steps(), st.data())
def test_a_chain_of_one_call_is_that_call(step: TrainingStep, data: st.DataObject) -> None:
    """Under a plan's windows, to the byte; an entry stands in front."""
    step = replace(step, holds_outputs=True)
    chain = concatenate([step])
    decisions = tuple(data.draw(st.booleans()) for _ in step.candidates)
    by_name = {name: go for name, go in zip(chain.candidates[0], decisions, strict=True) if name is not None}
    alone = simulate(step, decisions, copies=RATES, windows=no_windows(step))
    limit = alone.peak_bytes + data.draw(st.integers(0, alone.peak_bytes))
    windows = windows_for(chain.step, chain.step.decide(by_name), limit) or no_windows(chain.step)
    joined = simulate(chain.step, chain.step.decide(by_name), copies=RATES, windows=windows)
    alone = simulate(step, decisions, copies=RATES, windows=chain.windows_of(0, windows))
    assert [b.live_bytes for b in joined.boundaries[1:]] == [b.live_bytes for b in alone.boundaries]
    assert joined.bytes_offloaded == alone.bytes_offloaded
    assert joined.bytes_reclaimed == alone.bytes_reclaimed
    assert joined.num_prefetch_misses == alone.num_prefetch_misses


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(training_steps(4), min_size=2, max_size=4), st.data())
def test_chains_hold_together(steps: list[TrainingStep], data: st.DataObject) -> None:
    """Nothing passes between the calls: bytes moved add up, time is the sum, windows fall to the calls in order."""
    chain = concatenate(steps)
    decisions = [tuple(data.draw(st.booleans()) for _ in s.candidates) for s in steps]
    by_name = {
        name: go
        for names, flags in zip(chain.candidates, decisions, strict=True)
        for name, go in zip(names, flags, strict=True)
        if name is not None
    }
    flags = chain.step.decide(by_name)
    for k, own in enumerate(decisions):
        assert all(
            a == b or name is None
            for a, b, name in zip(chain.offload_of(k, flags), own, chain.candidates[k], strict=True)
        )
    assert chain.step.compute_ms == pytest.approx(sum(s.compute_ms for s in steps))
    windows = no_windows(chain.step)
    joined = simulate(chain.step, flags, copies=RATES, windows=windows)
    alone = [simulate(s, own, copies=RATES, windows=no_windows(s)) for s, own in zip(steps, decisions, strict=True)]
    assert joined.bytes_offloaded == sum(a.bytes_offloaded for a in alone)
    for k, step in enumerate(steps):
        mine = chain.windows_of(k, windows)
        assert (len(mine.in_flight), len(mine.ahead)) == (len(step.forward) + 1, len(step.backward) + 1)


def test_edges_of_a_compiled_graph() -> None:
    captured = capture(Block(), example_input().requires_grad_())
    assert captured.forward.outer is not None and captured.backward.outer is not None
    from fxoffload.compiler.offload_candidates import offload_candidates_of, rank_offload_candidates

    _, offload_candidates = offload_candidates_of(captured.forward)
    rank_offload_candidates(offload_candidates, captured.forward.saved.candidates, captured.backward)
    users = captured.forward.num_user_outputs
    graphs = (captured.forward.outer, captured.backward.outer)
    step = from_graphs(*graphs, offload_candidates, num_user_outputs=users)
    edges = edges_of(*graphs, offload_candidates, num_user_outputs=users)
    infos = {s.name: s for s in step.storages}
    inputs = [infos[n] for n in edges.inputs if n is not None]
    assert inputs and all(i.is_input and i.moved_bytes for i in inputs)
    assert len(edges.outputs) == users
    assert [infos[n].is_output for n in edges.outputs if n is not None] == [True]
    assert [infos[n].is_tangent for n in edges.tangents if n is not None] == [True]
    gradients = [n for n in edges.gradients if n is not None]
    assert gradients and all(infos[n].is_gradient for n in gradients)
    own = [m for m in offload_candidates if not m.is_input and not m.unread]
    assert len(edges.saved) == sum(m.sources for m in own)
    assert all(isinstance(m, OffloadCandidate) for m in own)
