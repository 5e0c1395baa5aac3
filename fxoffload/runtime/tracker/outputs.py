"""The use of a graph's outputs: whether the caller holds them, and whether gradients come from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxoffload.torch_private.storages import StorageRef
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass

# Of the bytes of all gradients: fewer that come do not count.
_FEW = 0.1


@dataclass(frozen=True)
class Zeros:
    """The zeros in place of a gradient that nothing comes from.

    Attributes:
        position: of the backward's argument.
        shape, stride, dtype, device: as traced.
        is_fixed: whether every call has that shape; else none can be made.
    """

    position: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_fixed: bool = True

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self) -> Tensor:
        """New ones."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


class Outputs:
    """The outputs of one graph, by bytes, without a loss: numbers do not count.

    Attributes:
        zeros: in place of the gradients of all outputs; empty: autograd makes them.
        left_out: positions of the backward's arguments that stay None where nothing comes from them.
        are_held: whether the caller still holds the outputs (logits, say) when the backward has ended; None where there
            are none, or where several forwards ran before it.
        have_gradients: whether the last backward was given gradients of them; None where there are none.
    """

    def __init__(self) -> None:
        self.zeros: Sequence[Zeros] = ()
        self.left_out: Collection[int] = ()
        self.are_held: bool | None = None
        self.have_gradients: bool | None = None
        self._refs: list[tuple[StorageRef, int]] = []
        self._num_forwards = 0  # since the last backward

    def made(self, outputs: Iterable[Any]) -> None:
        """The forward returns these."""
        found = [o for o in outputs if isinstance(o, Tensor) and o.layout is torch.strided and o.dim()]
        self._num_forwards += 1
        plain = [o for o in found if not is_traceable_wrapper_subclass(o)]
        self._refs = [(StorageRef(t), t.untyped_storage().nbytes()) for t in plain]

    def backward_begins(self, args: list[Any]) -> None:
        """With these arguments. Zeros take the place of gradients that nothing comes from, but for those left out."""
        given = missing = 0
        for zeros in self.zeros:
            is_missing = args[zeros.position] is None
            if is_missing and zeros.position not in self.left_out:
                args[zeros.position] = zeros.make()
            nbytes = zeros.nbytes if zeros.shape else 0
            missing, given = missing + nbytes * is_missing, given + nbytes * (not is_missing)
        if given + missing:
            self.have_gradients = given > _FEW * (given + missing)

    def backward_ended(self) -> None:
        """Nothing is held on the graph's behalf any more."""
        refs, self._refs = self._refs, []
        is_known, self._num_forwards = self._num_forwards == 1, 0
        if is_known and (total := sum(nbytes for _, nbytes in refs)):
            self.are_held = 2 * sum(nbytes for ref, nbytes in refs if not ref.is_expired()) > total
