"""What becomes of a graph's outputs: whether the caller holds them, and whether gradients come from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxoffload._torch_compat import StorageRef, is_traceable_wrapper_subclass


class Zeros(Protocol):
    """See ``fxoffload.compiler.tangents.Zeros``."""

    @property
    def position(self) -> int: ...
    def make(self) -> Tensor: ...


class Outputs:
    """The outputs of one graph. Of several forwards the last one counts; all is by bytes.

    Attributes:
        zeros: for the gradients of all outputs; empty: autograd makes them.
        are_held: whether the caller still holds the outputs (logits, say) when the backward has ended; None before, or
            where there are none.
        have_gradients: whether the last backward was given gradients of them, and not only of a loss; likewise.
    """

    def __init__(self) -> None:
        self.zeros: Sequence[Zeros] = ()
        self.are_held: bool | None = None
        self.have_gradients: bool | None = None
        self._refs: list[tuple[StorageRef, int]] = []

    def made(self, outputs: Iterable[Any]) -> None:
        """The forward returns these."""
        found = [o for o in outputs if isinstance(o, Tensor) and o.layout is torch.strided]
        plain = [o for o in found if not is_traceable_wrapper_subclass(o)]
        self._refs = [(StorageRef(t), t.untyped_storage().nbytes()) for t in plain]

    def backward_begins(self, args: list[Any]) -> None:
        """With these arguments, in which zeros take the place of gradients that nothing comes from."""
        given = made = 0
        for zeros in self.zeros:
            if args[zeros.position] is None:
                args[zeros.position] = zeros.make()
                made += args[zeros.position].nbytes
            else:
                given += args[zeros.position].nbytes
        if given + made:
            self.have_gradients = given > made

    def backward_ended(self) -> None:
        """Nothing is held on the graph's behalf any more."""
        refs, self._refs = self._refs, []
        if total := sum(nbytes for _, nbytes in refs):
            self.are_held = 2 * sum(nbytes for ref, nbytes in refs if not ref.is_expired()) > total
