"""Rates of matmuls, attention, device memory and launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fxoffload.machine.clocks import Clock
from fxoffload.machine.profile import FLOAT8, TF32, dtype_name, grouped_name

log = logging.getLogger(__name__)

# Grouped products as in a layer of experts: 128 of them, some hundred rows each; the gate and up projections of
# Qwen3-30B-A3B (2048 to twice 768).
_GROUPS, _ROWS, _INNER, _OUTER = 128, 512, 2048, 1536
# FlashAttention's convention: five matmuls against the forward's two.
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the measured work is: large enough for full speed, small enough to take milliseconds.

    matmul: rows and columns by dtype. attention: (heads, sequence length, head dimension) by dtype.
    stream_bytes: of a tensor that is read, and of another one that is written.
    """

    matmul: Mapping[torch.dtype, int]
    attention: Mapping[torch.dtype, tuple[int, int, int]]
    stream_bytes: int


CUDA = Sizes(
    matmul={torch.bfloat16: 8192, torch.float16: 8192, torch.float32: 8192},
    attention={torch.bfloat16: (32, 16384, 128), torch.float16: (32, 16384, 128), torch.float32: (32, 4096, 128)},
    stream_bytes=512 << 20,
)
CPU = Sizes(
    matmul={torch.float32: 768, torch.bfloat16: 256, torch.float16: 256},
    attention={torch.float32: (4, 512, 64), torch.bfloat16: (2, 256, 64)},
    stream_bytes=32 << 20,
)


def matmul_rates(device: torch.device, clock: Clock) -> dict[str, float]:
    """TFLOP/s of square matmuls by dtype; a dtype that the device refuses is left out."""
    found: dict[str, float] = {}
    for dtype, size in _sizes(device).matmul.items():
        with _float32_matmuls("ieee"):
            _add(found, dtype_name(dtype), lambda dtype=dtype, size=size: _matmul_rate(device, clock, dtype, size))
    if device.type == "cuda":
        size = CUDA.matmul[torch.float32]
        with _float32_matmuls("tf32"):
            _add(found, TF32, lambda: _matmul_rate(device, clock, torch.float32, size))
        _add(found, FLOAT8, lambda: _float8_rate(device, clock, size))
        _add(found, grouped_name(torch.bfloat16), lambda: _grouped_rate(device, clock, torch.bfloat16))
    return found


def attention_rates(device: torch.device, clock: Clock) -> tuple[dict[str, float], dict[str, float]]:
    """TFLOP/s of causal attention by dtype, forward and backward; a dtype that the device refuses is left out."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for dtype, shape in _sizes(device).attention.items():
        rate = partial(_attention_rate, device, clock, dtype, shape)
        _add(forward, dtype_name(dtype), partial(rate, backward=False))
        _add(backward, dtype_name(dtype), partial(rate, backward=True))
    return forward, backward


def memory_rate(device: torch.device, clock: Clock) -> float:
    """GB/s that an elementwise kernel reads and writes, together."""
    nbytes = _sizes(device).stream_bytes
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _significant(2 * nbytes / clock.ms(lambda: torch.neg(source, out=target)) / 1e6)


def launch_overhead_us(device: torch.device, clock: Clock) -> float:
    """Microseconds of host time to launch one small kernel from Python."""
    source, target = torch.ones(32, device=device), torch.ones(32, device=device)
    return _significant(1e3 * clock.host_ms(lambda: torch.neg(source, out=target), 200))


def kernel_floor_us(device: torch.device, clock: Clock) -> float:
    """Microseconds of device time of one small kernel in a queue of them."""
    source, target = torch.ones(32, device=device), torch.ones(32, device=device)
    return _significant(1e3 * clock.ms(lambda: torch.neg(source, out=target)))


def _sizes(device: torch.device) -> Sizes:
    return CUDA if device.type == "cuda" else CPU


def _matmul_rate(device: torch.device, clock: Clock, dtype: torch.dtype, size: int) -> float:
    left, right = (_random(device, dtype, size, size) for _ in range(2))
    product = torch.empty_like(left)
    return _tflop_per_s(2 * size**3, clock.ms(lambda: torch.mm(left, right, out=product), sustained=True))


def _attention_rate(
    device: torch.device, clock: Clock, dtype: torch.dtype, shape: tuple[int, int, int], *, backward: bool
) -> float:
    heads, length, width = shape
    q, k, v, grad = (_random(device, dtype, 1, heads, length, width) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    flops = 4 * heads * length * length * width / 2  # two matmuls, of which causal attention needs one half
    attend = partial(F.scaled_dot_product_attention, *inputs, is_causal=True)
    if not backward:
        with torch.no_grad():
            return _tflop_per_s(flops, clock.ms(attend, sustained=True))
    out = attend()
    ms = clock.ms(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), sustained=True)
    return _tflop_per_s(BACKWARD_FLOPS * flops, ms)


def _float8_rate(device: torch.device, clock: Clock, size: int) -> float:
    """One scale per tensor, bf16 out, without fast accumulation: the slower of the two ways in use."""
    left, right = (_random(device, torch.bfloat16, size, size).to(torch.float8_e4m3fn) for _ in range(2))
    scale, recipe = torch.ones((), dtype=torch.float32, device=device), F.ScalingType.TensorWise

    def multiply() -> Tensor:
        # The kernels want the right factor by columns.
        return F.scaled_mm(left, right.t(), scale, recipe, scale, recipe, output_dtype=torch.bfloat16)

    return _tflop_per_s(2 * size**3, clock.ms(multiply, sustained=True))


def _grouped_rate(device: torch.device, clock: Clock, dtype: torch.dtype) -> float:
    """All three products of a training step, which run at different speeds: rows by weights, gradients by transposed
    weights, and rows by gradients (one weight's gradient per group)."""
    rows = _random(device, dtype, _GROUPS * _ROWS, _INNER)
    grads = _random(device, dtype, _GROUPS * _ROWS, _OUTER)
    weights = _random(device, dtype, _GROUPS, _INNER, _OUTER)
    ends = torch.arange(_ROWS, _GROUPS * _ROWS + 1, _ROWS, dtype=torch.int32, device=device)

    def multiply() -> None:
        F.grouped_mm(rows, weights, offs=ends)
        F.grouped_mm(grads, weights.transpose(-2, -1), offs=ends)
        F.grouped_mm(rows.t(), grads, offs=ends)

    flops = 3 * 2 * _GROUPS * _ROWS * _INNER * _OUTER
    return _tflop_per_s(flops, clock.ms(multiply, sustained=True))


def _add(rates: dict[str, float], name: str, measure: Callable[[], float]) -> None:
    try:
        rates[name] = measure()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        log.debug("no rate for %s: %s", name, error)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    # Random values: a GPU multiplies zeros with less power, and so faster. A generator of its own: the user's is left
    # as it is.
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


@contextmanager
def _float32_matmuls(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _tflop_per_s(flops: float, ms: float) -> float:
    return _significant(flops / ms / 1e9)


def _significant(value: float) -> float:
    """Four digits: more would pretend to know."""
    return float(f"{value:.4g}")
