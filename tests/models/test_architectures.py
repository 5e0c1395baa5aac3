"""Stock architectures that differ in kind, on the CPU rehearsal: the same bits with and without offloading."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.models.architectures import ARCHITECTURES, LAYERS, build_architecture
from tests.support import assert_close, check_flip, compiled, train_step

pytestmark = pytest.mark.slow

# Dynamo breaks the graph of these within their stacks of layers, for plain Inductor too.
SEGMENTS = {"longformer": 3, "longt5": 2, "switch_transformers": 2}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_do_not_depend_on_offloading(name: str) -> None:
    built = build_architecture(name)
    module = compiled(built.model)
    eager, run = train_step(built.model, built.loss), train_step(built.model, lambda: built.loss(module))
    expected = eager()
    flip = check_flip(run, min_segments=SEGMENTS.get(name, LAYERS + 1))  # compares the bits
    assert_close(flip.observed, expected)
    assert any(key.startswith("grad ") for key in expected)
