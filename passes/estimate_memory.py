"""Pass on the segments of a forward or a backward graph: how many bytes does each allocate at its worst moment?

::

    layers_3:  reads 4 saved values that die here (1.2 GiB), returns 9 gradients (386 MiB), at most 672 MiB above entry

``[Note: How a segment's memory is walked]`` ``estimate_costs`` says which kernels there are, and what each reads from
memory and writes to it. A kernel's results are allocated before it runs, what it is the last to read is freed behind
it, and so are results that nobody reads. On top come:

1. *The order.* Inductor starts from the order of the graph, where a pointwise result stands at its first reader that
   needs it in memory (at the end, where only the caller does). It then tries three others (greedy by bytes; first come,
   first served; depth first from what touches least) and takes the one that peaks least by its own count, which knows
   neither hidden memory nor results written in place. So does this pass.
2. *In place.* A fused kernel writes a result over a value that it is the last to read, if both are as large, each
   element is read only where it is written, and no result that the kernel computes later needs it: of two results that
   are made of the same values, one. Of the inputs, this holds for donated ones only.
3. *Hidden memory* that an operator allocates and frees itself: ``_HIDDEN``.

Not modelled: what ``estimate_costs`` does not (so their workspaces too); results of one op that Inductor takes out of
their tuple late; workspaces of cuDNN; rounding to the allocator's blocks.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from fxoffload._torch_compat import hint, mutated_args
from fxoffload.passes.choose_donations import Donations
from fxoffload.passes.cut_segments import Segmentation
from fxoffload.passes.estimate_costs import Access, kernel_accesses
from fxoffload.passes.op_costs import (
    call_of,
    fused_form,
    node_kind,
    op_name,
    reduced_dims,
    shape_of,
    source_of,
    tensors_of,
)
from fxoffload.passes.values import Storages, extent_bytes, output_values, tensor_of


class EstimateMemory:
    """Segment name -> ``SegmentStep.temp_bytes``.

    Args:
        segmentation: of the graph.
        dying: segment name -> names of inputs whose memory is free once the segment has read them (``dying_inputs``).
        donations: segment name -> positions of inputs that it may also overwrite.
    """

    name = "estimate_memory"

    def __init__(
        self,
        segmentation: Segmentation,
        *,
        dying: Mapping[str, Collection[str]],
        donations: Donations | None = None,
    ) -> None:
        self.segmentation = segmentation
        self.dying = dying
        self.donations = donations or {}

    def __call__(self, gm: fx.GraphModule) -> dict[str, int]:
        return {
            s.name: estimate_temp_bytes(
                s.nodes,
                s.outputs,
                self.dying.get(s.name, ()),
                donated={s.inputs[i].name for i in self.donations.get(s.name, ())},
            )
            for s in self.segmentation.segments
        }


def estimate_temp_bytes(
    nodes: Sequence[fx.Node],
    outputs: Collection[fx.Node],
    dying: Collection[str] = (),
    *,
    donated: Collection[str] = (),
) -> int:
    """The most that ``nodes`` (in graph order), compiled as one piece, allocate above what is live when they begin.

    Sizes are hints; what has none counts nothing. See ``[Note: How a segment's memory is walked]``.

    Args:
        nodes: the ops.
        outputs: those of their values that live on.
        dying: names of values from outside whose memory is free once they have been read.
        donated: names of values among these that may be overwritten.
    """
    return _Memory(nodes, outputs, dying, donated).peak()


def dying_inputs(
    gm: fx.GraphModule, segmentation: Segmentation, handed_over: Collection[str] = ()
) -> dict[str, frozenset[str]]:
    """Segment name -> inputs whose memory dies in it: it is the last to read it, and the graph does not return it.

    Args:
        gm: the graph.
        segmentation: of it.
        handed_over: names of graph inputs that nobody else holds while it runs (what the forward saved).
    """
    storages = Storages(gm.graph.nodes)
    held = {storages.root(v) for v in output_values(gm.graph) if isinstance(v, fx.Node)}
    held |= {
        storages.root(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and n.name not in handed_over
    }
    last: dict[fx.Node, str] = {}
    for segment in segmentation.segments:
        last.update((storages.root(v), segment.name) for v in (*segment.inputs, *segment.outputs))
    return {
        s.name: frozenset(
            v.name
            for v in s.inputs
            if tensor_of(v) is not None and storages.root(v) not in held and last[storages.root(v)] == s.name
        )
        for s in segmentation.segments
    }


# -- buffers and kernels -----------------------------------------------------------------------------------------------

# Memory inside the segment: an op, and the place of the result among its results. Outside: the storage.
_Buffer: TypeAlias = tuple[Any, ...]


@dataclass(eq=False)
class _Kernel:
    """One kernel. ``place``: in the order of the graph; ``hidden``: bytes that its operators allocate and free
    themselves; ``reads``: buffer -> values, or views of them; ``writes``: buffer -> bytes."""

    place: int
    fused: bool
    hidden: int
    reads: dict[_Buffer, list[fx.Node]]
    steps: tuple[fx.Node, ...]
    writes: dict[_Buffer, int]
    overwrites: set[_Buffer]
    before: dict[_Kernel, None] = field(default_factory=dict)
    after: dict[_Kernel, None] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.writes.values())


class _Memory:
    """The kernels of one segment and the buffers between them.

    ``size``: bytes; ``readers``: who reads each buffer; ``kept``: buffers that outlive the segment; ``dying``: buffers
    from outside that do not; ``donated``: the part of these that may be overwritten.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], outputs: Collection[fx.Node], dying: Collection[str], donated: Collection[str]
    ) -> None:
        self.inside = {n: i for i, n in enumerate(nodes)}
        self.outputs = frozenset(outputs)
        self.size: dict[_Buffer, int] = {}
        self.dying: set[_Buffer] = set()
        self.donated: set[_Buffer] = set()
        for value in dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in self.inside):
            if value.name in dying and (tensor := tensor_of(value)) is not None:
                buffer = self.buffer_of(value)
                self.size[buffer] = max(self.size.get(buffer, 0), _storage_bytes(tensor))
                self.dying.add(buffer)
                if value.name in donated:
                    self.donated.add(buffer)
        self.kept = {self.buffer_of(v) for v in outputs}
        self.kernels = [self._kernel(access) for access in kernel_accesses(nodes)]
        self.kernels.sort(key=lambda k: k.place)
        self.readers: dict[_Buffer, list[_Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            for buffer in kernel.reads:
                self.readers[buffer].append(kernel)
        self._connect()

    def peak(self) -> int:
        """Bytes above what is live when the segment begins."""
        return max(self._walk(_best_order(self), real=True), 0)

    def planned_peak(self, order: Sequence[_Kernel]) -> int:
        """The same as Inductor counts it to choose an order."""
        return self._walk(order, real=False)

    def known(self, buffer: _Buffer) -> bool:
        """Whether Inductor knows when ``buffer`` dies: of inputs, only where they are donated."""
        return _is_inside(buffer) or buffer in self.donated

    def _freed(self, order: Sequence[_Kernel], outside: Collection[_Buffer]) -> list[list[_Buffer]]:
        """What dies behind each kernel."""
        last: dict[_Buffer, int] = {}
        for i, kernel in enumerate(order):
            last.update(dict.fromkeys((*kernel.writes, *kernel.reads), i))
        found: list[list[_Buffer]] = [[] for _ in order]
        for buffer, i in last.items():
            if buffer not in self.kept and (buffer in outside or _is_inside(buffer)):
                found[i].append(buffer)
        return found

    def _walk(self, order: Sequence[_Kernel], *, real: bool) -> int:
        live = peak = 0
        for kernel, freed in zip(order, self._freed(order, self.dying if real else self.donated), strict=True):
            live += kernel.nbytes
            if real:
                reused = self._in_place(kernel, freed)
                peak = max(peak, live - reused + kernel.hidden)
            else:
                peak = max(peak, live)
            live -= sum(self.size.get(buffer, 0) for buffer in freed)
        return peak

    # -- kernels -------------------------------------------------------------------------------------------------------

    def _kernel(self, access: Access) -> _Kernel:
        writes: dict[_Buffer, int] = {}
        overwrites: set[_Buffer] = set()
        for node in access.writes:
            if written := mutated_args(node):
                overwrites.update(self.buffer_of(v) for v in written)
                continue
            for buffer, tensor in _results(node):
                writes[buffer] = self.size[buffer] = _new_bytes(tensor)
        reads: dict[_Buffer, list[fx.Node]] = defaultdict(list)
        for value in access.reads:
            reads[self.buffer_of(value)].append(value)
        return _Kernel(
            min((self._place(n, alone=access.alone) for n in access.writes), default=len(self.inside)),
            not access.alone,
            sum(hidden_bytes(n) for n in access.writes),
            {buffer: values for buffer, values in reads.items() if buffer not in writes},
            tuple(sorted(access.steps, key=lambda n: self._place(n, alone=access.alone))),
            writes,
            overwrites,
        )

    def _place(self, node: fx.Node, *, alone: bool) -> int:
        """Where in the graph Inductor meets it as something to write: ``[Note: How a segment's memory is walked]``."""
        place = self.inside[node]
        if alone or fused_form(node) != "pointwise" or mutated_args(node):
            return place
        return min((self.inside[r] for r in self._forced_by(node)), default=len(self.inside) + place)

    def _forced_by(self, node: fx.Node) -> Iterator[fx.Node]:
        """Kernels of their own that read ``node`` or a view of it."""
        for user in node.users:
            if user in self.inside:
                if source_of(user) is not None:
                    yield from self._forced_by(user)
                elif node_kind(user) != "fused":
                    yield user

    def buffer_of(self, node: fx.Node) -> _Buffer:
        """The memory that ``node`` stands for."""
        path: list[Any] = []
        while node in self.inside and (source := source_of(node)) is not None:
            # Items of a view (of a split) show its source's memory, those of any other op have memory of their own.
            path = [node.args[1], *path] if node.target is operator.getitem else []
            node = source
        if node in self.inside:
            return (node, *path)
        value = tensor_of(node)
        return (
            (value.untyped_storage()._cdata,) if value is not None and value.layout is torch.strided else (node.name,)
        )

    def _connect(self) -> None:
        """Who waits for whom."""
        maker = {buffer: kernel for kernel in self.kernels for buffer in kernel.writes}
        for buffer, readers in self.readers.items():
            if buffer in maker:
                for reader in readers:
                    _link(maker[buffer], reader)
        for kernel in (k for k in self.kernels if k.overwrites):
            for other in self.kernels:
                if kernel.overwrites & (other.reads.keys() | other.overwrites):
                    _link(*sorted((kernel, other), key=lambda k: k.place))

    # -- in place ------------------------------------------------------------------------------------------------------

    def _in_place(self, kernel: _Kernel, freed: Sequence[_Buffer]) -> int:
        """Bytes that ``kernel`` writes over what dies with it.

        Each result can take the place of what no other step reads, but those that it is made of.
        """
        dead = {b for b in freed if b in kernel.reads and b in self.size and self.known(b)}
        if not kernel.fused or not dead:
            return 0
        touched = [self._touched(kernel, step) for step in kernel.steps]
        moved = {b for found in touched for b, kept in found.items() if not kept}
        total = 0
        for i, step in enumerate(kernel.steps):
            nbytes = kernel.writes.get((step,), 0)
            form = fused_form(step)
            if not nbytes or form not in ("pointwise", "scatter"):
                continue
            made_of = self._made_of(step, kernel)
            into = [self.buffer_of(step.args[0])] if form == "scatter" else touched[i]  # type: ignore[arg-type]
            for old in into:
                if (
                    old in dead
                    and (form == "scatter" or old not in moved)
                    and all(old not in other or kernel.steps[j] in made_of for j, other in enumerate(touched) if j != i)
                ):
                    value = kernel.reads[old][0]
                    same = tensors_of(value)[0].dtype == tensors_of(step)[0].dtype and _numel(value) == _numel(step)
                    if same and self.size[old] * 0.95 <= nbytes <= self.size[old]:
                        dead.remove(old)
                        total += nbytes
                        break
        return total

    def _made_of(self, step: fx.Node, kernel: _Kernel) -> set[fx.Node]:
        """The ops inside the kernel, written or not, that ``step`` is made of."""
        found: set[fx.Node] = set()
        todo = [step]
        while todo:
            for value in todo.pop().all_input_nodes:
                if value in self.inside and value not in found and self.buffer_of(value) not in kernel.reads:
                    found.add(value)
                    todo.append(value)
        return found

    def _touched(self, kernel: _Kernel, step: fx.Node) -> dict[_Buffer, bool]:
        """What one step of a kernel reads from memory -> whether each element stands where it is read for."""
        found: dict[_Buffer, bool] = {}
        todo = [(step, True)]
        seen = set(todo)
        while todo:
            node, kept = todo.pop()
            buffer = self.buffer_of(node)
            if node is not step and buffer in kernel.reads:
                found[buffer] = found.get(buffer, True) and kept and _same_order(node, step)
            elif node is step or (node in self.inside and node not in kernel.steps):
                if fused_form(node) != "reduction":
                    kept = kept and _keeps_places(node)
                following = {(value, kept) for value in node.all_input_nodes if tensors_of(value)} - seen
                seen |= following
                todo.extend(following)
        return found


def _keeps_places(node: fx.Node) -> bool:
    """Whether each element of what ``node`` gives stands where the element does of which it was made."""
    name = op_name(node.target)
    if source_of(node) is not None:
        return name in _SAME_PLACES
    return fused_form(node) == "pointwise" and name not in _OTHER_PLACES


def _same_order(value: fx.Node, step: fx.Node) -> bool:
    """Whether ``value`` lies in memory in the order in which ``step`` writes (a reduction takes any order)."""
    if fused_form(step) == "reduction":
        return True
    a, b = _layout(tensors_of(value)[0]), _layout(tensors_of(step)[0])
    return a == b or (_is_contiguous(a) and _is_contiguous(b))


_Layout: TypeAlias = list[tuple[int | None, int | None]]


def _layout(tensor: torch.Tensor) -> _Layout:
    """Hinted sizes with their strides, without dimensions of one element."""
    pairs = [(hint(size), hint(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [(size, stride) for size, stride in pairs if size != 1]


def _is_contiguous(layout: _Layout) -> bool:
    expected = 1
    for size, stride in reversed(layout):
        if size is None or stride != expected:
            return False
        expected *= size
    return True


def _aten(names: str) -> set[str]:
    return {f"aten.{name}" for name in names.split()}


_SAME_PLACES = _aten("view _unsafe_view reshape unsqueeze squeeze alias detach expand")
_OTHER_PLACES = _aten(
    """cat stack flip roll rot90 repeat constant_pad_nd select_scatter slice_scatter diagonal_scatter avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d glu max_pool2d_with_indices max_pool2d_with_indices_backward
    upsample_nearest2d _upsample_nearest_exact2d as_strided_scatter _unsafe_masked_index"""
)


def _link(first: _Kernel, second: _Kernel) -> None:
    if first is not second:
        first.after[second] = None
        second.before[first] = None


def _is_inside(buffer: _Buffer) -> bool:
    return isinstance(buffer[0], fx.Node)


def _numel(node: fx.Node) -> int:
    shape = shape_of(tensors_of(node)[0])
    return math.prod(shape) if shape is not None else 0


# -- the order ---------------------------------------------------------------------------------------------------------


def _best_order(memory: _Memory) -> list[_Kernel]:
    """The order with the smallest planned peak; of equals the first in the list."""
    kernels = _depth_first(memory.kernels, key=lambda k: k.place)
    place = {k: i for i, k in enumerate(kernels)}
    weight = {k: (k.nbytes + sum(memory.size.get(b, 0) for b in k.reads if memory.known(b)), place[k]) for k in kernels}
    orders = (
        kernels,
        _greedy(memory, kernels, place),
        _first_served(kernels, place),
        _depth_first(kernels, key=weight.__getitem__),
    )
    return min((o for o in orders if len(o) == len(kernels)), key=memory.planned_peak)


def _depth_first(kernels: Sequence[_Kernel], key: Callable[[_Kernel], Any]) -> list[_Kernel]:
    """Each kernel in turn, behind what it waits for."""
    order: dict[_Kernel, None] = {}
    for kernel in sorted(kernels, key=key):
        stack = [(kernel, iter(sorted(kernel.before, key=key)))] if kernel not in order else []
        entered = {kernel}
        while stack:
            current, rest = stack[-1]
            found = next((k for k in rest if k not in order and k not in entered), None)
            if found is None:
                order[current] = None
                stack.pop()
            else:
                entered.add(found)
                stack.append((found, iter(sorted(found.before, key=key))))
    return list(order)


def _first_served(kernels: Sequence[_Kernel], place: Mapping[_Kernel, int]) -> list[_Kernel]:
    """Of those that can run, the one whose inputs have been there the longest."""
    number: dict[_Kernel, int] = {}
    missing = {k: len(k.before) for k in kernels}
    ready: list[tuple[list[int], int, _Kernel]] = [([], place[k], k) for k in kernels if not k.before]
    heapq.heapify(ready)
    while ready:
        kernel = heapq.heappop(ready)[-1]
        number[kernel] = len(number)
        for later in kernel.after:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (sorted(number[k] for k in later.before), place[later], later))
    return list(number)


def _greedy(memory: _Memory, kernels: Sequence[_Kernel], place: Mapping[_Kernel, int]) -> list[_Kernel]:
    """Of those that can run and do not raise the peak, the one that leaves the least; else the one that allocates the
    least."""
    left = {b: len(readers) + (b in memory.kept) for b, readers in memory.readers.items() if memory.known(b)}
    known = {b: memory.size.get(b, 0) for b in left}
    live = sum(size for b, size in known.items() if not _is_inside(b))
    peak = max(live, sum(memory.size.get(b, 0) for b in memory.kept if _is_inside(b)))
    missing = {k: len(k.before) for k in kernels}
    ready = {k: None for k in kernels if not k.before}
    freed = {
        k: sum(known[b] for b in k.reads if left.get(b) == 1)
        + sum(size for b, size in k.writes.items() if b not in left and b not in memory.kept)
        for k in kernels
    }
    order: list[_Kernel] = []
    while ready:
        gap = peak - live
        kernel = min(ready, key=lambda k: (k.nbytes if k.nbytes > gap else 0, k.nbytes - freed[k], place[k]))
        del ready[kernel]
        order.append(kernel)
        live += kernel.nbytes
        peak = max(peak, live)
        live -= freed[kernel]
        for later in kernel.after:
            missing[later] -= 1
            if not missing[later]:
                ready[later] = None
        for buffer in kernel.reads:
            if buffer in left:
                left[buffer] -= 1
                if left[buffer] == 1:
                    for reader in memory.readers[buffer]:
                        freed[reader] += known[buffer]
    return order


# -- bytes -------------------------------------------------------------------------------------------------------------


def _results(node: fx.Node) -> list[tuple[_Buffer, torch.Tensor]]:
    """The tensors that an op makes, each with its buffer."""

    def leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                yield from leaves(item, (*path, i))

    return [((node, *path), tensor) for path, tensor in leaves(node.meta.get("val"), ())]


def _new_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a result: its elements, each once."""
    shape = shape_of(tensor)
    return math.prod(shape) * tensor.element_size() if shape is not None else 0


def _storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the allocation behind a value."""
    if tensor.layout is not torch.strided:
        return _new_bytes(tensor)
    return max(hint(tensor.untyped_storage().nbytes()) or 0, extent_bytes(tensor) or 0)


# -- hidden memory -----------------------------------------------------------------------------------------------------


def hidden_bytes(node: fx.Node) -> int:
    """What running ``node`` allocates besides its results, and has freed when it ends."""
    target, args = call_of(node)
    name = op_name(target)
    try:
        if name in _HIDDEN:
            return _HIDDEN[name](node, args)
        if fused_form(node) == "reduction":
            return _split_reduction(node)
    except _UnknownSizeError:
        pass
    return 0


class _UnknownSizeError(Exception):
    """A size has no hint."""


def _shape(value: Any) -> tuple[int, ...]:
    found = tensors_of(value) if isinstance(value, fx.Node) else []
    shape = shape_of(found[0]) if found else None
    if shape is None:
        raise _UnknownSizeError
    return shape


def _element(value: fx.Node) -> int:
    return tensors_of(value)[0].element_size()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _flash_backward(node: fx.Node, args: Sequence[Any], head_axis: int = 1) -> int:
    """flash_attn/flash_api.cpp, mha_bwd: dq is summed up in float32 and the row sums of dO * O are kept, both for rows
    and heads rounded up; with fewer heads of keys than of queries, dk and dv are made per query head and then summed.
    """
    query, key = _shape(args[1]), _shape(args[2])
    if len(query) == 3:
        query, key = (1, *query), (1, *key)
        head_axis = 2
    batch, heads, depth = query[0], query[head_axis], _round_up(query[-1], 32)
    rows = _round_up(query[3 - head_axis], 128)
    accumulated = 4 * batch * heads * rows * (depth + 1)
    if key[head_axis] == heads:
        return accumulated
    return accumulated + 2 * _element(args[2]) * batch * heads * key[3 - head_axis] * query[-1]


def _flash_rows_first(node: fx.Node, args: Sequence[Any]) -> int:
    """The same for (batch, sequence, head, depth)."""
    return _flash_backward(node, args, head_axis=2)


def _efficient_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """attention_backward.cu: the workspace holds float32 sums of dq, dk and dv for narrower types, and delta the row
    sums of dO * O."""
    query, key, value = (_shape(a) for a in args[1:4])
    delta = 4 * math.prod(query[:-1])
    if _element(args[1]) == 4:
        return delta
    return delta + 4 * sum(math.prod(s) for s in (query, key, value))


def _flex_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """torch/_inductor/kernel/flex/flex_attention.py: delta, the row sums of dO * O in float32."""
    return 4 * math.prod(_shape(args[0])[:-1])


def _sort(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Sort.cpp and cub: a second buffer of keys and of int64 places."""
    return math.prod(_shape(args[0])) * (_element(args[0]) + 8)


def _index_put(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Indexing.cu, index_put_with_sort_kernel: linear, sorted and original places, int64, with cub's
    buffers as much again. Only where Inductor falls back to it: accumulation in a type without fast atomics."""
    accumulate = len(args) > 3 and args[3]
    if not accumulate or tensors_of(args[0])[0].dtype != torch.bfloat16:
        return 0
    places = [_shape(i) for i in args[1] if isinstance(i, fx.Node)]
    return 6 * 8 * max((math.prod(s) for s in places), default=0)


def _embedding_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Embedding.cu: the places sorted, with their origins and counts. (Inductor decomposes the op into
    an index_put in float32, which is in the graph.)"""
    return 6 * 8 * math.prod(_shape(args[1]))


# How many partial results Inductor makes of one at most, about: it splits a reduction to fill the device.
_MAX_SPLITS = 256


def _split_reduction(node: fx.Node) -> int:
    """torch/_inductor/ir.py, Reduction.num_splits: where too few results are made of too much (the gradient of a norm's
    weight), partial results are written first, in float32."""
    kept, source = _new_elements(node), node.all_input_nodes[0]
    shape = _shape(source)
    dims = reduced_dims(node, len(shape))
    reduced = math.prod(shape[d] for d in dims)
    outer = any(i not in dims and shape[i] != 1 for i in range(max(dims, default=0), len(shape)))
    # Of the rows or columns that stay, there are enough to fill a device.
    if reduced < _MAX_SPLITS or (not outer and kept >= 1024):
        return 0
    return 4 * kept * min(_MAX_SPLITS, reduced // 8)


def _new_elements(node: fx.Node) -> int:
    return math.prod(_shape(node))


_HIDDEN: dict[str, Callable[[fx.Node, Sequence[Any]], int]] = {
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten._flash_attention_backward": _flash_rows_first,
    "torch_attn._varlen_attn_backward": _flash_rows_first,
    # cuDNN does not say what its workspace holds; its Hopper backward sums dq up in float32 too.
    "aten._scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "aten._cudnn_attention_backward": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten._efficient_attention_backward": _efficient_backward,
    "flex_attention_backward": _flex_backward,
    "aten.sort": _sort,
    "aten.argsort": _sort,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten.embedding_dense_backward": _embedding_backward,
}
