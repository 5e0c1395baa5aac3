"""Version counters are as they were: autograd takes nothing for modified that is not, and misses nothing that is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases.guarding import sentinel
from tests.phases.delayed import DelayedCopies
from tests.phases.phase_support import rehearse

WRITTEN = 20


def one_counter(count: int = 4) -> nn.ParameterList:
    """Parameters in storages of their own, as ``Module.to`` leaves them, that have one version counter."""
    whole = torch.zeros(count, 8)
    for _ in range(WRITTEN):
        whole.normal_()
    return nn.ParameterList(nn.Parameter(row) for row in whole).double()


def test_one_counter_settles_in_parts() -> None:
    model, copies = one_counter(), DelayedCopies()
    assert len({p.untyped_storage()._cdata for p in model}) == len(list(model))
    manager = rehearse(model, copies=copies)
    for _ in range(3):
        manager.offload("params")
        handle = manager.onload("params", wait=False)
        for parameter in model:
            parameter.sum()
        copies.run_all()
        handle.wait()
        assert [p._version for p in model] == [WRITTEN] * 4
    loss = (torch.ones(8, dtype=torch.double, requires_grad=True) * model[1]).sum()
    with torch.no_grad():
        model[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    manager.close()


def test_one_counter_leaves_in_parts() -> None:
    first, second = one_counter(2)
    model, other = nn.Module(), nn.Module()
    model.p, other.p = first, second
    manager = rehearse(model, extra={"other": other})
    x = torch.ones(8, dtype=torch.double, requires_grad=True)
    loss = (x * first).sum()
    manager.offload("params")
    manager.offload("extra")
    manager.onload()
    assert (first._version, second._version) == (WRITTEN, WRITTEN)
    loss.backward()
    manager.close()


@pytest.mark.parametrize("place", range(4))
def test_whoever_interrupts_an_offload_can_repeat_it(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    model = nn.ParameterList(nn.Parameter(torch.full((8,), float(i))) for i in range(4))
    manager = rehearse(model)
    set_version, calls = sentinel.set_version, []

    def interrupted(tensor: Tensor, version: int) -> None:
        calls.append(version)
        if len(calls) == place + 1:
            raise KeyboardInterrupt
        set_version(tensor, version)

    monkeypatch.setattr(sentinel, "set_version", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.offload("params")
    monkeypatch.undo()
    assert manager.where("params").value == "device"
    assert [p._version for p in model] == [0] * 4 and all(type(p) is nn.Parameter for p in model)
    manager.offload("params")
    assert manager.where("params").value == "host"
    manager.onload("params")
    assert [p[0].item() for p in model] == [0, 1, 2, 3]
    manager.close()
