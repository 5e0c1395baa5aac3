"""Segments without tangents: None leaves them out, gradients compile the segment once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxoffload.compiler.tangents import zeros_at
from fxoffload.compiler.without_tangents import WithoutTangents


class Counted:
    """Two versions of a segment of three inputs: the sum of all, in two layouts."""

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self) -> Any:
        self.compiled += 1
        return lambda args: [sum(args).t().contiguous().t()]  # type: ignore[union-attr]

    def segment(self) -> WithoutTangents:
        like = torch.zeros(2, 3)
        return WithoutTangents(lambda args: [args[0] * 1], [zeros_at(1, like), zeros_at(2, like)], self.compile, [like])


def ones() -> Tensor:
    return torch.ones(2, 3)


def test_none_leaves_it_out() -> None:
    counted = Counted()
    assert torch.equal(counted.segment()([ones(), None, None])[0], ones())
    assert counted.compiled == 0


def test_gradients_count_and_zeros_take_the_place_of_the_others() -> None:
    counted = Counted()
    segment = counted.segment()
    for given in ([ones(), 2 * ones(), None], [ones(), None, 2 * ones()], [ones(), ones(), ones()]):
        (found,) = segment(list(given))
        assert torch.equal(found, 3 * ones())
        assert found.stride() == (3, 1), "the next segments are compiled for that layout"
    assert counted.compiled == 1
    assert torch.equal(segment([ones(), None, None])[0], ones())
