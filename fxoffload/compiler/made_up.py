"""Made-up inputs for operators and segments that are measured.

Floating-point values are random. Integers that are the same in every step have those values. Others are
zero, which is a valid index. Where every reader is known, indices are spread over the rows instead: with zeros, a
scatter would write one row many times. Ends of groups (grouped products, packed sequences) are then even: with zeros,
all groups would be empty. Memory is new, and shared as the graph's inputs share theirs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import aten_names, call_of, is_grouped, node_kind, op_name, shape_of, tensors_of
from fxoffload.analysis.values import tensor_of
from fxoffload.compiler.constant_values import ConstantValues
from fxoffload.compiler.made_up_indices import ENDS, HANDS_ON, INDEX_ALONG, INDEX_LISTS, may_index_wrongly
from fxoffload.torch_private.op_schemas import HigherOrderOperator, OpOverload
from fxoffload.torch_private.symbolic_sizes import hint

# Operators of other libraries may read any address by an integer that they are given.
_KNOWN_LIBRARIES = ("aten", "prims", "torch_attn")
_ASSERTIONS = aten_names("_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range_for_size")
_COMPARES = aten_names("eq ne lt le gt ge")
# Their kernels read the seed and the offset of dropout on the host, unless a CUDA graph is captured. Both are on the
# CPU, whatever their descriptions say: a pointer to a GPU's memory ends the process.
_SEEDED_ON_HOST = aten_names("_scaled_dot_product_efficient_attention_backward _efficient_attention_backward")
_ALIGNED = 16  # elements, of the groups of a grouped product
# Of random values: of parameters and what else outlives a call (``initializer_range`` of most models), and of
# activations and gradients, which die in it. A GPU's power depends on the values, and so do its clocks: see
# [Note: In the order of the step] in ``time_segments``.
_STD, _STD_OF_DYING = 0.02, 1.0


class NotMadeUpError(Exception):
    """Something has no made-up inputs; says why."""


def why_not(nodes: Sequence[fx.Node]) -> str:
    """Why ``nodes`` (in graph order) must not run on made-up inputs; "" where they may."""
    reason = next((reason for n in nodes if (reason := _why_not(n))), "")
    return reason or ("an index that is computed from made-up values" if may_index_wrongly(nodes) else "")


def _why_not(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    if any(t.layout is torch.strided and shape_of(t) is None for t in tensors_of(node)):
        return "a size that depends on data"
    target, _ = call_of(node)
    name = op_name(target)
    if node_kind(node) == "collective" or "c10d" in name or name.startswith(("symm_mem.", "fsdp.")):
        return "a collective"
    if name in _ASSERTIONS:
        return "an assertion about values"
    if name.startswith("flex_attention"):
        return "a block mask, which has no made-up values"
    if isinstance(target, OpOverload):
        if target.namespace in _KNOWN_LIBRARIES:
            return "a size that depends on data" if torch.Tag.data_dependent_output in target.tags else ""
    elif not isinstance(target, HigherOrderOperator):
        return ""  # Python functions on sizes and tuples
    elif name not in ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"):
        return f"the higher-order operator {name}"
    if any(_is_integer(t) for v in node.all_input_nodes for t in tensors_of(v)):
        return "an operator of another library that reads integers"
    return ""


def _is_integer(tensor: torch.Tensor) -> bool:
    return not _is_float(tensor.dtype) and tensor.dtype is not torch.bool


@dataclass(frozen=True)
class _View:
    """One input that is a tensor. ``memory``: which of the allocations."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _RandomState:
    """One input that is the state of a device's random generator: as it is now. ``as_generator``: in a generator of its
    own, else in a tensor."""

    device: torch.device
    as_generator: bool

    def make(self) -> Any:
        on_gpu = self.device.type == "cuda"
        if self.as_generator:
            index = self.device.index or 0
            return (torch.cuda.default_generators[index] if on_gpu else torch.default_generator).clone_state()
        return torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()


# The memory that floating-point inputs of one allocation lie in: device, bytes, dtype of the first view of it.
_Kind = tuple[torch.device, int, torch.dtype]


class Shared:
    """Memory of floating-point inputs that calls of segments have in common, if they run one after another.

    Args:
        has_dying: it serves inputs that die in a call, too. The call may reuse their memory, so later calls find other
            values there: still of floating point, but less random, which takes less power and time.
    """

    def __init__(self, *, has_dying: bool = False) -> None:
        self.has_dying = has_dying
        self._tensors: dict[_Kind, list[torch.Tensor]] = {}

    def take(self, kind: _Kind, index: int) -> torch.Tensor:
        """The tensor of ``kind`` with that number, which is made if there are no more than ``index``."""
        found = self._tensors.setdefault(kind, [])
        while len(found) <= index:
            found.append(_random(kind, len(found), _STD))
        return found[index]


def nbytes_shared(all_made: Sequence[MadeUp], *, has_dying: bool = False) -> int:
    """Bytes of the inputs of all of them at once, where one ``Shared`` is used: what is not shared counts each time."""
    kinds = [made.kinds(has_dying=has_dying) for made in all_made]
    most: Counter[_Kind] = Counter()
    for of_one in kinds:
        most |= of_one
    own = sum(m.nbytes - sum(k[1] * n for k, n in of.items()) for m, of in zip(all_made, kinds, strict=True))
    return own + sum(kind[1] * count for kind, count in most.items())


class MadeUp:
    """Makes inputs.

    Args:
        inputs: values that ``nodes`` take from outside.
        device: tensors elsewhere are on the CPU.
        dying: positions of inputs that die in the call.
        left_out: positions of inputs that are None.
        constants: of the graph, which inputs may be; None: there are none.

    Raises:
        NotMadeUpError: for some input there is nothing to make up.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
        device: torch.device,
        dying: Collection[int] = (),
        left_out: Collection[int] = (),
        constants: ConstantValues | None = None,
    ) -> None:
        self._inputs = tuple(inputs)
        self._constants = constants
        self._inside = frozenset(nodes)
        self._sizes: list[int] = []  # of the allocations, in bytes
        self._devices: list[torch.device] = []
        places: dict[int, int] = {}
        self._views = [None if i in left_out else self._view(v, places, device) for i, v in enumerate(inputs)]
        self._dying = {v.memory for i in dying if isinstance(v := self._views[i], _View)}
        self._fills = [self._fill(v) for v in inputs]
        self.nbytes = sum(self._sizes)

    def make(self, shared: Shared | None = None) -> list[Any]:
        """New inputs, in the order of ``inputs``. ``shared``: the memory of floating-point values."""
        return self._make(range(len(self._views)), shared)

    def kinds(self, *, has_dying: bool) -> Counter[_Kind]:
        """How many allocations of each kind a ``Shared`` has of them."""
        members = self._members(self._views).items()
        found = [self._kind(place, of) for place, of in members if has_dying or place not in self._dying]
        return Counter(kind for kind in found if kind is not None)

    def make_integers(self, inputs: list[Any]) -> list[Any]:
        """``inputs`` with new tensors for the integers: a run may have reused their memory, and left no valid indices
        there."""
        found = list(inputs)
        stale = [i for i, v in enumerate(self._views) if isinstance(v, _View) and not _is_float(v.dtype)]
        for i, tensor in zip(stale, self._make(stale), strict=True):
            found[i] = tensor
        return found

    def _make(self, wanted: Sequence[int], shared: Shared | None = None) -> list[Any]:
        views = [self._views[i] for i in wanted]
        taken: Counter[_Kind] = Counter()
        memory: dict[int, torch.Tensor] = {}
        for place, of in self._members(views).items():
            kind = self._kind(place, of)
            if kind is None:
                memory[place] = torch.zeros(self._sizes[place], dtype=torch.uint8, device=self._devices[place])
            elif shared is None or (place in self._dying and not shared.has_dying):
                memory[place] = _random(kind, place, _STD_OF_DYING if place in self._dying else _STD)
            else:
                memory[place] = shared.take(kind, taken[kind])
                taken[kind] += 1
        made: list[Any] = []
        for i, view in zip(wanted, views, strict=True):
            if not isinstance(view, _View):
                made.append(view.make() if isinstance(view, _RandomState) else view)
                continue
            tensor = memory[view.memory].view(view.dtype).as_strided(view.shape, view.strides, view.offset)
            if (fill := self._fills[i]) is not None and tensor.numel():
                # Elements of an expanded dimension are one in memory.
                once = tuple(slice(0, 1) if s == 0 else slice(None) for s in view.strides)
                tensor[once] = fill(tensor.numel(), tensor.device).view(tensor.shape)[once]
            made.append(tensor)
        return made

    @staticmethod
    def _members(views: Iterable[object]) -> dict[int, list[_View]]:
        """Views by allocation."""
        found: dict[int, list[_View]] = {}
        for view in views:
            if isinstance(view, _View):
                found.setdefault(view.memory, []).append(view)
        return found

    def _kind(self, place: int, members: Sequence[_View]) -> _Kind | None:
        """Of an allocation that holds floating-point values only; None: it holds zeros at first."""
        if not all(_is_float(v.dtype) for v in members):
            return None
        return self._devices[place], self._sizes[place], members[0].dtype

    def _view(self, node: fx.Node, places: dict[int, int], device: torch.device) -> _View | _RandomState | int | None:
        value = node.meta.get("val")
        if value is None:  # a result that an operator does not have
            return None
        if isinstance(value, torch.Generator):
            return _RandomState(device if value.device.type == device.type else value.device, True)
        if (drawn := next((r for r in node.users if r in self._inside and _state_of(r) is node), None)) is not None:
            return _RandomState(device if any(t.is_cuda for t in tensors_of(drawn)) else torch.device("cpu"), False)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            if (size := hint(value)) is None:
                raise NotMadeUpError("a size without a hint")
            return size
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise NotMadeUpError(f"an input that is no strided tensor ({type(value).__name__})")
        shape = shape_of(value)
        strides = [hint(s) for s in value.stride()]
        offset = hint(value.storage_offset())
        if shape is None or None in strides or offset is None:
            raise NotMadeUpError("a size without a hint")
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else -1  # type: ignore[operator]
        key = value.untyped_storage()._cdata
        if key not in places:
            places[key] = len(self._sizes)
            self._sizes.append(0)
            is_there = value.device.type == device.type and not self._is_host_seed(node, value)
            self._devices.append(device if is_there else torch.device("cpu"))
        place = places[key]
        # Whole numbers of the widest dtype, so that any dtype can view it.
        self._sizes[place] = max(self._sizes[place], -(-(offset + last + 1) * value.element_size() // 16) * 16)
        return _View(place, shape, tuple(strides), offset, value.dtype)  # type: ignore[arg-type]

    def _is_host_seed(self, node: fx.Node, value: torch.Tensor) -> bool:
        readers = (op_name(call_of(r)[0]) for r in node.users if r in self._inside and r.op == "call_function")
        return value.ndim == 0 and _is_integer(value) and any(name in _SEEDED_ON_HOST for name in readers)

    def _fill(self, node: fx.Node) -> Callable[[int, torch.device], torch.Tensor] | None:
        """Makes the values of an integer input; None: they are zero, or random."""
        value = tensor_of(node)
        if value is None or not _is_integer(value):
            return None
        if self._constants is not None and (work_out := self._constants.of(node)) is not None:
            return lambda n, device: work_out()
        uses = list(_uses(node, self._inside))
        if not uses or None in uses:
            return None
        bounds = [bound for kind, bound in uses if kind == "index"]  # type: ignore[misc]
        ends = {(kind, bound) for kind, bound in uses if kind in ("ends", "starts")}  # type: ignore[misc]
        if bounds and not ends:
            least = min(bounds)
            return (lambda n, device: torch.arange(n, device=device) % least) if least > 0 else None
        if len(ends) == 1 and not bounds:
            ((kind, total),) = ends
            return lambda n, device: _even(n, total, kind == "starts").to(device)
        return None


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _random(kind: _Kind, seed: int, std: float) -> torch.Tensor:
    """Random values, as bytes: a GPU multiplies zeros with less power, and so faster. The generator is not the
    user's."""
    device, nbytes, dtype = kind
    found = torch.empty(nbytes, dtype=torch.uint8, device=device)
    flat = found.view(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    if dtype.itemsize > 1:
        flat.normal_(std=std, generator=generator)
    else:
        for part in flat.split(1 << 24):  # 8-bit floats, to which small values are zeros
            part.copy_(torch.empty(part.shape, device=device).normal_(generator=generator))
    return found


def _even(count: int, total: int, is_from_zero: bool) -> torch.Tensor:
    """Ends of ``count`` groups over ``total``; ``is_from_zero``: the first one is the beginning."""
    steps = torch.arange(count) if is_from_zero else torch.arange(1, count + 1)
    groups = max(count - is_from_zero, 1)
    found = steps * total // groups // _ALIGNED * _ALIGNED
    found[-1] = total
    return found


# -- what readers do with integers -------------------------------------------------------------------------------------


def _state_of(node: fx.Node) -> object:
    """The random state that ``node`` runs another operator with."""
    return node.args[0] if node.target is torch.ops.higher_order.run_with_rng_state else None


# How a reader uses an integer: ("index", number of rows), ("ends", elements over which groups lie), or the same with
# the beginning of the first group in front, ("starts", elements).
_Use = tuple[str, int]


def _uses(value: fx.Node, inside: Collection[fx.Node]) -> Iterator[_Use | None]:
    """How ``value``, its views and copies are used; None for a reader that is not known."""
    for reader in value.users:
        if reader not in inside:
            continue
        name = op_name(reader.target)
        if name in HANDS_ON or reader.target is operator.getitem:
            yield from _uses(reader, inside)
        elif (divisor := _divisor(value, reader, name)) is not None:
            # A token's copies for its experts follow one another: the index of a copy, divided, is the token's.
            for use in _uses(reader, inside):
                yield (use[0], use[1] * divisor) if use is not None and use[0] == "index" else None
        elif name not in _COMPARES:
            yield _use(value, reader, name)


def _divisor(value: fx.Node, reader: fx.Node, name: str) -> int | None:
    """What ``reader`` divides ``value`` by, rounding; None where it does something else."""
    rounds = name == "aten.floor_divide" or (name == "aten.div" and reader.kwargs.get("rounding_mode") is not None)
    if not rounds or len(reader.args) != 2 or reader.args[0] is not value or not isinstance(reader.args[1], int):
        return None
    return reader.args[1] if reader.args[1] > 0 else None


def _use(value: fx.Node, reader: fx.Node, name: str) -> _Use | None:
    target, args = call_of(reader)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(reader.kwargs)
    names = [n for n, v in given.items() if v is value or (isinstance(v, (list, tuple)) and value in v)]
    if len(names) != 1:
        return None
    (argument,) = names
    if argument in ENDS:
        return _ends(argument, reader, given)
    size = _indexed(value, name, argument, given)
    return None if size is None else ("index", size)


def _indexed(value: fx.Node, name: str, argument: str, given: dict[str, Any]) -> int | None:
    """How many there are of what ``value`` is an index into."""
    if name in INDEX_LISTS and argument == "indices":
        shape = _shape(given["self"])
        places = [i for i, v in enumerate(given["indices"]) if v is value]
        is_plain = all(v is None or not _is_mask(v) for v in given["indices"])
        return min(shape[i] for i in places) if shape is not None and is_plain else None
    if name in INDEX_ALONG and argument == "index":
        shape = _shape(given["self"])
        return shape[given["dim"]] if shape else None
    if name == "aten.embedding" and argument == "indices":
        shape = _shape(given["weight"])
        return shape[0] if shape else None
    if name == "aten.embedding_dense_backward" and argument == "indices":
        return hint(given["num_weights"])
    return None


def _ends(argument: str, reader: fx.Node, given: dict[str, Any]) -> _Use | None:
    if is_grouped(reader):
        a, b = _shape(given.get("self")), _shape(given.get("mat2"))
        if a is None or b is None:
            return None
        # Groups are parts of the rows, of the dimension that is summed over, or of the columns.
        return "ends", a[0] if len(b) == 3 else a[1] if len(a) == 2 else b[1]
    shape = _shape(given.get("query" if argument.endswith("_q") else "key"))
    return None if shape is None or len(shape) < 3 else ("starts", shape[-3] * (shape[0] if len(shape) == 4 else 1))


def _is_mask(node: fx.Node) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(node))


def _shape(node: object) -> tuple[int, ...] | None:
    value = tensor_of(node) if isinstance(node, fx.Node) else None
    return None if value is None else shape_of(value)
