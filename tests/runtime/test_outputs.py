"""Whether callers hold what a forward returned, when its backward has ended."""

from __future__ import annotations

import torch
from torch import Tensor

from fxoffload.runtime.tracker.outputs import Outputs, Zeros

SHAPES: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, (4,)), (2, (5,))]


def test_held_and_let_go_of_by_bytes() -> None:
    outputs = Outputs()
    assert outputs.are_held is None
    loss, logits = torch.zeros(()), torch.zeros(100)
    outputs.made([loss, logits.view(10, 10), None, 3])
    outputs.backward_ended()
    assert outputs.are_held is True
    outputs.made([loss, logits])
    del logits
    outputs.backward_ended()
    assert outputs.are_held is False, "a loss is nothing beside logits"


def test_a_backward_without_outputs_says_nothing() -> None:
    outputs = Outputs()
    outputs.made([])
    outputs.backward_ended()
    assert outputs.are_held is None
    outputs.made([torch.zeros(())])
    outputs.backward_ended()
    assert outputs.are_held is None, "a loss is no output that anybody holds"
    kept = torch.zeros(10)
    outputs.made([kept])
    outputs.backward_ended()
    outputs.backward_ended()  # once more, of a graph that was retained
    assert outputs.are_held is True


def test_several_forwards_before_a_backward_say_nothing() -> None:
    outputs = Outputs()
    kept = [torch.zeros(10), torch.zeros(10)]
    for value in kept:
        outputs.made([value])
    outputs.backward_ended()
    outputs.backward_ended()
    assert outputs.are_held is None


def test_gradients_are_told_from_zeros_that_were_made() -> None:
    outputs = Outputs()
    outputs.zeros = [Zeros(i, shape, (1,) * len(shape), torch.float32, torch.device("cpu")) for i, shape in SHAPES]
    for given, expected in (((0,), None), ((1,), True), ((2,), True), ((1, 2), True), ((), False)):
        outputs.have_gradients = None
        args = [torch.ones(shape) if i in given else None for i, shape in SHAPES]
        if expected is None:  # a loss alone
            outputs.zeros, every = outputs.zeros[:1], outputs.zeros
        outputs.backward_begins(args)
        assert outputs.have_gradients is expected, given
        assert all(bool(a.any()) is (i in given) for i, a in enumerate(args) if a is not None)
        if expected is None:
            outputs.zeros = every


def test_what_is_left_out_stays_none_and_counts_as_missing() -> None:
    outputs = Outputs()
    outputs.zeros = [Zeros(i, shape, (1,) * len(shape), torch.float32, torch.device("cpu")) for i, shape in SHAPES]
    outputs.left_out = {2}
    args: list[Tensor | None] = [None for _ in SHAPES]
    outputs.backward_begins(args)
    assert [a is None for a in args] == [i == 2 for i, _ in SHAPES]
    assert outputs.have_gradients is False
