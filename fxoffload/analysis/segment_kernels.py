"""The kernels of one compiled segment and the buffers between them: who makes, reads, overwrites and frees what."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from fxoffload.analysis.hidden_memory import hidden_bytes
from fxoffload.analysis.kernel_fusion import Access, Fusion
from fxoffload.analysis.op_costs import fused_form, node_kind, source_of
from fxoffload.analysis.values import element_bytes, storage_bytes, tensor_of
from fxoffload.torch_private.op_schemas import mutated_args

# Memory inside the segment: an op, and the place of the result among its results. Outside: the storage.
Buffer: TypeAlias = tuple[Any, ...]


@dataclass(eq=False)
class Kernel:
    """One kernel.

    Attributes:
        place: in the order of the graph.
        fused: whether Inductor generates it, instead of calling an operator.
        hidden: bytes that its operators allocate and free themselves.
        reads: buffer -> values, or views of them.
        steps: results that a fused one computes and writes or reduces, in the order of the graph.
        overwrites: buffers that were there before.
        reads_parts: whether it reads several parts of one value.
    """

    place: int
    fused: bool
    hidden: int
    reads: dict[Buffer, list[fx.Node]]
    steps: tuple[fx.Node, ...]
    writes: dict[Buffer, int]
    overwrites: set[Buffer]
    reads_parts: bool = False
    before: dict[Kernel, None] = field(default_factory=dict)
    after: dict[Kernel, None] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that it allocates for its results."""
        return sum(self.writes.values())


class SegmentKernels:
    """The kernels of one segment and the buffers between them.

    Args:
        outputs: those of their values that live on.
        dying: names of values from outside whose memory is free once they have been read.
        donated: names of values among these that may be overwritten.

    Attributes:
        kernels: in the order of the graph; who waits for whom is in each of them.
        inside: op -> its place in the graph.
        kept: buffers that outlive the segment.
        dying: buffers from outside that do not.
        donated: the part of these that may be overwritten.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], outputs: Collection[fx.Node], dying: Collection[str], donated: Collection[str]
    ) -> None:
        self.inside = {n: i for i, n in enumerate(nodes)}
        self.size: dict[Buffer, int] = {}
        self.dying: set[Buffer] = set()
        self.donated: set[Buffer] = set()
        for value in dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in self.inside):
            if value.name in dying and (tensor := tensor_of(value)) is not None:
                buffer = self.buffer_of(value)
                self.size[buffer] = max(self.size.get(buffer, 0), storage_bytes(tensor))
                self.dying.add(buffer)
                if value.name in donated:
                    self.donated.add(buffer)
        self.kept = {self.buffer_of(v) for v in outputs}
        self.kernels = [self._kernel(access) for access in Fusion(nodes).accesses()]
        self.kernels.sort(key=lambda k: k.place)
        self.readers: dict[Buffer, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            for buffer in kernel.reads:
                self.readers[buffer].append(kernel)
        self._connect()

    def known(self, buffer: Buffer) -> bool:
        """Whether Inductor knows when ``buffer`` dies: of inputs, only where they are donated."""
        return is_inside(buffer) or buffer in self.donated

    def buffer_of(self, node: fx.Node) -> Buffer:
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

    def freed(self, order: Sequence[Kernel], outside: Collection[Buffer]) -> list[list[Buffer]]:
        """The buffers that die after each kernel of ``order``; of buffers from outside, ``outside`` do."""
        last: dict[Buffer, int] = {}
        for i, kernel in enumerate(order):
            last.update(dict.fromkeys((*kernel.writes, *kernel.reads), i))
        found: list[list[Buffer]] = [[] for _ in order]
        for buffer, i in last.items():
            if buffer not in self.kept and (buffer in outside or is_inside(buffer)):
                found[i].append(buffer)
        return found

    def _kernel(self, access: Access) -> Kernel:
        writes: dict[Buffer, int] = {}
        overwrites: set[Buffer] = set()
        for node in access.writes:
            if written := mutated_args(node):
                overwrites.update(self.buffer_of(v) for v in written)
                continue
            for buffer, tensor in _results(node):
                writes[buffer] = self.size[buffer] = element_bytes(tensor)
        reads: dict[Buffer, list[fx.Node]] = defaultdict(list)
        for value in access.reads:
            reads[self.buffer_of(value)].append(value)
        return Kernel(
            min((self._place(n, alone=access.alone) for n in access.writes), default=len(self.inside)),
            not access.alone,
            sum(hidden_bytes(n) for n in access.writes),
            {buffer: values for buffer, values in reads.items() if buffer not in writes},
            tuple(sorted(access.steps, key=lambda n: self._place(n, alone=access.alone))),
            writes,
            overwrites,
            access.reads_parts,
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


def is_inside(buffer: Buffer) -> bool:
    """Whether an op of the segment makes it."""
    return isinstance(buffer[0], fx.Node)


def _link(first: Kernel, second: Kernel) -> None:
    if first is not second:
        first.after[second] = None
        second.before[first] = None


def _results(node: fx.Node) -> list[tuple[Buffer, torch.Tensor]]:
    """The tensors that an op makes, each with its buffer."""

    def leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                yield from leaves(item, (*path, i))

    return [((node, *path), tensor) for path, tensor in leaves(node.meta.get("val"), ())]
