"""Which kernels a compiler makes of the ops of a segment, and what each reads from memory and writes to it.

``[Note: What a fused kernel moves]`` Contractions, attention, convolutions and opaque ops are kernels of their own.
Everything else is fused as Inductor would, and only moves memory:

1. *Written to memory* is the result of a kernel of its own, of a reduction or of a scatter. So is each pointwise result
   that a kernel of its own reads or that leaves the segment. Any other pointwise result exists in registers only: each
   reader recomputes it from its inputs. Inductor's limits are 8 reads, or 4 where it has several readers. To read two
   parts of a value, as a rotation by halves does, is to read it twice. A pointwise result of at most 4 reads that
   kernels of their own read by views only is written when the first of them comes. Until then readers recompute it.
2. *Kernels* are formed by Inductor's scheduler from the written values. Two that read the same value, or of which one
   reads a result of the other, become one if their loops fit and no third one has to run between them. First come those
   of one form, then those that share most bytes, then the nearest in the graph. Two far apart do not join. Nor do two
   that share few bytes, compared with the buffers that one could reuse from the other. Loops fit that go over as many
   elements. Around a reduction, they may go over as many as come out of it or, for whole rows, go into it. Reductions
   fit over the same dimension. A result made of several parts of one value is tiled otherwise than a reduction.
3. A kernel reads each value once: of a view, its part; of an expanded one, its different elements; of an indexed one,
   as many elements as it takes. It writes the results that something outside it reads. Values between its own ops are
   free.

Not modelled: templates with fused epilogues, reductions split in two, rows and columns reduced in one kernel, caches,
kernels that run side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import (
    aten_names,
    base_of,
    distinct_bytes,
    fused_form,
    is_wait,
    node_kind,
    numel_of,
    op_name,
    reduced_dims,
    runs_alone,
    shape_of,
    source_of,
    tensors_of,
)
from fxoffload.torch_private.op_schemas import mutated_args

# Inductor's realize_acc_reads_threshold and realize_reads_threshold: a pointwise result that needs more reads is
# written to memory after all (the second holds where several ops read it).
_MAX_READS, _MAX_REPEATED_READS = 8, 4

# torch/_inductor/scheduler.py: fuse_nodes, are_long_distant_nodes, can_fusion_increase_peak_memory.
_MAX_ROUNDS, _MAX_DISTANCE, _MIN_GAIN = 10, 64, 32


@dataclass(frozen=True, eq=False)
class Access:
    """The values that one kernel reads from memory and writes to it.

    Attributes:
        writes: ops whose results it writes; of a kernel of its own, the op.
        reads: values, or views of them, that it reads and does not make itself.
        steps: results that a fused kernel computes and writes or reduces, in order; the rest is part of these.
        alone: whether it is a kernel of its own: a contraction, attention, a convolution, an opaque op.
        reads_parts: whether it reads several parts of one value, as a rotation by halves does.
    """

    writes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    alone: bool
    reads_parts: bool = False


# Written value -> its reads (of itself, or of views of it) -> bytes.
_Reads = dict[fx.Node, dict[fx.Node, int]]
# Written value, and which of its elements are read, in what order, by the views that lead there.
_Load = tuple[fx.Node, tuple[str, ...]]
# Views that only number elements anew.
_SAME_ELEMENTS = aten_names("view reshape _unsafe_view unsqueeze squeeze expand alias detach")


@dataclass(frozen=True)
class _Loop:
    """The iterations of a fused kernel: for each of ``kept`` elements, ``reduced`` ones (1: no reduction)."""

    kept: int
    reduced: int = 1
    dims: str = ""  # which dimensions are reduced: "inner", "outer", or "" for none
    reads_parts: bool = False  # whether it reads several parts of one value


@dataclass(eq=False)
class _Kernel:
    """Values that one fused kernel computes, or (without loops) a kernel of its own.

    Attributes:
        first, last: places of its parts in the graph, counted in kernels.
        parts, before: sets of such places (bits): its own, and those of kernels that have to run before it.
        waits_for: those of ``before`` that it has to wait for directly.
        single: sizes and types of values that only one of its parts reads.
    """

    first: int
    last: int
    parts: int
    before: int
    waits_for: set[int] = field(default_factory=set)
    loops: set[_Loop] = field(default_factory=set)
    reads: _Reads = field(default_factory=dict)
    members: list[fx.Node] = field(default_factory=list)
    single: dict[tuple[torch.dtype, int], None] = field(default_factory=dict)

    @property
    def reduces(self) -> bool:
        """Whether it has a reduction."""
        return any(loop.dims for loop in self.loops)

    def absorb(self, other: _Kernel) -> None:
        """Make the two one."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.parts |= other.parts
        self.before = (self.before | other.before) & ~self.parts
        self.waits_for |= other.waits_for
        self.loops |= other.loops
        self.members += other.members
        self.single |= other.single
        _merge(self.reads, other.reads)


class Fusion:
    """The kernels of ``nodes`` (in graph order), compiled as one piece. See ``[Note: What a fused kernel moves]``.

    A value counts no bytes where a size of it has no hint.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._inside = set(nodes)
        self._sizes: dict[fx.Node, int] = {}
        self._alone: dict[fx.Node, _Reads] = {}  # Kernel of its own -> its reads.
        self._all: list[_Kernel] = []  # By place, before any two become one.
        self._kernel_of: dict[fx.Node, _Kernel] = {}  # Written value -> the fused kernel that makes it.
        self._place_of: dict[fx.Node, int] = {}  # Written value -> place of the kernel that made or changed it last.
        self._readers: dict[fx.Node, list[int]] = defaultdict(list)  # Value -> places of its readers.
        self._in_registers: dict[fx.Node, _Reads] = {}  # Unwritten value -> reads that computing it takes.
        self._loads: dict[fx.Node, set[_Load]] = {}  # Unwritten value -> the same, one entry for each time it is read.

        # Values that something outside reads from memory.
        self._wanted_outside = {
            base_of(n) for n in nodes if any(_real_readers(u) for u in n.users if u not in self._inside)
        }
        self._wanted = self._wanted_outside | {base_of(i) for n in nodes if _is_barrier(n) for i in _inputs(n)}
        for node in nodes:
            if _is_barrier(node):
                self._run_alone(node)
            elif node_kind(node) == "fused":
                self._fuse(node)
        self._kernels = self._joined()

    def accesses(self) -> list[Access]:
        """What each kernel reads and writes, in no particular order."""
        found = [
            Access((node,), tuple(part for parts in reads.values() for part in parts), (node,), True)
            for node, reads in self._alone.items()
        ]
        for kernel, results in self._fused():
            read = tuple(part for parts in self._read_from_memory(kernel).values() for part in parts)
            reads_parts = any(loop.reads_parts for loop in kernel.loops)
            found.append(Access(tuple(results), read, tuple(kernel.members), False, reads_parts))
        return found

    def traffic(self) -> Iterator[tuple[fx.Node | None, int]]:
        """The op and the bytes of each kernel, in no particular order. The op is None where the kernel is fused.

        Bytes are those of values that it reads and does not make itself, of its results, and of values that existed
        before and that it modifies. Of a fused kernel, these are part of its results.
        """
        for node, reads in self._alone.items():
            overwritten = sum(self._bytes(v) for v in mutated_args(node))
            yield node, self._read_bytes(reads) + self._bytes(node) + overwritten
        for kernel, results in self._fused():
            yield None, self._read_bytes(self._read_from_memory(kernel)) + sum(self._bytes(m) for m in results)

    def _fused(self) -> list[tuple[_Kernel, list[fx.Node]]]:
        """The fused kernels, and which of their members they write."""
        handed_on = {b for k in self._kernels for b in k.reads if self._kernel_of.get(b, k) is not k}
        return [
            (k, [m for m in k.members if m in self._wanted or m in handed_on or mutated_args(m)]) for k in self._kernels
        ]

    def _read_from_memory(self, kernel: _Kernel) -> _Reads:
        own = set(kernel.members)
        return {base: parts for base, parts in kernel.reads.items() if base not in own}

    # -- which values are written --------------------------------------------------------------------------------------

    def _fuse(self, node: fx.Node) -> None:
        written = bool(node in self._wanted or mutated_args(node))
        if not written and not node.users:
            return  # a value without a reader is not computed
        reads, loads = self._reads_of(node), self._loads_of(node)
        if fused_form(node) in ("pointwise", "gather") and not written:
            readers = {r for u in node.users for r in _real_readers(u)}
            if len(loads) <= (_MAX_REPEATED_READS if len(readers) > 1 else _MAX_READS):
                self._in_registers[node], self._loads[node] = reads, loads
                return
        elif fused_form(node) == "pointwise" and self._is_written_late(node) and len(loads) <= _MAX_REPEATED_READS:
            self._in_registers[node], self._loads[node] = reads, loads
        kernel = self._new_kernel(node, reads)
        kernel.loops.add(replace(_loop_of(node), reads_parts=len({b for b, _ in loads}) < len(loads)))
        kernel.members.append(node)
        self._kernel_of[node] = kernel

    def _is_written_late(self, node: fx.Node) -> bool:
        """Whether kernels of their own read ``node`` through views only, and nothing outside reads it."""
        if node in self._wanted_outside or mutated_args(node):
            return False
        return not any(_is_barrier(u) for u in node.users)

    def _reads_of(self, node: fx.Node) -> _Reads:
        """The reads from memory that computing ``node`` takes."""
        found: _Reads = {}
        overwritten = mutated_args(node) if op_name(node.target) == "aten.copy_" else []
        for value in _inputs(node):
            if value in overwritten:
                continue
            base = base_of(value)
            parts = self._in_registers[base] if base in self._in_registers else {base: {value: self._bytes(value)}}
            if fused_form(node) == "gather" and value is node.args[0]:
                parts = _limited(parts, numel_of(node))
            _merge(found, parts)
        return found

    def _loads_of(self, node: fx.Node) -> set[_Load]:
        """How often computing ``node`` reads which values."""
        found: set[_Load] = set()
        for value in _inputs(node):
            base, shown = base_of(value), _elements_of(value)
            found.update((b, (*how, *shown)) for b, how in self._loads.get(base, {(base, ())}))
        return found

    # -- kernels -------------------------------------------------------------------------------------------------------

    def _run_alone(self, node: fx.Node) -> None:
        reads = self._alone[node] = {}
        for value in _inputs(node):
            if base_of(value) in self._kernel_of:  # from now on it is in memory
                self._in_registers.pop(base_of(value), None)
                self._loads.pop(base_of(value), None)
            _merge(reads, {base_of(value): {value: self._bytes(value)}})
        self._new_kernel(node, reads)

    def _new_kernel(self, node: fx.Node, reads: _Reads) -> _Kernel:
        """A kernel for ``node``, which reads ``reads``."""
        place = len(self._all)
        changed = [base_of(v) for v in mutated_args(node)]
        waits_for = {self._place_of[b] for b in (*reads, *changed) if b in self._place_of}
        waits_for.update(p for b in changed for p in self._readers[b])
        before = 0
        for p in waits_for:
            before |= self._all[p].parts | self._all[p].before
        kernel = _Kernel(place, place, 1 << place, before, waits_for, reads=reads)
        self._all.append(kernel)
        for base in reads:
            self._readers[base].append(place)
        self._place_of |= dict.fromkeys((node, *changed), place)
        return kernel

    # -- which become one ----------------------------------------------------------------------------------------------

    def _joined(self) -> list[_Kernel]:
        """The fused kernels, by ``[Note: What a fused kernel moves]``, 2."""
        for base, readers in self._readers.items():
            if len(readers) == 1 and base in self._place_of and base not in self._wanted_outside:
                tensor = tensors_of(base)[0]
                self._all[readers[0]].single[tensor.dtype, self._bytes(base)] = None
        now = list(self._all)  # by place: the kernel that it is part of by now
        for _ in range(_MAX_ROUNDS):
            kernels = list(dict.fromkeys(now))
            pairs = self._pairs([k for k in kernels if k.loops])
            pairs.sort(key=lambda pair: pair[0], reverse=True)
            for _, first, second in pairs:
                one, other = now[first], now[second]
                if one is not other and self._may_join(one, other, now):
                    self._join(one, other, now)
            if len(set(now)) == len(kernels):
                break
        return [k for k in dict.fromkeys(now) if k.loops]

    def _pairs(self, kernels: list[_Kernel]) -> list[tuple[tuple[bool, int, int], int, int]]:
        """Those that share anything: how much they gain, and their places."""
        users: dict[fx.Node, list[_Kernel]] = defaultdict(list)
        for kernel in kernels:
            for value in dict.fromkeys((*kernel.members, *kernel.reads)):
                users[value].append(kernel)
        found: dict[tuple[int, int], None] = {}
        for group in users.values():
            for i, one in enumerate(group):
                for other in group[i + 1 : i + 1 + _MAX_DISTANCE]:
                    if _fit(one.loops | other.loops):
                        found[one.first, other.first] = None
        kernel_at = {k.first: k for k in kernels}
        pairs = []
        for first, second in found:
            one, other = kernel_at[first], kernel_at[second]
            gain = (one.reduces == other.reduces, self._shared_bytes(one, other), -_distance(one, other))
            pairs.append((gain, first, second))
        return pairs

    def _may_join(self, one: _Kernel, other: _Kernel, now: list[_Kernel]) -> bool:
        if not _fit(one.loops | other.loops):
            return False
        related = bool(one.before & other.parts or other.before & one.parts)
        if not related and _distance(one, other) > _MAX_DISTANCE:
            return False
        # A scattered result is whole only when the kernel has ended.
        if any(m in b.reads and fused_form(m) == "scatter" for a, b in ((one, other), (other, one)) for m in a.members):
            return False
        overlaid = sum(nbytes for _, nbytes in one.single.keys() & other.single.keys())
        if overlaid > _MIN_GAIN * self._shared_bytes(one, other):
            return False
        return not related or not any(
            now[p] is not one and now[p] is not other and now[p].before & a.parts
            for a, b in ((one, other), (other, one))
            for p in b.waits_for
        )

    def _join(self, one: _Kernel, other: _Kernel, now: list[_Kernel]) -> None:
        one.absorb(other)
        for value in other.members:
            self._kernel_of[value] = one
        for place, kernel in enumerate(now):
            if kernel is other:
                now[place] = one
        for kernel in dict.fromkeys(now):
            if kernel is not one and kernel.before & one.parts:
                kernel.before |= one.before | one.parts

    def _shared_bytes(self, one: _Kernel, other: _Kernel) -> int:
        """Bytes of the values that both read, or that one writes and the other reads."""
        return sum(
            min(self._used_bytes(one, value), self._used_bytes(other, value))
            for value in (*one.members, *one.reads)
            if value in other.reads or (value in one.reads and self._kernel_of.get(value) is other)
        )

    def _used_bytes(self, kernel: _Kernel, value: fx.Node) -> int:
        nbytes = self._bytes(value)
        return min(nbytes, sum(kernel.reads[value].values())) if value in kernel.reads else nbytes

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _read_bytes(self, reads: _Reads) -> int:
        return sum(min(self._bytes(base), sum(parts.values())) for base, parts in reads.items())

    def _bytes(self, node: fx.Node) -> int:
        if node not in self._sizes:
            self._sizes[node] = distinct_bytes(node) or 0
        return self._sizes[node]


def _is_barrier(node: fx.Node) -> bool:
    return runs_alone(node) and not is_wait(node)


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [i for i in node.all_input_nodes if tensors_of(i)]


def _real_readers(user: fx.Node) -> list[fx.Node]:
    """``user``, or who reads it where it only shows its input under another shape."""
    if user.op == "output" or _is_barrier(user) or node_kind(user) == "fused":
        return [user]
    return [r for u in user.users for r in _real_readers(u)]


def _elements_of(value: fx.Node) -> tuple[str, ...]:
    """Which elements of its base a view shows, and in what order: empty for all, as they are."""
    steps: list[str] = []
    while (source := source_of(value)) is not None:
        if op_name(value.target) not in _SAME_ELEMENTS:
            steps.append(f"{op_name(value.target)}{[a for a in value.args if a is not source]}{dict(value.kwargs)}")
        value = source
    return tuple(reversed(steps))


def _fit(loops: set[_Loop]) -> bool:
    """Whether all of ``loops`` can run in one kernel."""
    reductions = [loop for loop in loops if loop.dims]
    plain = {loop.kept for loop in loops if not loop.dims}
    if not reductions:
        return len(plain) == 1
    (reduction, *others) = reductions
    if any(loop.reads_parts and not loop.dims for loop in loops):
        return False
    # Inductor goes over columns in another order than over their sources, and often in pieces.
    around = {reduction.kept} if reduction.dims == "outer" else {reduction.kept, reduction.kept * reduction.reduced}
    return not others and plain <= around


def _distance(one: _Kernel, other: _Kernel) -> int:
    return max(abs(one.first - other.last), abs(other.first - one.last))


def _merge(into: _Reads, reads: _Reads) -> None:
    for base, parts in reads.items():
        known = into.setdefault(base, {})
        for part, nbytes in parts.items():
            known[part] = max(known.get(part, 0), nbytes)


def _limited(reads: _Reads, num_elements: int) -> _Reads:
    """At most ``num_elements`` of each value: as many as an indexing op takes."""
    return {
        base: {part: min(nbytes, num_elements * tensors_of(part)[0].element_size()) for part, nbytes in parts.items()}
        for base, parts in reads.items()
    }


def _loop_of(node: fx.Node) -> _Loop:
    kept = numel_of(node)
    if fused_form(node) != "reduction":
        return _Loop(kept)
    (source, *_) = _inputs(node)
    total = numel_of(source)
    dims = reduced_dims(node, len(tensors_of(source)[0].shape))
    if not kept or total <= kept:
        return _Loop(kept)
    shape = shape_of(tensors_of(source)[0]) or ()
    kept_dims = [i for i, size in enumerate(shape) if i not in dims and size != 1]
    inner = all(i > max(kept_dims, default=-1) for i in dims if shape[i] != 1)
    return _Loop(kept, total // kept, "inner" if inner else "outer")
