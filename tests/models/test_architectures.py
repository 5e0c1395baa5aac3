"""Stock architectures that differ in kind, on the CPU rehearsal: the same bits with and without offloading."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.models.architectures import ARCHITECTURES, LAYERS, build_architecture
from tests.support import assert_close, check_flip, compiled, train_step

pytestmark = pytest.mark.slow

# Dynamo breaks the graph of these within their stacks of layers, for plain Inductor too.
SEGMENTS = {"longformer": 3, "longt5": 2, "switch_transformers": 2}
# With torch 2.11 it does so in each layer that has experts (grouped_mm on the CPU). transformers 5.17 reads a drawn
# number in each layer of OPT and BART.
_TORCH, _TRANSFORMERS = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, transformers.__version__))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_do_not_depend_on_offloading(name: str) -> None:
    built = build_architecture(name)
    module = compiled(built.model)
    eager, run = train_step(built.model, built.loss), train_step(built.model, lambda: built.loss(module))
    expected = eager()
    # compares the bits
    if _TORCH >= (2, 12) and _TRANSFORMERS >= (5, 24):
        flip = check_flip(run, min_segments=SEGMENTS.get(name, LAYERS + 1))
    else:
        flip = check_flip(run, min_segments=1, reloads=None)  # the next of many graphs may be predicted wrongly (Jamba)
    assert_close(flip.observed, expected)
    assert any(key.startswith("grad ") for key in expected)
