"""Variants of compiled graphs at run time: the same numbers whatever each call runs, and nothing kept for longer."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxoffload
from fxoffload.errors import TokenLostError
from fxoffload.runtime import executor
from fxoffload.runtime.bundle import Bundle, bundle_of, bundle_token
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.executor import (
    KEPT_FOR_HOOKS,
    KEPT_IN_BACKWARD,
    KEPT_WITHOUT_VARIANT,
    backward_callable,
    forward_callable,
)
from fxoffload.runtime.outer_program import OuterProgram
from fxoffload.runtime.tracker import step_tracker
from fxoffload.runtime.tracker.plan_maker import PlanMaker
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transfer import Group
from fxoffload.runtime.variant import Variant, VariantLayout, Variants
from fxoffload.step.choice import Choice
from tests.runtime.forced import CPU, Forced, Layers, bundles
from tests.runtime.test_executor import Outer, plus_one, program
from tests.support import assert_close, assert_equal, assert_nothing_held, compile_counts, effects

MIXES = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (0, 1, 2), (2, 0, 1), (1, 2, 0)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("gate", [False, True])
def test_every_mix_of_variants_gives_the_same_bits(gate: bool, same_code: Callable[..., Any]) -> None:
    forced = Forced(Layers(gate=True)) if gate else same_code(Forced)
    forced.force(0, 0, 0)
    expected = forced.step()
    counts = compile_counts()
    for variants, offload in itertools.product(MIXES, (False, True)):
        forced.force(*variants, offload=offload)
        fxoffload.reset_stats()
        with bundles() as made:
            assert_equal(forced.step(), expected)
        assert len(made) == sum(v > 0 for v in variants)
        assert_nothing_held()
        stats = fxoffload.stats()
        assert (stats.bytes_offloaded > 0) == offload
        assert not stats.calls_kept
    assert {**compile_counts(), "segments": 0} == {**counts, "segments": 0}


def test_policies_and_decisions_outweigh_a_variant(same_code: Callable[..., Any]) -> None:
    """Behind all others with the same code: it changes decisions."""
    forced = same_code(Forced)
    expected = forced.step()
    with bundles() as made:
        forced.force(1, 2, 1)
        with fxoffload.override_policy("offload_all"):
            assert_equal(forced.step(), expected)
        forced.force(1, 2, 1)
        forced.force(1, 2, 1)
        for tracked in forced.order:  # should a choice slip through
            tracked.may_follow = lambda: True
        with fxoffload.override_policy("offload_all"):
            assert_equal(forced.step(), expected)
        for graph in forced.graphs:
            graph.decisions[graph.saved.candidates[0].name] = True
        forced.force(1, 2, 1)
        assert_equal(forced.step(), expected)
    assert not made


@pytest.mark.slow
@pytest.mark.parametrize("variants", [(1, 1, 1), (2, 0, 1)])
def test_with_inductor(variants: tuple[int, ...]) -> None:
    forced = Forced(inner="inductor")
    plain = forced.step()
    forced.force(*variants)
    kept = forced.step()
    forced.force(*variants, offload=True)
    assert_equal(forced.step(), kept)
    assert_close(kept, plain)
    assert any(m.donates for g in forced.graphs for v in g.variants for m in v.backward.children())


@pytest.mark.slow
def test_attention_is_recomputed_without_its_random_state() -> None:
    forced = Forced(compiles=False)
    name = "_scaled_dot_product_flash_attention_for_cpu.default"
    for (_, number), found in forced.variants.items():
        variant = found.partitioning
        assert any(name in str(n.target) for n in variant.backward.graph.nodes) == (number == 2)
        nodes = [*variant.forward.graph.nodes, *variant.backward.graph.nodes]
        assert not any("rng_state" in f"{n.name} {n.target}" for n in nodes)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_graph_that_is_retained_gives_the_same_gradients_again(inner: str, offload: bool) -> None:
    forced = Forced(inner=inner)
    forced.force(2, 1, 0, offload=offload)
    expected = forced.step()
    torch.manual_seed(7)
    loss = forced.loss()
    for keep in (True, True, False):
        forced.model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=keep)
        assert_equal({"loss": loss.detach(), **effects(forced.model)}, expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_two_forwards_before_a_backward_are_two_sets_of_bundles(offload: bool) -> None:
    forced = Forced()
    expected = []
    inputs = [forced.x, forced.x + 0.5]
    for x in inputs:
        forced.x = x
        expected.append(forced.step())
    forced.force(1, 2, 0, 2, 1, 2, offload=offload)
    forced.model.zero_grad(set_to_none=True)
    with bundles() as made:
        losses = [forced.model(x).square().mean() for x in inputs]
        assert len(made) == 5
        for i in (1, 0):
            forced.model.zero_grad(set_to_none=True)
            losses[i].backward()
            assert_equal({"loss": losses[i].detach(), **effects(forced.model)}, expected[i])
    assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_backwards_in_the_order_of_the_forwards(offload: bool) -> None:
    """Each finds the variant and the group of its own tokens, however the chain goes."""
    forced = Forced()
    expected = []
    inputs = [forced.x, forced.x + 0.5]
    for x in inputs:
        forced.x = x
        expected.append(forced.step())
    forced.force(0, 1, 2, 2, 0, 1, offload=offload)
    losses = [forced.model(x).square().mean() for x in inputs]
    for i in (0, 1):
        forced.model.zero_grad(set_to_none=True)
        losses[i].backward()
        assert_equal({"loss": losses[i].detach(), **effects(forced.model)}, expected[i])
    assert_nothing_held()


# -- lifetimes of saved values -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_a_graph_that_is_dropped_frees_everything(gate: bool, offload: bool) -> None:
    """By reference counting alone; ``gate``: the saved value is an output, which holds its own graph."""
    forced = Forced(Layers(gate=gate))
    forced.force(1, 2, 1, offload=offload)
    gc.collect()
    gc.disable()
    try:
        with bundles() as made:
            loss = forced.loss()
            assert [b() is not None for b in made] == [True] * 3
            values = [weakref.ref(v) for b in made for v in b()._values if isinstance(v, Tensor)]  # type: ignore[union-attr]
            assert values
            del loss
            assert [b() for b in made] == [None] * 3
            assert not any(v() is not None for v in values)
            assert_nothing_held()
    finally:
        gc.enable()


@pytest.mark.slow
def test_values_die_with_the_backward_of_their_call() -> None:
    """Not with the graph: the loss is held."""
    forced = Forced()
    forced.force(1, 2, 1)
    with bundles() as made:
        loss = forced.loss()
        values = [weakref.ref(v) for b in made for v in b()._values]  # type: ignore[union-attr]
        loss.backward()
        assert not any(v() is not None for v in values)
    del loss


def hand_made(save: Callable[[list[Any]], list[Any]], use: Callable[[list[Any]], list[Any]]) -> Variant:
    """x -> (out, a, b): a and b are saved; the backward takes the tangent with them."""
    outer = Outer()
    x = outer.input("x")
    out, a, b = outer.segment(save, x, results=3)
    forward = program(outer.module(out, a, b))
    outer = Outer()
    a, b, tangent = outer.input("a"), outer.input("b"), outer.input("tangents_1")
    (grad,) = outer.segment(use, a, b, tangent)
    backward = program(outer.module(grad), copies={})
    # Variant 0 saves two values as well, and its backward takes them before the tangent.
    layout = VariantLayout((0,), 1, 3, (), (1, 2), ("a", "b"), 1, 0, "c", (-1, -2, 2))
    return Variant(forward, backward, (), layout)


def first_program() -> OuterProgram:
    outer = Outer()
    x = outer.input("x")
    (out,) = outer.segment(plus_one, x)
    return program(outer.module(out, out, out))


def variants_of(variant: Variant) -> Variants:
    found = Variants()
    found.add(1, variant)
    return found


def test_a_segment_is_given_the_only_references_to_what_a_bundle_held() -> None:
    dead: list[bool] = []

    def save(args: list[Any]) -> list[Any]:
        return [args[0] + 1, args[0] + 2, args[0] + 3]

    def use(args: list[Any]) -> list[Any]:
        watched = [weakref.ref(a) for a in args[:2]]
        grad = args[0] * args[1] * args[2]
        args.clear()
        dead.extend(w() is None for w in watched)
        return [grad]

    variants = variants_of(hand_made(save, use))
    forward = forward_callable(first_program(), lambda _: Choice((), variant=1), variants=variants)
    backward = backward_callable(first_program(), variants=variants)
    out, token, filler = forward([torch.ones(3)])
    assert torch.equal(out, torch.full((3,), 2.0))
    assert filler.numel() == 0 and bundle_of(filler, "") is None
    # The token outlives the step_tracker, as where something else holds it.
    for keeps_graph in (True, False):
        with mock.patch.object(executor, "backward_keeps_graph", lambda keeps=keeps_graph: keeps):
            assert torch.equal(backward([token, filler, torch.full((3,), 5.0)])[0], torch.full((3,), 60.0))
    assert dead == [False, False, True, True]
    with pytest.raises(RuntimeError, match="a backward took it already"):
        backward([token, filler, torch.ones(3)])


def test_a_value_that_a_segment_overwrites_is_copied_where_the_graph_is_kept() -> None:
    def use(args: list[Any]) -> list[Any]:
        return [args[0].mul_(args[1]).mul_(args[2])]

    variant = hand_made(lambda a: [a[0] + 1, a[0] + 2, a[0] + 3], use)
    variant.backward.overwritten = (0,)
    variants = variants_of(variant)
    forward = forward_callable(first_program(), lambda _: Choice((), variant=1), variants=variants)
    _, token, filler = forward([torch.ones(3)])
    backward = backward_callable(first_program(), variants=variants)
    for keeps_graph in (True, True, False):
        with mock.patch.object(executor, "backward_keeps_graph", lambda keeps=keeps_graph: keeps):
            assert torch.equal(backward([token, filler, torch.full((3,), 5.0)])[0], torch.full((3,), 60.0))


def test_decisions_are_in_the_order_of_the_candidates() -> None:
    made = hand_made(lambda a: a, lambda a: a)
    variants = variants_of(Variant(made.forward, made.backward, (2, 0, 1), made.layout))
    choice = Choice((True, False, False), None, 1)
    assert variants.in_order(choice) == Choice([False, True, False], None, 1)
    assert variants.in_order(Choice((True,), None, 2)) == Choice((True,), None, 2)


def test_a_call_of_variant_0_between_others() -> None:
    """The backward knows from its arguments."""
    variant = hand_made(lambda a: [a[0], a[0], a[0]], lambda a: [a[2]])
    outer = Outer()
    inputs = [outer.input(n) for n in ("c", "d", "tangents_1")]
    backward = backward_callable(program(outer.module(inputs[0])), variants=variants_of(variant))
    assert torch.equal(backward([torch.ones(2), torch.zeros(2), torch.zeros(2)])[0], torch.ones(2))


def test_a_copy_of_a_bundles_token_is_refused() -> None:
    variants = variants_of(hand_made(lambda a: [a[0], a[0], a[0]], lambda a: [a[2]]))
    token = bundle_token(Bundle(1, Group(), ("a", "b"), [torch.ones(2), torch.ones(2)]))
    backward = backward_callable(first_program(), variants=variants)
    with pytest.raises(TokenLostError, match="found a copy of the token"):
        backward([token.clone(), torch.empty(0), torch.ones(2)])
    with pytest.raises(TypeError, match="one owner"):
        copy.deepcopy(token)


# -- writes to saved values --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_an_input_that_is_modified_before_the_backward_raises(offload: bool) -> None:
    """The bias is read again by variant 2 only."""
    forced = Forced()
    bias = forced.model.layers[1].qkv.bias  # type: ignore[union-attr,index]
    variant = forced.variants[forced.order[1], 2]
    saved = {n.name: n.meta["val"] for n in variant.partitioning.forward.graph.find_nodes(op="placeholder")}
    assert any(saved[name].shape == bias.shape for name in variant.layout.names if name in saved)
    for variant in (0, 2):
        forced.force(0, variant, 0, offload=offload)
        loss = forced.loss()
        with torch.no_grad():
            bias.add_(1.0)
        if variant == 0:
            loss.backward()
        else:
            with pytest.raises(
                RuntimeError, match=r"expected primals_\d+, .* at version \d+, found version \d+: an op"
            ):
                loss.backward()


def test_versions_of_a_bundle() -> None:
    value, view = torch.ones(4), torch.ones(4)
    bundle = Bundle(1, Group(), ("value", "view"), [value, view[1:]])
    assert [torch.equal(v, torch.ones_like(v)) for v in bundle.take(keeps_graph=True)] == [True, True]
    view.add_(1)
    with pytest.raises(RuntimeError, match=r"expected view, a tensor of \[3\] .* at version 0, found version 1"):
        bundle.take(keeps_graph=True)


# -- calls that must not run a variant ---------------------------------------------------------------------------------


def kept_reasons() -> dict[str, int]:
    return dict(fxoffload.stats().calls_kept)


@pytest.mark.slow
def test_under_users_hooks_variant_0_runs() -> None:
    forced = Forced()
    expected = forced.step()
    forced.force(1, 2, 1)
    fxoffload.reset_stats()
    packed: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value)
        return value.clone()

    with bundles() as made, torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        assert_equal(forced.step(), expected)
    assert packed and not made


@pytest.mark.slow
def test_a_choice_that_slips_through_is_not_followed_under_hooks() -> None:
    forced = Forced()
    expected = forced.step()
    forced.force(1, 2, 1, offload=True)
    fxoffload.reset_stats()
    with (
        mock.patch.object(step_tracker, "saved_tensor_hooks_active", lambda: False),
        bundles() as made,
        torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda v: v),
    ):
        assert_equal(forced.step(), expected)
    assert not made
    assert kept_reasons() == {KEPT_FOR_HOOKS: 3}
    assert fxoffload.stats().bytes_offloaded == 0


@pytest.mark.slow
def test_a_forward_inside_a_backward_runs_variant_0() -> None:
    class Checkpointed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            """The second layer's forward runs twice."""
            x = self.layers[0](x)
            x = checkpoint(self.layers[1], x, use_reentrant=True)  # type: ignore[assignment]
            return self.layers[2](x)

    forced = Forced(Layers())
    expected = forced.step()
    forced.model.__class__ = Checkpointed
    forced.force(2, 2, 2, offload=True)
    with bundles() as made:
        assert_equal(forced.step(), expected)
    assert 0 < len(made) < 3
    assert_nothing_held()


def test_a_choice_that_slips_through_is_not_followed_in_a_backward() -> None:
    variants = variants_of(hand_made(lambda a: [a[0], a[0], a[0]], lambda a: [a[2]]))
    forward = forward_callable(first_program(), lambda _: Choice((), variant=1), variants=variants)
    with mock.patch.object(executor, "in_backward", lambda: True):
        found = forward([torch.ones(2)])
    assert all(torch.equal(v, torch.full((2,), 2.0)) for v in found)
    assert kept_reasons() == {KEPT_IN_BACKWARD: 1}


def test_a_variant_that_is_not_compiled_is_not_run() -> None:
    forced = Forced(compiles=False)
    expected = forced.step()
    forced.force(1, 0, 2, offload=True)
    fxoffload.reset_stats()
    with bundles() as made:
        assert_equal(forced.step(), expected)
    assert not made
    assert kept_reasons() == {KEPT_WITHOUT_VARIANT: 2}


# -- a plan that has to be made ready ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_variants_are_compiled_when_the_first_step_begins() -> None:
    forced = Forced(compiles=False)
    expected = forced.step()
    prepared: list[bool] = []

    def prepare() -> None:
        prepared.append(engine_for(CPU).calls._lock._is_owned())  # type: ignore[attr-defined]
        forced.compile()

    forced.force(1, 2, 0, prepare=prepare)
    assert_equal(forced.step(), expected)
    with bundles() as made:
        assert_equal(forced.step(), expected)
    assert len(made) == 2
    assert prepared == [False]
    assert [len(g.variants) for g in forced.graphs] == [2] * len(forced.graphs)


@pytest.mark.slow
def test_a_plan_that_cannot_be_made_ready_gives_way_to_another() -> None:
    forced = Forced()
    expected = forced.step()
    asked: list[int] = []

    def fail() -> None:
        asked.append(1)
        raise ValueError("on purpose")

    forced.force(1, 2, 1, prepare=fail, otherwise=lambda: forced.plan((0, 0, 0), offload=True))
    fxoffload.reset_stats()
    with bundles() as made:
        with pytest.warns(UserWarning, match="goes on with another plan: ValueError: on purpose"):
            assert_equal(forced.step(), expected)
        moved = fxoffload.stats().bytes_offloaded
        assert moved > 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal(forced.step(), expected)
    assert not made and asked == [1]
    assert fxoffload.stats().bytes_offloaded == 2 * moved


@pytest.mark.slow
def test_a_plan_is_not_made_ready_in_the_middle_of_a_step() -> None:
    """A plan from another thread may come at any time, and the first graph may be called again later in the chain."""
    forced = Forced(Layers())
    engine_for(CPU).calls._step = None
    prepared: list[int] = []
    x = forced.model.layers[0](forced.x)  # type: ignore[operator,index]
    x = forced.model.layers[1](x)  # type: ignore[operator,index]
    chains = forced.order[2].chains
    chains.take(chains.at(()), forced.plan((1, 1, 1), offload=False, prepare=lambda: prepared.append(1)))
    loss = forced.model.layers[2](x).sum()  # type: ignore[operator,index]
    assert not prepared
    loss.backward()
    forced.model.layers[2](x)  # type: ignore[operator,index]
    assert prepared == [1], "a step begins there"


@pytest.mark.slow
def test_what_was_interrupted_is_made_ready_later() -> None:
    forced = Forced(Layers())
    prepared: list[str] = []

    def prepare() -> None:
        prepared.append("again" if prepared else "interrupted")
        if len(prepared) == 1:
            raise KeyboardInterrupt

    forced.force(1, 2, 0, prepare=prepare)
    with pytest.raises(KeyboardInterrupt):
        forced.step()
    assert forced.chains.may_prepare
    forced.step()
    assert prepared == ["interrupted", "again"] and not forced.chains.may_prepare


@pytest.mark.slow
def test_calls_look_for_what_to_make_ready_only_where_something_may_be() -> None:
    forced = Forced(Layers())
    with mock.patch.object(PlanMaker, "_make_ready", autospec=True, return_value=True) as looks:
        forced.step()
        assert not looks.called
        forced.force(1, 2, 0, prepare=lambda: None)
        forced.step()
        assert looks.call_count == 1


@pytest.mark.slow
def test_an_empty_group_of_a_variant_is_found_again() -> None:
    """Everything kept under a plan's windows: the backward still has them, and takes back what earlier calls moved."""
    forced = Forced()
    forced.force(1, 1, 1)
    seen: list[Any] = []
    begins = TrackedGraph.backward_begins

    def backward_begins(tracked: Any, group: Group, args: Sequence[Any]) -> Group:
        seen.append((len(group), group.takes_below, len(tracked.calls._step.pending)))
        return begins(tracked, group, args)

    with mock.patch.object(TrackedGraph, "backward_begins", backward_begins):
        forced.step()
    assert seen == [(0, True, 3), (0, True, 2), (0, True, 1)]
    assert engine_for(CPU).calls._step is not None
    assert engine_for(CPU).calls._step.has_ended


@pytest.mark.slow
def test_a_backward_of_variant_0_does_not_take_a_variants_call() -> None:
    """Of the same graph, later in the chain: its windows are for other segments."""
    forced = Forced()
    forced.force(0, 0, 1)
    first, second, third = forced.model.layers  # type: ignore[misc]
    x = second(first(forced.x))
    y = third(x.detach().requires_grad_())
    step = engine_for(CPU).calls._step
    assert step is not None
    assert [c.is_bundled for c in step.pending] == [False, False, True]
    x.sum().backward()
    assert [c.place for c in step.pending] == [2]
    y.sum().backward()
    assert not step.pending


@pytest.mark.slow
def test_a_call_waits_for_its_backward_as_long_as_its_token_lives() -> None:
    forced = Forced()
    forced.force(1, 2, 1)
    loss = forced.loss()
    step = engine_for(CPU).calls._step
    assert step is not None
    assert [c.waits() for c in step.pending] == [True] * 3
    del loss
    assert [c.waits() for c in step.pending] == [False] * 3


def test_arguments_are_given_away() -> None:
    """They die with the forward that reads them."""
    layout: Any = SimpleNamespace(inputs=(2, 0))
    program: Any = None
    args: list[Any] = ["first", "second", "third"]
    assert Variant(program, program, (), layout).arguments_of_forward(args) == ["third", "first"]
    assert args == []
