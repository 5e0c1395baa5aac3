"""What all tests of phases need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..interrupts import switches


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # torch's own CPU optimizers differ in a last bit from run to run with several threads.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_stays_switched() -> Iterator[None]:
    """Later tests would end the process: away tensors were touched without being asked."""
    yield
    assert switches() == []
