"""Operations on tensors without values, recorded, and done later on those with values.

[Note: Recorded conversions]
The code of transformers knows how the weights in memory become those of a checkpoint, and works on a whole state dict.
It runs once, on meta tensors, and each operator is recorded. So it is known which tensors an output is made of, and an
output can be made as soon as these are there.

Rejected: a call of that code for each output. It walks the model and compiles its patterns each time, and some patterns
depend on earlier renames. A list of known conversions: each version has others.

Where the operators come to a view of one input, a copy in between does not matter: the output is cut from the input
directly. Else a fused ``gate_up_proj`` would be copied by halves before an expert is cut from one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxoffload.torch_private.tensor_subclasses import TorchDispatchMode

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
class OutputOfOp:
    """One of the tensors that an operator returns."""

    call: Call
    index: int


Node = Input | Call | OutputOfOp
Computed = MutableMapping[Call, Any]


class RecordedCut(NamedTuple):
    """A view of the input, which is contiguous."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Derivation:
    """How one output is made.

    Attributes:
        inputs: the names of the tensors that it is made of.
        shape, dtype: of the output.
        cut: where it is a view of its only input.
        node: where it is not.
        new_bytes: the most memory that making it takes, in addition to that of ``kept``.
        kept: operators that other outputs need too, and that are done once.
    """

    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: RecordedCut | None
    node: Node
    new_bytes: int
    kept: frozenset[Call]

    def is_input(self, shape: tuple[int, ...]) -> bool:
        """Whether it is its input, of that shape, as it is."""
        return self.shape == shape and self.cut == RecordedCut(shape, contiguous_stride(shape), 0)

    def make(self, inputs: Mapping[str, Tensor], computed: Computed) -> Tensor:
        """The output, contiguous and in memory of its own.

        Args:
            inputs: contiguous.
            computed: receives results that other outputs need too.
        """
        if self.cut is not None:
            view = inputs[self.inputs[0]].as_strided(*self.cut)
            return view.clone(memory_format=torch.contiguous_format)
        found = self._value(self.node, inputs, computed)
        if _is_new(self.node, self.kept):
            return found.contiguous()
        return found.clone(memory_format=torch.contiguous_format)

    def _value(self, node: Node, inputs: Mapping[str, Tensor], computed: Computed) -> Any:
        if isinstance(node, Input):
            return inputs[node.name]
        if isinstance(node, OutputOfOp):
            return self._value(node.call, inputs, computed)[node.index]
        if node in computed:
            return computed[node]

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, (Input, Call, OutputOfOp)):
                return self._value(leaf, inputs, computed)
            is_meta = isinstance(leaf, torch.device) and leaf.type == "meta"
            return inputs[self.inputs[0]].device if is_meta else leaf

        args, kwargs = _mapped((node.args, node.kwargs), filled)
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


class _Made(NamedTuple):
    """How a tensor was made.

    Attributes:
        tensor: is kept, for its id must not be given to another one.
        node: what made it.
        name: of the only input that it is a view of, if copies in between do not count.
        view: that view.
    """

    tensor: Tensor
    node: Node
    name: str
    view: Tensor | None


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Operators such as ``contiguous()`` and ``to()`` make a view or a copy, and their schema says a view."""
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


class OpRecorder(TorchDispatchMode):
    """Records the operations on some meta tensors; see [Note: Recorded conversions].

    Args:
        inputs: contiguous meta tensors by name. Names of one tensor are names of one input, the first.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._indices = _IndicesWithValues()
        self._made: dict[int, _Made] = {}
        for name, tensor in inputs.items():
            self._made.setdefault(id(tensor), _Made(tensor, Input(name), name, tensor))

    def __enter__(self) -> OpRecorder:
        self._indices.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._indices.__exit__(*raised)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            raise NotRecorded(f"{op} writes to a tensor")
        read = list(_tensors_in((args, kwargs)))
        found = op(*args, **kwargs)
        made = [found] if isinstance(found, Tensor) else list(_tensors_in(found))
        if not any(tensor.is_meta for tensor in (*read, *made)):
            return found  # of constants
        for tensor in read:
            if tensor.is_meta and id(tensor) not in self._made:
                raise NotRecorded(f"{op} reads a tensor of shape {tuple(tensor.shape)} that is not in the state dict")
        new_bytes = 0 if op.is_view else sum(tensor.nbytes for tensor in made)
        node_args, node_kwargs = _mapped((tuple(args), kwargs), self._node_in_place)
        call = Call(op, node_args, node_kwargs, new_bytes)
        name, views = self._views(op, args, kwargs, made)
        for index, (tensor, view) in enumerate(zip(made, views, strict=True)):
            node = call if tensor is found else OutputOfOp(call, index)
            self._made[id(tensor)] = _Made(tensor, node, name, view)
        return found

    def _views(self, op: Any, args: Any, kwargs: Any, made: list[Tensor]) -> tuple[str, Sequence[Tensor | None]]:
        """The results as views of an input, where they can be, and the name of that input."""
        none = "", [None] * len(made)
        source = self._made.get(id(args[0])) if args else None
        if source is None or source.view is None or op is aten.as_strided.default:
            return none
        if op in _COPIES:
            return (source.name, [source.view]) if made[0].dtype == source.view.dtype else none
        if not op.is_view:
            return none
        views = made
        if source.view is not source.tensor:  # there was a copy
            try:
                found = op(source.view, *args[1:], **kwargs)
            except RuntimeError:
                return none  # its strides do not allow that
            views = [found] if isinstance(found, Tensor) else list(found)
        are_alike = all(
            view.shape == copy.shape and view.dtype == source.view.dtype and _share_memory(view, source.view)
            for view, copy in zip(views, made, strict=True)
        )
        return (source.name, views) if are_alike else none

    def derivations(self, outputs: Mapping[str, Tensor]) -> dict[str, Derivation]:
        """How the tensors are made, by their names."""
        made = {name: self._made.get(id(tensor)) for name, tensor in outputs.items()}
        found: dict[str, Derivation] = {}
        nodes: dict[str, Node] = {}
        for name, one in made.items():
            if one is None:
                raise NotRecorded(f"{name!r} is not made of the tensors that were given")
            if one.view is not None and not (one.view.is_conj() or one.view.is_neg()):
                found[name] = _cut_from(one.name, one.view)
            else:
                nodes[name] = one.node
        below = {name: dict.fromkeys(_below(node)) for name, node in nodes.items()}
        uses = Counter(node for names in below.values() for node in names)
        kept = frozenset(node for node, count in uses.items() if count > 1 and isinstance(node, Call))
        computed = {name: _computed(outputs[name], node, below[name], kept) for name, node in nodes.items()}
        return {name: found.get(name) or computed[name] for name in outputs}

    def _node_in_place(self, leaf: Any) -> Any:
        made = self._made.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return leaf if made is None else made.node


def derivation_of_input(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Derivation:
    """The input as it is."""
    return _cut_from(name, torch.empty(shape, dtype=dtype, device="meta"))


def _cut_from(name: str, view: Tensor) -> Derivation:
    cut = RecordedCut(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))
    return Derivation((name,), cut.size, view.dtype, cut, Input(name), view.nbytes, frozenset())


def _computed(output: Tensor, node: Node, below: Iterable[Node], kept: frozenset[Call]) -> Derivation:
    inputs = tuple({node.name: None for node in below if isinstance(node, Input)})
    if not inputs:
        raise NotRecorded(f"a tensor of shape {tuple(output.shape)} is made of none of the model's")
    calls = {node for node in below if isinstance(node, Call)}
    new_bytes = sum(call.new_bytes for call in calls - kept) + (0 if _is_new(node, kept) else output.nbytes)
    return Derivation(inputs, tuple(output.shape), output.dtype, None, node, new_bytes, kept & calls)


def _is_new(node: Node, kept: frozenset[Call]) -> bool:
    """Whether a value has memory that nothing else has."""
    return isinstance(node, Call) and node.new_bytes > 0 and node not in kept


def _below(node: Node) -> Iterator[Node]:
    """A node and all that it is made of."""
    yield node
    if isinstance(node, OutputOfOp):
        yield from _below(node.call)
    elif isinstance(node, Call):
        for leaf in _leaves((node.args, node.kwargs)):
            if isinstance(leaf, (Input, Call, OutputOfOp)):
                yield from _below(leaf)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of an operator with each leaf changed. ``tree_map`` takes ten times as long."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(one, change) for one in tree])
    if isinstance(tree, dict):
        return {key: _mapped(one, change) for key, one in tree.items()}
    return change(tree)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _leaves(one)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
