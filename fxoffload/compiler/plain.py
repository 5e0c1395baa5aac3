"""A graph compiled as plain Inductor does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from fxoffload.torch_private.graphs import boxed_eager
from fxoffload.torch_private.inductor import inductor_config
from fxoffload.torch_private.inductor_compiler import compile_fx_inner


def compile_plain(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, inner: str, **kwargs: Any
) -> Callable[[list[Any]], Any]:
    """Compile a whole graph without touching it. ``kwargs``: as for ``compile_fx_inner``."""
    if inner == "aot_eager":
        return boxed_eager(gm)
    # A custom partitioner in the configuration would keep the graph out of Inductor's cache.
    with inductor_config.patch(custom_partitioner_fn=None):
        return compile_fx_inner(gm, example_inputs, **kwargs)  # type: ignore[return-value]
