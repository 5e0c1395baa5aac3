"""The executor on outer graphs written by hand: the contents of its slots, its saved values and results, and their
release."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

import fxoffload
from fxoffload import ops
from fxoffload.runtime import executor
from fxoffload.runtime.copies.streams import HostCopies
from fxoffload.runtime.engine import Budgets, CopyEngine, engine_for
from fxoffload.runtime.executor import backward_callable, forward_callable
from fxoffload.runtime.outer_program import OuterProgram, RuntimeOptions
from fxoffload.runtime.transfer import Transfer, slot_of
from fxoffload.step.choice import Choice
from fxoffload.step.offload_candidate import OffloadCandidate
from tests.capture import Tower, example_input, rehearsal_options

CPU = torch.device("cpu")
OPTIONS = RuntimeOptions(Budgets(1 << 24, 1 << 24, 1 << 24), min_bytes=1)


class Segment(nn.Module):
    def __init__(self, fn: Callable[[list[Any]], Sequence[Any]]) -> None:
        super().__init__()
        self.fn = fn


class Outer:
    """An outer graph under construction. Segments are functions that take a list, which they clear."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.modules: dict[str, Any] = {}

    def input(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def constant(self, name: str, value: Tensor) -> fx.Node:
        self.modules[name] = value
        return self.graph.get_attr(name)

    def segment(self, fn: Callable[[list[Any]], Sequence[Any]], *args: fx.Node, results: int = 1) -> list[fx.Node]:
        name = f"segment_{len(self.modules)}"
        self.modules[name] = Segment(fn)
        return self._unpack(self.graph.call_module(name, args), results)

    def offload(self, *sources: fx.Node) -> list[fx.Node]:
        return self._unpack(self.graph.call_function(ops.offload, (list(sources),)), len(sources))

    def op(self, op: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(op, args)

    def wait(self, request: fx.Node, count: int) -> list[fx.Node]:
        return self._unpack(self.graph.call_function(ops.wait_reload, (request,)), count)

    def _unpack(self, packed: fx.Node, count: int) -> list[fx.Node]:
        return [self.graph.call_function(operator.getitem, (packed, i)) for i in range(count)]

    def module(self, *outputs: Any) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(self.modules, self.graph)


def plus_one(args: list[Any]) -> list[Any]:
    (x,) = args
    args.clear()
    return [x + 1]


def run(program: OuterProgram, *args: Any, decisions: Sequence[bool] = ()) -> list[Any]:
    return forward_callable(program, lambda _: Choice(decisions))(list(args))


def program(outer: fx.GraphModule, **changes: Any) -> OuterProgram:
    return OuterProgram(outer, device=CPU, options=changes.pop("options", OPTIONS), **changes)


# -- what slots hold -------------------------------------------------------------------------------------------------


def test_a_segment_is_given_the_only_reference_to_what_it_is_the_last_to_read() -> None:
    """Each segment drops its inputs halfway: those it reads last are gone then, those that are read again are not."""
    seen: list[list[bool]] = []

    def look(args: list[Any]) -> list[Any]:
        watched = [weakref.ref(a) for a in args]
        total = sum(a.sum() for a in args)
        args.clear()
        seen.append([w() is not None for w in watched])
        return [total.expand(3).clone()]

    outer = Outer()
    x, y = outer.input("x"), outer.input("y")
    (a,) = outer.segment(look, x, y)
    (b,) = outer.segment(look, a, y)
    (c,) = outer.segment(look, b, a)
    forward_callable(program(outer.module(c)), lambda _: Choice(()))([torch.ones(3), torch.ones(3)])
    # x goes with the first segment, y with the second, a and b with the third.
    assert seen == [[False, True], [True, False], [False, False]]


def test_what_is_returned_is_not_let_go() -> None:
    held: list[bool] = []

    def look(args: list[Any]) -> list[Any]:
        watched = weakref.ref(args[0])
        args.clear()
        held.append(watched() is not None)
        return []

    outer = Outer()
    x = outer.input("x")
    (a,) = outer.segment(plus_one, x)
    outer.segment(look, a, results=0)
    (found,) = run(program(outer.module(a)), torch.ones(3))
    assert held == [True]
    assert torch.equal(found, torch.full((3,), 2.0))


def test_the_callers_list_is_emptied() -> None:
    outer = Outer()
    x = outer.input("x")
    args = [torch.ones(3)]
    forward_callable(program(outer.module(*outer.segment(plus_one, x))), lambda _: Choice(()))(args)
    assert args == []


def test_results_that_nothing_takes_die_at_once() -> None:
    watched: list[weakref.ref[Tensor]] = []

    def three(args: list[Any]) -> list[Any]:
        results = [torch.ones(3) for _ in range(3)]
        watched.extend(map(weakref.ref, results))
        return results

    def look(args: list[Any]) -> list[Any]:
        alive.extend(w() is not None for w in watched)
        return [args[0]]

    alive: list[bool] = []
    outer = Outer()
    one, _, three_ = outer.segment(three, outer.input("x"), results=3)
    outer.graph.erase_node(next(n for n in outer.graph.nodes if n.target is operator.getitem and n.args[1] == 1))
    (out,) = outer.segment(look, three_)
    run(program(outer.module(out, one)), torch.ones(3))
    assert alive == [True, False, True]


def test_constants_outputs_that_are_no_values_and_inputs_that_pass_through() -> None:
    outer = Outer()
    x = outer.input("x")
    constant = outer.constant("weights", torch.tensor([3.0]))

    def multiply(args: list[Any]) -> list[Any]:
        return [args[0] * args[1]]

    (a,) = outer.segment(multiply, x, constant)
    made = program(outer.module(None, a, x, 7))
    for _ in range(2):  # constants are still there the second time
        value = torch.ones(3)
        none, result, passed, seven = run(made, value)
        assert (none, seven) == (None, 7)
        assert torch.equal(result, torch.full((3,), 3.0))
        assert passed is value


# -- forward ---------------------------------------------------------------------------------------------------------


def saving(*names: str, is_input: bool = False, wait: bool = False) -> tuple[fx.GraphModule, list[OffloadCandidate]]:
    """Returns its inputs (as if saved), each a candidate of its own."""
    outer = Outer()
    inputs = [outer.input(name) for name in names]
    copies = outer.offload(*inputs)
    outer.op(ops.release, copies)
    if wait:
        outer.op(ops.wait_offload, copies)
    return outer.module(*copies), [OffloadCandidate(name, 1, is_input) for name in names]


def test_the_decisions_are_taken_at_each_call() -> None:
    gm, offload_candidates = saving("x", "y")
    made = program(gm, offload_candidates=offload_candidates)
    for decisions in ((True, False), (False, True), (False, False), (True, True)):
        values = [torch.ones(4), torch.ones(8)]
        results = run(made, *values, decisions=decisions)
        for result, value, offload in zip(results, values, decisions, strict=True):
            slot = slot_of(result, "x")
            assert (slot is not None) == offload
            assert offload or result is value
    assert fxoffload.stats().num_copies == 4


def test_only_a_call_that_offloads_is_in_the_save_order() -> None:
    gm, offload_candidates = saving("x")
    made = program(gm, offload_candidates=offload_candidates)
    save_order = engine_for(CPU).save_order
    kept = run(made, torch.ones(4), decisions=(False,))
    assert len(save_order) == 0
    tokens = run(made, torch.ones(4), decisions=(True,))
    assert len(save_order) == 1
    del tokens
    assert len(save_order) == 0
    assert len(kept) == 1


def test_what_is_smaller_than_min_bytes_at_run_time_stays() -> None:
    gm, offload_candidates = saving("x", "y")
    made = program(gm, offload_candidates=offload_candidates, options=RuntimeOptions(OPTIONS.budgets, min_bytes=32))
    results = run(made, torch.ones(7), torch.ones(8), decisions=(True, True))
    assert [slot_of(r, "x") is not None for r in results] == [False, True]


def test_views_of_one_storage_are_one_transfer_and_strangers_are_two() -> None:
    outer = Outer()
    x, y, z = outer.input("x"), outer.input("y"), outer.input("z")
    copies = outer.offload(x, y, z)
    outer.op(ops.release, copies)
    made = program(outer.module(*copies), offload_candidates=[OffloadCandidate("x", 3, False)])
    base = torch.ones(16)
    results = run(made, base[:8], base[8:], torch.ones(4), decisions=(True,))
    slots = [slot_of(r, "x") for r in results]
    assert slots[0].transfer is slots[1].transfer is not slots[2].transfer  # type: ignore[union-attr]
    assert fxoffload.stats().num_copies == 2


def test_a_value_on_another_device_than_the_trace_says_passes_through() -> None:
    """As the seed of attention without dropout, which is on the host."""
    gm, offload_candidates = saving("x", "y")
    made = program(gm, offload_candidates=offload_candidates)
    elsewhere = torch.ones(4, device="meta")
    results = run(made, elsewhere, torch.ones(4), decisions=(True, True))
    assert results[0] is elsewhere
    assert slot_of(results[1], "y") is not None
    assert fxoffload.stats().num_copies == 1


def test_a_value_that_does_not_fit_the_host_passes_through() -> None:
    gm, offload_candidates = saving("x", "y")
    small = RuntimeOptions(Budgets(engine_for(CPU).arena.reserved_bytes, 0, 0), min_bytes=1)
    made = program(gm, offload_candidates=offload_candidates, options=small)
    value = torch.ones(1 << 24)
    results = run(made, value, value.clone(), decisions=(True, True))
    assert results[0] is value
    assert fxoffload.stats().bytes_kept_host_full == 2 * value.nbytes


def test_the_ranks_order_the_group() -> None:
    gm, offload_candidates = saving("x", "y", "z")
    for offload_candidate, rank in zip(offload_candidates, (2, 0, 1), strict=True):
        offload_candidate.rank = rank
    results = run(
        program(gm, offload_candidates=offload_candidates), *(torch.ones(n) for n in (4, 8, 12)), decisions=(True,) * 3
    )
    group = slot_of(results[0], "x").group  # type: ignore[union-attr]
    assert [t.nbytes for t in group.in_need_order()] == [32, 48, 16]


def test_graph_inputs_are_not_reclaimable() -> None:
    for is_input in (True, False):
        gm, offload_candidates = saving("x", is_input=is_input, wait=is_input)
        (token,) = run(program(gm, offload_candidates=offload_candidates), torch.ones(4), decisions=(True,))
        assert slot_of(token, "x").transfer.reclaimable is not is_input  # type: ignore[union-attr]


@pytest.mark.parametrize(("everything", "limit"), [(False, 1 << 24), (True, 0)])
def test_release_goes_to_the_budget_in_a_forward_and_to_nothing_in_a_backward(
    everything: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(CopyEngine, "release", lambda self, limit_bytes: seen.append(limit_bytes))
    outer = Outer()
    x = outer.input("x")
    copies = outer.offload(x)
    outer.op(ops.release, [] if everything else copies)
    run(
        program(outer.module(*copies), offload_candidates=[OffloadCandidate("x", 1, False)]),
        torch.ones(4),
        decisions=(True,),
    )
    assert seen == [limit]


@pytest.mark.parametrize(
    ("patched", "reason"),
    [
        ("in_backward", executor.KEPT_IN_BACKWARD),
        ("saved_tensor_hooks_active", executor.KEPT_FOR_HOOKS),
        ("compiled_autograd_active", executor.KEPT_FOR_COMPILED_AUTOGRAD),
    ],
)
def test_a_call_whose_tokens_somebody_would_see_keeps_everything(
    patched: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, patched, lambda: True)
    gm, offload_candidates = saving("x")
    value = torch.ones(4)
    assert run(program(gm, offload_candidates=offload_candidates), value, decisions=(True,))[0] is value
    assert run(program(gm, offload_candidates=offload_candidates), value, decisions=(False,))[0] is value
    assert fxoffload.stats().calls_kept == {reason: 1}  # the second kept everything anyway


# -- backward --------------------------------------------------------------------------------------------------------


def reloading(*names: str, look: Callable[[list[Any]], Sequence[Any]] = plus_one) -> fx.GraphModule:
    """One segment for each of its inputs, in order."""
    outer = Outer()
    inputs = [outer.input(name) for name in names]
    requests = [outer.op(ops.reload, [node], CPU) for node in inputs]
    outer.op(ops.prefetch)
    results = []
    for request in requests:
        (value,) = outer.wait(request, 1)
        results += outer.segment(look, value)
        outer.op(ops.prefetch)
    return outer.module(*results)


def saved(*values: Tensor) -> list[Any]:
    """What a forward hands to autograd for them, all offloaded."""
    names = [f"x{i}" for i in range(len(values))]
    gm, offload_candidates = saving(*names)
    return run(program(gm, offload_candidates=offload_candidates), *values, decisions=(True,) * len(values))


def test_tokens_and_values_may_be_mixed() -> None:
    made = program(reloading("a", "b"), copies={0: "a", 1: "b"})
    value = torch.ones(4)
    found = backward_callable(made)([*saved(torch.full((4,), 5.0)), value])
    assert torch.equal(found[0], torch.full((4,), 6.0))
    assert torch.equal(found[1], torch.full((4,), 2.0))


def test_a_value_that_was_kept_is_the_very_tensor_that_the_segment_reads() -> None:
    seen: list[Any] = []

    def look(args: list[Any]) -> list[Any]:
        seen.append(args[0].data_ptr())
        return [args.pop()]

    value = torch.ones(4)
    backward_callable(program(reloading("a", look=look), copies={0: "a"}))([value])
    assert seen == [value.data_ptr()]


def test_a_reloaded_value_dies_in_the_segment_that_reads_it() -> None:
    alive: list[tuple[int, bool]] = []
    watched: list[weakref.ref[Tensor]] = []

    def look(args: list[Any]) -> list[Any]:
        watched.append(weakref.ref(args[0].untyped_storage()))
        args.clear()
        alive.append((len(watched), any(w() is not None for w in watched)))
        return [torch.zeros(1)]

    options = RuntimeOptions(Budgets(1 << 24, 0, 0), min_bytes=1)
    tokens = saved(*(torch.ones(256) for _ in range(3)))
    engine_for(CPU).release(0)  # so that nothing is reclaimed
    backward_callable(program(reloading("a", "b", "c", look=look), copies={0: "a", 1: "b", 2: "c"}, options=options))(
        tokens
    )
    assert alive == [(1, False), (2, False), (3, False)]
    assert fxoffload.stats().bytes_reloaded == 3 * 1024


def test_the_blocks_return_with_the_tokens() -> None:
    made = program(reloading("a", "b"), copies={0: "a", 1: "b"})
    tokens = saved(torch.ones(128), torch.ones(128))
    assert fxoffload.stats().host_bytes_in_use == 1024
    backward_callable(made)(list(tokens))  # autograd holds them still
    assert fxoffload.stats().host_bytes_in_use == 1024
    tokens.clear()
    assert fxoffload.stats().host_bytes_in_use == 0


def test_the_group_leaves_the_save_order_when_its_backward_begins_unless_the_graph_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = program(reloading("a"), copies={0: "a"})
    tokens = saved(torch.ones(4))
    save_order = engine_for(CPU).save_order
    monkeypatch.setattr(executor, "backward_keeps_graph", lambda: True)
    backward_callable(made)(list(tokens))
    assert len(save_order) == 1
    monkeypatch.setattr(executor, "backward_keeps_graph", lambda: False)
    backward_callable(made)(list(tokens))
    assert len(save_order) == 0


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_kept_graph_keeps_its_values_from_being_overwritten(
    keeps_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(args: list[Any]) -> list[Any]:
        return [args.pop().add_(1)]

    monkeypatch.setattr(executor, "backward_keeps_graph", lambda: keeps_graph)
    made = program(reloading("a", look=overwrite), copies={0: "a"}, overwritten=[0])
    base = torch.ones(2, 4)
    value = base.t()
    found = backward_callable(made)([value])
    assert found[0].stride() == value.stride()
    assert torch.equal(base, torch.full((2, 4), 1.0 if keeps_graph else 2.0))


def test_what_the_backward_does_not_read_is_not_reloaded() -> None:
    outer = Outer()
    a, _ = outer.input("a"), outer.input("b")
    request = outer.op(ops.reload, [a], CPU)
    (value,) = outer.wait(request, 1)
    made = program(outer.module(*outer.segment(plus_one, value)), copies={0: "a", 1: "b"})
    tokens = saved(torch.ones(4), torch.ones(8))
    engine_for(CPU).release(0)
    options = RuntimeOptions(OPTIONS.budgets, min_bytes=1, prefetch=False)
    made.options = options
    backward_callable(made)(tokens)
    assert fxoffload.stats().bytes_reloaded == 16


def test_two_views_of_one_transfer_come_back_in_one_buffer() -> None:
    outer = Outer()
    a, b = outer.input("a"), outer.input("b")
    request = outer.op(ops.reload, [a, b], CPU)
    values = outer.wait(request, 2)
    made = program(outer.module(*values), copies={0: "a", 1: "b"})
    forward = Outer()
    copies = forward.offload(forward.input("x"), forward.input("y"))
    forward.op(ops.release, copies)
    base = torch.arange(16.0)
    tokens = run(
        program(forward.module(*copies), offload_candidates=[OffloadCandidate("x", 2, False)]),
        base[:8],
        base[8:],
        decisions=(True,),
    )
    engine_for(CPU).release(0)
    found = backward_callable(made)(tokens)
    assert torch.equal(torch.cat(found), base)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


# -- in a whole step -------------------------------------------------------------------------------------------------


def test_an_exception_in_a_segment_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tower(3)
    compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options())
    compiled(example_input()).sum().backward()
    assert fxoffload.stats().host_bytes_in_use == 0

    take = CopyEngine.take
    left = [2]

    def fail(self: CopyEngine, transfers: Sequence[Transfer]) -> list[Tensor]:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of luck")
        return take(self, transfers)

    loss = compiled(example_input()).sum()
    with monkeypatch.context() as patch:
        patch.setattr(CopyEngine, "take", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            loss.backward()
    del loss
    found = fxoffload.stats()
    assert (found.host_bytes_in_use, found.num_groups_on_tape) == (0, 0)
    model.zero_grad()
    compiled(example_input()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert engine_for(CPU)._ahead_bytes == 0


def test_a_profile_names_the_segments() -> None:
    model = Tower(2)
    compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options())
    with torch.profiler.profile() as profile:
        compiled(example_input()).sum().backward()
    names = {e.key for e in profile.key_averages()}
    assert {"fxoffload::layers_0", "fxoffload::layers_1"} <= names


def test_the_steps_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is walked while a step runs."""
    built: list[int] = []
    build = OuterProgram._build

    def count(self: OuterProgram, steps: Any) -> None:
        built.append(1)
        build(self, steps)

    monkeypatch.setattr(OuterProgram, "_build", count)
    compiled = torch.compile(Tower(2), backend="fxoffload", options=rehearsal_options())
    for _ in range(3):
        compiled(example_input()).sum().backward()
    assert len(built) == 2


def test_both_directions_follow_the_boxed_convention() -> None:
    for make in (lambda made: forward_callable(made, lambda _: Choice(())), backward_callable):
        outer = Outer()
        fn = make(program(outer.module(outer.input("x"))))
        assert fn._boxed_call is True  # type: ignore[attr-defined]


def test_what_the_backward_does_not_read_is_dropped() -> None:
    gm, offload_candidates = saving("x")
    offload_candidates[0].unread = True
    value = torch.ones(4)
    for decision in (True, False):
        (saved,) = run(program(gm, offload_candidates=offload_candidates), value, decisions=(decision,))
        assert saved.shape == (0,)
        assert (saved.dtype, saved.device) == (value.dtype, value.device)
    assert fxoffload.stats().bytes_offloaded == 0


# -- pacing ----------------------------------------------------------------------------------------------------------


class Paced(HostCopies):
    """Writes down when a paced call begins."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def pace(self) -> None:
        self.said.append("pace")


@pytest.mark.parametrize("paced", [False, True])
def test_a_paced_forward_waits_before_it_launches_anything(monkeypatch: pytest.MonkeyPatch, paced: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_for(CPU), "streams", Paced(said))

    def work(args: list[Any]) -> list[Any]:
        said.append("segment")
        return plus_one(args)

    outer = Outer()
    x = outer.input("x")
    (a,) = outer.segment(work, x)
    (b,) = outer.segment(work, a)
    runs = forward_callable(program(outer.module(b)), lambda _: Choice((), paced=paced))
    (found,) = runs([torch.ones(3)])
    assert torch.equal(found, torch.full((3,), 3.0))
    assert said == (["pace"] if paced else []) + ["segment", "segment"]
