"""Numbers of fxoffload in a Trainer's logs.

[Note: Logs and reporters] The Trainer hands one dict of logs to its callbacks in order. Its reporters (W&B,
TensorBoard, ...) come before a user's callbacks, which would add numbers too late. So while it trains, a small callback
stands in front of all others and adds them there. The user's callback itself keeps its place, on which more may
depend (whether a step is saved is decided by one before it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fxoffload.torch_private.transformers import callback_handler_of_event

_GIB = 2**30


class PerStep:
    """What counters rose by in a step, on average since they were last read."""

    def __init__(self) -> None:
        self._step = 0
        self._before: Mapping[str, float] = {}

    def begin(self, step: int, counters: Mapping[str, float]) -> None:
        """Count from here."""
        self._step, self._before = step, dict(counters)

    def read(self, step: int, counters: Mapping[str, float]) -> dict[str, float]:
        """The same names, and numbers for one step; {} where none has ended since. ``step``: how many have."""
        count = step - self._step
        if count <= 0:
            return {}
        found = {}
        for name, now in counters.items():
            before = self._before.get(name, 0.0)
            # A counter that was set to zero meanwhile counts from there.
            found[name] = (now - before if now >= before else now) / count
        self.begin(step, counters)
        return found


class AddsToLogs(TrainerCallback):
    """Adds its numbers to logs that lack them: for reporters that come after it. See [Note: Logs and reporters].

    Only to logs of steps, not of an evaluation or of a whole training.
    """

    added: frozenset[str]  # names of these numbers

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds to the logs, where that was not done before reporters saw them."""
        if logs is not None and "loss" in logs and state.is_world_process_zero and not self.added & logs.keys():
            add_to_logs(state, logs, self._numbers(state))

    def _numbers(self, state: TrainerState) -> dict[str, float]:
        raise NotImplementedError


class AddsFirst(TrainerCallback):
    """Stands in front of a Trainer's callbacks, and lets ``callback`` see logs there."""

    def __init__(self, callback: AddsToLogs) -> None:
        self.on_log = callback.on_log


def put_first(callback: AddsToLogs) -> Callable[[], None]:
    """Let ``callback`` see logs before reporters do. Called by it in an event. Returns what ends it."""
    handler = callback_handler_of_event()
    if handler is None:
        return lambda: None
    mine = AddsFirst(callback)
    # A new list: the event that is under way goes on with the one that it began with.
    handler.callbacks = [mine, *handler.callbacks]

    def end() -> None:
        handler.callbacks = [one for one in handler.callbacks if one is not mine]

    return end


def step_of(state: TrainerState | None) -> int:
    """How many steps have ended; None: a loop that is no Trainer's begins at 0."""
    return 0 if state is None else state.global_step


def add_to_logs(state: TrainerState, logs: dict[str, Any], found: Mapping[str, float]) -> None:
    """Put numbers into logs, and into the history that the Trainer has written them to already."""
    rounded = {name: float(f"{value:.5g}") for name, value in found.items()}
    logs.update(rounded)
    history = state.log_history
    if history and history[-1].get("step") == state.global_step and "loss" in history[-1]:
        history[-1].update(rounded)


def gib(nbytes: float) -> float:
    """Bytes in GiB."""
    return nbytes / _GIB
