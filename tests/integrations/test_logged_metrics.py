"""What a Trainer's reporters see of fxoffload."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback
from transformers.integrations import integration_utils

import fxoffload
from fxoffload.integrations import logged_metrics
from fxoffload.integrations.logged_metrics import PerStep, add_to_logs
from fxoffload.integrations.transformers import OffloadCallback
from fxoffload.integrations.trl import PhaseCallback
from tests.integrations.test_transformers import CPU_OPTIONS, NUM_STEPS, VOCABULARY, RandomTokens
from tests.integrations.test_trl import train

OURS = {"fxoffload/offloaded_gib", "fxoffload/reloaded_gib", "fxoffload/exposed_ms", "fxoffload/host_gib"}
PHASES = {f"fxoffload/phases/{name}" for name in ("offload_gib", "onload_gib", "exposed_ms", "host_gib")}


class Reporter(TrainerCallback):
    """As those of transformers: in front of a user's callbacks."""

    seen: list[dict[str, Any]]

    def __init__(self) -> None:
        Reporter.seen = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        Reporter.seen.append(dict(logs or {}))


class Tiny(nn.Module):
    """Two layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return {"loss": hidden.square().mean()}


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    return {"report_to": ["tensorboard"], "max_steps": NUM_STEPS, "eval_strategy": "steps", "eval_steps": NUM_STEPS}


def test_reporters_see_what_steps_moved(
    tmp_path: Path, reporting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = [OffloadCallback(policy="offload_all", **CPU_OPTIONS), PhaseCallback(device_types=("cpu",))]
    changes = {"logging_steps": 2, "eval_dataset": RandomTokens(), "prediction_loss_only": True, **reporting}
    added: dict[str, float] = {}
    monkeypatch.setattr(
        logged_metrics, "add_to_logs", lambda state, logs, found: (added.update(found), add_to_logs(state, logs, found))
    )
    trainer = train(tmp_path, *callbacks, model=Tiny(), **changes)
    names = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    assert names.index("Reporter") < names.index("OffloadCallback") and "AddsFirst" not in names
    steps = [logs for logs in Reporter.seen if "loss" in logs]
    others = [logs for logs in Reporter.seen if "loss" not in logs]
    assert len(steps) == NUM_STEPS // 2 and all(logs.keys() >= OURS | PHASES for logs in steps)
    assert len(others) >= 2 and not any(OURS & logs.keys() for logs in others)  # an evaluation, the whole training
    moved = fxoffload.metrics()["fxoffload/bytes_offloaded"]
    assert steps[0]["fxoffload/offloaded_gib"] > 0
    assert added["fxoffload/offloaded_gib"] == pytest.approx(moved / NUM_STEPS / 2**30)
    history = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert [{name: logs[name] for name in OURS | PHASES} for logs in history] == [
        {name: logs[name] for name in OURS | PHASES} for logs in steps
    ]


def test_counters_become_steps() -> None:
    per_step = PerStep()
    per_step.begin(10, {"bytes": 100.0})
    assert per_step.read(10, {"bytes": 150.0}) == {}
    assert per_step.read(15, {"bytes": 200.0}) == {"bytes": 20.0}
    assert per_step.read(17, {"bytes": 30.0}) == {"bytes": 15.0}  # set to zero meanwhile


def test_only_the_history_of_the_same_step_is_added_to() -> None:
    logs: dict[str, Any] = {"loss": 1.0}
    state: Any = SimpleNamespace(global_step=3, log_history=[{"loss": 1.0, "step": 2}])
    add_to_logs(state, logs, {"x": 0.123456})
    assert logs["x"] == 0.12346 and "x" not in state.log_history[0]
    state.log_history.append({"loss": 1.0, "step": 3})
    add_to_logs(state, logs, {"x": 0.5})
    assert state.log_history[1]["x"] == 0.5


def test_outside_of_a_trainer_the_callback_adds_itself() -> None:
    state: Any = SimpleNamespace(global_step=0, log_history=[], is_world_process_zero=True)
    callback, args = OffloadCallback(**CPU_OPTIONS), SimpleNamespace(torch_compile=False, n_gpu=0)
    callback.on_train_begin(args, state, None, model=nn.Linear(2, 2))  # type: ignore[arg-type]
    state.global_step = 1
    logs: dict[str, Any] = {"loss": 1.0}
    callback.on_log(args, state, None, logs=logs)  # type: ignore[arg-type]
    assert logs.keys() >= OURS and logs["fxoffload/offloaded_gib"] == 0.0
    state.is_world_process_zero = False
    callback.on_log(args, state, None, logs=(elsewhere := {"loss": 1.0}))  # type: ignore[arg-type]
    assert elsewhere == {"loss": 1.0}
