"""Whatever makes the backend do nothing, or less than its user thinks, is told: once, with what to change."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload import tell
from tests.support import Block, Stack, batch, compiled, rehearsal


class Told:
    """The warnings of ours in a block, but not those about plans."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
        self.texts += [str(w.message) for w in seen if "offload" in str(w.message)]

    def one(self, *parts: str) -> str:
        """The only warning, which has these parts."""
        (text,) = self.texts
        for part in parts:
            assert part in text
        return text


@pytest.fixture
def told() -> Told:
    return Told()


def train(call: Callable[[Tensor], Tensor], steps: int = 1) -> None:
    for _ in range(steps):
        (call(batch()) ** 2).sum().backward()


def planned(model: Stack, **changes: Any) -> Callable[[Tensor], Tensor]:
    free = {"in_flight_budget": None, "prefetch_budget": None}
    return compiled(model, **{"policy": "auto", "profile": "h200", **free, **changes})


# -- checkpointing in a graph ------------------------------------------------------------------------------------------


def policy(saved: CheckpointPolicy, other: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda ctx, op, *args, **kwargs: saved if op is torch.ops.aten.addmm.default else other


class Checkpointed(Block):
    contexts: Any = None

    def forward(self, x: Tensor) -> Tensor:
        more = {} if self.contexts is None else {"context_fn": self.contexts}
        return checkpoint(super().forward, x, use_reentrant=False, **more)


class Selective(Checkpointed):
    contexts = staticmethod(
        functools.partial(
            create_selective_checkpoint_contexts,
            policy(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
        )
    )


@pytest.mark.slow
def test_checkpointing_in_a_graph_that_is_obeyed_is_told_with_what_it_costs(told: Told) -> None:
    with told():
        train(planned(Stack(2, block=Checkpointed), checkpoints="obey"))
        train(planned(Stack(2, block=Selective)))
    plans = fxoffload.plans()
    assert all("activation checkpointing is on" in p.summary for p in plans)
    assert "activation checkpointing is on" in str(plans[0])
    # Its budget is that of the step that runs now.
    told.one(
        "activation checkpointing is on",
        "'checkpoints': 'plan'",
        " ms and ",
        f"activation_budget={plans[0].baseline.peak_bytes} ",
    )
    again = [[d for d in p.decisions if d.reason == "activation checkpointing is on"] for p in plans]
    assert all(d.action == "recompute" and d.nbytes > 0 for found in again for d in found)
    full, selective = (sum(d.total_bytes for d in found) for found in again)
    assert 0 < selective < full


@pytest.mark.slow
def test_what_checkpointing_costs_is_what_the_plan_without_it_says(told: Told) -> None:
    with told():
        train(planned(Stack(2, block=Checkpointed), checkpoints="obey"))
        train(planned(Stack(2)))
    with_it, without = fxoffload.plans()
    assert f"{with_it.baseline.step_ms:.3g} ms" in told.one()
    assert f"{without.baseline.step_ms:.3g} ms" in told.one()
    assert without.baseline.step_ms < with_it.baseline.step_ms
    assert "checkpointing" not in without.summary


class InARegion(Checkpointed):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.slow
def test_checkpointing_in_a_nested_region_is_obeyed(told: Told) -> None:
    """It is partitioned before there is a plan. Some versions of torch inline such a region: then it is planned."""
    with told():
        train(planned(Stack(2, block=InARegion)))
    if fxoffload.plans()[-1].checkpointing is None:
        told.one("activation checkpointing is on in compiled code")


@pytest.mark.slow
def test_checkpointing_in_layers_compiled_on_their_own(told: Told) -> None:
    model = Stack(2, block=Checkpointed)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(policy="auto", checkpoints="obey"))
    with told():
        train(model, 2)
    told.one("activation checkpointing is on in compiled code")


@pytest.mark.slow
def test_policies_that_ask_for_offloading_and_offload_all_are_obeyed_in_silence(told: Told) -> None:
    class Offloaded(Checkpointed):
        contexts = staticmethod(
            functools.partial(
                create_selective_checkpoint_contexts,
                policy(
                    getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", CheckpointPolicy.MUST_SAVE),
                    CheckpointPolicy.PREFER_RECOMPUTE,
                ),
            )
        )

    with told():
        train(compiled(Stack(2, block=Checkpointed)))
        if hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):
            train(planned(Stack(2, block=Offloaded)))
    assert not told.texts


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("trl", "gradient_checkpointing=False in SFTConfig, GRPOConfig"),
        ("transformers", "gradient_checkpointing=False in TrainingArguments"),
        ("accelerate", "activation_checkpointing: false"),
        ("verl", "enable_gradient_checkpointing=False"),
        ("lightning", "activation_checkpointing_policy"),
        ("torchtitan", "activation_checkpoint.mode"),
    ],
)
def test_the_switch_is_named_as_the_framework_at_hand_does(
    module: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("trl", "transformers", "accelerate", "verl", "lightning", "torchtitan"):
        monkeypatch.delitem(sys.modules, known, raising=False)
    assert part not in tell.without_checkpointing()
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert part in tell.without_checkpointing()


# -- around compiled code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_around_compiled_layers(reentrant: bool, told: Told) -> None:
    model = Stack(2)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal())

    def call(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)
        return x

    with told():
        train(call, 2)
    told.one("activation checkpointing is on around compiled code", "calls_kept", "Switch it off")


@pytest.mark.slow
def test_saved_tensor_hooks(told: Told) -> None:
    call = compiled(Stack(2))
    with told():
        train(call)
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu():
                train(call)
    told.one("saved-tensor hooks of torch.autograd.graph", "activation_offloading=False", "calls_kept")


@pytest.mark.slow
def test_compiled_autograd(told: Told) -> None:
    call = compiled(Stack(2))
    with told(), torch._dynamo.compiled_autograd._enable(lambda gm: gm):
        train(call, 2)
    told.one("compiled autograd is on", "calls_kept")


# -- nothing that could move -------------------------------------------------------------------------------------------


def test_all_values_are_small(told: Told) -> None:
    with told():
        for num_layers in (1, 2):
            train(compiled(Stack(num_layers), min_bytes="1MiB"))
    told.one("policy='offload_all'", "smaller than min_bytes (1.0 MiB)", "Lower min_bytes")


@pytest.mark.slow_except("frozen")
@pytest.mark.parametrize(
    ("model", "changes", "part"),
    [
        (lambda: Stack(2), {"policy": "auto", "min_bytes": "1MiB", "profile": "h200"}, "smaller than min_bytes"),
        (lambda: Stack(2).requires_grad_(False), {}, "nothing requires grad"),
    ],
    ids=["small", "frozen"],
)
def test_who_asked_for_nothing_in_particular_reads_it_in_the_log(
    model: Callable[[], Stack], changes: dict[str, Any], part: str, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fxoffload")
    with told():
        compiled(model(), **changes)(batch())
    assert not told.texts
    assert caplog.text.count(part) == 1


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FXOFFLOAD_DISABLE", "1")
    caplog.set_level(logging.INFO, "fxoffload")
    train(compiled(Stack(2)))
    assert "FXOFFLOAD_DISABLE is set" in caplog.text


def test_devices_that_are_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with torch.device("meta"):
            compiled(Stack(2))(torch.empty(2, 6, 16))
    assert caplog.text.count("expected tensors on cpu, as device_types says, found them on meta") == 1
