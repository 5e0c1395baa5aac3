"""How large a decoder a GPU can train without any help, in a fraction of its free memory."""

from __future__ import annotations

from fxoffload.bench.records import BenchWork
from fxoffload.errors import FxOffloadError
from fxoffload.sizes import format_bytes

LAYERS = 8
HEAD_DIM = 128
HIDDEN_SIZES = (4096, 2048, 1024)
MOST_TOKENS, TOKENS_STEP = 16_384, 1024
ENOUGH_TOKENS = 4096  # fewer keep a large GPU waiting: a smaller model with more tokens is taken instead
PART_OF_FREE = 0.7
# Measured with Inductor on decoders of this shape, bfloat16: saved for each layer, token and hidden feature.
SAVED_BYTES = 34.25
WORKING_SET = 1.25  # the backward's, as a multiple of the saved bytes
PARAMETERS_OF_HIDDEN_SQUARED = 11.5  # q, k, v, o with a fourth of the heads for k and v; three of 3 x hidden
BYTES_A_PARAMETER = 2 + 2  # the weight and its gradient


class BenchError(FxOffloadError):
    """``fxoffload bench`` cannot measure anything here."""


def choose(free_bytes: int) -> BenchWork:
    """The work for a GPU with so much free memory: Qwen3-8B's layers where they fit, smaller ones elsewhere.

    Raises:
        BenchError: less is free than the smallest model takes; the message says how much that is.
    """
    for hidden in HIDDEN_SIZES:
        least = ENOUGH_TOKENS if hidden != HIDDEN_SIZES[-1] else TOKENS_STEP
        tokens = min(MOST_TOKENS, _most_tokens(free_bytes, hidden))
        if tokens >= least:
            return _work(hidden, tokens)
    needed = int(_needed(HIDDEN_SIZES[-1], TOKENS_STEP) / PART_OF_FREE)
    raise BenchError(
        f"expected at least {format_bytes(needed)} of free GPU memory, found {format_bytes(free_bytes)}; "
        "end what else uses the GPU, or choose another with CUDA_VISIBLE_DEVICES"
    )


def rehearsal() -> BenchWork:
    """The same steps without a GPU: less than a minute, uncompiled, and no word about speed."""
    return BenchWork("cpu", "float32", 2, 64, 64, 128, 4, 2, 16, inner="aot_eager", warmup=2, steps=5, cycles=2)


def _work(hidden: int, tokens: int) -> BenchWork:
    heads = hidden // HEAD_DIM
    return BenchWork("cuda", "bfloat16", LAYERS, tokens, hidden, 3 * hidden, heads, heads // 4, HEAD_DIM)


def _needed(hidden: int, tokens: int) -> float:
    parameters = PARAMETERS_OF_HIDDEN_SQUARED * hidden**2 * LAYERS
    return parameters * BYTES_A_PARAMETER + SAVED_BYTES * hidden * LAYERS * tokens * WORKING_SET


def _most_tokens(free_bytes: int, hidden: int) -> int:
    room = PART_OF_FREE * free_bytes - _needed(hidden, 0)
    each = _needed(hidden, 1) - _needed(hidden, 0)
    return max(0, int(room / each)) // TOKENS_STEP * TOKENS_STEP
