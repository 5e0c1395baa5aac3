"""What the caller of an offload or of a weight stream does not wait for."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases.inventory import Inventory
from fxoffload.phases.ledger import PhaseLedger
from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.weight_sync import bucket_stream
from fxoffload.phases.weight_sync.plans import WeightPlans
from fxoffload.runtime.copies.streams import HostCopies
from tests.phases.phase_support import Tied, make, rehearse, train


class Renamed(nn.Linear):
    """As FSDP1 does in ``summon_full_params``."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"renamed_{name}", parameter) for name, parameter in super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return ((f"renamed_{name}", buffer) for name, buffer in super().named_buffers(*args, **kwargs))


def test_nobody_collects_garbage_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    collecting: list[bool] = []

    def watch(kind: Any, name: str) -> None:
        method = getattr(kind, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            collecting.append(gc.isenabled())
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, watched)

    watch(PhaseLedger, "on_device")
    watch(PhaseLedger, "leave")
    watch(WeightPlans, "plan")
    assert gc.isenabled()
    manager.offload("optimizer", wait=False).wait()
    for _ in manager.stream_weights():
        pass
    assert gc.isenabled() and collecting == [False, False, False]
    manager.onload("optimizer")
    monkeypatch.setattr(PhaseLedger, "leave", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.offload("optimizer")
    assert gc.isenabled()
    monkeypatch.undo()
    manager.close()


@pytest.mark.parametrize("kind", [Tied, lambda: Renamed(2, 2), lambda: nn.Sequential(Tied(), Renamed(2, 2))])
def test_what_a_model_has_is_what_torch_says(kind: Any) -> None:
    model = kind()
    for module in model.modules():
        module.register_parameter("none", None)
        module.register_buffer("nothing", None)
        module.register_buffer("something", torch.ones(1))
    inventory = Inventory({"a": model, "b": nn.Linear(2, 2)}, None, None)
    parameters = [(f"a.{name}", id(p)) for name, p in model.named_parameters()]
    buffers = [(f"a.{name}", id(b)) for name, b in model.named_buffers()]
    assert [(n, id(t)) for n, t in inventory.collect("params") if n[0] == "a"] == parameters
    assert [(n, id(t)) for n, t in inventory.collect("buffers") if n[0] == "a"] == buffers


def test_copies_begin_before_the_memory_for_later_ones_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PhaseManager(nn.ParameterList(nn.Parameter(torch.ones(256)) for _ in range(64)), device_types=("cpu",))
    manager.offload("params")
    seen: list[str] = []

    class Watched(bucket_stream.BucketLedger):
        def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
            seen.append("take" if shape[0] else "-")
            return super().take(shape, dtype, device)

    class Copies(HostCopies):
        def reload_waits_for_compute(self) -> None:
            seen.append("wait")

        def reload(self, pieces: Any, *, gives_way: bool = True) -> object:
            if pieces := list(pieces):
                seen.append("copy")
            return super().reload(pieces, gives_way=gives_way)

    monkeypatch.setattr("fxoffload.phases.weight_sync.weights.BucketLedger", Watched)
    monkeypatch.setattr(manager, "copies", lambda device: Copies())
    stream = manager.stream_weights(16 << 10)
    assert stream.plan.landings == 2
    next(stream)
    # Tensors that are not gathered have no stage; each landing waits for the earlier owner of its memory.
    assert seen.pop(0) == "-"
    whole = ["take"] * len(stream.plan.buckets[0].finished)
    assert seen == ["take", "wait", "copy", "take", "wait", "copy", *whole, "wait", "copy"]
    stream.close()
    manager.close()
