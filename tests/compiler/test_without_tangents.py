"""Segments without tangents: None leaves them out, gradients compile the segment once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxoffload.compiler.without_tangents import WithoutTangents


class Counted:
    """Versions of a segment of three inputs: the sum of those that are there, in another layout than without two."""

    def __init__(self) -> None:
        self.missing: list[tuple[int, ...]] = []

    def compile_without(self, missing: tuple[int, ...]) -> Any:
        self.missing.append(missing)
        return lambda args: [sum(args).t().contiguous().t()]  # type: ignore[union-attr]

    def segment(self) -> WithoutTangents:
        return WithoutTangents(lambda args: [args[0] * 1], (1, 2), self.compile_without, [torch.zeros(2, 3)])


def ones() -> Tensor:
    return torch.ones(2, 3)


def test_none_leaves_it_out() -> None:
    counted = Counted()
    assert torch.equal(counted.segment()([ones(), None, None])[0], ones())
    assert not counted.missing


def test_gradients_that_come_count() -> None:
    counted = Counted()
    segment = counted.segment()
    for _ in range(2):
        for given in ([ones(), 2 * ones(), None], [ones(), None, 2 * ones()], [ones(), ones(), ones()]):
            (found,) = segment(list(given))
            assert torch.equal(found, 3 * ones())
            assert found.stride() == (3, 1), "the next segments are compiled for that layout"
    assert counted.missing == [(2,), (1,), ()] and segment.num_compiled == 4
    assert torch.equal(segment([ones(), None, None])[0], ones())
