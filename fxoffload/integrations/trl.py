"""``fxoffload.phases`` in the trainers of transformers and TRL."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from fxoffload.environment import phases_device_types
from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.guarding.overrides import Override
from fxoffload.phases.metrics import Transition
from fxoffload.phases.optimizers import leaves
from fxoffload.phases.phase import GROUPS, OPTIMIZER

try:
    from transformers import TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "fxoffload.integrations.trl needs transformers; install it with pip install 'fxoffload[transformers]'"
    ) from error

from fxoffload.integrations.logged_metrics import AddsToLogs, PerStep, gib, put_first, step_of

_HOST = "fxoffload/phases/host_gib"


class PhaseCallback(AddsToLogs):
    """The optimizer state is on the device around ``optimizer.step()`` only.

        phases = PhaseCallback()
        trainer = GRPOTrainer(model, ..., callbacks=[phases])

    The state leaves in the background when a step has ended, after the optimizer and the learning rate's scheduler. It
    returns right before the optimizer's next step.

    It also returns for a checkpoint, as sharded state may be gathered on the device: a callback that orders one belongs
    in front of this one. And it returns when ``train()`` or ``eval()`` of the optimizer itself changes its mode:
    schedule-free ones then convert the parameters, with the help of the state. If another engine generates on the same
    GPU, wrap that in ``with phases.rollout():``, which sends everything else away too.

    It adds to the logs of training steps, and so to W&B, TensorBoard and the like. Averages for one step since the last
    log: ``fxoffload/phases/offload_gib``, ``.../onload_gib`` and ``.../exposed_ms``, the time that calls and streams
    waited for these copies. As it is then: ``fxoffload/phases/host_gib``.

    Args:
        early: the state returns when a step begins, hidden by forward and backward, which then have less room. Not for
            trainers that generate inside the step (GRPO), unless in ``rollout()``.
        device_types: whose tensors leave; by default as FXOFFLOAD_PHASES_DEVICE_TYPES says, else CUDA.
        options: of ``fxoffload.phases.PhaseManager``.
    """

    added = frozenset({_HOST})

    def __init__(self, *, early: bool = False, device_types: tuple[str, ...] | None = None, **options: Any) -> None:
        self.early = early
        self._options = {"device_types": device_types or phases_device_types(), **options}
        self._manager: PhaseManager | None = None
        self._undo: list[Callable[[], None]] = []
        self._waits_for_save = False
        self._per_step = PerStep()
        self._moved: _Moved | None = None

    @property
    def manager(self) -> PhaseManager:
        """The manager of the trainer's model and optimizer.

        Raises:
            RuntimeError: there is none before training begins, nor after its end.
        """
        if self._manager is None:
            raise RuntimeError(
                "expected training to be under way, found none: PhaseCallback has a manager between on_train_begin and "
                "on_train_end. Register it with Trainer(callbacks=[...]) and use it inside train()"
            )
        return self._manager

    @contextmanager
    def rollout(self, *groups: str) -> Iterator[None]:
        """In this block the groups are on the host; by default all of them. Afterwards each is back where it was.

        Parameters return in the background, and each layer waits for its own.
        """
        manager = self.manager
        leaving = groups or GROUPS
        resident = [group for group in leaving if manager.where(group) in (Where.DEVICE, Where.ARRIVING)]
        manager.offload(*leaving)
        try:
            yield
        finally:
            if resident:
                manager.onload(*resident, wait=False)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Makes the manager; state that a checkpoint brought leaves."""
        if model is None or optimizer is None:
            raise RuntimeError(
                "on_train_begin was called without a model and an optimizer; register PhaseCallback with a "
                "transformers.Trainer rather than calling it"
            )
        self._close()
        self._manager = PhaseManager(model, optimizer, **self._options)
        for one in leaves(optimizer):
            self._undo += _returned_for_modes(one, self._manager)
        self._manager.offload(OPTIMIZER, wait=False)
        self._undo.append(put_first(self))
        self._moved = _Moved(self._manager)
        self._per_step.begin(step_of(state), self._moved.sums())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The state returns here with ``early``; where it has returned for a save that did not come, it leaves."""
        if self.early:
            self.manager.onload(OPTIMIZER, wait=False)
        elif self._waits_for_save:
            self.manager.offload(OPTIMIZER, wait=False)
        self._waits_for_save = False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The state returns; the step waits for each tensor."""
        self.manager.onload(OPTIMIZER, wait=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The state leaves in the background; not if a checkpoint is to be written."""
        if control.should_save:
            self._return_for_save()
        else:
            self.manager.offload(OPTIMIZER, wait=False)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """As at the end of a step."""
        if control.should_save:
            self._return_for_save()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """With ``save_strategy="best"`` a checkpoint may be written; the decision comes after all callbacks."""
        if self._manager is not None and args.save_strategy == "best":
            self._return_for_save()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The checkpoint is written: the state leaves."""
        if self._waits_for_save:
            self._waits_for_save = False
            self.manager.offload(OPTIMIZER, wait=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything is back."""
        self._close()

    def _numbers(self, state: TrainerState) -> dict[str, float]:
        if self._manager is None or self._moved is None:
            return {}
        found = self._per_step.read(state.global_step, self._moved.sums())
        return {**found, _HOST: gib(self._manager.image.reserved_bytes)}

    def _return_for_save(self) -> None:
        self._waits_for_save = True
        self.manager.onload(OPTIMIZER)

    def _close(self) -> None:
        self._waits_for_save = False
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        if self._manager is not None:
            self._manager.close()
            self._manager = self._moved = None


class _Moved:
    """What the transitions of a manager came to. It keeps the last ones only: each is counted once, when it is over."""

    def __init__(self, manager: PhaseManager) -> None:
        self._manager = manager
        self._counted: weakref.WeakSet[Transition] = weakref.WeakSet()
        self._recent: list[tuple[Transition, float]] = []  # with the waits that were counted: streams may wait still
        self._gib = {"offload": 0.0, "onload": 0.0}
        self._exposed_s = 0.0

    def sums(self) -> dict[str, float]:
        """Since the manager was made."""
        self._exposed_s += sum(one.exposed_seconds - before for one, before in self._recent)
        self._recent = []
        for one in list(self._manager.transitions):
            if one.is_over and one not in self._counted:
                self._counted.add(one)
                if one.kind in self._gib and not one.failed:
                    self._gib[one.kind] += gib(one.nbytes)
                    self._exposed_s += (exposed := one.exposed_seconds)
                    self._recent.append((one, exposed))
        found = {f"fxoffload/phases/{kind}_gib": moved for kind, moved in self._gib.items()}
        return {**found, "fxoffload/phases/exposed_ms": 1e3 * self._exposed_s}


def _returned_for_modes(optimizer: Any, manager: PhaseManager) -> list[Callable[[], None]]:
    """Has the state on the device when the optimizer changes its mode. Returns functions that take that away again.

    A call that asks for the present mode needs nothing: the Trainer makes one in front of every step.
    """
    mode = ""

    def change(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal mode
        if name != mode:
            manager.onload(OPTIMIZER)
        found = method(*args, **kwargs)
        mode = name
        return found

    names = [name for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
    return [Override(optimizer, name, partial(change, name)).put() for name in names]
