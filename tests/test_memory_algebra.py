"""Bytes that may be on the device at each segment boundary, computed from the outer graphs and compared with reality.

The forward, right before segment k is called::

    live(k) = R(k) + F(k)

    R(k)  what segment k or a later op still reads: the residual stream between two layers, and what is returned
    F(k)  sources of copies that are under way. A release lets the oldest go until in_flight_budget bytes are left, so
          F(k) <= in_flight_budget + what was offloaded since the last release (at most one segment's values)

The backward, right before segment k is called (its values have been waited for)::

    live(k) = R(k) + G(k) + S(k) + P(k)

    R(k)  gradients of the residual stream that segment k or a later one reads
    G(k)  gradients so far: they are returned at the end
    S(k)  saved values that segment k or a later one reads and that some segment up to k has asked for; those that no
          later one reads die inside segment k
    P(k)  reloaded ahead: P(k) <= max(prefetch_budget, the largest single storage)

On the CPU every copy is finished when it has started, so both sides are exact: the sets of storages are compared, not
only their sizes. A storage is watched through a C++ weak reference, which keeps nothing alive.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fxoffload
from fxoffload import ops
from fxoffload.analysis.labels import STORAGE_KEY
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.ops import is_op
from fxoffload.runtime import outer_program
from fxoffload.runtime.engine import CopyEngine, engine_for
from tests.capture import Tower, example_input, rehearsal_options

NUM_LAYERS = 5
BATCH = 4


@dataclass
class Boundary:
    """Live storages right before a segment was called."""

    segment: str
    live: set[str]  # storage classes of what segments returned and waits handed out
    reloaded_bytes: int  # of all buffers that were reloaded into
    ahead_bytes: int
    in_flight_bytes: int


@dataclass
class Watch:
    """Hooks at an outer program's segment boundaries."""

    boundaries: list[Boundary] = field(default_factory=list)
    values: dict[str, list[StorageWeakRef]] = field(default_factory=dict)
    buffers: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def clear(self) -> None:
        self.boundaries.clear()
        self.values.clear()
        self.buffers.clear()

    def look(self, segment: str) -> None:
        engine = engine_for(torch.device("cpu"))
        live = {name for name, refs in self.values.items() if not all(r.expired() for r in refs)}
        reloaded = sum(nbytes for ref, nbytes in self.buffers if not ref.expired())
        self.boundaries.append(Boundary(segment, live, reloaded, engine._ahead_bytes, engine._in_flight_bytes))

    def see(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            self.values.setdefault(storage(node), []).append(StorageWeakRef(value.untyped_storage()))


def storage(node: fx.Node) -> str:
    return str(node.meta[STORAGE_KEY])


def items(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.target is operator.getitem]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches every outer graph that is compiled while it is active."""
    found = Watch()

    def watched(make: Callable[..., Any], *, is_segment: bool) -> Callable[..., Any]:
        def build(node: fx.Node, steps: Any) -> Any:
            step = make(node, steps)
            results = [(item, steps.slot(item)) for item in items(node)]

            def run(slots: list[Any], call: Any) -> None:
                if is_segment:
                    found.look(str(node.target))
                step(slots, call)
                for item, slot in results:
                    found.see(item, slots[slot])

            return run

        return build

    def reload(self: CopyEngine, transfer: Any, *target: Any) -> None:
        start_reload(self, transfer, *target)
        found.buffers.append((StorageWeakRef(transfer.there.buffer.untyped_storage()), transfer.nbytes))

    start_reload = CopyEngine._reload
    monkeypatch.setattr(CopyEngine, "_reload", reload)
    monkeypatch.setattr(outer_program, "_segment_step", watched(outer_program._segment_step, is_segment=True))
    monkeypatch.setattr(outer_program, "_wait_reload_step", watched(outer_program._wait_reload_step, is_segment=False))
    yield found


def run(watch: Watch, **options: Any) -> tuple[CompiledGraph, list[Boundary], list[Boundary]]:
    """One step after the one that compiles: the boundaries of its forward and of its backward."""
    torch.manual_seed(0)
    model = Tower(NUM_LAYERS)
    alive = set(fxoffload.graphs())
    compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options(**options))
    compiled(example_input(BATCH)).sum().backward()
    (graph,) = set(fxoffload.graphs()) - alive
    model.zero_grad()
    fxoffload.reset_stats()
    watch.clear()
    loss = compiled(example_input(BATCH)).sum()
    forward = list(watch.boundaries)
    watch.clear()
    loss.backward()
    assert fxoffload.stats().host_bytes_in_use == 0
    return graph, forward, list(watch.boundaries)


def nbytes_of(graph: CompiledGraph) -> dict[str, int]:
    """Storage class of the forward -> bytes of its candidate."""
    outer = {n.name: n for n in graph.forward.graph.nodes}
    return {storage(outer[n.name]): c.nbytes or 0 for c in graph.saved.candidates for n in c.nodes}


def last_readers(outer: fx.GraphModule) -> tuple[dict[fx.Node, int], dict[str, int]]:
    """Order of the nodes, and storage class -> order of the last op that reads one of its values."""
    order = {n: i for i, n in enumerate(outer.graph.nodes)}
    last: dict[str, int] = {}
    for node in order:
        if STORAGE_KEY in node.meta and node.op != "placeholder":
            readers = [order[u] for u in node.users if u.target is not operator.getitem]
            last[storage(node)] = max([last.get(storage(node), -1), *readers])
    return order, last


# -- forward ---------------------------------------------------------------------------------------------------------


def expected_forward(graph: CompiledGraph, in_flight: int | None) -> list[tuple[str, set[str], set[str], int]]:
    """(segment, R, F, bytes offloaded since the last release) at each boundary of a forward that offloads all.

    ``in_flight``: None for what the layer that moved most so far has moved (before the first layer: all there is).
    """
    sizes = nbytes_of(graph)
    order, last = last_readers(graph.forward)
    made: set[str] = set()
    flying: deque[str] = deque()
    of_layers: set[str] = set()
    since_release = largest = before_layers = 0
    found = []
    for node in graph.forward.graph.nodes:
        if node.op == "call_module":
            still_read = {name for name in made if last[name] >= order[node]}
            found.append((str(node.target), still_read, set(flying), since_release))
            made |= {storage(item) for item in items(node)}
            if node.meta["layer"]:
                of_layers |= {storage(item) for item in items(node)}
        elif is_op(node, ops.offload):
            sources = list(dict.fromkeys(map(storage, node.args[0])))  # type: ignore[arg-type]
            flying.extend(sources)
            since_release += sum(sizes[s] for s in sources)
            largest = max(largest, sum(sizes[s] for s in sources if s in of_layers))
            before_layers += 0 if largest else sum(sizes[s] for s in sources)
        elif is_op(node, ops.release):
            limit = (largest or before_layers) if in_flight is None else in_flight
            while flying and sum(sizes[s] for s in flying) > limit:
                flying.popleft()
            since_release = 0
    return found


def layer_bytes(graph: CompiledGraph) -> int:
    """What one layer in the middle of the stack saves."""
    sizes = nbytes_of(graph)
    call = next(n for n in graph.forward.graph.nodes if n.target == "layers_2")
    return sum(sizes.get(name, 0) for name in {storage(i) for i in items(call)})


def budget(layers: float | None) -> int:
    return 1 << 30 if layers is None else max(1, int(layers * LAYER))


# Per layer: normalised input A, up-projection 4 A, gelu 4 A, residual stream; and the norm's statistics, A / 16 each.
A = BATCH * 8 * 16 * 4
LAYER = 10 * A + A // 16


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 0.5, 1, 2.5, None], ids=lambda x: f"in flight {x} layers")
def test_forward(watch: Watch, layers: float | None) -> None:
    in_flight = budget(layers)
    graph, boundaries, _ = run(watch, in_flight_budget=in_flight)
    sizes = nbytes_of(graph)
    expected = expected_forward(graph, in_flight)
    assert [b.segment for b in boundaries] == [segment for segment, *_ in expected]
    assert len(boundaries) == NUM_LAYERS + 2
    for boundary, (segment, still_read, flying, since_release) in zip(boundaries, expected, strict=True):
        # Exactly R + F, apart from the caller's tensors.
        assert boundary.live - inputs(graph) == (still_read | flying) - inputs(graph), segment
        assert boundary.in_flight_bytes == sum(sizes[s] for s in flying)
        # The bound itself: one segment's values on top of the budget, plus the residual stream between two layers.
        assert boundary.in_flight_bytes <= in_flight + since_release
        assert since_release <= 1.1 * layer_bytes(graph)
        residual = still_read - flying - inputs(graph)
        assert sum(sizes.get(s, A) for s in residual) <= 2 * A
    if layers == 0:
        # With nothing in flight, the live bytes do not grow with depth.
        live = [sum(sizes.get(s, A) for s in b.live) for b in boundaries if b.segment.startswith("layers")]
        assert len(set(live[2:])) == 1
        assert live[-1] <= 1.1 * layer_bytes(graph) + 2 * A


def inputs(graph: CompiledGraph) -> set[str]:
    """Storage classes that the caller brings: they live on whatever we do, and are not watched."""
    return {storage(n) for n in graph.forward.graph.find_nodes(op="placeholder")}


@pytest.mark.slow
def test_the_forwards_window_follows_the_segments(watch: Watch) -> None:
    """Without a budget: the bytes that the largest layer moves, so that each layer's copies run during the next."""
    graph, boundaries, _ = run(watch)
    sizes = nbytes_of(graph)
    expected = expected_forward(graph, None)
    for boundary, (_, still_read, flying, _) in zip(boundaries, expected, strict=True):
        assert boundary.live - inputs(graph) == (still_read | flying) - inputs(graph)
        assert boundary.in_flight_bytes == sum(sizes[s] for s in flying) <= 2.1 * layer_bytes(graph)
    assert max(b.in_flight_bytes for b in boundaries) >= 0.9 * layer_bytes(graph)


@pytest.mark.slow
def test_a_forward_that_keeps_holds_everything_it_saved(watch: Watch) -> None:
    """The counter-check: the same hooks see the memory grow with depth where nothing is offloaded."""
    graph, boundaries, _ = run(watch, policy="keep_all")
    sizes = nbytes_of(graph)
    live = [sum(sizes.get(s, 0) for s in b.live) for b in boundaries if b.segment.startswith("layers")]
    steps = [after - before for before, after in itertools.pairwise(live[1:])]
    assert all(step >= 0.9 * layer_bytes(graph) for step in steps)


@pytest.mark.slow
def test_the_size_of_a_layer_is_what_the_algebra_says(watch: Watch) -> None:
    graph, *_ = run(watch)
    assert 9 * A < layer_bytes(graph) <= LAYER + 2 * A


# -- backward --------------------------------------------------------------------------------------------------------


def backward_names(graph: CompiledGraph) -> dict[str, int]:
    """Storage class of the backward -> bytes of the saved value, for those that come back."""
    assert graph.backward is not None
    size = {n.name: c.nbytes or 0 for c in graph.saved.candidates for n in c.nodes}
    return {storage(n): size[n.name] for n in graph.backward.graph.find_nodes(op="placeholder") if n.name in size}


def expected_backward(graph: CompiledGraph) -> list[tuple[str, set[str], set[str]]]:
    """(segment, R and G, S) at each boundary of a backward."""
    assert graph.backward is not None
    order, last = last_readers(graph.backward)
    made: set[str] = set()
    handed: set[str] = set()
    found = []
    for node in graph.backward.graph.nodes:
        if node.op == "call_module":
            at = order[node]
            found.append((str(node.target), {s for s in made if last[s] >= at}, {s for s in handed if last[s] >= at}))
            made |= {storage(item) for item in items(node)}
        elif is_op(node, ops.wait_reload):
            handed |= {storage(item) for item in items(node)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 1, 2.5, None], ids=lambda x: f"prefetch {x} layers")
def test_backward(watch: Watch, layers: float | None) -> None:
    prefetch = budget(layers)
    graph, _, boundaries = run(watch, in_flight_budget=1, prefetch_budget=prefetch)
    assert fxoffload.stats().bytes_reclaimed == 0
    sizes = backward_names(graph)
    largest = max(sizes.values())
    expected = expected_backward(graph)
    assert [b.segment for b in boundaries] == [segment for segment, *_ in expected]
    last_bytes = 0
    for boundary, (segment, gradients, saved) in zip(boundaries, expected, strict=True):
        # Exactly R + G + S. A saved value whose last reader has run is in none of them.
        assert boundary.live == gradients | saved, segment
        # P is all that was reloaded and not yet handed out, and it is bounded.
        assert boundary.ahead_bytes <= max(prefetch, largest)
        assert boundary.reloaded_bytes == sum(sizes[s] for s in saved) + boundary.ahead_bytes
        # S is one segment's values, and the few that the next ones share with it.
        assert sum(sizes[s] for s in saved) <= 1.3 * layer_bytes(graph)
        last_bytes = boundary.reloaded_bytes
    assert last_bytes <= 2 * A  # the last segment needs the model's input alone: nothing is left over
    if layers is not None and layers >= 1:
        assert fxoffload.stats().num_prefetch_misses <= len(sizes)


@pytest.mark.slow
def test_the_backwards_window_follows_the_segments(watch: Watch) -> None:
    """Without a budget: half as much again as the largest need of a layer: reloads run during the layer before."""
    graph, _, boundaries = run(watch, in_flight_budget=1)
    ahead = [b.ahead_bytes for b in boundaries if b.segment.startswith("layers")]
    assert all(a <= 1.7 * layer_bytes(graph) for a in ahead)
    assert max(ahead) >= 1.2 * layer_bytes(graph)
    for boundary, (segment, gradients, saved) in zip(boundaries, expected_backward(graph), strict=True):
        assert boundary.live == gradients | saved, segment


@pytest.mark.slow
def test_a_saved_value_dies_in_the_segment_that_reads_it_last(watch: Watch) -> None:
    graph, _, boundaries = run(watch, in_flight_budget=1)
    assert graph.backward is not None
    order, last = last_readers(graph.backward)
    calls = [n for n in graph.backward.graph.nodes if n.op == "call_module"]
    sizes = backward_names(graph)
    checked = 0
    for name in sizes:
        (reader,) = [n for n in calls if order[n] == last[name]]
        at = calls.index(reader)
        assert name in boundaries[at].live, f"{name} is not there when {reader} begins"
        if at + 1 < len(calls):
            assert name not in boundaries[at + 1].live, f"{name} outlives {reader}"
            checked += 1
    assert checked >= 3 * NUM_LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keep_all", "auto"])
def test_a_kept_value_dies_in_the_segment_that_reads_it_last_too(watch: Watch, policy: str) -> None:
    """Nothing of ours, of AOTAutograd's or of autograd's holds what a backward has handed to its segments."""
    graph, _, boundaries = run(watch, policy=policy, in_flight_budget=1, disable=("planner",))
    sizes = backward_names(graph)
    expected = expected_backward(graph)
    assert any(b.live & set(sizes) for b in boundaries)
    for boundary, (segment, gradients, saved) in zip(boundaries, expected, strict=True):
        assert boundary.live == gradients | saved, segment


def test_what_is_taken_back_is_not_reloaded(watch: Watch) -> None:
    """With all of it still in flight, the backward holds the sources themselves, and no second buffer."""
    graph, _, boundaries = run(watch, in_flight_budget="1GiB")
    reclaimed = sum(c.nbytes or 0 for c in graph.saved.candidates if not c.is_input)
    assert fxoffload.stats().bytes_reclaimed == reclaimed
    assert max(b.reloaded_bytes for b in boundaries) <= sum(c.nbytes or 0 for c in graph.saved.candidates if c.is_input)


def test_the_live_bytes_of_a_backward_do_not_grow_with_depth(watch: Watch) -> None:
    """Saved values only: gradients of parameters are returned and so must grow."""
    graph, _, boundaries = run(watch, in_flight_budget=1, prefetch_budget=1)
    in_layers = [b.reloaded_bytes for b in boundaries if b.segment.startswith("layers")]
    assert len(in_layers) == NUM_LAYERS
    assert max(in_layers[:-1]) - min(in_layers[:-1]) <= 2 * A
    assert max(in_layers) <= 1.3 * layer_bytes(graph)


def test_weak_references_see_storages() -> None:
    """The instrument itself: a tensor that dies is seen, one that another holds is not."""
    value = torch.ones(4)
    ref = StorageWeakRef(value.untyped_storage())
    view = value[1:]
    del value
    assert not ref.expired()
    del view
    assert ref.expired()
