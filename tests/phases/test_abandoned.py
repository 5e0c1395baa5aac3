"""What a forward without a backward left on the device does not stay there during a rollout."""

from __future__ import annotations

import gc

import torch

from fxoffload.phases import PhaseManager
from fxoffload.runtime.engine import engine_for
from tests.support import Stack, batch, compiled

CPU = torch.device("cpu")


def test_an_offload_lets_go_of_what_forwards_left() -> None:
    torch.compiler.reset()
    model = Stack()
    module = compiled(model, in_flight_budget="1GiB", prefetch_budget=None)
    module(batch()).sum().backward()
    manager = PhaseManager(model, device_types=("cpu",))
    engine = engine_for(CPU)
    out = module(batch())
    held = engine._in_flight_bytes
    assert held > 0
    manager.offload()
    assert engine._in_flight_bytes == held, "its backward may come yet"
    manager.onload()
    del out
    gc.collect()
    assert engine._in_flight_bytes == held
    manager.offload()
    assert engine._in_flight_bytes == 0
    manager.close()
