"""Whether callers hold what a forward returned, when its backward has ended."""

from __future__ import annotations

import torch

from fxoffload.runtime.tracker.outputs import Outputs


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
