"""Graphs broken on purpose, at least one for each rule of the three proofs, each on a copy of a graph that passes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from fxoffload import ops
from fxoffload.analysis.labels import CANDIDATES_KEY, STORAGE_KEY
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.compiler.pipeline import PROOFS
from fxoffload.compiler.segments import SegmentCall
from fxoffload.errors import VerificationError
from fxoffload.ops import is_op
from fxoffload.passes import verify_pairing, verify_transfers, verify_wiring
from fxoffload.passes.insert_transfers import COPY_KEY, DONATABLE_KEY, InsertOffloads
from fxoffload.passes.verify_pairing import VerifyPairing
from fxoffload.passes.verify_transfers import VerifyTransfers
from fxoffload.passes.verify_wiring import VerifyWiring
from tests.capture import WIDTH, Captured, Sketch, Tower, bare_tower, capture, example_input, rehearsal_options


class TwoInputs(nn.Module):
    """Saves both of its inputs, and an intermediate; takes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x * y) * torch.tensor([1.0, 2.0])[0]).exp()


@functools.cache
def two_inputs() -> Captured:
    torch.manual_seed(0)
    return capture(TwoInputs(), example_input().requires_grad_(), example_input(4).mul(2).requires_grad_())


class Skipping(Tower):
    """The first block's output skips the others: the gradient that it gets is read at both ends of the backward."""

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers  # type: ignore[misc]
        x = skipped = first(self.embed(x))
        for layer in rest:
            x = layer(x)
        return self.head(x + skipped)


@functools.cache
def skipping() -> Captured:
    torch.manual_seed(0)
    return capture(Skipping(4), example_input())


def skipping_backward() -> fx.GraphModule:
    return copy.deepcopy(skipping().outer_backward)


def forward() -> fx.GraphModule:
    return copy.deepcopy(bare_tower().outer_forward)


def backward() -> fx.GraphModule:
    return copy.deepcopy(bare_tower().outer_backward)


def two() -> fx.GraphModule:
    return copy.deepcopy(two_inputs().outer_forward)


# -- reading and changing outer graphs -------------------------------------------------------------------------------


def calls(gm: fx.GraphModule, op: Any) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if is_op(n, op)]


def segments(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_module"))


def items(packed: fx.Node) -> list[fx.Node]:
    return sorted((u for u in packed.users if u.target is operator.getitem), key=lambda n: n.args[1])  # type: ignore[arg-type,return-value]


def listed(node: fx.Node) -> list[fx.Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    return [item for packed in calls(gm, ops.offload) for item in items(packed)]


def source_of(copied: fx.Node) -> fx.Node:
    packed, index = copied.args
    return listed(packed)[index]  # type: ignore[arg-type,index]


def set_output(gm: fx.GraphModule, values: list[Any]) -> None:
    gm.graph.output_node().args = (tuple(values),)


def outputs(gm: fx.GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def insert(gm: fx.GraphModule, before: fx.Node, op: Any, *args: Any) -> fx.Node:
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(op, args)


def set_input(call: fx.Node, place: int, value: fx.Node) -> None:
    call.args = (*call.args[:place], value, *call.args[place + 1 :])


def give(gm: fx.GraphModule, call: fx.Node, value: fx.Node, attribute: str) -> None:
    """Say that the segment writes ``value`` ("mutates") or may reuse it ("donates")."""
    module = gm.get_submodule(str(call.target))
    setattr(module, attribute, (call.args.index(value),))


def reader_of(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    return next(s for s in segments(gm) if value in s.args)


def kept_for_the_next_layer(gm: fx.GraphModule) -> tuple[fx.Node, fx.Node, fx.Node]:
    """A copied value that a later segment reads: (copy, source, reader)."""
    for item in copies(gm):
        source = source_of(item)
        for call in segments(gm):
            if source in call.args and source.op != "placeholder":
                return item, source, call
    raise AssertionError("no segment reads what another one saved")


Breaker = Callable[[], fx.GraphModule]
BREAKERS: dict[str, tuple[str, Breaker]] = {}


def breaks(rule: str) -> Callable[[Breaker], Breaker]:
    def register(make: Breaker) -> Breaker:
        BREAKERS[make.__name__] = (rule, make)
        return make

    return register


# -- unpaired --------------------------------------------------------------------------------------------------------


@breaks("unpaired")
def release_missing() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.release)[0]
    node.args = (listed(node)[1:],)
    return gm


@breaks("unpaired")
def release_twice() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.release)[-1]
    insert(gm, gm.graph.output_node(), ops.release, listed(node)[:1])
    return gm


@breaks("unpaired")
def release_of_a_value() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.release)[-1]
    node.args = ([*listed(node), source_of(copies(gm)[0])],)
    return gm


@breaks("unpaired")
def release_of_all_copies_packed() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.release)[-1]
    node.args = (calls(gm, ops.offload)[-1],)
    return gm


@breaks("unpaired")
def copy_not_returned() -> fx.GraphModule:
    gm = forward()
    last = copies(gm)[-1]
    set_output(gm, [None if v is last else v for v in outputs(gm)])
    return gm


@breaks("unpaired")
def copy_that_nothing_takes() -> fx.GraphModule:
    gm = forward()
    first, second = items(calls(gm, ops.offload)[1])[:2]
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)
    node = calls(gm, ops.release)[0]
    node.args = (list(dict.fromkeys(listed(node))),)
    return gm


@breaks("unpaired")
def one_copy_taken_twice_and_another_never() -> fx.GraphModule:
    gm = forward()
    first, second = items(calls(gm, ops.offload)[1])[:2]
    second.args = first.args
    return gm


@breaks("unpaired")
def offload_waited_for_that_was_not_started() -> fx.GraphModule:
    gm = forward()
    (node,) = calls(gm, ops.wait_offload)
    node.args = ([*listed(node), gm.graph.find_nodes(op="placeholder")[0]],)
    return gm


@breaks("unpaired")
def reload_without_wait() -> fx.GraphModule:
    gm = backward()
    insert(gm, segments(gm)[-1], ops.reload, [], torch.device("cpu"))
    return gm


@breaks("unpaired")
def wait_taken_out() -> fx.GraphModule:
    """What the segments read of it they read from the tangent: shapes are another matter."""
    gm = backward()
    wait = calls(gm, ops.wait_reload)[0]
    tangent = gm.graph.find_nodes(op="placeholder")[-1]
    for item in items(wait):
        item.replace_all_uses_with(tangent)
        gm.graph.erase_node(item)
    gm.graph.erase_node(wait)
    return gm


@breaks("unpaired")
def wait_without_reload() -> fx.GraphModule:
    gm = backward()
    insert(gm, segments(gm)[0], ops.wait_reload, gm.graph.find_nodes(op="placeholder")[-1])
    return gm


@breaks("unpaired")
def wait_twice() -> fx.GraphModule:
    gm = backward()
    insert(gm, gm.graph.output_node(), ops.wait_reload, calls(gm, ops.reload)[0])
    return gm


@breaks("unpaired")
def reload_asked_for_twice() -> fx.GraphModule:
    gm = backward()
    node = calls(gm, ops.reload)[1]
    node.args = ([*listed(node), listed(calls(gm, ops.reload)[0])[0]], node.args[1])
    return gm


@breaks("unpaired")
def reload_of_what_was_never_offloaded() -> fx.GraphModule:
    gm = backward()
    plain = next(n for n in gm.graph.find_nodes(op="placeholder") if COPY_KEY not in n.meta)
    node = calls(gm, ops.reload)[0]
    node.args = ([*listed(node), plain], node.args[1])
    return gm


# -- used-after-release ----------------------------------------------------------------------------------------------


@breaks("used-after-release")
def segment_reads_what_was_released() -> fx.GraphModule:
    gm = forward()
    item, _, call = kept_for_the_next_layer(gm)
    node = next(n for n in calls(gm, ops.release) if item in listed(n))
    node.args = ([c for c in listed(node) if c is not item],)
    insert(gm, call, ops.release, [item])
    return gm


@breaks("used-after-release")
def segment_reads_a_view_of_what_was_released() -> fx.GraphModule:
    gm = forward()
    call = segments(gm)[-1]
    call.args[0].meta[STORAGE_KEY] = source_of(listed(calls(gm, ops.release)[0])[0]).meta[STORAGE_KEY]  # type: ignore[union-attr]
    return gm


@breaks("used-after-release")
def source_returned_after_release() -> fx.GraphModule:
    gm = forward()
    _, source, _ = kept_for_the_next_layer(gm)
    set_output(gm, [source, *outputs(gm)])
    return gm


@breaks("used-after-release")
def source_copied_after_release() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.release)[0]
    insert(gm, gm.graph.output_node(), ops.offload, [source_of(listed(node)[-1])])
    return gm


# -- source-overwritten ----------------------------------------------------------------------------------------------


@breaks("source-overwritten")
def segment_writes_a_source_under_copy() -> fx.GraphModule:
    gm = forward()
    _, source, call = kept_for_the_next_layer(gm)
    give(gm, call, source, "mutates")
    return gm


@breaks("source-overwritten")
def segment_is_given_a_source_under_copy() -> fx.GraphModule:
    gm = forward()
    _, source, call = kept_for_the_next_layer(gm)
    give(gm, call, source, "donates")
    return gm


@breaks("source-overwritten")
def segment_writes_a_view_of_a_source() -> fx.GraphModule:
    gm = forward()
    call = segments(gm)[-1]
    value = call.args[0]
    assert isinstance(value, fx.Node)
    value.meta[STORAGE_KEY] = source_of(copies(gm)[0]).meta[STORAGE_KEY]
    for node in calls(gm, ops.release):  # at the end, so that only the write is wrong
        gm.graph.output_node().prepend(node)
    give(gm, call, value, "mutates")
    return gm


@breaks("source-overwritten")
def segment_writes_a_source_that_was_waited_for() -> fx.GraphModule:
    """The copy is safe; but where the run time keeps, it returns the source itself."""
    gm = forward()
    item, source, call = kept_for_the_next_layer(gm)
    insert(gm, call, ops.wait_offload, [item])
    give(gm, call, source, "mutates")
    return gm


# -- caller-may-write ------------------------------------------------------------------------------------------------


@breaks("caller-may-write")
def graph_input_not_waited_for() -> fx.GraphModule:
    gm = forward()
    (node,) = calls(gm, ops.wait_offload)
    gm.graph.erase_node(node)
    return gm


@breaks("caller-may-write")
def one_of_two_graph_inputs_not_waited_for() -> fx.GraphModule:
    gm = two()
    (node,) = calls(gm, ops.wait_offload)
    assert len(listed(node)) == 2
    node.args = (listed(node)[1:],)
    return gm


@breaks("caller-may-write")
def graph_inputs_waited_for_in_another_order() -> fx.GraphModule:
    """The engine waits for the last copy of the list, on a stream that makes them in order."""
    gm = two()
    (node,) = calls(gm, ops.wait_offload)
    node.args = (listed(node)[::-1],)
    return gm


@breaks("caller-may-write")
def another_copy_of_the_graph_input_waited_for() -> fx.GraphModule:
    gm = forward()
    (wait,) = calls(gm, ops.wait_offload)
    (item,) = listed(wait)
    again = insert(gm, segments(gm)[0], ops.offload, [source_of(item)])
    other = insert(gm, segments(gm)[0], operator.getitem, again, 0)
    wait.args = ([other],)
    insert(gm, wait, ops.release, [other])
    set_output(gm, [*outputs(gm), other])
    return gm


@breaks("caller-may-write")
def graph_input_copied_as_if_it_could_be_reclaimed() -> fx.GraphModule:
    gm = forward()
    node = calls(gm, ops.offload)[0]
    (candidate,) = node.meta[CANDIDATES_KEY]
    assert candidate.is_input
    node.meta[CANDIDATES_KEY] = (dataclasses.replace(candidate, is_input=False),)
    return gm


# -- read-before-wait ------------------------------------------------------------------------------------------------


@breaks("read-before-wait")
def segment_reads_a_copy_placeholder() -> fx.GraphModule:
    gm = backward()
    placeholder = next(n for n in gm.graph.find_nodes(op="placeholder") if COPY_KEY in n.meta)
    set_input(segments(gm)[0], 0, placeholder)
    return gm


@breaks("read-before-wait")
def segment_reads_a_copy_in_the_forward() -> fx.GraphModule:
    gm = forward()
    item, source, call = kept_for_the_next_layer(gm)
    set_input(call, call.args.index(source), item)
    return gm


@breaks("read-before-wait")
def reload_unpacked_without_its_wait() -> fx.GraphModule:
    gm = backward()
    wait = calls(gm, ops.wait_reload)[0]
    item = items(wait)[0]
    item.args = (wait.args[0], item.args[1])
    return gm


@breaks("read-before-wait")
def segment_reads_a_reload_itself() -> fx.GraphModule:
    gm = backward()
    set_input(segments(gm)[0], 0, calls(gm, ops.reload)[0])
    return gm


@breaks("read-before-wait")
def backward_returns_a_copy_placeholder() -> fx.GraphModule:
    gm = backward()
    placeholder = next(n for n in gm.graph.find_nodes(op="placeholder") if COPY_KEY in n.meta)
    set_output(gm, [*outputs(gm), placeholder])
    return gm


@breaks("read-before-wait")
def forward_returns_all_copies_packed() -> fx.GraphModule:
    gm = forward()
    set_output(gm, [*outputs(gm), calls(gm, ops.offload)[0]])
    return gm


@breaks("read-before-wait")
def copy_offloaded_again() -> fx.GraphModule:
    gm = backward()
    placeholder = next(n for n in gm.graph.find_nodes(op="placeholder") if COPY_KEY in n.meta)
    insert(gm, segments(gm)[0], ops.offload, [placeholder])
    return gm


# -- donated-then-read -----------------------------------------------------------------------------------------------


def crossing(gm: fx.GraphModule) -> tuple[fx.Node, list[fx.Node]]:
    """An intermediate that two or more segments read, and its readers."""
    for call in segments(gm):
        for value in items(call):
            readers = [s for s in segments(gm) if value in s.args]
            if len(readers) > 1:
                return value, readers
    raise AssertionError("no intermediate is read by two segments")


@breaks("donated-then-read")
def donated_then_read_by_a_later_segment() -> fx.GraphModule:
    gm = skipping_backward()
    value, readers = crossing(gm)
    give(gm, readers[0], value, "donates")
    return gm


@breaks("donated-then-read")
def donated_tangent() -> fx.GraphModule:
    gm = backward()
    tangent = gm.graph.find_nodes(op="placeholder")[-1]
    give(gm, reader_of(gm, tangent), tangent, "donates")
    return gm


@breaks("donated-then-read")
def donated_view_of_a_tangent() -> fx.GraphModule:
    gm = backward()
    tangent = gm.graph.find_nodes(op="placeholder")[-1]
    value = next(v for v in segments(gm)[1].args if v.target is operator.getitem)  # type: ignore[union-attr]
    value.meta[STORAGE_KEY] = tangent.meta[STORAGE_KEY]  # type: ignore[union-attr]
    give(gm, segments(gm)[1], value, "donates")  # type: ignore[arg-type]
    return gm


@breaks("donated-then-read")
def donated_reload_of_what_autograd_shares() -> fx.GraphModule:
    """Not marked as belonging to this backward alone: kept, it is the user's own tensor."""
    gm = backward()
    value = items(calls(gm, ops.wait_reload)[0])[0]
    give(gm, reader_of(gm, value), value, "donates")
    return gm


@breaks("donated-then-read")
def donated_constant() -> fx.GraphModule:
    gm = backward()
    gm.register_buffer("constant", torch.ones(3))
    with gm.graph.inserting_before(segments(gm)[0]):
        constant = gm.graph.get_attr("constant")
    set_input(segments(gm)[0], 0, constant)
    give(gm, segments(gm)[0], constant, "donates")
    return gm


@breaks("donated-then-read")
def donated_then_returned() -> fx.GraphModule:
    gm = backward()
    call = segments(gm)[1]
    value = next(v for v in call.args if v.target is operator.getitem and v.args[0].op == "call_module")  # type: ignore[union-attr]
    give(gm, call, value, "donates")  # type: ignore[arg-type]
    set_output(gm, [*outputs(gm), value])
    return gm


@breaks("donated-then-read")
def donated_then_offloaded() -> fx.GraphModule:
    gm = backward()
    call = segments(gm)[1]
    value = next(v for v in call.args if v.target is operator.getitem and v.args[0].op == "call_module")  # type: ignore[union-attr]
    give(gm, call, value, "donates")  # type: ignore[arg-type]
    insert(gm, gm.graph.output_node(), ops.offload, [value])
    return gm


@breaks("donated-then-read")
def donated_and_read_through_another_input() -> fx.GraphModule:
    gm = skipping_backward()
    value, readers = crossing(gm)
    call = readers[-1]
    other = next(i for i, v in enumerate(call.args) if v is not value)
    give(gm, call, value, "donates")  # type: ignore[arg-type]
    set_input(call, other, value)  # type: ignore[arg-type]
    gm.get_submodule(str(call.target)).donates = (call.args.index(value),)  # type: ignore[assignment,union-attr]
    return gm


# -- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BREAKERS)
def test_a_broken_graph_is_refused(name: str) -> None:
    rule, make = BREAKERS[name]
    gm = make()
    gm.graph.lint()  # the graph is well-formed: only the proof can see the mistake
    with pytest.raises(VerificationError, match=rf"^{rule}: ") as caught:
        VerifyTransfers()(gm)
    assert caught.value.pass_name == "verify_transfers"


def test_every_rule_has_a_breaking_graph() -> None:
    assert {rule for rule, _ in BREAKERS.values()} == set(verify_transfers.RULES)
    assert {rule for rule, _ in WIRING.values()} == set(verify_wiring.RULES)
    assert {rule for rule, _ in PAIRING.values()} == set(verify_pairing.RULES)


@pytest.mark.parametrize("make", [forward, backward, two, lambda: copy.deepcopy(two_inputs().outer_backward)])
def test_untouched_graphs_pass(make: Breaker) -> None:
    gm = make()
    assert VerifyTransfers()(gm) is gm


def test_a_saved_value_of_this_backward_alone_may_be_donated() -> None:
    """What ``donated_reload_of_what_autograd_shares`` must not be mistaken for."""
    gm = backward()
    value = items(calls(gm, ops.wait_reload)[0])[0]
    give(gm, reader_of(gm, value), value, "donates")
    placeholder = next(n for n in gm.graph.find_nodes(op="placeholder") if f"{n.name}_value" == value.name)
    placeholder.meta[DONATABLE_KEY] = True
    VerifyTransfers()(gm)


def test_the_last_reader_may_be_given_an_intermediate() -> None:
    gm = skipping_backward()
    value, readers = crossing(gm)
    give(gm, readers[-1], value, "donates")
    VerifyTransfers()(gm)


# -- wiring ----------------------------------------------------------------------------------------------------------

WiringCase = tuple[fx.GraphModule, VerifyWiring]
WIRING: dict[str, tuple[str, Callable[[], WiringCase]]] = {}


def miswires(make: Callable[[], WiringCase]) -> Callable[[], WiringCase]:
    WIRING[make.__name__] = ("miswired", make)
    return make


def forward_proof() -> VerifyWiring:
    state = bare_tower().forward
    return VerifyWiring(state.gm, state.segmentation)


def backward_proof() -> VerifyWiring:
    state = bare_tower().backward
    return VerifyWiring(state.gm, state.segmentation)


@miswires
def two_inputs_of_a_segment_swapped() -> WiringCase:
    gm = forward()
    call = segments(gm)[1]
    call.args = (call.args[1], call.args[0], *call.args[2:])
    return gm, forward_proof()


@miswires
def an_input_too_few() -> WiringCase:
    gm = forward()
    segments(gm)[1].args = segments(gm)[1].args[:-1]
    return gm, forward_proof()


@miswires
def two_copies_returned_in_each_others_place() -> WiringCase:
    gm = forward()
    values = outputs(gm)
    one, other = (values.index(c) for c in copies(gm)[-2:])
    values[one], values[other] = values[other], values[one]
    set_output(gm, values)
    return gm, forward_proof()


@miswires
def two_results_of_a_segment_swapped() -> WiringCase:
    gm = forward()
    one, other = items(segments(gm)[1])[:2]
    one.args, other.args = other.args, one.args
    return gm, forward_proof()


@miswires
def a_result_that_the_segment_does_not_have() -> WiringCase:
    gm = forward()
    last = items(segments(gm)[1])[-1]
    last.args = (last.args[0], 99)
    return gm, forward_proof()


@miswires
def a_copy_that_the_offload_does_not_make() -> WiringCase:
    gm = forward()
    last = copies(gm)[-1]
    last.args = (last.args[0], 99)
    return gm, forward_proof()


@miswires
def a_part_of_a_value() -> WiringCase:
    gm = forward()
    insert(gm, gm.graph.output_node(), operator.getitem, gm.graph.find_nodes(op="placeholder")[0], 0)
    return gm, forward_proof()


@miswires
def two_copies_unpacked_in_each_others_place() -> WiringCase:
    gm = forward()
    one, other = items(calls(gm, ops.offload)[2])[:2]
    one.args, other.args = other.args, one.args
    return gm, forward_proof()


@miswires
def two_reloads_unpacked_in_each_others_place() -> WiringCase:
    gm = backward()
    one, other = items(calls(gm, ops.wait_reload)[1])[:2]
    one.args, other.args = other.args, one.args
    return gm, backward_proof()


@miswires
def one_reload_unpacked_twice() -> WiringCase:
    gm = backward()
    one, other = items(calls(gm, ops.wait_reload)[1])[:2]
    other.args = one.args
    return gm, backward_proof()


@miswires
def two_copies_asked_for_in_each_others_place() -> WiringCase:
    gm = backward()
    node = calls(gm, ops.reload)[1]
    one, other, *rest = listed(node)
    node.args = ([other, one, *rest], node.args[1])
    return gm, backward_proof()


@miswires
def a_segment_called_twice() -> WiringCase:
    gm = forward()
    call = segments(gm)[1]
    with gm.graph.inserting_after(call):
        gm.graph.call_module(str(call.target), call.args)
    return gm, forward_proof()


@miswires
def a_segment_never_called() -> WiringCase:
    gm = forward()
    call = segments(gm)[-1]
    for item in items(call):
        item.replace_all_uses_with(call.args[0])  # type: ignore[arg-type]
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    return gm, forward_proof()


@miswires
def an_op_between_the_segments() -> WiringCase:
    gm = forward()
    insert(gm, gm.graph.output_node(), torch.ops.aten.zero_.default, source_of(copies(gm)[1]))
    return gm, forward_proof()


@miswires
def an_output_too_few() -> WiringCase:
    gm = forward()
    set_output(gm, outputs(gm)[:-1])
    return gm, forward_proof()


@miswires
def a_gradient_replaced_by_none() -> WiringCase:
    gm = backward()
    values = outputs(gm)
    values[next(i for i, v in enumerate(values) if v is not None)] = None
    set_output(gm, values)
    return gm, backward_proof()


@miswires
def an_op_that_no_segment_holds() -> WiringCase:
    state = bare_tower().forward
    first, *rest = state.segmentation.segments
    shorter = dataclasses.replace(first, nodes=first.nodes[:-1])
    return forward(), VerifyWiring(state.gm, dataclasses.replace(state.segmentation, segments=(shorter, *rest)))


@miswires
def another_graph() -> WiringCase:
    return forward(), backward_proof()


@miswires
def another_constant() -> WiringCase:
    state = two_inputs().forward
    gm = two()
    (node,) = gm.graph.find_nodes(op="get_attr")
    setattr(gm, str(node.target), torch.zeros(2))
    return gm, VerifyWiring(state.gm, state.segmentation)


def writers() -> WiringCase:
    """Two segments that write to a buffer and return nothing: no data flow says in which order, or that they run."""
    sketch = Sketch()
    x, buffer = sketch.input("x", 4), sketch.input("buffer", 4)
    out = sketch.op(torch.ops.aten.sin.default, x)
    copy_ = sketch.op(torch.ops.aten.copy_.default, buffer, out)
    add_ = sketch.op(torch.ops.aten.add_.Tensor, buffer, out)
    inner = sketch.module([out])
    cuts = Segmentation(
        (
            Segment("compute", "", (out,), (x,), (out,)),
            Segment("copy", "", (copy_,), (buffer, out), ()),
            Segment("add", "", (add_,), (buffer, out), ()),
        )
    )
    modules = {s.name: SegmentCall(s) for s in cuts.segments}
    return InsertOffloads(cuts, (), modules)(inner), VerifyWiring(inner, cuts)


def test_writers_as_they_are_wired_pass() -> None:
    gm, proof = writers()
    proof(gm)


@miswires
def a_writer_that_never_runs() -> WiringCase:
    gm, proof = writers()
    gm.graph.erase_node(segments(gm)[-1])
    return gm, proof


@miswires
def two_writers_in_each_others_place() -> WiringCase:
    gm, proof = writers()
    _, one, other = segments(gm)
    other.append(one)
    return gm, proof


@miswires
def a_writer_that_runs_twice() -> WiringCase:
    gm, proof = writers()
    last = segments(gm)[-1]
    with gm.graph.inserting_after(last):
        gm.graph.call_module(str(last.target), last.args)
    return gm, proof


@pytest.mark.parametrize("name", WIRING)
def test_a_miswired_graph_is_refused(name: str) -> None:
    gm, proof = WIRING[name][1]()
    with pytest.raises(VerificationError, match=r"^miswired: ") as caught:
        proof(gm)
    assert caught.value.pass_name == "verify_wiring"


def test_graphs_as_they_are_wired_pass() -> None:
    for captured in (bare_tower(), two_inputs()):
        for state, outer in ((captured.forward, captured.outer_forward), (captured.backward, captured.outer_backward)):
            assert VerifyWiring(state.gm, state.segmentation)(outer) is outer


# -- pairing ---------------------------------------------------------------------------------------------------------

PairingCase = tuple[fx.GraphModule, VerifyPairing]
PAIRING: dict[str, tuple[str, Callable[[], PairingCase]]] = {}


def mispairs(rule: str) -> Callable[[Callable[[], PairingCase]], Callable[[], PairingCase]]:
    def register(make: Callable[[], PairingCase]) -> Callable[[], PairingCase]:
        PAIRING[make.__name__] = (rule, make)
        return make

    return register


def pairing(outer: fx.GraphModule | None = None) -> VerifyPairing:
    state = bare_tower().forward
    return VerifyPairing(state.gm, outer or bare_tower().outer_forward, state.num_user_outputs)


def copied(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.find_nodes(op="placeholder") if n.meta.get(COPY_KEY)]


@mispairs("pair-missing")
def a_copy_taken_as_a_value() -> PairingCase:
    gm = backward()
    del copied(gm)[0].meta[COPY_KEY]
    return gm, pairing()


@mispairs("pair-missing")
def a_value_taken_as_a_copy() -> PairingCase:
    gm = backward()
    next(n for n in gm.graph.find_nodes(op="placeholder") if COPY_KEY not in n.meta).meta[COPY_KEY] = True
    return gm, pairing()


@mispairs("pair-missing")
def a_forward_that_stopped_to_offload() -> PairingCase:
    gm = forward()
    item = copies(gm)[-1]
    set_output(gm, [source_of(item) if v is item else v for v in outputs(gm)])
    return backward(), pairing(gm)


@mispairs("pair-missing")
def a_copy_that_is_no_input_of_the_backward() -> PairingCase:
    gm = backward()
    first = copied(gm)[0]
    tangent = gm.graph.find_nodes(op="placeholder")[-1]
    first.replace_all_uses_with(tangent)
    gm.graph.erase_node(first)
    return gm, pairing()


@mispairs("pair-missing")
def a_copy_returned_to_the_caller() -> PairingCase:
    gm = forward()
    set_output(gm, [copies(gm)[0], *outputs(gm)[1:]])
    return backward(), pairing(gm)


@mispairs("pair-missing")
def a_saved_value_that_the_caller_sees_as_a_copy() -> PairingCase:
    """The saved value is one of the caller's outputs too, and both places return the copy."""
    state = bare_tower().forward
    gm, inner = forward(), copy.deepcopy(state.gm)
    place = outputs(gm).index(copies(gm)[-1])
    for graph in (gm, inner):
        values = outputs(graph)
        set_output(graph, [values[place], *values[1:]])
    return backward(), VerifyPairing(inner, gm, state.num_user_outputs)


@mispairs("pair-order")
def two_saved_values_in_each_others_place() -> PairingCase:
    gm = backward()
    one, other = copied(gm)[1:3]
    assert one.meta["val"].shape == other.meta["val"].shape  # only the names tell
    other.append(one)
    return gm, pairing()


@mispairs("pair-order")
def another_shape() -> PairingCase:
    gm = backward()
    one, other = copied(gm)[1], copied(gm)[-1]
    assert one.meta["val"].shape != other.meta["val"].shape
    one.meta["val"] = other.meta["val"]
    return gm, pairing()


@mispairs("pair-order")
def another_dtype() -> PairingCase:
    gm = backward()
    one = copied(gm)[1]
    one.meta["val"] = one.meta["val"].to(torch.float64)
    return gm, pairing()


@mispairs("pair-donated")
def one_of_two_views_of_a_copy_donated() -> PairingCase:
    """In the forward the two share a storage and so a transfer; nothing in the backward says that they do."""
    outer, gm = forward(), backward()
    one, other = copies(outer)[-3:-1]
    source_of(one).meta[STORAGE_KEY] = source_of(other).meta[STORAGE_KEY]
    value = next(i for w in calls(gm, ops.wait_reload) for i in items(w) if i.name == f"{source_of(one).name}_value")
    give(gm, reader_of(gm, value), value, "donates")
    return gm, pairing(outer)


@pytest.mark.parametrize("name", PAIRING)
def test_a_pair_that_does_not_fit_is_refused(name: str) -> None:
    rule, make = PAIRING[name]
    gm, proof = make()
    with pytest.raises(VerificationError, match=rf"^{rule}: ") as caught:
        proof(gm)
    assert caught.value.pass_name == "verify_pairing"


def test_pairs_as_they_are_made_pass() -> None:
    for captured in (bare_tower(), two_inputs()):
        state = captured.forward
        proof = VerifyPairing(state.gm, captured.outer_forward, state.num_user_outputs)
        assert proof(captured.outer_backward) is captured.outer_backward


def test_two_views_of_a_copy_may_come_back_where_nothing_overwrites_them() -> None:
    outer = forward()
    one, other = copies(outer)[-3:-1]
    source_of(one).meta[STORAGE_KEY] = source_of(other).meta[STORAGE_KEY]
    pairing(outer)(backward())


# -- the proofs are part of every compile ----------------------------------------------------------------------------


def compile_with(proof: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    def refute(self: Any, gm: fx.GraphModule) -> fx.GraphModule:
        raise VerificationError(f"refuted by {proof.name}", proof.name)

    monkeypatch.setattr(proof, "__call__", refute)
    model = torch.compile(Tower(2), backend="fxoffload", options=rehearsal_options(**options))
    model(example_input()).sum().backward()


@pytest.mark.parametrize("proof", [VerifyWiring, VerifyTransfers, VerifyPairing])
def test_every_compile_is_proven(proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerificationError, match=f"refuted by {proof.name}"):
        compile_with(proof, monkeypatch)


@pytest.mark.parametrize("proof", [VerifyWiring, VerifyTransfers, VerifyPairing])
def test_the_switch_leaves_every_proof_out(proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(proof, monkeypatch, disable=("verify",))
    assert proof.name in PROOFS


def test_the_session_hands_the_forward_to_the_backwards_proof() -> None:
    assert bare_tower().backward.forward is bare_tower().forward
