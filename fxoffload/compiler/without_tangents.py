"""A segment that is compiled without tangents, and once more with them when some come.

See [Note: Gradients that nothing comes from] in ``compiler.tangents``. What a segment is given in their place is None.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxoffload.runtime.tracker.outputs import Zeros

log = logging.getLogger(__name__)

Compiled = Callable[[list[Any]], Sequence[Any]]


class WithoutTangents:
    """Called as the segment is: with a list of inputs, which it clears.

    Args:
        compiled: takes the inputs but for the tangents.
        tangents: for inputs that are left out. Where others of them are given, zeros take their place.
        compile_with: compiles the segment with all inputs.
        outputs: fake results of ``compiled``: the next segments expect that layout.
    """

    def __init__(
        self,
        compiled: Compiled,
        tangents: Sequence[Zeros],
        compile_with: Callable[[], Compiled],
        outputs: Sequence[Any],
    ) -> None:
        self.compiled = compiled
        self._tangents = tuple(tangents)
        self._compile_with = compile_with
        self._strides = [v.stride() if isinstance(v, Tensor) and v.layout is torch.strided else None for v in outputs]
        self._with: Compiled | None = None
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        """How many versions of the segment are compiled."""
        return 1 + (self._with is not None)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if all(args[t.position] is None for t in self._tangents):
            for position in sorted((t.position for t in self._tangents), reverse=True):
                del args[position]
            return self.compiled(args)
        for tangent in self._tangents:
            if args[tangent.position] is None:
                args[tangent.position] = tangent.make()
        results = self._with_tangents()(args)
        return [self._laid_out(result, strides) for result, strides in zip(results, self._strides, strict=True)]

    def _with_tangents(self) -> Compiled:
        with self._lock:
            if self._with is None:
                log.info("gradients come from outputs besides the loss: a segment is compiled with them")
                self._with = self._compile_with()
            return self._with

    @staticmethod
    def _laid_out(result: Any, strides: Sequence[Any] | None) -> Any:
        if strides is None or not isinstance(result, Tensor) or result.stride() == tuple(strides):
            return result
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
