"""How much of what returns is started at once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fxoffload.phases.moving.arrivals import FIRST_BYTES, FIRST_MAPPED_BYTES, SLICE, Arrivals
from fxoffload.phases.moving.storages import Holding


def first_slice(nbytes: int, settings: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of 100 storages of this size."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    storage = torch.empty(0).untyped_storage()
    mover: Any = mock.Mock()
    arrivals = Arrivals(mover)
    arrivals.add(Holding(storage, nbytes, torch.device("cpu"), "params", str(i), mock.Mock()) for i in range(100))
    begun = arrivals.start_first()
    mover.start_arriving.assert_called_once_with(begun)
    assert [held.name for held in begun] == [str(i) for i in range(len(begun))]
    assert arrivals.head_start_s == pytest.approx(len(begun) * nbytes / 120e9)
    return len(begun)


@pytest.mark.parametrize(("settings", "most"), [("", FIRST_BYTES), ("expandable_segments:True", FIRST_MAPPED_BYTES)])
def test_the_caller_starts_less_where_pages_are_mapped(
    settings: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_slice(most // 20, settings, monkeypatch) == 20
    assert first_slice(most, settings, monkeypatch) == 1
    assert first_slice(1 << 10, settings, monkeypatch) == 4 * SLICE
