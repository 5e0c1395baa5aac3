"""Memory that is on the device before a step's first call is watched, and yet belongs to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fxoffload.runtime.profiler.allocator_trace import Block, cuda_blocks
from fxoffload.torch_private.storages import StorageRef
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


class FirstArguments:
    """The arguments of a step's first call.

    Some are gone or emptied before the step has ended: the parameters of a layer that FSDP gathers for it, an embedding
    that was offloaded, rotary tables that no layer needs any longer. They were there for the step alone.

    Args:
        args: of the first call.

    Attributes:
        addresses: of their memory when it began.
    """

    def __init__(self, args: Iterable[Any]) -> None:
        plain: dict[int, Tensor] = {}
        tensors = _plain(args)
        on_device = [a for a in tensors if a.device.type != "cpu"]
        for a in on_device or tensors:  # a batch that the model itself moves to the device is on the host
            plain.setdefault(a.untyped_storage()._cdata, a)
        # Not the tensors: an argument of a compiled graph may be a view that lives for the call.
        self._given = [(StorageRef(a), a.untyped_storage().nbytes()) for a in plain.values()]
        self._most = 0
        self.addresses = frozenset(address for ref, _ in self._given if (address := ref.address()))

    def left_bytes(self) -> int:
        """Bytes of the arguments that are gone or empty by now, or were at an earlier call."""
        self._most = max(self._most, sum(nbytes for ref, nbytes in self._given if not ref.nbytes()))
        return self._most


class OnOtherStreams:
    """Memory on streams other than the compute stream that is allocated when a step begins, and gone when it ends.

    FSDP2 gathers a layer's parameters into such a buffer, and keeps it until it gathers the next layer's. Arguments of
    the first call do not count here (see ``FirstArguments``). On the compute stream such memory cannot be told from
    memory that the last step's results still hold.

    Args:
        read: lists the allocated blocks.
        compute: the handle of the compute stream.
        args: of the first call.

    Attributes:
        compute: that handle.
    """

    def __init__(self, read: Callable[[], Iterable[Block]], compute: int, args: Iterable[Any]) -> None:
        self._read = read
        self.compute = compute
        self._given = [StorageRef(a) for a in _plain(args)]
        self._first = self._bytes()

    def gone_bytes(self) -> int:
        """Bytes that each of the streams has fewer by now."""
        now = self._bytes()
        return sum(max(nbytes - now[stream], 0) for stream, nbytes in self._first.items())

    def _bytes(self) -> Counter[int]:
        found: Counter[int] = Counter()
        without = {ref.address() for ref in self._given}  # FSDP1 empties them, and fills them elsewhere
        for stream, address, nbytes in self._read():
            if stream != self.compute and address not in without:
                found[stream] += nbytes
        return found


def others_watch(device: torch.device) -> Callable[[Iterable[Any]], OnOtherStreams] | None:
    """Begins to watch a GPU, where a step's first call has these arguments, on the stream that is current then; None
    where the allocator says nothing."""
    read = cuda_blocks(device)
    if read is None:
        return None
    return lambda args: OnOtherStreams(read, torch.cuda.current_stream(device).cuda_stream, args)


def _plain(args: Iterable[Any]) -> list[Tensor]:
    """The tensors that have a storage of their own."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.layout is torch.strided]
    return [a for a in tensors if not is_traceable_wrapper_subclass(a)]
