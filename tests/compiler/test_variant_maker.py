"""Variants of a compiled graph before they run: the choices, the fit, and the compiled code."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._config_module import ConfigModule

from fxoffload.analysis.find_frontier import FindFrontier
from fxoffload.compiler import variant_maker as variant_maker
from fxoffload.compiler.build import Builder
from fxoffload.compiler.chain_search import _variants_of
from fxoffload.compiler.fit import Signature, fit
from fxoffload.compiler.session import CompileSession
from fxoffload.passes.unwrap_random import UnwrapRandom
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.torch_private.graphs import copy_graph
from tests.runtime.forced import CPU, Forced, Layers, part_of, variant_maker_of
from tests.support import assert_equal, rehearsal

aten, order = torch.ops.aten, torch.ops.higher_order


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing compiled before."""
    torch.compiler.reset()
    yield
    engine_for(CPU).calls._step = None


def sites_of(model: nn.Module, *inputs: Tensor, steps: int = 1, **changes: Any) -> list[TrackedGraph]:
    """Where the graphs of a model's layers are called, in order of compilation."""
    found: list[TrackedGraph] = []
    make = StepTracker.track

    def track(calls: StepTracker) -> TrackedGraph:
        found.append(make(calls))
        return found[-1]

    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fxoffload", options=rehearsal(**{"policy": "auto", **changes}))
    with mock.patch.object(StepTracker, "track", track):
        for _ in range(steps):
            model(*inputs).square().mean().backward()
    return found


class Same(nn.Module):
    """One layer, in a list."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.layers[0](x)


class Dropping(nn.Module):
    """Attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        """The attention's output."""
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2)


class Counting(nn.Module):
    """Writes to a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        with torch.no_grad():
            self.seen.add_(x.detach().mean(0))
        return self.down(F.gelu(self.up(x)))


class Adding(nn.Module):
    """Saves a function of its input, or its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output."""
        return self.up((x + y).exp())


# -- what there is to choose from --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_points_go_from_least_to_most_recomputation() -> None:
    forced = Forced(compiles=False)
    for tracked in forced.order:
        points = variant_maker_of(tracked).points()
        assert points is variant_maker_of(tracked).points()
        assert [set(p) for p in points] == [{""}] * len(points)
        saved = [p[""].nbytes for p in points]
        assert len(saved) > 2 and saved == sorted(set(saved), reverse=True)


def uncompiled() -> Forced:
    return Forced(compiles=False)


def test_a_planned_variant_changes_nothing_and_says_what_it_saves(same_code: Callable[..., Any]) -> None:
    forced = same_code(uncompiled)
    tracked = forced.order[1]
    mine, graph = variant_maker_of(tracked), part_of(tracked).graph
    joint = str(mine._source.joint.graph)
    tags = [n.meta.get("recompute") for n in mine._source.joint.graph.nodes]
    variants = [mine.variant(p) for p in mine.points()]
    assert str(mine._source.joint.graph) == joint
    assert [n.meta.get("recompute") for n in mine._source.joint.graph.nodes] == tags
    found = [d for d in variants if d is not None]
    assert len(found) == len(variants)
    nbytes = [d.saved.candidate_bytes for d in found]
    assert nbytes == sorted(nbytes, reverse=True) and nbytes[-1] < nbytes[0] == graph.saved.candidate_bytes
    assert [c.name for c in found[0].step.candidates] == [c.name for c in found[0].saved.candidates]
    edges = tracked.edges
    assert edges is not None
    for variant in found:
        assert len(variant.edges.inputs) == len(edges.inputs)
        assert len(variant.edges.tangents) == len(edges.tangents)
        assert variant.edges.outputs == edges.outputs
        assert [t is None for t in variant.edges.tangents] == [t is None for t in edges.tangents]
        assert len(variant.edges.gradients) == len(edges.gradients)
    assert not graph.variants and not mine.is_compiled(1)


def test_layers_are_looked_at_once(same_code: Callable[..., Any]) -> None:
    mine = variant_maker_of(same_code(uncompiled).order[1])
    base = mine.variant(mine.points()[0])
    assert base is not None
    estimates, joint, settings = mine._source.estimates, mine._source.joint, mine._settings
    with mock.patch.object(FindFrontier, "__call__", autospec=True, side_effect=FindFrontier.__call__) as finds:
        assert mine.choices(base).classes is estimates.layer_classes(joint, settings, mine._rates)
        assert settings.estimates is estimates.segments(mine._rates)
        assert not finds.called
        measured = replace(mine._rates, op_times={"an operator": 1.0})
        assert estimates.segments(measured) is not settings.estimates
        estimates.layer_classes(joint, replace(settings, rates=measured), measured)
        assert finds.call_count == 1


def test_a_variant_leaves_out_the_same_tangents(same_code: Callable[..., Any]) -> None:
    """A backward is given None for those of the graph that was compiled first."""
    maker = variant_maker_of(same_code(uncompiled).first)
    points = maker.points()[0]
    assert maker.variant(points) is not None
    with mock.patch.object(maker, "_left_out", frozenset({"tangents_1"})):
        assert maker.variant(points) is None


def test_there_are_at_most_two_variants(same_code: Callable[..., Any]) -> None:
    forced = same_code(uncompiled)
    tracked = forced.first
    mine = variant_maker_of(tracked)
    for number in (1, 2):
        assert mine.add(forced.variants[tracked, number]) == number
    third = mine.variant(mine.points()[0])
    assert third is not None
    with pytest.raises(RuntimeError, match="at most 2 variants"):
        mine.add(third)
    with pytest.raises(RuntimeError, match="found 3, which cannot"):
        mine.compile(3)


@pytest.mark.slow_except("forward")
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_variant_that_fails_leaves_everything_as_it_was(step: str, same_code: Callable[..., Any]) -> None:
    """The last one of ``uncompiled``: it compiles variants."""
    forced = same_code(uncompiled) if step == "forward" else uncompiled()
    expected = forced.step()
    mine = variant_maker_of(forced.first)
    with mock.patch.object(Builder, step, side_effect=ValueError("on purpose")):
        with pytest.raises(ValueError, match="on purpose"):
            mine.compile(1)
    with pytest.raises(RuntimeError, match="found 1, which cannot"):
        mine.compile(1)
    assert not mine.is_compiled(1) and not part_of(forced.first).graph.variants
    assert torch._guards.TracingContext.try_get() is None
    mine.compile(2)
    for tracked in forced.order[1:]:
        variant_maker_of(tracked).compile(2)
    forced.force(2, 2, 2)
    assert_equal(forced.step(), expected)


class Alone(nn.Module):
    """A model of one layer of two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output."""
        return self.layers[0](x, y)


def test_edges_name_inputs_that_only_a_variant_may_save() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 16), torch.randn(4, 16)
    (tracked,) = sites_of(Alone(Adding()), *inputs)
    (edges,) = [tracked.edges]
    assert edges is not None
    placeholders = part_of(tracked).graph.forward.graph.find_nodes(op="placeholder")
    given = [n.name if n.meta["val"].shape == (4, 16) else None for n in placeholders]
    saved = {c.name for c in part_of(tracked).graph.saved.candidates}
    assert saved.isdisjoint(n.name for n in placeholders)
    assert list(edges.inputs) == given
    assert sum(n is not None for n in given) == 2
    torch.compiler.reset()
    (tracked,) = sites_of(Alone(Adding()), *inputs, disable=("tape_recompute",))
    assert tracked.edges is not None and not any(tracked.edges.inputs)


@pytest.mark.parametrize("logs", [True, False])
def test_variants_of_a_graph_that_logs_are_told(logs: bool) -> None:
    """Plain Inductor breaks it; see ``TrainingStep.no_zeros``."""

    class Says(Adding):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if logs:
                logging.getLogger("tests.model").info("from a layer")
            return super().forward(x, y)

    (tracked,) = sites_of(Alone(Says()), torch.randn(4, 16), torch.randn(4, 16))
    assert variant_maker_of(tracked)._settings.logs is logs


@pytest.mark.slow
def test_without_the_piece_there_is_no_variant_maker() -> None:
    for changes in ({"disable": ("tape_recompute",)}, {"recompute": "cheap"}):
        torch.compiler.reset()
        found = sites_of(Layers(2), torch.randn(2, 12, 16), **changes)
        assert found and all(part_of(s).variant_maker is None for s in found)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"policy": "offload_all"}, {"disable": ("tape_plan",)}])
def test_a_graph_that_joins_no_chain_has_no_description(changes: dict[str, Any]) -> None:
    with mock.patch.object(variant_maker, "VariantMaker") as made:
        assert [s.description for s in sites_of(Layers(2), torch.randn(2, 12, 16), **changes)] == [None, None]
    made.assert_not_called()


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_a_graph_that_writes_to_its_inputs_has_no_variants() -> None:
    found = sites_of(Same(Counting()), torch.randn(8, 16))
    assert [part_of(s).variant_maker for s in found] == [None]


@pytest.mark.slow
def test_random_numbers_are_not_drawn_again() -> None:
    """No point computes dropout again; a partition that did would not fit."""
    torch.manual_seed(0)
    (tracked,) = sites_of(Same(Dropping()), torch.randn(2, 12, 16))
    assert any(variant_maker_of(tracked).variant(p) is not None for p in variant_maker_of(tracked).points())
    forced = Forced(Layers(2), compiles=False)
    points = variant_maker_of(forced.first).points()[-1]
    assert variant_maker_of(forced.first).variant(points) is not None
    with mock.patch("fxoffload.passes.unwrap_random.never_drops", lambda node: False):
        found = variant_maker_of(forced.first)._make(points)  # it has the one from before
    # From torch 2.14 on the partitioner itself leaves attention alone that cannot draw.
    assert found is None or hasattr(partitioners, "is_nonzero_dropout_sdpa")


SIGNATURE = Signature(
    inputs=("x", "w", "b"),
    outputs=("out",),
    saved=("x", "mm", "gelu"),
    sizes=frozenset(),
    given=("x", "mm", "gelu", "tangents_1"),
    gradients=("dx", "dw", "None"),
)


def test_where_values_lie() -> None:
    other = replace(SIGNATURE, saved=("b", "x", "norm"), given=("b", "x", "norm", "tangents_1"), inputs=("x", "w", "b"))
    found = fit(SIGNATURE, other)
    assert found is not None
    assert found.direct == ((2, 1),)
    assert (found.bundled, found.names) == ((1, 3), ("b", "norm"))
    assert (found.carrier, found.carried_to, found.carrier_name) == (2, 1, "mm")
    assert found.arguments == (-1, 0, -2, 3)
    assert (found.num_user_outputs, found.num_results, found.inputs) == (1, 4, (0, 1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": ("other",)},
        {"gradients": ("dx", "None", "dw")},
        {"gradients": ("dx", "dw")},
        {"inputs": ("x", "w", "b", "fwd_rng_state_0")},
        {"given": ("x", "mm", "gelu", "bwd_rng_state_0", "tangents_1")},
        {"given": ("x", "mm", "gelu", "tangents_2")},
        {"saved": ("x", "mm", None)},
        {"saved": ("x", "mm"), "given": ("x", "mm", "gelu", "tangents_1")},  # it is not given unsaved values
    ],
)
def test_what_does_not_fit(changes: dict[str, Any]) -> None:
    assert fit(SIGNATURE, SIGNATURE) is not None
    assert fit(SIGNATURE, replace(SIGNATURE, **changes)) is None


def test_sizes_keep_slots_of_their_own() -> None:
    """A size that both save keeps its place. One that only the first saves is any number, one that only the other saves
    is in the bundle. None of their slots is a token's."""
    first = replace(
        SIGNATURE,
        inputs=("s0", "s1", "x", "w", "b"),
        saved=("x", "mm", "s0", "mul"),
        sizes=frozenset({"s0", "mul"}),
        given=("s0", "mul", "x", "mm", "tangents_1"),
    )
    other = replace(
        first,
        saved=("norm", "x", "s0", "s1"),
        sizes=frozenset({"s0", "s1"}),
        given=("s0", "s1", "norm", "x", "tangents_1"),
    )
    found = fit(first, other)
    assert found is not None
    assert found.direct == ((2, 1), (3, 3))
    assert found.numbers == (4,)
    assert (found.bundled, found.names) == ((1, 4), ("norm", "s1"))
    assert (found.carrier, found.carried_to, found.carrier_name) == (2, 3, "mm")
    assert found.arguments == (0, -2, -1, 2, 4)
    only_sizes = replace(first, saved=("x", "s0"), sizes=frozenset({"s0"}), given=("s0", "x", "tangents_1"))
    assert fit(only_sizes, only_sizes) is None, "there is no slot for the token"


def test_there_must_be_a_slot_for_the_token() -> None:
    only_inputs = replace(SIGNATURE, saved=("x", "w"), given=("x", "w", "tangents_1"))
    assert fit(only_inputs, only_inputs) is None
    assert fit(only_inputs, replace(only_inputs, saved=("x", "b"), given=("x", "b", "tangents_1"))) is not None


# -- random states -----------------------------------------------------------------------------------------------------

_FLASH = aten._scaled_dot_product_flash_attention.default


def _joint(dropout: float) -> fx.GraphModule:
    graph = fx.Graph()
    q = graph.placeholder("q")
    attention = graph.call_function(_FLASH, (q, q, q, dropout, True), {"scale": 0.5})
    attention.meta["layer"] = "kept"
    item = graph.call_function(operator.getitem, (attention, 0))
    graph.output((item,))
    return fx.GraphModule({}, graph)


def _wrapped(kind: str, dropout: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """As the partitioner leaves forward and backward: ``kind`` is the form of the wrappers."""
    found = []
    for direction in ("fwd", "bwd"):
        graph = fx.Graph()
        q = graph.placeholder("q")
        args = (_FLASH, q, q, q, dropout, True)
        outputs: list[fx.Node] = []
        if kind == "graphsafe":
            state = graph.placeholder(f"{direction}_rng_state_0")
            node = graph.call_function(order.graphsafe_run_with_rng_state, args, {"scale": 0.5, "rng_state": state})
        elif direction == "fwd":
            pair = graph.call_function(order.run_and_save_rng_state, args, {"scale": 0.5})
            outputs = [graph.call_function(operator.getitem, (pair, 0))]
            node = graph.call_function(operator.getitem, (pair, 1))
        else:
            state = graph.placeholder("rng_state_output_0")
            tangent = graph.placeholder("tangents_1")
            node = graph.call_function(order.run_with_rng_state, (state, *args), {"scale": 0.5})
            outputs = [tangent]
        item = graph.call_function(operator.getitem, (node, 0))
        graph.output((item, *outputs))
        found.append(fx.GraphModule({}, graph))
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["saved", "graphsafe"])
def test_attention_without_dropout_needs_no_state(kind: str) -> None:
    unwrap = UnwrapRandom(_joint(0.0))
    for gm in _wrapped(kind, 0.0):
        assert unwrap(gm)
        nodes = list(gm.graph.nodes)
        assert [n.name for n in nodes if n.op == "placeholder"] in (["q"], ["q", "tangents_1"])
        (attention,) = (n for n in nodes if n.target is _FLASH)
        assert attention.kwargs == {"scale": 0.5}
        assert [getattr(a, "name", a) for a in attention.args] == ["q", "q", "q", 0.0, True]
        assert attention.meta["layer"] == "kept"
        assert [u.args for u in attention.users] == [(attention, 0)]
        assert {n.target for n in nodes if n.op == "call_function"} == {_FLASH, operator.getitem}
        (values,) = gm.graph.output_node().args
        assert [v.name for v in values] in (["getitem"], ["getitem_2"], ["getitem", "tangents_1"])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["saved", "graphsafe"])
def test_attention_with_dropout_keeps_its_state(kind: str) -> None:
    unwrap = UnwrapRandom(_joint(0.5))
    assert [unwrap(gm) for gm in _wrapped(kind, 0.5)] == [False, False]


def test_what_is_not_known_is_left_alone() -> None:
    other = fx.Graph()
    other.output((other.placeholder("q"),))
    unwrap = UnwrapRandom(fx.GraphModule({}, other))
    assert [unwrap(gm) for gm in _wrapped("saved", 0.0)] == [False, False]


def test_ops_are_told_apart_by_their_keywords() -> None:
    """Two attentions over the same inputs, in other scales; a third drops out, which only its keyword says."""
    keywords: list[dict[str, Any]] = [
        {"scale": 0.5, "dropout_p": 0.0},
        {"scale": 0.25, "dropout_p": 0.0},
        {"scale": 0.5, "dropout_p": 0.5},
    ]
    joint, graph = fx.Graph(), fx.Graph()
    q = joint.placeholder("q")
    for i, one in enumerate(keywords):
        joint.call_function(_FLASH, (q, q, q), one).meta["number"] = i
    joint.output((q,))
    q, state = graph.placeholder("q"), graph.placeholder("fwd_rng_state_0")
    for one in reversed(keywords):
        graph.call_function(order.graphsafe_run_with_rng_state, (_FLASH, q, q, q), {**one, "rng_state": state})
    graph.output((q,))
    gm = fx.GraphModule({}, graph)
    assert not UnwrapRandom(fx.GraphModule({}, joint))(gm)
    dropping, *_ = graph.find_nodes(op="call_function", target=order.graphsafe_run_with_rng_state)
    graph.erase_node(dropping)
    gm.recompile()
    assert UnwrapRandom(fx.GraphModule({}, joint))(gm)
    found = gm.graph.find_nodes(op="call_function", target=_FLASH)
    assert [(n.meta["number"], n.kwargs) for n in found] == [(1, keywords[1]), (0, keywords[0])]


# -- compiling ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_variant_is_compiled_once() -> None:
    forced = Forced(compiles=False)
    mine = variant_maker_of(forced.first)
    mine.compile(2)
    assert (mine.is_compiled(1), mine.is_compiled(2)) == (False, True)
    with mock.patch.object(Builder, "forward") as build:
        mine.compile(2)
    build.assert_not_called()
    (shown,) = part_of(forced.first).graph.variants
    assert shown.number == 2
    saved = forced.variants[forced.first, 2].saved
    assert [c.name for c in shown.saved.candidates] == [c.name for c in saved.candidates]
    assert shown.forward.graph.find_nodes(op="call_module") and shown.backward.graph.find_nodes(op="call_module")


@pytest.mark.slow
def test_compiling_draws_no_random_numbers() -> None:
    forced = Forced(compiles=False)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    find = Builder.find

    def drawing(*args: Any) -> Any:
        torch.rand(100)
        return find(*args)

    with mock.patch.object(Builder, "find", drawing):
        variant_maker_of(forced.first).compile(1)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_two_threads_compile_a_variant_once(fails: bool) -> None:
    forced = Forced(compiles=False)
    mine, errors, calls = variant_maker_of(forced.first), [], []
    both, find = threading.Barrier(2), Builder.find

    def slow(*args: Any) -> Any:
        calls.append(args)
        time.sleep(0.3)
        if fails:
            raise ValueError("on purpose")
        return find(*args)

    def run() -> None:
        both.wait()
        try:
            mine.compile(1)
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    with mock.patch.object(Builder, "find", slow):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1
    assert mine.is_compiled(1) != fails and len(part_of(forced.first).graph.variants) == 1 - fails
    expected = ["expected a variant that can be compiled, found 1, which cannot", "on purpose"] if fails else []
    assert sorted(errors) == expected


@pytest.mark.slow
def test_numbers_are_given_once_whoever_asks() -> None:
    forced = Forced(compiles=False)
    mine = variant_maker_of(forced.first)
    variants = mine.variants()
    both, found = threading.Barrier(8), []

    class Slow(dict[Any, int]):
        def __len__(self) -> int:
            time.sleep(0.01)
            return super().__len__()

    mine._numbers = Slow()

    def run(variant: Any) -> None:
        both.wait()
        found.append((variants.index(variant), mine.add(variant)))

    threads = [threading.Thread(target=run, args=(variants[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 2 and {n for _, n in found} == {1, 2}


@pytest.mark.slow
def test_lost_numbers_leave_no_room() -> None:
    forced = Forced(compiles=False)
    mine, tracked = variant_maker_of(forced.first), part_of(forced.first)
    first, second = mine.variants()
    assert mine.room() == 0 and _variants_of(mine, tracked.step) == [first, second]
    with mock.patch.object(Builder, "forward", side_effect=ValueError("on purpose")):
        with pytest.raises(ValueError, match="on purpose"):
            mine.compile(1)
        assert mine.variants() == [second] and mine.room() == 0
        assert _variants_of(mine, tracked.step) == [second]
        with pytest.raises(ValueError, match="on purpose"):
            mine.compile(2)
    assert mine.variants() == [] and mine.room() == 0
    assert _variants_of(mine, tracked.step) == []


@pytest.mark.slow
def test_a_graph_with_one_variant_may_have_another() -> None:
    forced = Forced(compiles=False)
    mine, tracked = variant_maker_of(forced.first), part_of(forced.first)
    first, second = mine.variants()
    del mine._numbers[second]
    assert mine.room() == 1
    offered = _variants_of(mine, tracked.step)
    assert first in offered and len(offered) > 1
    assert mine.add(next(d for d in offered if d is not first)) == 2


@pytest.mark.slow
def test_the_joint_graph_is_kept_as_it_was_before_it_was_partitioned() -> None:
    given: list[tuple[fx.GraphModule, str]] = []
    partition = CompileSession.partition

    def looking(session: CompileSession, gm: fx.GraphModule, *args: Any) -> Any:
        given.append((gm, str(gm.graph)))
        found = partition(session, gm, *args)
        for node in gm.graph.nodes:
            node.meta["recompute"] = "changed"
        return found

    with mock.patch.object(CompileSession, "partition", looking):
        (tracked, *_) = sites_of(Layers(2), torch.randn(2, 12, 16))
    joint = variant_maker_of(tracked)._source.joint
    assert str(joint.graph) == given[0][1]
    assert all(joint is not gm and set(joint.graph.nodes).isdisjoint(gm.graph.nodes) for gm, _ in given)
    assert not any("recompute" in n.meta for n in joint.graph.nodes)


def test_copies_share_no_graphs_of_higher_order_ops() -> None:
    def graph_over(name: str, value: Any) -> fx.GraphModule:
        graph = fx.Graph()
        root = nn.Module()
        setattr(root, name, value)
        graph.output((graph.placeholder("x"), graph.get_attr(name)))
        return fx.GraphModule(root, graph)

    inner = graph_over("constant", torch.ones(2))
    inner.meta["kept"] = True
    middle = graph_over("body", inner)
    gm = graph_over("true_graph", middle)
    copied = copy_graph(gm)
    mine: Any = copied.get_submodule("true_graph.body")
    assert copied.true_graph is not middle and mine is not inner
    assert mine.constant is inner.constant and mine.meta == {"kept": True}
    mine.graph.output_node().args = ((),)
    for node in copied.true_graph.graph.nodes:
        node.meta["recompute"] = "changed"
    assert len(inner.graph.output_node().args[0]) == 2  # type: ignore[arg-type]
    assert not any(n.meta for n in middle.graph.nodes)


@pytest.mark.slow
def test_copies_of_a_joint_graph_share_nothing_that_changes() -> None:
    forced = Forced(compiles=False)
    joint = variant_maker_of(forced.first)._source.joint
    copied = copy_graph(joint)
    for node in copied.graph.nodes:
        node.meta["recompute"] = "changed"
    assert not any(n.meta.get("recompute") == "changed" for n in joint.graph.nodes)


@pytest.mark.slow
def test_the_settings_of_the_first_compilation_hold_for_variants() -> None:
    """Those that the backend patched, and those that the user has changed since."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    seen: list[tuple[bool, int, float]] = []
    forced = Forced(compiles=False, inner="inductor", inductor={"max_fusion_size": 3})
    find = Builder.find

    def looking(*args: Any) -> Any:
        seen.append((config.fallback_random, config.max_fusion_size, functorch_config.activation_memory_budget))
        return find(*args)

    with (
        mock.patch.object(Builder, "find", looking),
        config.patch(fallback_random=True),
        functorch_config.patch(activation_memory_budget=0.5),
        torch.autocast("cpu", torch.bfloat16),
    ):
        variant_maker_of(forced.first).compile(1)
        assert config.fallback_random and torch.is_autocast_enabled("cpu")
    assert seen == [(False, 3, 1.0)]


class _Pass(CustomGraphPass):
    """A user's, which cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, graph: fx.Graph) -> None:
        """Change nothing."""

    def uuid(self) -> str:
        """Of the pass."""
        return "pass"


@pytest.mark.slow
def test_settings_are_the_users_own_objects() -> None:
    from torch._inductor import config

    mine, seen, find = _Pass(), [], Builder.find

    def looking(*args: Any) -> Any:
        seen.append(config.post_grad_custom_post_pass)
        return find(*args)

    with config.patch(post_grad_custom_post_pass=mine):
        forced = Forced(compiles=False)
    with mock.patch.object(Builder, "find", looking):
        variant_maker_of(forced.first).compile(1)
    assert seen == [mine] and config.post_grad_custom_post_pass is None


@pytest.mark.slow
def test_a_graph_without_a_variant_maker_has_a_description(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "fxoffload"),
        mock.patch("fxoffload.compiler.session.variant_maker_for", side_effect=TypeError("on purpose")),
    ):
        found = sites_of(Layers(2), torch.randn(2, 12, 16))
    assert len(found) == 2 and all(part_of(s).variant_maker is None for s in found)
    assert "no variants that recompute more: TypeError: on purpose" in caplog.text


@pytest.mark.slow
def test_a_planned_variant_patches_no_settings_that_are_the_same() -> None:
    """Up to torch 2.11, a patch is seen by all threads; a partitioning reads no other settings of the backend."""
    from torch._inductor import config

    with config.patch(fallback_random=True, max_fusion_size=3):
        forced = Forced(compiles=False)
        mine = variant_maker_of(forced.first)
        with config.patch(max_fusion_size=5), mock.patch.object(ConfigModule, "patch") as patch:
            assert mine.variant(mine.points()[-1]) is not None
        patch.assert_not_called()


@pytest.mark.slow
def test_a_planned_variant_sees_the_settings_that_the_partitioner_reads() -> None:
    import torch._functorch.config as functorch_config

    forced = Forced(compiles=False)
    mine = variant_maker_of(forced.first)
    seen, partition = [], mine._source.partition

    def looking(gm: fx.GraphModule) -> Any:
        seen.append((functorch_config.activation_memory_budget, functorch_config.enable_autograd_cache))
        return partition(gm)

    mine._source = replace(mine._source, partition=looking)
    with functorch_config.patch(activation_memory_budget=0.5, enable_autograd_cache=True):
        assert mine.variant(mine.points()[0]) is not None
        assert functorch_config.activation_memory_budget == 0.5
    assert seen == [(1.0, True)]
