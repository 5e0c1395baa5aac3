"""A segment that is compiled without tangents, and again with all when some come.

Where sizes vary, zeros cannot be made for the rest: then it is compiled again for each set of tangents that comes.
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
Positions = tuple[int, ...]


class WithoutTangents:
    """Called as the segment is: with a list of inputs, which it clears.

    Args:
        compiled: takes the inputs but for the tangents.
        left_out: positions of the tangents, in order.
        zeros: for the tangents that do not come when others do; empty where sizes vary.
        compile_without: compiles the segment for the inputs but for those at some positions.
        outputs: fake results of ``compiled``: the next segments expect that layout.
    """

    def __init__(
        self,
        compiled: Compiled,
        left_out: Positions,
        zeros: Sequence[Zeros],
        compile_without: Callable[[Positions], Compiled],
        outputs: Sequence[Any],
    ) -> None:
        self.compiled = compiled
        self._left_out = left_out
        self._zeros = tuple(zeros)
        self._compile_without = compile_without
        self._strides = [_fixed_strides(v) for v in outputs]
        self._versions: dict[Positions, Compiled] = {}
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        missing = tuple(i for i in self._left_out if args[i] is None)
        if self._zeros and missing != self._left_out:
            for zeros in self._zeros:
                if args[zeros.position] is None:
                    args[zeros.position] = zeros.make()
            missing = ()
        for position in reversed(missing):
            del args[position]
        if missing == self._left_out:
            return self.compiled(args)
        results = self._version(missing)(args)
        return [_laid_out(result, strides) for result, strides in zip(results, self._strides, strict=True)]

    def _version(self, missing: Positions) -> Compiled:
        with self._lock:
            if missing not in self._versions:
                log.info("outputs besides the loss are given gradients: a segment is compiled with them")
                self._versions[missing] = self._compile_without(missing)
            return self._versions[missing]


def _fixed_strides(value: Any) -> tuple[int, ...] | None:
    """None where there is nothing to tell."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return tuple(value.stride()) if all(type(n) is int for n in value.stride()) else None


def _laid_out(result: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or not isinstance(result, Tensor) or result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
