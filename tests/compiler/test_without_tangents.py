"""Segments without tangents: None leaves them out, gradients compile the segment once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxoffload.compiler.tangents import zeros_like
from fxoffload.compiler.without_tangents import WithoutTangents


class Counted:
    """Versions of a segment of four inputs: the sum of those that are there, in another layout than without three."""

    def __init__(self) -> None:
        self.missing: list[tuple[int, ...]] = []

    def compile_without(self, missing: tuple[int, ...]) -> Any:
        self.missing.append(missing)
        return lambda args: [sum(args).t().contiguous().t()]  # type: ignore[union-attr]

    def segment(self, *, varies: bool = False) -> WithoutTangents:
        like = torch.zeros(2, 3)
        zeros = [z for i in (1, 2, 3) if not varies and (z := zeros_like(i, like)) is not None]
        return WithoutTangents(lambda args: [args[0] * 1], (1, 2, 3), zeros, self.compile_without, [like])


def ones() -> Tensor:
    return torch.ones(2, 3)


def test_none_leaves_it_out() -> None:
    counted = Counted()
    assert torch.equal(counted.segment()([ones(), None, None, None])[0], ones())
    assert not counted.missing


@pytest.mark.parametrize("varies", [False, True])
def test_gradients_that_come_count(varies: bool) -> None:
    """Zeros take the place of the others; where sizes vary, there is a version without them."""
    counted = Counted()
    segment = counted.segment(varies=varies)
    for _ in range(2):
        for come in ((1,), (2, 3), (1, 2, 3)):
            (found,) = segment([ones(), *(i * ones() if i in come else None for i in (1, 2, 3))])
            assert torch.equal(found, (1 + sum(come)) * ones()), come
            assert found.stride() == (3, 1), "the next segments are compiled for that layout"
    assert counted.missing == ([(2, 3), (1,), ()] if varies else [()])
    assert torch.equal(segment([ones(), None, None, None])[0], ones())
