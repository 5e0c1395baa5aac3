"""The callback in a real Trainer that writes checkpoints, and in one that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from fxoffload.integrations.trl import PhaseCallback
from fxoffload.phases import Where
from tests.integrations.test_transformers import SETTINGS, RandomTokens, losses, make_model

AWAY = (Where.HOST, Where.LEAVING)


class Watched(Trainer):
    """Looks where the optimizer's state is when a step begins and when a checkpoint is written."""

    phases: PhaseCallback
    fails_at = 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saved = [*getattr(self, "saved", []), (self.state.global_step, self.phases.manager.where("optimizer"))]
        super()._save_checkpoint(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = [*getattr(self, "begun", []), self.phases.manager.where("optimizer")]
        if len(self.begun) == self.fails_at:
            raise ValueError("a batch that is no good")
        return super().training_step(*args, **kwargs)


class BehindSaves(TrainerCallback):
    """Looks where the state is when a checkpoint was written and the callback in front of this one was told so."""

    def __init__(self, phases: PhaseCallback) -> None:
        self.phases = phases
        self.found: list[Where] = []

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(self.phases.manager.where("optimizer"))


def trainer(folder: Path, phases: PhaseCallback, **changes: Any) -> Watched:
    settings = {"output_dir": str(folder), "max_steps": 4, "per_device_eval_batch_size": 2, **SETTINGS, **changes}
    data = RandomTokens()
    made = Watched(
        make_model(), TrainingArguments(**settings), train_dataset=data, eval_dataset=data, callbacks=[phases]
    )
    made.phases = phases
    return made


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "saving",
    [
        {"save_strategy": "steps", "save_steps": 2},
        {"save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1},
        {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["steps", "epoch", "behind an evaluation"],
)
def test_the_state_is_on_the_device_while_a_checkpoint_is_written(
    tmp_path: Path, saving: dict[str, Any], early: bool
) -> None:
    phases = PhaseCallback(device_types=("cpu",), early=early)
    ours = trainer(tmp_path, phases, **saving)
    behind = BehindSaves(phases)
    ours.add_callback(behind)
    ours.train()
    assert len(behind.found) == 2 and all(where in AWAY for where in behind.found)
    assert len(ours.saved) == 2
    assert {where for _, where in ours.saved} == {Where.DEVICE}
    if not early:
        assert all(where in AWAY for where in ours.begun[1:])


@pytest.mark.parametrize("better", [True, False])
def test_the_state_is_there_where_an_evaluation_decides_about_a_checkpoint(tmp_path: Path, better: bool) -> None:
    phases = PhaseCallback(device_types=("cpu",))
    ours = trainer(
        tmp_path,
        phases,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="grade",
        greater_is_better=better,
    )
    grade = iter(range(10))
    evaluate = ours.evaluate
    ours.evaluate = lambda *args, **kwargs: {**evaluate(*args, **kwargs), "eval_grade": next(grade)}  # type: ignore[method-assign]
    ours.train()
    assert ours.saved == [(step, Where.DEVICE) for step in ((1, 2, 3, 4) if better else (1,))]
    assert all(where in AWAY for where in ours.begun[1:])
    assert ours.evaluate()["eval_loss"] > 0  # after training there is no manager


def test_training_goes_on_from_a_checkpoint_after_an_exception(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    phases = PhaseCallback(device_types=("cpu",))
    ours = trainer(tmp_path / "ours", phases, **saving)
    ours.fails_at = 3
    with pytest.raises(ValueError, match="a batch that is no good"):
        ours.train()
    assert phases.manager.where("optimizer") in AWAY
    ours.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert ours.state.global_step == 4
    theirs = trainer(tmp_path / "theirs", PhaseCallback(device_types=("cpu",)), **saving)
    theirs.train()
    assert losses(ours) == losses(theirs)
