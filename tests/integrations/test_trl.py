"""The callback in a real Trainer. The CPU is the device."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from fxoffload.integrations.trl import PhaseCallback
from fxoffload.phases import OffloadedError, Where
from fxoffload.phases.moving.host_image import HostMemoryError
from tests.integrations.phases_support import bytes_of, state_of, total
from tests.integrations.test_transformers import SETTINGS, RandomTokens, losses, make_model

STEPS = 4


class Watch(TrainerCallback):
    """Bytes of the optimizer's state on the device: before and after every optimizer step, and in between."""

    def __init__(self, phases: PhaseCallback | None) -> None:
        self.phases = phases
        self.storages: list[torch.UntypedStorage] = []
        self.forward: list[int] = []
        self.stepped: list[int] = []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.phases is not None:
            self.phases.manager.onload("optimizer")
            self.stepped.append(total(self.storages))

    def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.phases is not None:
            if self.phases.early:
                self.phases.manager.onload("optimizer")
            else:
                self.phases.manager.offload("optimizer")
            self.forward.append(total(self.storages))

    def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.phases is not None and not self.storages:
            self.phases.manager.onload("optimizer")
            self.storages = bytes_of(t for t in state_of(optimizer.optimizer))
            self.phases.manager.offload("optimizer", wait=False)


def train(
    folder: Path, *callbacks: TrainerCallback, resume: str | None = None, model: Any = None, **changes: Any
) -> Trainer:
    settings = {"output_dir": str(folder), "max_steps": STEPS, **SETTINGS, **changes}
    given = {name: settings.pop(name) for name in ("eval_dataset", "optimizers") if name in settings}
    trainer = Trainer(
        model or make_model(),
        TrainingArguments(**settings),
        train_dataset=RandomTokens(),
        callbacks=list(callbacks),
        **given,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    assert losses(ours) == losses(theirs) and losses(ours)
    expected = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("early", [False, True])
def test_training_is_the_same_and_the_state_is_there_for_the_step_only(tmp_path: Path, early: bool) -> None:
    phases = PhaseCallback(device_types=("cpu",), early=early)
    watch = Watch(phases)
    ours = train(tmp_path, phases, watch)
    assert_same(ours, train(tmp_path))
    size = total(watch.storages)  # it is back when training has ended
    assert size > 0
    assert watch.stepped[1:] == [size] * (STEPS - 1)
    assert watch.forward[1:] == [size if early else 0] * (STEPS - 1)
    with pytest.raises(RuntimeError, match="expected training to be under way"):
        _ = phases.manager


def test_a_checkpoint_is_written_while_the_state_is_away_and_read(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    phases = PhaseCallback(device_types=("cpu",))
    train(tmp_path / "ours", phases, **saving)
    train(tmp_path / "theirs", **saving)
    files = [tmp_path / who / "checkpoint-2" / "optimizer.pt" for who in ("ours", "theirs")]
    states = [torch.load(file)["state"] for file in files]
    assert states[0].keys() == states[1].keys() and states[0]
    for key, entry in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in entry.items())
    resumed = [
        train(tmp_path / f"{who}-resumed", *callbacks, resume=str(tmp_path / "ours" / "checkpoint-2"))
        for who, callbacks in (("ours", [PhaseCallback(device_types=("cpu",))]), ("theirs", []))
    ]
    assert_same(*resumed)


class Rollouts(TrainerCallback):
    """Generates at the beginning of every step with everything away, and looks where each group is."""

    def __init__(self, phases: PhaseCallback) -> None:
        self.phases = phases
        self.inside: list[int] = []
        self.away: list[bool] = []

    def on_step_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        weights = bytes_of(model.parameters())
        with self.phases.rollout():
            self.inside.append(total(weights))
            with pytest.raises(OffloadedError):
                model(input_ids=torch.zeros(1, 2, dtype=torch.long))
        self.phases.manager.onload("params")  # waits for what returns in the background
        self.inside.append(total(weights))
        away = self.phases.manager.where("optimizer") is Where.HOST
        self.away.append(away)
        with self.phases.rollout("optimizer"):
            assert self.phases.manager.where("params") is not Where.HOST
        # Groups that were away before stay away.
        assert (self.phases.manager.where("optimizer") is Where.HOST) == away


def test_rollouts_inside_a_trainer(tmp_path: Path) -> None:
    phases = PhaseCallback(device_types=("cpu",))
    rollouts = Rollouts(phases)
    ours = train(tmp_path, phases, rollouts)
    assert_same(ours, train(tmp_path))
    size = rollouts.inside[1]
    assert size > 0 and rollouts.inside == [0, size] * STEPS
    assert rollouts.away == [False] + [True] * (STEPS - 1)  # also where it was still leaving when the rollout began


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match='expected grads="keep"'):
        PhaseCallback(grads="keeep").on_train_begin(
            None,
            None,
            None,
            model=torch.nn.Linear(2, 2),
            optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1),  # type: ignore[arg-type]
        )
    with pytest.raises(RuntimeError, match="without a model and an optimizer"):
        PhaseCallback().on_train_begin(None, None, None)  # type: ignore[arg-type]


def test_what_is_still_leaving_when_a_rollout_begins_stays_away() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    phases = PhaseCallback(device_types=("cpu",))
    nobody: Any = None
    goes_on: Any = SimpleNamespace(should_save=False)
    phases.on_train_begin(nobody, nobody, nobody, model=model, optimizer=optimizer)
    manager = phases.manager
    manager.onload()
    manager.release_host_memory()
    go, take = threading.Event(), manager.image.take

    def slowly(nbytes: int) -> Any:
        go.wait()
        return take(nbytes)

    manager.image.take = slowly  # type: ignore[method-assign]
    phases.on_step_end(nobody, nobody, goes_on)
    assert manager.where("optimizer") is Where.LEAVING
    threading.Timer(0.2, go.set).start()
    with phases.rollout():
        assert manager.where("optimizer") is Where.HOST
    assert manager.where("optimizer") is Where.HOST
    manager.onload("params")
    assert manager.where("optimizer") is Where.HOST
    phases.on_train_end(nobody, nobody, nobody)


class ScheduleFree(torch.optim.Optimizer):
    """Turns the parameters over with its state when its mode changes, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "in_training": True})
        self.num_modes = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 0.5)

    def train(self) -> None:
        self._turn_over(True, 0.25)

    def eval(self) -> None:
        self._turn_over(False, -1 / 3)

    @torch.no_grad()
    def _turn_over(self, in_training: bool, weight: float) -> None:
        self.num_modes += 1
        for group in self.param_groups:
            if group["in_training"] != in_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["in_training"] = in_training


@pytest.mark.parametrize("early", [False, True])
def test_an_optimizer_that_reads_its_state_in_front_of_an_evaluation(tmp_path: Path, early: bool) -> None:
    def trained(*callbacks: TrainerCallback) -> Trainer:
        model = make_model()
        made = ScheduleFree(model.parameters())
        data = RandomTokens()
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
        trainer = train(tmp_path, *callbacks, model=model, eval_dataset=data, optimizers=(made, None), **evaluated)
        assert made.num_modes > STEPS
        assert "train" not in vars(made) and "eval" not in vars(made)
        return trainer

    assert_same(trained(PhaseCallback(device_types=("cpu",), early=early)), trained())


def test_a_mode_that_the_optimizer_is_in_brings_nothing_back() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = ScheduleFree(model.parameters())
    phases = PhaseCallback(device_types=("cpu",))
    nobody: Any = None
    goes_on: Any = SimpleNamespace(should_save=False)
    phases.on_train_begin(nobody, nobody, nobody, model=model, optimizer=optimizer)
    found = []
    for change in (optimizer.train, optimizer.train, optimizer.eval, optimizer.eval, optimizer.train):
        change()
        found.append(phases.manager.where("optimizer") is Where.DEVICE)
        phases.on_pre_optimizer_step(nobody, nobody, nobody)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        phases.on_step_end(nobody, nobody, goes_on)
        phases.manager.offload("optimizer")
    assert found == [True, False, True, False, True]
    phases.on_train_end(nobody, nobody, nobody)


def test_a_learning_rate_on_the_device(tmp_path: Path) -> None:
    """Its scheduler writes it after the optimizer's step."""

    def trained(*callbacks: TrainerCallback) -> Trainer:
        model = make_model()
        made = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        return train(tmp_path, *callbacks, model=model, optimizers=(made, None))

    assert_same(trained(PhaseCallback(device_types=("cpu",))), trained())


def test_a_failure_in_the_background_does_not_outlast_training(tmp_path: Path) -> None:
    """What could not leave is where it was, and training has ended."""
    phases = PhaseCallback(device_types=("cpu",))

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEPS - 1:
                phases.manager.onload()
                phases.manager.release_host_memory()
                phases.manager.image.take = full  # type: ignore[method-assign]

    def full(nbytes: int) -> Any:
        raise HostMemoryError("the host is full")

    assert_same(train(tmp_path, phases, Full()), train(tmp_path))
