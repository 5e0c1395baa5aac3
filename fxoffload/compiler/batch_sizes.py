"""The sizes of a graph that vary from call to call: their symbols, and where a call tells their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import tensors_of
from fxoffload.torch_private.symbolic_sizes import free_symbols, free_unbacked_symbols, hint, hints_at, largest_size

Sizes = tuple[int, ...]

# Sizes are rounded up to this many steps for each power of two, so that few schedules serve all of them.
_STEPS = 8


@dataclass(frozen=True)
class BatchSizes:
    """Symbolic sizes that a graph is given.

    Attributes:
        symbols: in the order of their placeholders.
        positions: of the placeholders, and so of the arguments, whose values they are.
        hints: their values in the call that is compiled for.
        upper: the most that each may be, None without a bound.
    """

    symbols: tuple[Any, ...]
    positions: Sizes
    hints: Sizes
    upper: tuple[int | None, ...]

    @staticmethod
    def of(gm: fx.GraphModule) -> BatchSizes | None:
        """The sizes of ``gm``'s calls; None where they are fixed, or not all of them are told as arguments."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        used = {s for n in gm.graph.nodes for t in tensors_of(n) for s in free_symbols(t)}
        needed = {s for n in placeholders for t in tensors_of(n) for s in free_symbols(t)}
        found: dict[Any, tuple[int, int, int | None]] = {}
        for position, node in enumerate(placeholders):
            value, symbol = node.meta.get("val"), _symbol_of(node)
            # An integer that no tensor's size depends on does not change the step.
            if symbol in used and (known := hint(value)) is not None:
                found.setdefault(symbol, (position, known, largest_size(value)))
        if not found or not needed <= found.keys():
            return None
        positions, hints, upper = zip(*found.values(), strict=True)
        return BatchSizes(tuple(found), positions, hints, upper)

    def in_forward(self, gm: fx.GraphModule) -> BatchSizes | None:
        """The same, with the positions among the placeholders of the forward graph; None where one is missing."""
        place = {_symbol_of(n): i for i, n in reversed(list(enumerate(gm.graph.find_nodes(op="placeholder"))))}
        if not place.keys() >= set(self.symbols):
            return None
        return replace(self, positions=tuple(place[s] for s in self.symbols))

    def told_by(self, args: Sequence[Any]) -> Sizes:
        """The sizes of the call with these arguments."""
        return tuple(int(args[i]) for i in self.positions)

    def named(self, sizes: Sizes) -> dict[Any, int]:
        """Symbol -> value."""
        return dict(zip(self.symbols, sizes, strict=True))

    def rounded_up(self, sizes: Sizes) -> Sizes:
        """The next larger sizes of a coarse grid: at most an eighth more, and no more than a size can be."""
        found = []
        for size, upper in zip(sizes, self.upper, strict=True):
            unit = max(1, (1 << max(size, 1).bit_length() - 1) // _STEPS)
            rounded = -(-size // unit) * unit
            found.append(rounded if upper is None else max(size, min(rounded, upper)))
        return tuple(found)

    def at_upper(self) -> BatchSizes:
        """The same, with the largest sizes taken as those that are compiled for, where all are known."""
        if None in self.upper:
            return self
        return replace(self, hints=tuple(u for u in self.upper if u is not None))

    def one_more(self, index: int) -> Sizes:
        """The compiled-for sizes with the one at ``index`` larger by one."""
        return (*self.hints[:index], self.hints[index] + 1, *self.hints[index + 1 :])

    def scaled(self, factor: float, index: int) -> Sizes | None:
        """The compiled-for sizes with the one at ``index`` multiplied; None where it cannot be that large."""
        size, upper = round(self.hints[index] * factor), self.upper[index]
        if upper is not None and size > upper:
            return None
        return (*self.hints[:index], size, *self.hints[index + 1 :])


def _symbol_of(placeholder: fx.Node) -> Any:
    """The size symbol that an integer argument stands for; None for any other argument."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.SymInt) or free_unbacked_symbols(value) or not value.node.expr.is_Symbol:
        return None
    return value.node.expr


def depends_on_data(joint: fx.GraphModule) -> bool:
    """Whether activations have sizes that are known only when they are there, as what an expert computes for the tokens
    that a router sends it. What a graph saves of those weighs nothing in a plan."""
    return any(
        value.is_floating_point() and free_unbacked_symbols(value)
        for node in joint.graph.nodes
        if node.op == "call_function"
        for value in tensors_of(node)
    )


@dataclass(frozen=True)
class GraphBytes:
    """How large a call is: the bytes of all values of a joint graph; each view counts, too.

    It does not depend on how the graph is partitioned, so that it compares calls of graphs that were compiled for
    different sizes.

    Attributes:
        total: as a SymInt.
    """

    total: Any

    @staticmethod
    def of(joint: fx.GraphModule) -> GraphBytes | None:
        """None where no value's size varies."""
        shapes: Counter[Any] = Counter()
        samples: dict[Any, torch.Tensor] = {}
        for node in joint.graph.nodes:
            if node.op != "call_function":
                continue
            for value in tensors_of(node):
                if free_symbols(value) and not free_unbacked_symbols(value):
                    key = (tuple(str(n) for n in value.shape), value.dtype)
                    shapes[key] += 1
                    samples[key] = value
        if not samples:
            return None
        total: Any = 0
        for key, value in samples.items():
            total = total + shapes[key] * value.element_size() * value.numel()
        return GraphBytes(total)

    def at(self, sizes: Mapping[Any, int]) -> int:
        """In a call with these sizes. Nothing is guarded on."""
        with hints_at(sizes):
            found = hint(self.total)
        assert found is not None
        return found
