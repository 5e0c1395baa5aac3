"""One op of a graph as data: its kind, its FLOPs, the bytes of its values. No kernel, no time, no graph change.

Sizes are read as hints, so that asking for a cost never adds a guard. The FLOPs of matrix products, and of any op that
a user gave a formula by ``torch.utils.flop_counter.register_flop_formula``, come from that registry. Attention and
convolution are counted here, for three errors of the registry. It ignores causal masks. It reads the (batch, sequence,
head, dim) layout of ``_flash_attention_forward`` as (batch, head, sequence, dim). It counts a depthwise convolution's
weight gradient as if it had one group.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from fxoffload.torch_private.op_schemas import aliased_args, mutated_args
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.symbolic_sizes import hint

Kind = Literal["matmul", "attention", "convolution", "collective", "opaque", "fused", "view"]
Form = Literal["pointwise", "reduction", "gather", "scatter"]


def aten_names(names: str) -> set[str]:
    """Names of ATen ops, as ``op_name`` tells them."""
    return {f"aten.{name}" for name in names.split()}


# The library's name of the operator, without its overload.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._cudnn_attention_forward",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "torch_attn._varlen_attn",
    "flex_attention",
}
_ATTENTION_BACKWARD = {
    *(f"{name}_backward" for name in _ATTENTION if not name.endswith("_forward")),
    *(f"{name.removesuffix('_forward')}_backward" for name in _ATTENTION if name.endswith("_forward")),
}
_SEQUENCE_FIRST = ("aten._flash_attention", "aten._efficient_attention")
_OFFSETS = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")  # given where several sequences are packed into one
_CONVOLUTION = {"aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.convolution_overrideable"}
_CONVOLUTION_BACKWARD = {"aten.convolution_backward"}
_GROUPED = {"aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"}
# Matrix products that the registry lacks: the places of the two factors.
_PRODUCTS = {
    "aten.mv": (0, 1),
    "aten.addmv": (1, 2),
    "aten.dot": (0, 1),
    "aten.vdot": (0, 1),
    "aten._int_mm": (0, 1),
} | {"aten._scaled_mm_v2": (0, 1)}
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAITS = {"_c10d_functional.wait_tensor", "_c10d_functional_autograd.wait_tensor"}
UNDECLARED_VIEWS = {"aten._unsafe_view", "aten._reshape_alias"}  # views that their schemas do not call so

# torch 2.13 tags ops that Inductor fuses as pointwise or reduction. These are the ops without a tag, there or in 2.11.
_POINTWISE = aten_names(
    """_to_copy arange bernoulli cat clone constant_pad_nd copy copy_ empty empty_like empty_strided fill full
    full_like lift_fresh_copy masked_fill native_dropout native_dropout_backward new_empty new_full new_ones
    new_zeros ones ones_like rand rand_like randint randn randn_like repeat scalar_tensor select_scatter
    slice_scatter diagonal_scatter stack where as_strided_scatter split_with_sizes_copy zeros zeros_like avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d glu max_pool2d_with_indices max_pool2d_with_indices_backward
    upsample_nearest2d _upsample_nearest_exact2d floor_divide __and__ __or__ __xor__ _unsafe_masked_index"""
)
_REDUCTIONS = aten_names(
    """sum mean amax amin max min prod any all argmax argmin var var_mean std std_mean logsumexp norm aminmax nansum
    linalg_vector_norm count_nonzero"""
) | {"prims.sum", "prims.xor_sum", "prims.prepare_softmax_online"}
_NOT_POINTWISE_PRIMS = {"prims._make_token", "prims._sink_tokens"}
# Pointwise in form, but an element of the result does not stand where the one does of which it was made.
OTHER_PLACES = aten_names(
    """cat stack flip roll rot90 repeat constant_pad_nd select_scatter slice_scatter diagonal_scatter avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d glu max_pool2d_with_indices max_pool2d_with_indices_backward
    upsample_nearest2d _upsample_nearest_exact2d as_strided_scatter _unsafe_masked_index"""
)
_GATHERS = aten_names("embedding gather index _unsafe_index index_select take")
_SCATTERS = aten_names(
    """index_put index_put_ _unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_add scatter_reduce
    index_add masked_scatter embedding_dense_backward"""
)


# Higher-order ops that run another op with a random state of its own -> the place of that op among their arguments.
_RNG_WRAPPERS = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}


@functools.cache
def op_name(target: Any) -> str:
    """``aten.mm`` for every overload of it; a higher-order op's own name."""
    return str(getattr(target, "overloadpacket", target))


def sets_random_state(node: fx.Node) -> bool:
    """Whether ``node`` runs another op and saves or sets the random state for it."""
    return op_name(node.target) in _RNG_WRAPPERS


def is_grouped(node: fx.Node) -> bool:
    """Whether ``node`` is a grouped matrix product."""
    return op_name(call_of(node)[0]) in _GROUPED


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that ``node`` runs and its positional arguments, without a wrapper that saves or sets the random state."""
    skip = _RNG_WRAPPERS.get(op_name(node.target))
    if skip is None:
        return node.target, node.args
    return node.args[skip], node.args[skip + 1 :]


def kwargs_of(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of the op that ``node`` runs; see ``call_of``."""
    return {name: value for name, value in node.kwargs.items() if name != "rng_state"}


def node_kind(node: fx.Node) -> Kind:
    """The kind of ``node``, on which its time depends.

    ==============  ================================================================================================
    ``matmul``      Matrix products, and custom ops with a registered FLOP formula.
    ``attention``   Scaled-dot-product and flex attention.
    ``convolution`` Convolutions.
    ``collective``  Collectives over a process group, and the wait for them.
    ``fused``       Ops that Inductor generates code for: pointwise ops, reductions, copies, indexing.
    ``opaque``      Kernels of their own that only move bytes, as far as is known: sorts, scans, custom ops.
    ``view``        Free: views, items of a tuple, sizes, checks.
    ==============  ================================================================================================
    """
    if node.op != "call_function":
        return "view"
    target, _ = call_of(node)
    if (kind := _kind_by_name(op_name(target))) is not None:
        return kind
    if _formula(target) is not None:
        return "matmul"
    if _is_view(node):
        return "view"
    return "opaque" if fused_form(node) is None else "fused"


@functools.cache
def _kind_by_name(name: str) -> Kind | None:
    if name.split(".")[0] in _COLLECTIVES:
        return "collective"
    if name in _ATTENTION or name in _ATTENTION_BACKWARD:
        return "attention"
    if name in _CONVOLUTION or name in _CONVOLUTION_BACKWARD:
        return "convolution"
    return "matmul" if name in _GROUPED or name in _PRODUCTS else None


def runs_alone(node: fx.Node) -> bool:
    """Whether ``node`` is a kernel of its own, and not part of another op's or nothing at all."""
    return node_kind(node) not in ("fused", "view")


def fused_form(node: fx.Node) -> Form | None:
    """How Inductor loops over an op that it fuses; None for an op that it does not."""
    return _form(node.target)


@functools.cache
def _form(target: Any) -> Form | None:
    name, tags = op_name(target), getattr(target, "tags", ())
    if name in _GATHERS:
        return "gather"
    if name in _SCATTERS:
        return "scatter"
    if name in _REDUCTIONS or any(tag.name == "reduction" for tag in tags):
        return "reduction"
    if name in _POINTWISE or torch.Tag.pointwise in tags:
        return "pointwise"
    # Inductor's own primitives (random numbers, conversions, iota) are elementwise.
    return "pointwise" if name.startswith("prims.") and name not in _NOT_POINTWISE_PRIMS else None


def source_of(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` shows under another shape, or as one item of it; None where it is memory of its
    own."""
    if node.op != "call_function" or (node_kind(node) != "view" and not is_wait(node)):
        return None
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and tensors_of(source) else None


def base_of(node: fx.Node) -> fx.Node:
    """The op or graph input that any number of views lead to."""
    while (source := source_of(node)) is not None:
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem or op_name(node.target) in UNDECLARED_VIEWS or not tensors_of(node):
        return not mutated_args(node)
    return bool(aliased_args(node)) and not mutated_args(node)


def is_backward_attention(node: fx.Node) -> bool:
    """Whether ``node`` is an attention backward (five matrix products for the forward's two)."""
    return op_name(call_of(node)[0]) in _ATTENTION_BACKWARD


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective: it moves nothing."""
    return op_name(node.target) in _WAITS


def compute_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that a contraction multiplies in: its first factor's."""
    target, args = call_of(node)
    places = _PRODUCTS.get(op_name(target), (1 if op_name(target) in ("aten.addmm", "aten.baddbmm") else 0,))
    found = tensors_of(args[places[0]]) if isinstance(args[places[0]], fx.Node) else []
    return found[0].dtype if found else torch.float32


# -- sizes -------------------------------------------------------------------------------------------------------------


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that ``node`` stands for."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)] if value is not None else []


def shape_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """Hinted sizes; None where one has no hint."""
    sizes = [hint(s) for s in value.shape]
    return None if None in sizes else tuple(sizes)  # type: ignore[arg-type]


def numel_of(node: fx.Node) -> int:
    """Elements of its first result; 0 where a size has no hint."""
    shape = shape_of(tensors_of(node)[0])
    return 0 if shape is None else math.prod(shape)


def distinct_bytes(node: fx.Node) -> int | None:
    """Bytes of different elements: expanded dimensions count once. None where a size has no hint."""
    total = 0
    for value in tensors_of(node):
        shape = shape_of(value)
        if shape is None:
            return None
        strides = [hint(s) for s in value.stride()] if value.layout is torch.strided else [1] * len(shape)
        different = (size for size, stride in zip(shape, strides, strict=True) if stride != 0 or size == 0)
        total += math.prod(different) * value.element_size()
    return total


# -- FLOPs -------------------------------------------------------------------------------------------------------------


def op_flops(node: fx.Node) -> float:
    """Floating-point operations of a contraction (a multiplication and an addition are two); 0.0 for any other op, and
    where a size has no hint.

    Causal attention counts the pairs that its mask leaves: half of them where queries and keys are equally many.
    Packed sequences count as equally long, flex attention as dense: neither offsets nor a block mask have values here.
    """
    kind = node_kind(node)
    if kind not in ("matmul", "attention", "convolution"):
        return 0.0
    target, args = call_of(node)
    count = {"attention": _attention_flops, "convolution": _convolution_flops}.get(kind, _matmul_flops)
    try:
        return float(count(node, target, args))
    except UnknownSizeError:
        return 0.0


class UnknownSizeError(Exception):
    """A size has no hint."""


def _shape(value: object) -> tuple[int, ...]:
    assert isinstance(value, fx.Node)
    (tensor,) = tensors_of(value)
    return _sizes(tensor)


def _formula(target: Any) -> Any:
    return flop_registry.get(getattr(target, "overloadpacket", target))


def _matmul_flops(node: fx.Node, target: Any, args: Sequence[Any]) -> float:
    name = op_name(target)
    if name in _GROUPED:
        a, b = _shape(args[0]), _shape(args[1])
        # A 2-D factor holds the groups one after another: their lengths, which are not known, add up to its own.
        groups = a[0] if len(a) == len(b) == 3 else 1
        return 2 * groups * a[-2] * a[-1] * b[-1]
    if name in _PRODUCTS:
        a, b = (_shape(args[i]) for i in _PRODUCTS[name])
        return 2 * math.prod(a) * (b[1] if len(b) == 2 else 1)
    formula = _formula(target)
    values = fx.map_arg((tuple(args), dict(node.kwargs)), _stand_in)
    output = [torch.empty(_sizes(t), device="meta") for t in tensors_of(node)]
    return formula(*values[0], **values[1], out_val=output[0] if len(output) == 1 else output)  # type: ignore[index]


def _stand_in(node: fx.Node) -> Any:
    """A meta tensor of the hinted sizes: a formula may compare sizes, which must not become guards."""
    made = [torch.empty(_sizes(t), dtype=t.dtype, device="meta") for t in tensors_of(node)]
    if isinstance(node.meta.get("val"), torch.Tensor):
        return made[0]
    return made or hint(node.meta.get("val"))


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    shape = shape_of(value)
    if shape is None:
        raise UnknownSizeError
    return shape


def _convolution_flops(node: fx.Node, target: Any, args: Sequence[Any]) -> float:
    backward = op_name(target) in _CONVOLUTION_BACKWARD
    first, x, weight = (args[0], args[1], args[2]) if backward else (node, args[0], args[1])
    transposed = bool(argument_of(target, args, "transposed"))
    # Each position of the output (of a transposed one: of the input) meets the filter once; the weight's own shape
    # already has the channels divided by the groups.
    small = _shape(x) if transposed else _shape(first)
    once = 2 * small[0] * math.prod(small[2:]) * math.prod(_shape(weight))
    return once * sum(map(bool, args[10][:2])) if backward else once


def _attention_flops(node: fx.Node, target: Any, args: Sequence[Any]) -> float:
    name = op_name(target)
    query, key, value = (_shape(argument_of(target, args, n)) for n in ("query", "key", "value"))
    if (offsets := _offsets(target, args)) is not None:
        num_sequences = max(_shape(offsets)[0] - 1, 1)
        tokens_q, tokens_k = (s[-3] * (s[0] if len(s) == 4 else 1) for s in (query, key))
        batch, heads, size_q, size_k = num_sequences, query[-2], tokens_q / num_sequences, tokens_k / num_sequences
    else:
        # Without a batch dimension some backends take 3-D tensors.
        batch = query[0] if len(query) == 4 else 1
        sequence, head = (-3, -2) if name.startswith((*_SEQUENCE_FIRST, "torch_attn.")) else (-2, -3)
        heads, size_q, size_k = query[head], query[sequence], key[sequence]
    pairs = size_q * size_k * (_causal_share(size_q, size_k) if _is_causal(node, target, args) else 1.0)
    # Forward: scores, output. Backward: scores again, and the gradients of scores and values, of queries and keys.
    depth = 3 * query[-1] + 2 * value[-1] if name in _ATTENTION_BACKWARD else query[-1] + value[-1]
    return 2 * batch * heads * pairs * depth


def attention_sizes(node: fx.Node) -> tuple[int, int] | None:
    """Queries and keys of one sequence of an attention; None where a size has no hint."""
    target, args = call_of(node)
    place = -3 if op_name(target).startswith((*_SEQUENCE_FIRST, "torch_attn.")) else -2
    try:
        return tuple(_shape(argument_of(target, args, n, node.kwargs))[place] for n in ("query", "key"))  # type: ignore[return-value]
    except UnknownSizeError:
        return None


def _causal_share(size_q: float, size_k: float) -> float:
    """Share of the pairs under a causal mask that begins at the first query and key."""
    if not size_q or not size_k:
        return 1.0
    return size_q / (2 * size_k) if size_q <= size_k else 1 - size_k / (2 * size_q)


def _is_causal(node: fx.Node, target: Any, args: Sequence[Any]) -> bool:
    flag = argument_of(target, args, "is_causal", node.kwargs)
    return bool(flag or argument_of(target, args, "custom_mask_type", node.kwargs))


def _offsets(target: Any, args: Sequence[Any]) -> fx.Node | None:
    """Where each of several sequences begins that are packed into one."""
    if op_name(target).startswith("aten._scaled_dot_product"):
        return None  # an output of the forward that is handed on to the backward: empty for tensors of four dimensions
    found = (argument_of(target, args, name) for name in _OFFSETS)
    return next((o for o in found if isinstance(o, fx.Node) and tensors_of(o)), None)


def reduced_dims(node: fx.Node, rank: int) -> set[int]:
    """The dimensions of its input that a reduction reduces."""
    found = [argument_of(node.target, node.args, name, node.kwargs) for name in ("dim", "dims")]
    dims = next((d for d in found if d is not None), [])
    dims = [dims] if isinstance(dims, int) else dims
    return {d % rank for d in dims} if rank and dims else set(range(rank))


def argument_of(target: Any, args: Sequence[Any], name: str, kwargs: Any = None) -> Any:
    """An argument by its name in the schema (higher-order ops have none: query, key and value come first there)."""
    if kwargs and name in kwargs:
        return kwargs[name]
    schema = getattr(target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else ["query", "key", "value"]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None
