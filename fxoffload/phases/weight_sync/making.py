"""Makes the tensors that are handed out of the weights in memory, one after the other, as they come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxoffload.phases.weight_sync.bucket_stream import BucketLedger
from fxoffload.phases.weight_sync.recorded import Computed
from fxoffload.phases.weight_sync.saved import Saved, SaveStep
from fxoffload.phases.weight_sync.units import Unit


class Maker:
    """Holds weights until all outputs that need them were made.

    Args:
        saved: how outputs are made; None: weights are handed out as they come.
        ledger: is charged with the tensors that are held and made.
    """

    def __init__(self, saved: Saved | None, ledger: BucketLedger) -> None:
        self._saved, self._ledger = saved, ledger
        self._waiting: dict[str, Tensor] = {}
        self._charged: dict[str, int] = {}  # of those that wait

    def take(self, unit: Unit, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The outputs of a unit that has come; each with memory of its own, but for names of one tensor."""
        for (start, shape), names in unit.regions.items():
            part = whole.view(-1)[start:][: torch.Size(shape).numel()].view(shape)
            is_whole = part.nbytes == whole.nbytes
            with self._ledger.charged(0 if is_whole else part.nbytes):
                if not is_whole:
                    part = part.clone()
                for name in names:
                    if self._saved is None:
                        yield name, part
                    else:
                        self._waiting[name] = part
                        yield from self._outputs(name, self._saved)
                del part

    def settle(self) -> None:
        """The stream drops the weights that it gave: those that still wait are charged here."""
        for name, tensor in self._waiting.items():
            if name not in self._charged:
                self._ledger.charge(tensor.nbytes)
                self._charged[name] = tensor.nbytes

    def close(self) -> None:
        """Gives back the weights that wait."""
        self._waiting.clear()
        for name in list(self._charged):
            self._ledger.discharge(self._charged.pop(name))

    def _outputs(self, name: str, saved: Saved) -> Iterator[tuple[str, Tensor]]:
        computed: Computed = {}
        with self._ledger.charged(saved.kept_bytes(name)):
            for step in saved.steps[name]:
                yield step.output, self._make(step, computed)

    def _make(self, step: SaveStep, computed: Computed) -> Tensor:
        inputs = self._waiting
        with self._ledger.charged(step.new_bytes):
            made = inputs[step.done[0]] if step.is_input else step.derivation.make(inputs, computed)
        for name in step.done:
            inputs.pop(name)
            self._ledger.discharge(self._charged.pop(name, 0))
        return made
