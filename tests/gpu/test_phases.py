"""Phases on a GPU: nothing is noticed, memory is free as the driver sees it, and every copy is waited for."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.phases import OffloadedError, PhaseManager, Where
from fxoffload.phases.moving.device_memory import has_expandable_segments

from .gpu_support import MIB, Stack, build, deterministic, fresh_input, sleep

pytestmark = pytest.mark.gpu

DEPTH = 8
SLOW_MS = 20.0


def make(**options: Any) -> tuple[Stack, torch.optim.Optimizer]:
    model = build(DEPTH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def train(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    loss = call(fresh_input(i))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def manager_of(model: nn.Module, optimizer: Any, *, slow: bool = False, **options: Any) -> PhaseManager:
    manager = PhaseManager(model, optimizer, **options)
    if slow:
        copies: Any = manager.copies(next(model.parameters()).device)
        copies.before_copy = lambda stream: sleep(SLOW_MS / 20)
    return manager


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [t for entries in optimizer.state.values() for t in entries.values()]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "loop"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_training_between_cycles_is_bit_equal(options: dict[str, Any], slow: bool) -> None:
    with deterministic():
        model, optimizer = make(**options)
        reference, reference_optimizer = make(**options)
        train(model, optimizer, 0)
        train(reference, reference_optimizer, 0)
        manager = manager_of(model, optimizer, slow=slow)
        ids = [id(p) for p in model.parameters()]
        for i in range(1, 6):
            manager.enter("rollout")
            assert manager.where("params") is manager.where("optimizer") is Where.HOST
            # Another owner has the memory meanwhile, and writes to it.
            litter = torch.full((64 * MIB,), 255, dtype=torch.uint8, device="cuda")
            del litter
            with manager.phase("logprob"), torch.no_grad():
                assert torch.equal(model(fresh_input(100 + i)), reference(fresh_input(100 + i)))
            with manager.phase("train", then="sync"):
                assert torch.equal(train(model, optimizer, i), train(reference, reference_optimizer, i))
        manager.onload()
        assert ids == [id(p) for p in model.parameters()]
        steps = [entries["step"] for entries in optimizer.state.values()]
        assert {t.device.type for t in steps} == {"cuda" if options.get("fused") else "cpu"}
        for a, b in zip(values(model, optimizer), values(reference, reference_optimizer), strict=True):
            assert torch.equal(a, b)
        manager.close()


def test_the_driver_gets_the_memory() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda") for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager = manager_of(model, optimizer)
    # What the driver takes once for a process' first copies and registrations does not come back.
    manager.offload()
    # Besides tensors that other tests left alive: that memory is used again, and stays with the allocator.
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    manager.onload()
    torch.cuda.synchronize()
    nbytes = sum(t.nbytes for t in values(model, optimizer) if t.is_cuda)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    allocated = torch.cuda.memory_allocated()
    handle = manager.offload()
    assert handle.done()
    assert allocated - torch.cuda.memory_allocated() >= nbytes
    expected = nbytes - idle - 24 * MIB  # small ones share a segment with others
    assert expected > nbytes // 2
    assert torch.cuda.mem_get_info()[0] - free >= expected
    assert manager.transitions[-1].freed_bytes >= expected
    assert manager.image.reserved_bytes <= 1.02 * nbytes
    manager.close()


@pytest.mark.skipif(has_expandable_segments(), reason="expandable segments are mapped page by page, whatever the call")
def test_the_driver_is_asked_for_many_storages_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(64)))  # 16 MiB each
    manager = manager_of(model, None)
    calls = []
    for _ in range(2):
        manager.offload()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        manager.onload()
        calls.append(torch.cuda.memory_stats()["num_device_alloc"] - before)
    # 128, 256, 512 MiB and the rest; and a few until it is known that what other tests left idle is in pieces.
    assert 1 <= min(calls) <= max(calls) <= 12
    manager.close()


def test_what_is_away_raises_and_the_context_lives() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    model(fresh_input(1)).backward()
    manager = manager_of(model, optimizer)
    weight = next(model.parameters())
    manager.enter("rollout")
    uses: list[Callable[[], object]] = [
        lambda: weight + 1,
        lambda: weight.clone(),
        lambda: model(fresh_input(0)),
        lambda: optimizer.step(),
        lambda: nn.utils.clip_grad_norm_([weight], 1.0),
    ]
    for use in uses:
        with pytest.raises(OffloadedError):
            use()
    torch.cuda.synchronize()
    manager.enter("train")
    train(model, optimizer, 1)
    torch.cuda.synchronize()
    manager.close()


def test_the_first_layer_runs_before_the_last_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)  # so that there are many slow copies
    model, optimizer = make()
    train(model, optimizer, 0)
    x = fresh_input(0)
    with torch.no_grad():
        model(x)  # a kernel that runs for the first time is loaded, which waits for the device
    # The freed memory stays with the allocator: cudaMalloc waits for kernels that run, and so would the caller.
    manager = manager_of(model, optimizer, empty_cache=False)
    manager.offload()
    copies: Any = manager.copies(x.device)
    copies.before_copy = lambda stream: sleep(SLOW_MS)
    seen: list[Where] = []
    hook = model.layers[0].register_forward_hook(lambda *_: seen.append(manager.where("params")))
    began = time.perf_counter()
    handle = manager.onload(wait=False)
    called = time.perf_counter() - began
    with torch.no_grad():
        model(x)
    hook.remove()
    told = f"the call took {called:.3f} s, with the forward {time.perf_counter() - began:.3f} s, done: {handle.done()}"
    assert seen == [Where.ARRIVING], told
    handle.wait()
    assert time.perf_counter() - began > SLOW_MS / 1e3 * DEPTH * 12 - 0.5, "copies are not slow: nothing was tested"
    copies.before_copy = None
    manager.close()


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_compiled_by_fxoffload(how: str) -> None:
    torch.compiler.reset()
    options = {"policy": "offload_all", "min_bytes": 1, "profile": "h200"}
    with deterministic():
        model, optimizer = make()
        reference, reference_optimizer = make()
        calls: list[Any] = []
        for one in (model, reference):
            if how == "layers":
                for layer in one.layers:
                    layer.compile(backend="fxoffload", options=options)
                calls.append(one)
            else:
                calls.append(torch.compile(one, backend="fxoffload", options=options))
        train(calls[0], optimizer, 0)
        train(calls[1], reference_optimizer, 0)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        manager = manager_of(model, optimizer, slow=True)
        for i in range(1, 4):
            manager.enter("rollout")
            with pytest.raises(OffloadedError):
                calls[0](fresh_input(i))
            with manager.phase("train"):
                assert torch.equal(train(calls[0], optimizer, i), train(calls[1], reference_optimizer, i))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
        manager.close()
    fxoffload.release_host_memory()


def fill() -> list[Tensor]:
    """Takes all memory that torch's allocator may still have."""
    taken = []
    for size in (64 * MIB, 2 * MIB, MIB // 4):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


def test_no_room_on_the_device_loses_nothing() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    before = values(model, optimizer)
    before_host = [t.cpu() for t in before]
    del before
    manager = manager_of(model, optimizer)
    manager.offload()
    gc.collect()  # other tests' models
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    total = torch.cuda.mem_get_info()[1]
    most = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(most / total)
    filling = fill()  # what other tests have left would hold the model
    torch.cuda.set_per_process_memory_fraction((most + 24 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            manager.onload()
        assert manager.where("params") is Where.HOST
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del filling
    manager.onload()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(values(model, optimizer), before_host, strict=True))
    manager.close()


def test_gradients_are_right_while_optimizer_state_returns() -> None:
    """Copies to the device start in a thread of their own, in memory that the backward has just freed."""
    torch.manual_seed(0)
    width = 2048
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(8))
    )
    model = model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8192, width, device="cuda")

    def gradients() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    gradients()
    optimizer.step()
    expected = [gradient.clone() for gradient in gradients()]
    manager = PhaseManager(model, optimizer)
    for _ in range(20):
        manager.offload("optimizer", wait=False)
        gradients()
        manager.drain()
        handle = manager.onload("optimizer", wait=False)
        found = gradients()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        handle.wait()
    manager.close()
