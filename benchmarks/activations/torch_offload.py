"""PyTorch's built-in activation offloading (``torch._functorch._activation_offloading``), told to offload all it takes.

It moves saved values that carry ``meta["should_offload"]`` in the joint graph; torch decides nothing itself. Here a
pass on the joint graph tags every computed value of at least ``min_bytes``. torch refuses views, getitems (the outputs
of attention), values that are not contiguous, and model outputs; the partitioner chooses the saved values, as for
``inductor``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from benchmarks.schema import Variant
from fxoffload.sizes import parse_bytes

MIN_BYTES = "1MiB"
STREAMS = {
    "activation_offload_separate_stream": True,
    "activation_offload_sink_wait": True,
    "activation_reload_prefetch": True,
}


class TagAll(CustomGraphPass):
    """Tags computed tensors of at least ``min_bytes`` (size hints for dynamic shapes); counts them."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.num_tagged = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor) and _num_bytes(value) >= self.min_bytes:
                node.meta["should_offload"] = True
                self.num_tagged += 1

    def uuid(self) -> object:
        return ("fxoffload-benchmark-tag-all", self.min_bytes)


@contextlib.contextmanager
def offload_everything(variant: Variant) -> Iterator[None]:
    """Around everything that compiles and runs under ``torch_offload`` or ``torch_offload_streams``."""
    options = dict(variant.options)
    tag = TagAll(parse_bytes(options.pop("min_bytes", MIN_BYTES), "min_bytes"))
    streams = {**STREAMS, **options} if variant.kind == "torch_offload_streams" else {}
    with (
        functorch_config.patch({"enable_activation_offloading": True, **streams}),
        inductor_config.patch(joint_custom_post_pass=tag),
    ):
        yield


def _num_bytes(value: torch.Tensor) -> int:
    sizes = [size if isinstance(size, int) else (size.node.hint or 0) for size in value.shape]
    return math.prod(sizes) * value.element_size()
