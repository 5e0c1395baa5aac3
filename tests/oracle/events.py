"""What the copy engine does in steps whose plans are fixed, and in steps without one, event by event."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fxoffload
from tests.capture import Tower
from tests.oracle import adapter
from tests.oracle.models import HeavyHead, SharedGates, TwoKinds
from tests.support import Stack, batch, rehearsal

Act = Callable[[Any, adapter.Log], None]


def _forward(run: Any, log: adapter.Log, index: int = 0) -> Tensor:
    log.append(f"-- forward {index}")
    return run(batch(index)).square().sum()


def _backward(loss: Tensor, log: adapter.Log, index: int = 0, **how: bool) -> None:
    log.append(f"-- backward {index}")
    loss.backward(**how)


def _step(run: Any, log: adapter.Log) -> None:
    _backward(_forward(run, log), log)


def _steps(count: int) -> Act:
    def act(run: Any, log: adapter.Log) -> None:
        for _ in range(count):
            _step(run, log)

    return act


def _microbatches(order: tuple[int, ...]) -> Act:
    """Forwards 0, 1, ..., then backwards in ``order``, in two steps."""

    def act(run: Any, log: adapter.Log) -> None:
        for _ in range(2):
            losses = [_forward(run, log, i) for i in range(len(order))]
            for i in order:
                _backward(losses[i], log, i)
            del losses

    return act


def _twice(run: Any, log: adapter.Log) -> None:
    loss = _forward(run, log)
    _backward(loss, log, retain_graph=True)
    _backward(loss, log)


def _dropped(run: Any, log: adapter.Log) -> None:
    loss = _forward(run, log, 0)
    log.append("-- its graph is dropped")
    del loss
    _step(run, log)


@dataclass(frozen=True)
class Script:
    """Steps of a model, and their plan.

    Attributes:
        made: the plan, in words.
        act: runs the model, once compiled.
        model: makes it.
        options: of ``torch.compile``, on top of ``tests.support.rehearsal``.
        per_layer: whether each layer is compiled on its own.
        follows: fixes the plan of the graph after the first step, which is not in the log.
        around: fixes plans of steps.
        first_step: where the log begins.
    """

    made: str
    act: Act
    model: Callable[[], nn.Module] = lambda: Stack(3)
    options: dict[str, Any] = field(default_factory=dict)
    per_layer: bool = False
    follows: Callable[[Any], None] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    first_step: int = 0


_FREE: dict[str, Any] = {"in_flight_budget": None, "prefetch_budget": None}

SCRIPTS: dict[str, Script] = {
    "no room": Script("all offloaded, one byte in flight and ahead", _steps(1), options={"prefetch_budget": 1}),
    "windows of the segments": Script(
        "all offloaded, no budgets", _steps(2), lambda: Stack(3, dropout=0.1), dict(_FREE)
    ),
    "windows of the segments, a heavy head": Script(
        "all offloaded, no budgets; the head saves more than a layer", _steps(1), HeavyHead, dict(_FREE)
    ),
    "windows of the segments, values before the layers": Script(
        "all offloaded, no budgets; the embedding saves values too", _steps(1), lambda: Tower(3), dict(_FREE)
    ),
    "some room in flight": Script(
        "all offloaded, 2 KiB in flight", _steps(1), HeavyHead, {"in_flight_budget": 2048, "prefetch_budget": None}
    ),
    "some room ahead": Script(
        "all offloaded, 4 KiB ahead", _steps(1), HeavyHead, {"in_flight_budget": None, "prefetch_budget": 4096}
    ),
    "room for everything": Script(
        "all offloaded, 1 MiB in flight and ahead",
        _steps(1),
        SharedGates,
        {"in_flight_budget": "1MiB", "prefetch_budget": "1MiB"},
    ),
    "host full": Script("all offloaded, 4 KiB of host memory", _steps(1), options={"host_budget": 4096}),
    "some, under windows": Script(
        "two of three values offloaded, windows of 3000 B in flight and 5000 B ahead with gaps",
        _steps(2),
        lambda: Stack(4),
        dict(_FREE),
        follows=lambda graph: adapter.follow_in_graph(graph, lambda i: i % 3 != 1, 3000, 5000),
    ),
    "layers": Script(
        "each layer compiled, all offloaded, 2 KiB in flight, 4 KiB ahead",
        _steps(2),
        options={"in_flight_budget": 2048, "prefetch_budget": 4096},
        per_layer=True,
    ),
    "planned layers": Script(
        "each layer compiled, four of five values offloaded, windows of 4000 B in flight and 6000 B ahead with gaps; "
        "the step after the plan was made",
        _steps(4),
        lambda: TwoKinds(breaks=False, pairs=2),
        {"policy": "auto", "activation_budget": "1GiB", "disable": ("calibration",), **_FREE},
        per_layer=True,
        around=lambda: adapter.plans_for_steps(lambda i: i % 5 != 2, 4000, 6000),
        first_step=3,
    ),
    "microbatches, last first": Script(
        "all offloaded, 8 KiB ahead; two forwards, then their backwards in reverse",
        _microbatches((1, 0)),
        lambda: Stack(2),
        {"prefetch_budget": 8192},
    ),
    "microbatches, first first": Script(
        "the same, backwards in the order of the forwards",
        _microbatches((0, 1)),
        lambda: Stack(2),
        {"prefetch_budget": 8192},
    ),
    "a graph that is kept": Script("all offloaded, two backwards of one forward", _twice, lambda: Stack(2)),
    "a forward without a backward": Script("all offloaded", _dropped, lambda: Stack(2)),
}


def run(name: str) -> list[str]:
    """The log of a script."""
    script = SCRIPTS[name]
    with adapter.recording() as log, script.around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = script.model()
        how: dict[str, Any] = {"backend": "fxoffload", "options": rehearsal(**script.options)}
        run = model if script.per_layer else torch.compile(model, **how)
        for layer in model.layers if script.per_layer else ():  # type: ignore[union-attr]
            layer.compile(**how)
        if script.follows is not None:
            before = set(fxoffload.graphs())
            _step(run, log)
            (graph,) = set(fxoffload.graphs()) - before
            script.follows(graph)
            log.clear()
        with nullcontext() if script.follows is None else fxoffload.override_policy("auto"):
            script.act(run, log)
        begins = [i for i, line in enumerate(log) if line == "-- forward 0"]
        return _renumbered(log[begins[script.first_step] :])


def _renumbered(log: list[str]) -> list[str]:
    """Values and copies are numbered from 1, whatever ran before the log begins."""
    numbers: dict[str, dict[str, int]] = {}

    def number(found: re.Match[str]) -> str:
        known = numbers.setdefault(found[1], {})
        return f"{found[1]}{known.setdefault(found[2], len(known) + 1)}"

    return [re.sub(r"\b(v|offload |reload )(\d+)", number, line) for line in log]
