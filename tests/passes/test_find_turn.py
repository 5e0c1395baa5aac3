from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxoffload import ops
from fxoffload.compiler.pipeline import ForwardState
from fxoffload.ops import is_op
from fxoffload.passes.find_turn import FindTurn, Turn
from tests.capture import Block, Tower, capture, example_input, tiny_tower


def segment_of(state: ForwardState) -> dict[str, int]:
    """Candidate -> the segment that makes the last of its values; -1 for a graph input."""
    made_in = {n: i for i, s in enumerate(state.segmentation.segments) for n in s.outputs}
    return {c.name: max(made_in.get(n, -1) for n in c.nodes) for c in state.saved.candidates}


class WithHead(nn.Module):
    """A tower and a classifier whose logits outweigh a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(3)
        self.classifier = nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.tower(x)).logsumexp(-1).sum()


def test_a_light_head_turns_with_the_last_layer() -> None:
    state = tiny_tower(3).forward
    turn = FindTurn(state.segmentation, state.saved.candidates)(state.gm)
    assert not turn.heavy_head
    segments = segment_of(state)
    last = max(i for i, s in enumerate(state.segmentation.segments) if s.layer)
    assert turn.names == {c.name for c in state.saved.candidates if not c.is_input and segments[c.name] >= last}
    assert 0 < len(turn.names) < len(state.saved.candidates)


def test_a_heavy_head_turns_alone() -> None:
    captured = capture(WithHead(), example_input())
    state = captured.forward
    turn = FindTurn(state.segmentation, state.saved.candidates)(state.gm)
    assert turn.heavy_head
    segments = segment_of(state)
    last = max(i for i, s in enumerate(state.segmentation.segments) if s.layer)
    assert turn.names <= {c.name for c in state.saved.candidates if segments[c.name] > last}
    assert any((c.nbytes or 0) >= 4 * 8 * 4096 * 4 for c in state.saved.candidates if c.name in turn.names)
    marked = [bool(n.args) for n in captured.outer_backward.graph.nodes if is_op(n, ops.prefetch)]
    assert marked[:2] == [True, True]
    assert not any(marked[-3:])


def test_a_graph_without_layers_has_no_turn() -> None:
    state = capture(Block(), example_input()).forward
    assert FindTurn(state.segmentation, state.saved.candidates)(state.gm) == Turn()


@pytest.mark.slow
def test_of_a_long_head_about_one_segments_bytes_stay() -> None:
    class LongHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(3)
            self.rest = nn.ParameterList(torch.randn(8, 8) for _ in range(40))

        def forward(self, x: Tensor) -> Tensor:
            x = self.tower(x)
            for weight in self.rest:
                x = torch.tanh(x @ weight)
            return x.sum()

    state = capture(LongHead(), example_input()).forward
    turn = FindTurn(state.segmentation, state.saved.candidates)(state.gm)
    segments = segment_of(state)
    of_layers = [
        sum(c.nbytes or 0 for c in state.saved.candidates if segments[c.name] == i)
        for i, s in enumerate(state.segmentation.segments)
        if s.layer
    ]
    stays = [c.nbytes or 0 for c in state.saved.candidates if c.name in turn.names]
    behind = [
        c
        for c in state.saved.candidates
        if segments[c.name] > max(i for i, s in enumerate(state.segmentation.segments) if s.layer)
    ]
    assert turn.heavy_head
    assert max(of_layers) <= sum(stays) <= max(of_layers) + max(stays)
    assert len(stays) < len(behind)
