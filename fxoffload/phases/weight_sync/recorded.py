"""Operations on tensors without values, recorded, and done later on those with values.

[Note: Recorded conversions]
How the weights in memory become those of a checkpoint is known to the code of transformers, which works on a whole
state dict. It runs once, on meta tensors, and each operator is recorded. So it is known which tensors an output is made
of, and an output can be made as soon as these are there. Rejected: a call of that code for each output (it walks the
model and compiles its patterns each time, and some patterns depend on what was renamed before); a list of known
conversions (each version has others).

Where the operators come to a view of one input, a copy in between does not matter: the output is cut from the input
directly. Else a fused ``gate_up_proj`` would be copied by halves before an expert is cut from one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._to_copy.default)


@dataclass(eq=False, slots=True)
class Input:
    """A named tensor."""

    name: str


@dataclass(eq=False, slots=True)
class Call:
    """An operator on other nodes; ``new_bytes``: the memory that it allocates, 0 for a view."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    new_bytes: int


@dataclass(eq=False, slots=True)
class Item:
    """One of the tensors that an operator returns."""

    call: Call
    index: int


Node = Input | Call | Item
Computed = MutableMapping[Call, Any]


class Cut(NamedTuple):
    """A view of the input, which is contiguous."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """How one output is made.

    Attributes:
        inputs: the names of the tensors that it is made of.
        shape, dtype: of the output.
        cut: where it is a view of its only input.
        node: where it is not.
        new_bytes: the memory that making it takes, at most, beside that of ``kept``.
        kept: operators that other outputs need too, and that are done once.
    """

    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Cut | None
    node: Node
    new_bytes: int
    kept: frozenset[Call]

    def is_input(self, shape: tuple[int, ...]) -> bool:
        """Whether it is its input, of that shape, as it is."""
        return self.shape == shape and self.cut == Cut(shape, contiguous_stride(shape), 0)

    def make(self, inputs: Mapping[str, Tensor], computed: Computed) -> Tensor:
        """The output, contiguous and in memory of its own.

        Args:
            inputs: contiguous.
            computed: receives what other outputs need too.
        """
        if self.cut is not None:
            view = inputs[self.inputs[0]].as_strided(*self.cut)
            return view.clone(memory_format=torch.contiguous_format)
        found = self._value(self.node, inputs, computed)
        if isinstance(self.node, Call) and self.node.new_bytes and self.node not in self.kept:
            return found.contiguous()
        return found.clone(memory_format=torch.contiguous_format)

    def _value(self, node: Node, inputs: Mapping[str, Tensor], computed: Computed) -> Any:
        if isinstance(node, Input):
            return inputs[node.name]
        if isinstance(node, Item):
            return self._value(node.call, inputs, computed)[node.index]
        if node in computed:
            return computed[node]

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, (Input, Call, Item)):
                return self._value(leaf, inputs, computed)
            is_meta = isinstance(leaf, torch.device) and leaf.type == "meta"
            return inputs[self.inputs[0]].device if is_meta else leaf

        args, kwargs = pytree.tree_map(filled, (node.args, node.kwargs))
        found = node.op(*args, **kwargs)
        if node in self.kept:
            computed[node] = found
        return found


class NotRecorded(Exception):
    """An operator whose result depends on values, or that writes."""


class _IndicesWithValues(TorchFunctionMode):
    """Makes tensors of the lists that meta tensors are indexed with: torch's own would be meta tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            tensor, index = args
            index = tuple(map(_as_tensor, index)) if isinstance(index, tuple) else _as_tensor(index)
            args = tensor, index
        return function(*args, **(kwargs or {}))


def _as_tensor(index: Any) -> Any:
    return torch.tensor(index, device="cpu") if isinstance(index, list) else index


class _Known(NamedTuple):
    tensor: Tensor  # is kept, for its id must not be given to another one
    node: Node
    uncopied: Tensor | None  # the same values as a view of the input, where there is one


def recipe_of_input(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Recipe:
    """The input as it is."""
    nbytes = math.prod(shape) * dtype.itemsize
    return Recipe((name,), shape, dtype, Cut(shape, contiguous_stride(shape), 0), Input(name), nbytes, frozenset())


class Recorder(TorchDispatchMode):
    """Records what is done to some meta tensors; see [Note: Recorded conversions].

    Args:
        inputs: contiguous meta tensors by name. Names of one tensor are names of one input, the first.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._indices = _IndicesWithValues()
        for name, tensor in inputs.items():
            self._known.setdefault(id(tensor), _Known(tensor, Input(name), tensor.detach()))

    def __enter__(self) -> Recorder:
        self._indices.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._indices.__exit__(*raised)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if op._schema.is_mutable:
            raise NotRecorded(f"{op} writes to a tensor")
        found = op(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*read, *made)):
            return found  # of constants
        if unknown := [tensor for tensor in read if tensor.is_meta and id(tensor) not in self._known]:
            raise NotRecorded(f"{op} reads a tensor of shape {tuple(unknown[0].shape)} that is not in the state dict")
        self._record(op, args, kwargs, found, made)
        return found

    def _record(self, op: Any, args: Any, kwargs: Any, found: Any, made: list[Tensor]) -> None:
        new_bytes = 0 if op.is_view else sum(tensor.nbytes for tensor in made)
        read, options = pytree.tree_map(self._node_of, (tuple(args), dict(kwargs)))
        call = Call(op, read, options, new_bytes)
        uncopied = self._uncopied(op, args, kwargs, found, made)
        if isinstance(found, Tensor):
            self._known[id(found)] = _Known(found, call, uncopied[0])
        else:
            for index, tensor in enumerate(made):
                self._known[id(tensor)] = _Known(tensor, Item(call, index), uncopied[index])

    def _node_of(self, leaf: Any) -> Any:
        known = self._known.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return leaf if known is None else known.node

    def _uncopied(self, op: Any, args: Any, kwargs: Any, found: Any, made: list[Tensor]) -> list[Any]:
        """What is made, as views of the input, where that is possible."""
        none = [None] * len(made)
        known = self._known.get(id(args[0])) if args else None
        if known is None or known.uncopied is None or op is aten.as_strided.default:
            return none
        if op in _COPIES:
            return [known.uncopied] if made[0].dtype == known.uncopied.dtype else none
        if not op.is_view:
            return none
        try:
            views = pytree.tree_leaves(op(known.uncopied, *args[1:], **kwargs))
        except RuntimeError:
            return none  # its strides do not allow that
        are_alike = all(
            view.shape == copy.shape and view.dtype == known.uncopied.dtype
            for view, copy in zip(views, made, strict=True)
        )
        return views if are_alike else none

    def recipes(self, outputs: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """How the tensors are made, by their names."""
        unknown = [name for name, tensor in outputs.items() if id(tensor) not in self._known]
        if unknown:
            raise NotRecorded(f"{unknown[0]!r} is not made of the tensors that were given")
        known = {name: self._known[id(tensor)] for name, tensor in outputs.items()}
        uses: Counter[Node] = Counter()
        for one in known.values():
            if one.uncopied is None:
                uses.update(set(_below(one.node)))
        kept = frozenset(node for node, count in uses.items() if count > 1 and isinstance(node, Call))
        return {name: _recipe(one, kept) for name, one in known.items()}


def _recipe(known: _Known, kept: frozenset[Call]) -> Recipe:
    below = dict.fromkeys(_below(known.node))
    inputs = tuple(node.name for node in below if isinstance(node, Input))
    cut = None
    if known.uncopied is not None and not (known.uncopied.is_conj() or known.uncopied.is_neg()):
        view = known.uncopied
        cut = Cut(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))
    if not inputs:
        raise NotRecorded(f"a tensor of shape {tuple(known.tensor.shape)} is made of none of the model's")
    tensor, new_bytes = known.tensor, known.tensor.nbytes
    if cut is not None:
        return Recipe(inputs, tuple(tensor.shape), tensor.dtype, cut, known.node, new_bytes, frozenset())
    calls = {node for node in below if isinstance(node, Call)}
    new_bytes += sum(node.new_bytes for node in calls - kept)
    return Recipe(inputs, tuple(tensor.shape), tensor.dtype, None, known.node, new_bytes, kept & calls)


def _below(node: Node) -> Iterator[Node]:
    """A node and all that it is made of."""
    yield node
    if isinstance(node, Item):
        yield from _below(node.call)
    elif isinstance(node, Call):
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, (Input, Call, Item)):
                yield from _below(leaf)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
