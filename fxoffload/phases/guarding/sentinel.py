"""Tensors that cannot be touched by mistake while their memory is away.

[Note: Away classes]
A tensor whose storage was emptied is dangerous. ``p + 1``, ``p.clone()`` and ``AdamW.step()`` end the process on a CPU
and the CUDA context on a GPU. ``torch.save`` writes nothing, silently. So the Python class of a tensor is switched
while it is away (``p.__class__ = AwayParameter``): the object, its identity and its type relations stay. Torch
functions on it come to us first, all but those that ask no class (``torch.tensor(p)``, ``torch.func``, DLPack). At home
a tensor has its own class, so that this costs nothing, and no compiled code changes.

Rejected: guards on the modules' and optimizers' entry points alone, which miss whatever a user writes. A
TorchFunctionMode: Dynamo guards on the stack of modes, so everything would recompile. ``swap_tensors``: it refuses
tensors that autograd or a weak reference holds.

[Note: Objects made meanwhile]
A subclass's own code makes tensors: ``type(self)(...)``, a class method, ``__tensor_unflatten__``. While a tensor is
away its ``type`` is the away class. New objects must not keep that class: an onload does not know them. So the away
class makes objects of the class at home. An object that gets the away class in another way
(``_make_wrapper_subclass``), or the attributes of an away tensor, gets its own class at its first use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.sizes import format_bytes
from fxoffload.torch_private.tensor_subclasses import DisableTorchFunctionSubclass
from fxoffload.torch_private.tensor_versions import set_version


class OffloadedError(RuntimeError):
    """A tensor that is on the host was used as if it were on the device. The message names the call that helps."""


@dataclass(eq=False, slots=True)
class _Away:
    """The record of a tensor that is away.

    Attributes:
        process: in which it was sent away.
        of: ``id`` of the tensor. Others may have its attributes; see [Note: Objects made meanwhile].
        counts: whether the tensor has a version counter.
        is_counted: whether that counter was raised by one.
    """

    home: type
    holdings: list[Holding]
    process: int
    of: int
    counts: bool
    is_counted: bool = False


_RECORD = "_fxoffload_away"
# Methods, functions and attributes that need no memory of a tensor.
_METADATA = frozenset(
    """__hash__ __len__ _backward_hooks _base _grad _grad_fn _has_symbolic_sizes_strides
    _post_accumulate_grad_hooks _version device dim dtype element_size get_device grad grad_fn is_coalesced
    is_complex is_conj is_contiguous is_cpu is_cuda is_floating_point is_hpu is_inference is_ipu is_leaf
    is_maia is_meta is_mkldnn is_mps is_mtia is_neg is_nested is_ort is_quantized is_shared is_signed
    is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout names nbytes ndim ndimension nelement
    numel output_nr register_hook register_post_accumulate_grad_hook requires_grad requires_grad_ retain_grad
    retains_grad shape size storage_offset stride""".split()  # noqa: SIM905
)
_WRITES = ("__set__", "__delete__")
_WRITABLE = frozenset({"grad", "_grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"})
_CLASSES: dict[type, type] = {}
_HOMES: dict[type, type] = {}  # the other way round
_LOCK = ForkSafeRLock()

# A function's name, and the function that gives stand-ins for away tensors among its arguments.
_ANSWER: ContextVar[tuple[str, Callable[[Tensor], Tensor]] | None] = ContextVar("answer", default=None)

untouched = DisableTorchFunctionSubclass
"""Context manager in which away tensors are handled raw, without checks."""


def is_away(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is on the host, or on its way."""
    record = getattr(tensor, "__dict__", {}).get(_RECORD)
    return record is not None and any(holding.where is not Where.DEVICE for holding in record.holdings)


def holdings_of(tensor: Tensor) -> list[Holding]:
    """The storages that an away tensor lies in; empty for a tensor at home."""
    record = getattr(tensor, "__dict__", {}).get(_RECORD)
    return list(record.holdings) if record is not None else []


def home_of(tensor: Tensor) -> Any:
    """The class that a tensor has at home."""
    return _HOMES.get(type(tensor), type(tensor))


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a tensor has at home."""
    return {name: value for name, value in tensor.__dict__.items() if name != _RECORD}


@locked(lambda *parts: _LOCK)
def send_away(*parts: tuple[Iterable[Tensor], Holding]) -> None:
    """Switches the class of tensors that lie in a holding, for each of some parts."""
    process = os.getpid()
    for tensors, holding in parts:
        for tensor in tensors:
            attributes: Any = tensor.__dict__
            record = attributes.get(_RECORD)
            if record is None or all(held.where is Where.DEVICE for held in record.holdings):
                counted = record is not None and record.is_counted and record.of == id(tensor)
                record = _Away(home_of(tensor), [holding], process, id(tensor), not tensor.is_inference(), counted)
                attributes[_RECORD] = record
            elif holding not in record.holdings:
                record.holdings.append(holding)
            if type(tensor) is record.home or not record.is_counted:
                # A backward reads what its forward saved in C++, without asking the class: it ends the process,
                # unless autograd takes the tensor for modified and raises.
                _count(tensor, record, is_away=True)
                tensor.__class__ = _CLASSES.get(record.home) or _away_class(record.home)


@locked(lambda *parts: _LOCK)
def bring_back(*parts: tuple[Iterable[Tensor], Holding]) -> None:
    """Gives tensors their classes back, once nothing of them is away any more."""
    for tensors, holding in parts:
        for tensor in tensors:
            record = tensor.__dict__.get(_RECORD)
            if record is None:
                continue
            if record.holdings != [holding]:
                record.holdings = [held for held in record.holdings if held is not holding]
                if record.holdings:
                    continue
            _come_home(tensor, record)


def _come_home(tensor: Tensor, record: _Away) -> None:
    if record.of == id(tensor):
        _count(tensor, record, is_away=False)
    tensor.__class__ = record.home
    attributes: Any = tensor.__dict__
    del attributes[_RECORD]


# The change of a version counter that is being made: a tensor, its record, the version that is next, and whether the
# tensor leaves. Several tensors may have one counter, so a change that an exception cut short comes before any other.
_COUNTING: list[tuple[Tensor, _Away, int, bool]] = []


def _count(tensor: Tensor, record: _Away, *, is_away: bool) -> None:
    """Raises a tensor's version counter by one while it is away: once, wherever an exception comes."""
    _count_on()
    if record.counts and record.is_counted != is_away:
        _COUNTING.append((tensor, record, tensor._version + (1 if is_away else -1), is_away))
        _count_on()


def _count_on() -> None:
    while _COUNTING:
        tensor, record, version, is_away = _COUNTING[0]
        set_version(tensor, version)
        record.is_counted = is_away
        _COUNTING.pop()


@contextlib.contextmanager
def answered(name: str, stand_in: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In this block the function of that name gets ``stand_in(tensor)`` in place of each away tensor. A state dict is
    read by ``detach``, and loaded by ``copy_``."""
    token = _ANSWER.set((name, stand_in))
    try:
        yield
    finally:
        _ANSWER.reset(token)


def touch(tensor: Tensor, what: str, *, writes: bool = False) -> None:
    """Fences an arriving tensor; raises ``OffloadedError`` for one on the host, and in a child forked meanwhile."""
    record = tensor.__dict__.get(_RECORD)
    if record is not None and record.process != os.getpid():
        raise OffloadedError(_complaint_of_a_child(record, what))
    for holding in holdings_of(tensor):
        holding.owner.touched(holding, what, writes=writes)
    _give_own_class(tensor)


def fence_arriving(tensors: Iterable[Tensor], what: str) -> None:
    """Fences those of the tensors that are arriving; one on the host is left alone."""
    for tensor in tensors:
        if any(holding.where is Where.ARRIVING for holding in holdings_of(tensor)):
            touch(tensor, what)


def _give_own_class(tensor: Tensor) -> None:
    """If it has an away class, and nothing of it is away; see [Note: Objects made meanwhile]."""
    home = _HOMES.get(type(tensor))
    if home is not None and all(holding.where is Where.DEVICE for holding in holdings_of(tensor)):
        attributes: Any = tensor.__dict__
        with _LOCK:
            record = attributes.get(_RECORD)
            if record is None:
                tensor.__class__ = home
            else:
                _come_home(tensor, record)


def _complaint_of_a_child(record: _Away, what: str) -> str:
    holding = record.holdings[0] if record.holdings else None
    name = "a tensor" if holding is None else f"{holding.name} ({format_bytes(holding.nbytes)} of the {holding.group})"
    return (
        f"{what} needs {name}, which was offloaded when this process was forked: a forked child has no part of the "
        "host image. Call onload() in the parent before it forks, or make the child with the spawn or forkserver method"
    )


def _away_class(home: type) -> type:
    if home not in _CLASSES:
        made = type(home)(
            f"Away{home.__name__}",
            (home,),
            {
                "__new__": lambda cls, *args, **kwargs: home(*args, **kwargs),
                "__torch_function__": classmethod(_torch_function),
                "__reduce_ex__": _again("pickle", "__reduce_ex__"),
                "__deepcopy__": _again("copy.deepcopy", "__deepcopy__"),
                "_use_count": _again("swap_tensors()", "_use_count"),
                "as_subclass": _again("as_subclass()", "as_subclass"),
                "__repr__": _describe,
                "__str__": _describe,
                "__format__": lambda self, spec: _describe(self),
                "__module__": __name__,
            },
        )
        _HOMES[made] = home
        _CLASSES[home] = made
    return _CLASSES[home]


def _torch_function(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name, writes = _name(func)
    kwargs = kwargs or {}
    if name in _METADATA and (not writes or name in _WRITABLE):
        with untouched():
            return func(*args, **kwargs)
    answer = _ANSWER.get()
    if answer is not None and name == answer[0] and is_away(args[0]):
        given = [answer[1](one) if isinstance(one, Tensor) and is_away(one) else one for one in args]
        found = func(*given, **kwargs)
        return args[0] if found is given[0] else found
    for tensor in _tensors_in((args, kwargs)):
        _give_own_class(tensor)
    away = [t for t in _tensors_in((args, kwargs)) if is_away(t)]
    written = [*_tensors_in(kwargs.get("out"))]
    if writes or name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        written += _tensors_in(args[:1])
    for tensor in away:
        touch(tensor, name, writes=any(tensor is one for one in written))
    if any(is_away(tensor) for tensor in away):
        raise AssertionError(f"a tensor was still away after it had been fenced for {name}: a bug in fxoffload")
    return func(*args, **kwargs)


def _name(func: Callable[..., Any]) -> tuple[str, bool]:
    """The name of a torch function, or of the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", *_WRITES):
        return getattr(getattr(func, "__self__", None), "__name__", name), name in _WRITES
    return name.rpartition(".")[2], False


def _tensors_in(tree: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif depth and isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors_in(item, depth - 1)


def _again(what: str, method: str) -> Callable[..., Any]:
    """A method that touches first and is then asked of the class at home."""

    def call(self: Tensor, *args: Any) -> Any:
        touch(self, what)
        return getattr(self, method)(*args)

    return call


def _describe(self: Tensor, *args: Any, **kwargs: Any) -> str:
    _give_own_class(self)
    if not is_away(self):
        return format(self, *args) if args else repr(self)
    record = cast(_Away, self.__dict__.get(_RECORD))
    with untouched():
        form = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
    places = sorted({holding.where.value for holding in record.holdings})
    return f"{type(self).__name__}({form}, {' and '.join(places)}: see fxoffload.phases)"
