from __future__ import annotations

import pytest

from fxoffload.passes.choose_actions import POLICIES, ChooseActions
from tests.capture import Block, capture, example_input, tiny_tower


@pytest.mark.slow
def test_offload_all_and_keep_all() -> None:
    state = tiny_tower(3).forward
    choose = ChooseActions(state.segmentation, state.saved.candidates)
    assert choose("offload_all") == (True,) * len(state.saved.candidates)
    assert choose("keep_all") == (False,) * len(state.saved.candidates)


def test_auto_keeps_what_the_last_layer_and_all_behind_it_saved() -> None:
    state = tiny_tower(3).forward
    chosen = ChooseActions(state.segmentation, state.saved.candidates)("auto")
    made_in = {n: i for i, s in enumerate(state.segmentation.segments) for n in s.outputs}
    (last,) = [i for i, s in enumerate(state.segmentation.segments) if s.layer == "layers.2"]
    for candidate, offload in zip(state.saved.candidates, chosen, strict=True):
        assert offload == (max(made_in.get(n, -1) for n in candidate.nodes) < last)
    assert 0 < sum(chosen) < len(chosen)


def test_auto_offloads_all_of_a_graph_without_layers() -> None:
    """Under per-layer compile the graph is one layer; whether others follow cannot be seen from here."""
    state = capture(Block(), example_input()).forward
    assert all(ChooseActions(state.segmentation, state.saved.candidates)("auto"))


def test_an_unknown_policy_lists_the_known() -> None:
    state = tiny_tower().forward
    with pytest.raises(ValueError, match="unknown policy 'all'") as caught:
        ChooseActions(state.segmentation, state.saved.candidates)("all")
    assert all(policy in str(caught.value) for policy in POLICIES)
