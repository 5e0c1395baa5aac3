"""``recompute="cheap"``: fewer bytes, the same bits as a run that recomputes nothing.

Comparing keeping with offloading could not see a wrong recomputation: both would make the same mistake.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import fxoffload
from tests.marks import slow
from tests.models.zoo import MODELS, build
from tests.support import Observed, assert_close, assert_equal, compiled, train_step

LAYERS = 3
WITH_DROPOUT = ("gpt2", "bert", "t5", "qwen3")
# Of those without, the ones that differ most.
UNLIKE = ("llama", "mixtral", "vit")


def observe(name: str, recompute: str, dropout: float = 0.0) -> tuple[Observed, fxoffload.Stats]:
    torch.compiler.reset()
    fxoffload.reset_stats()
    built = build(name, layers=LAYERS, dropout=dropout)
    module = compiled(built.model, recompute=recompute)
    run = train_step(built.model, lambda: built.loss(module))
    run()
    fxoffload.reset_stats()
    return run(), fxoffload.stats()


def check(name: str, dropout: float = 0.0, share: float = 0.9) -> Observed:
    """Observations of a recomputation."""
    plain, without = observe(name, "default", dropout)
    again, stats = observe(name, "cheap", dropout)
    assert_equal(again, plain)
    assert stats.bytes_offloaded == stats.bytes_reloaded > 0
    assert stats.bytes_offloaded < share * without.bytes_offloaded
    return again


# Those with dropout do the same below.
@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in UNLIKE else slow(n) for n in MODELS])
def test_the_same_bits_from_fewer_bytes(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow(n) if n in ("gpt2", "bert") else n for n in WITH_DROPOUT])
def test_masks_are_saved_and_not_drawn_again(name: str) -> None:
    again = check(name, dropout=0.25, share=1.0)
    built = build(name, layers=LAYERS, dropout=0.25)
    eager = train_step(built.model, built.loss)()
    assert_close(again, eager)
