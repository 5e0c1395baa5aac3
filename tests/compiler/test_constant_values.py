"""Values that a graph makes of nothing: found, worked out, and handed to a segment of the backward that reads them."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.compiler.constant_values import ConstantValues
from fxoffload.compiler.made_up import MadeUp
from tests.compiler.test_made_up import CPU, traced

aten = torch.ops.aten


def buckets(length: int) -> Tensor:
    """As of T5: most tokens lie far apart, in the last bucket."""
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    return torch.where(distance < 2, 0, distance).clamp(max=4)


def forward_with(make: object) -> tuple[fx.GraphModule, fx.Node]:
    """Looks ``make``'s indices up in a table; and the indices."""
    gm = traced(lambda table: aten.embedding(table, make(table)), torch.zeros(8, 3))  # type: ignore[operator]
    (lookup,) = gm.graph.find_nodes(op="call_function", target=aten.embedding.default)
    return gm, lookup.args[1]  # type: ignore[return-value]


def backward_of(index: fx.Node) -> fx.GraphModule:
    """The table's gradient, of a gradient and the saved ``index``."""
    graph = fx.Graph()
    grad, saved = graph.placeholder("tangents_1"), graph.placeholder(index.name)
    found = graph.call_function(aten.embedding_dense_backward.default, (grad, saved, 8, -1, False))
    graph.output(found)
    shape = index.meta["val"].shape
    with index.meta["val"].fake_mode:
        grad.meta["val"], saved.meta["val"] = torch.empty(*shape, 3), torch.empty(shape, dtype=torch.int64)
        found.meta["val"] = torch.empty(8, 3)
    return fx.GraphModule({}, graph)


def test_a_saved_index_has_its_true_values() -> None:
    gm, index = forward_with(lambda table: buckets(9))
    backward = backward_of(index)
    inputs = backward.graph.find_nodes(op="placeholder")
    nodes = backward.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    made = MadeUp(inputs, nodes, CPU, constants=ConstantValues(gm))
    assert torch.equal(made.make()[1], buckets(9))
    assert torch.equal(made.make_integers(made.make())[1], buckets(9))
    assert torch.equal(MadeUp(inputs, nodes, CPU).make()[1], (torch.arange(81) % 8).view(9, 9))


@pytest.mark.parametrize(
    "make",
    [
        lambda table: table[0, :].long(),
        lambda table: buckets(4) + table.sum().long(),
        lambda table: torch.randint(0, 8, (4,)),
        lambda table: torch.arange(4).clamp_(max=2),
    ],
    ids=["of an input", "of an input and more", "random", "in place"],
)
def test_no_other_value_is_worked_out(make: object) -> None:
    gm, index = forward_with(make)
    assert ConstantValues(gm).of(index) is None


def test_values_are_not_worked_out_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, index = forward_with(lambda table: buckets(9))
    assert ConstantValues(gm).of(index) is not None
    monkeypatch.setattr("fxoffload.compiler.constant_values._MOST_BYTES", 81 * 8 - 1)
    assert ConstantValues(gm).of(index) is None
    monkeypatch.undo()
    monkeypatch.setattr("fxoffload.compiler.constant_values._MOST_OPS", 3)
    assert ConstantValues(gm).of(index) is None


def test_an_index_may_be_expanded() -> None:
    gm, index = forward_with(lambda table: buckets(9)[:1].expand(3, 9))
    backward = backward_of(index)
    (_, saved) = inputs = backward.graph.find_nodes(op="placeholder")
    with index.meta["val"].fake_mode:
        saved.meta["val"] = torch.empty(1, 9, dtype=torch.int64).expand(3, 9)
    nodes = backward.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    found = MadeUp(inputs, nodes, CPU, constants=ConstantValues(gm)).make()[1]
    assert torch.equal(found, buckets(9)[:1].expand(3, 9)) and found.stride() == (0, 1)


def test_a_placeholder_of_another_graph_is_no_constant() -> None:
    gm, _ = forward_with(lambda table: buckets(9))
    (table,) = gm.graph.find_nodes(op="placeholder")
    assert ConstantValues(gm).of(table) is None
