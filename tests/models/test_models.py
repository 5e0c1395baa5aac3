"""Real models on the CPU rehearsal: the same bits with and without offloading, cuts at the layers, code shared by them.

``aot_eager`` inside: every op is ATen's own, so what can differ is only what fxoffload does.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
import torch

pytest.importorskip("transformers")

import fxoffload
from tests.marks import slow
from tests.models.zoo import MODELS, build
from tests.support import (
    Flip,
    Observed,
    assert_close,
    assert_equal,
    assert_nothing_held,
    check_flip,
    compiled,
    segment_calls,
    train_step,
)

LAYERS = 3
# The attention that these use by default has dropout everywhere, or only inside attention (qwen3).
WITH_DROPOUT = ("gpt2", "bert", "t5", "qwen3")
# transformers' grouped_mm for the CPU breaks the graph inside every layer there: fragments have no layers to cut at.
MIXTRAL_BREAKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


# scope="module" below: the tests of one model stand side by side, and one process serves them from this cache.
@functools.cache
def flipped(name: str, dropout: float = 0.0) -> tuple[Flip, Observed]:
    """The model trained offloading and keeping, and eagerly."""
    built = build(name, layers=LAYERS, dropout=dropout)
    eager = train_step(built.model, built.loss)()
    module = compiled(built.model)
    segments = 1 if name == "mixtral" and MIXTRAL_BREAKS else LAYERS + 1
    return check_flip(train_step(built.model, lambda: built.loss(module)), min_segments=segments), eager


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS, scope="module")
def test_gradients_do_not_depend_on_offloading(name: str) -> None:
    flip, eager = flipped(name)  # compares the bits
    assert_close(flip.observed, eager)
    assert any(key.startswith("grad ") for key in eager)
    assert flip.stats.bytes_reloaded == flip.stats.bytes_offloaded


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow(n) if n == "t5" else n for n in WITH_DROPOUT])
def test_dropout_is_that_of_eager_under_the_same_seed(name: str) -> None:
    # inner="aot_eager" forces fallback_random: the masks come from the generator that eager uses.
    flip, eager = flipped(name, 0.25)
    assert_close(flip.observed, eager)
    without, _ = flipped(name)
    assert not torch.equal(flip.observed["loss"], without.observed["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ("qwen3", "t5", "mixtral") else slow(n) for n in MODELS])
def test_default_windows_on_real_models(name: str) -> None:
    """With reclaiming; the other tests here bind the windows to nothing."""
    built = build(name, layers=LAYERS)
    module = compiled(built.model, in_flight_budget=None, prefetch_budget=None)
    run = train_step(built.model, lambda: built.loss(module))
    run()
    fxoffload.reset_stats()
    found = run()
    stats = fxoffload.stats()
    with fxoffload.override_policy("keep_all"):
        kept = run()
    assert_equal(found, kept)
    assert stats.bytes_reclaimed + stats.bytes_reloaded == stats.bytes_offloaded > 0
    assert stats.bytes_reclaimed > 0
    assert_nothing_held()


@pytest.mark.inductor
def test_gradients_under_inductor_do_not_depend_on_offloading() -> None:
    # Inductor's own CPU code for the embedding's gradient adds atomically: one thread, one order.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        built = build("qwen3", layers=2)
        eager = train_step(built.model, built.loss)()
        module = compiled(built.model, inner="inductor")
        flip = check_flip(train_step(built.model, lambda: built.loss(module)), min_segments=3)
    finally:
        torch.set_num_threads(threads)
    assert_close(flip.observed, eager)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS, scope="module")
def test_cuts_are_balanced(name: str) -> None:
    if name == "mixtral" and MIXTRAL_BREAKS:
        pytest.skip("grouped_mm breaks the graph inside every layer")
    flip, _ = flipped(name)
    (graph,) = [g for g in flip.graphs if g.layer_names]
    assert graph.backward is not None
    stacks = 2 if name == "t5" else 1
    assert len(graph.layer_names) == LAYERS * stacks
    for outer, order in ((graph.forward, 1), (graph.backward, -1)):
        calls = segment_calls(outer)
        assert [c.layer for c in calls if c.layer] == list(graph.layer_names)[::order]
        by_stack: dict[str, list[int]] = defaultdict(list)
        for call in calls:
            if call.layer:
                by_stack[call.layer.rpartition(".")[0]].append(call.num_ops)
        assert len(by_stack) == stacks
        for sizes in by_stack.values():
            assert max(sizes) <= sum(sizes) / 2, sizes
        # Nor does a collapse hide in the code before, between or after the layers.
        everything = [c.num_ops for c in calls]
        assert max(everything) <= sum(everything) / 2, everything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dropout", "few", "many"),
    [
        ("qwen3", 0.0, 4, 6),
        slow("gpt2", 0.1, 4, 6),
        # Each number counts twice: an encoder and a decoder.
        ("t5", 0.1, 3, 4),
        # Its cuts lie inside the blocks, since their repeats begin at the first repeated op. So two segments at each
        # end of the backward are special: with fewer than five blocks none is ordinary.
        slow("albert", 0.0, 5, 7),
    ],
)
def test_number_of_compilations_does_not_grow_with_depth(name: str, dropout: float, few: int, many: int) -> None:
    assert _compilations(name, few, dropout=dropout) == _compilations(name, many, dropout=dropout)


@pytest.mark.slow
def test_number_of_compilations_does_not_grow_with_depth_under_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU has no compiled backward of flex attention, and torch refuses to trace one; ATen's dense form, which
    # aot_eager runs, exists. The test: each layer's score function and block mask do not defeat the key.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
    counts = [_compilations("llama", layers, attn_implementation="flex_attention") for layers in (4, 6)]
    assert counts[0] == counts[1]


def _compilations(name: str, layers: int, **extra: object) -> int:
    torch.compiler.reset()
    fxoffload.reset_stats()
    built = build(name, layers=layers, **extra)  # type: ignore[arg-type]
    built.loss(compiled(built.model))  # compiles the backward too
    stats = fxoffload.stats()
    assert stats.num_segments_reused >= layers - 3
    return stats.num_segments_compiled
