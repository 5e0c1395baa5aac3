"""Values that one forward call of a compiled graph saved: transfers (one per storage), their group, and tokens.

[Note: Ownership]
AOTAutograd saves *tokens*: empty CPU tensors that carry a ``Slot``. A slot owns its group, a group its transfers, a
transfer its host block. When autograd drops the tokens, reference counting returns the blocks to the arena. That
happens when the backward has run, the graph was dropped, or an exception unwound it; ``retain_graph`` keeps the tokens
and so the blocks. It may happen on any thread at any time. So only the callbacks of weak references run then, which
append to queues; they are in C, where no signal can raise.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxoffload.errors import TokenLostError
from fxoffload.runtime.host_memory.arena import HostBlock
from fxoffload.runtime.profiler.step_clock import StepRecording
from fxoffload.step.choice import Windows

_TOKEN_ATTRIBUTE = "_fxoffload_slot"
# A shape that no saved value has. It survives whatever a hook does to a token (detach, clone, a trip to another
# device), so it shows a copy that lost the attribute. Two of its sizes broadcast with next to nothing.
_TOKEN_SHAPE, _TOKEN_DTYPE = (3, 0, 7919), torch.uint8
_SERIAL = itertools.count()


@dataclass(frozen=True, slots=True)
class View:
    """How a saved tensor lies in its storage range. ``offset`` is in elements from the start of the range."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, buffer: Tensor) -> Tensor:
        """The tensor on a buffer of bytes that holds the range."""
        value = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return value.set_(buffer.untyped_storage(), self._base(buffer) + self.offset, self.shape, self.stride)

    def _base(self, buffer: Tensor) -> int:
        return buffer.storage_offset() // self.dtype.itemsize


class Watch:
    """Tells whether a tensor was modified in place since it began, as autograd does for its saved tensors.

    It shares the tensor's version counter, and holds neither its memory nor the graph that made it.
    """

    __slots__ = ("_twin", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        self._twin = tensor.detach()
        # The counter stays; the memory goes.
        self._twin.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def of(tensor: Tensor) -> Watch | None:
        """A watch of a tensor that autograd made, or of a view of one. None for any other: a leaf, or a view of one,
        may be a parameter whose memory is emptied or filled without a change of its version (FSDP does that)."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_inference():
            return None
        root = tensor if tensor._base is None else tensor._base
        return None if root.grad_fn is None else Watch(tensor)

    def is_broken(self) -> bool:
        """Whether it was."""
        return self._twin._version != self._version


@dataclass(frozen=True, slots=True)
class There:
    """The bytes of a transfer on the device, while a reload is under way or finished but not yet handed out.

    Attributes:
        ready: the event after which they are there.
        stream: the compute stream that ``buffer`` was allocated on.
        reclaimed: whether ``buffer`` is the source itself, taken back. Else it takes bytes of the prefetch budget.
    """

    buffer: Tensor
    ready: object
    stream: object
    reclaimed: bool


class Transfer:
    """One storage range on its way to the host and back.

    Attributes:
        nbytes: bytes of the range.
        block: where it lies on the host.
        there: on the device, if it is there. One store changes it.
        views: the saved tensors in the range.
        serial: grows with every copy to the host.
        reclaimable: whether the source, while it is still held, equals the copy (the caller may write to a graph input
            after the forward has returned).
        watch: of the caller's memory. The caller may then write to it without waiting for the copy (see
            [Note: Watched inputs] in ``fxoffload.runtime.engine``).
    """

    __slots__ = ("__weakref__", "block", "nbytes", "reclaimable", "serial", "there", "views", "watch")

    def __init__(
        self, nbytes: int, block: HostBlock, views: Sequence[View], *, reclaimable: bool, watch: Watch | None = None
    ) -> None:
        self.nbytes = nbytes
        self.block = block
        self.views = tuple(views)
        self.reclaimable = reclaimable or watch is not None
        self.watch = watch
        self.there: There | None = None
        self.serial = next(_SERIAL)

    def __reduce__(self) -> NoReturn:
        # A copy, made with a token that is copied deeply, would return the same block a second time.
        raise TypeError("expected one owner of an offloaded value, found an attempt to copy or pickle its token")


class Group:
    """Everything that one forward call of one compiled graph moved to the host.

    Transfers are ranked by the order in which the backward will ask for them. So prefetching from another graph's
    backward starts with those needed first. ``stream``: the compute stream of the forward call. ``windows``: of the
    plan that the call followed. ``takes_below``: whether that plan is one for a chain of calls, whose first backward
    also takes back values of earlier calls that are still on the device. ``was_passed_over``: its backward was
    expected, and another one began: it may never begin, as of a loss that the caller keeps. ``following``: the groups
    whose backwards come next, as that plan has them; None: the save order tells.
    """

    __slots__ = (
        "__weakref__",
        "_needs",
        "_ranked",
        "following",
        "recording",
        "stream",
        "takes_below",
        "was_passed_over",
        "windows",
    )

    def __init__(self, stream: object = None, windows: Windows | None = None) -> None:
        self._ranked: list[tuple[int, Transfer]] = []
        self._needs: dict[int, int] = {}
        self.stream = stream
        self.windows = windows
        self.was_passed_over = False
        self.takes_below = False
        self.following: tuple[weakref.ref[Group], ...] | None = None
        self.recording: StepRecording | None = None  # of the step of this call alone, until its backward begins

    def add(self, rank: int, transfer: Transfer, *, sets_window: bool = True) -> None:
        """``rank``: place in the order in which the backward first uses saved values. ``sets_window``: whether its
        segment counts for ``prefetch_window_bytes``."""
        self._ranked.append((rank, transfer))
        if sets_window:
            self._needs[rank] = self._needs.get(rank, 0) + transfer.nbytes

    def in_need_order(self) -> list[Transfer]:
        """All transfers, those that the backward needs first in front."""
        return [t for _, t in sorted(self._ranked, key=lambda item: item[0])]

    def prefetch_window_bytes(self) -> int:
        """The default for how many bytes to reload ahead of use.

        The most that one segment of the backward needs at once, and half as much more where there are several. Their
        copies do not take equal shares of their time. A window of one segment would leave the link idle during those
        that compute for longer.
        """
        largest = max(self._needs.values(), default=0)
        return largest * 3 // 2 if len(self._needs) > 1 else largest

    def __len__(self) -> int:
        return len(self._ranked)


@dataclass(slots=True)
class Slot:
    """One saved tensor inside a group."""

    group: Group
    transfer: Transfer
    view: View


def make_token(slot: Slot) -> Tensor:
    """A tensor that stands for an offloaded one among the values that autograd saves."""
    token = empty_token()
    setattr(token, _TOKEN_ATTRIBUTE, slot)
    return token


def empty_token() -> Tensor:
    """A tensor of a token's form, which stands for nothing yet."""
    return torch.empty(_TOKEN_SHAPE, dtype=_TOKEN_DTYPE)


def is_token(value: Any) -> bool:
    """Whether ``value`` stands for an offloaded tensor."""
    return hasattr(value, _TOKEN_ATTRIBUTE)


def slot_of(value: Any, name: str) -> Slot | None:
    """The slot of a token, None for a tensor that was kept.

    Raises:
        TokenLostError: ``value`` has a token's form but lost the value that it stood for.
    """
    slot = getattr(value, _TOKEN_ATTRIBUTE, None)
    if slot is not None:
        return slot
    if isinstance(value, Tensor) and value.shape == _TOKEN_SHAPE and value.dtype is _TOKEN_DTYPE:
        raise TokenLostError(
            f"expected the saved value {name} or the token that stands for its offloaded copy, found a copy of the "
            "token: something (a saved-tensor hook set after the forward, a deep copy, pickling) replaced what "
            "autograd saved. Set such hooks around the forward as well, where fxoffload sees them and keeps everything"
        )
    return None
