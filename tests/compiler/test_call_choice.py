"""Which calls of a graph are measured as steps of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fxoffload.compiler.call_choice import CallChoice
from fxoffload.runtime import executor
from fxoffload.runtime.variant import Variants
from fxoffload.step.choice import Choice, RanCall, Windows

CHOICE = Choice((True, False), Windows((0,), (0,)))


def choice_of(replan: Any, **about: Any) -> CallChoice:
    tracked: Any = SimpleNamespace(followed=None)
    return CallChoice(SimpleNamespace(plan_box=None), tracked, Variants(), (0, 1), replan=replan, **about)  # type: ignore[arg-type]


def test_calls_of_other_sizes_and_choices_are_kept_apart() -> None:
    replan = mock.Mock()
    calls = choice_of(replan)
    assert calls.step_begins([torch.ones(1), 16], CHOICE) is replan.step_begins.return_value
    replan.step_begins.assert_called_once_with(signature=RanCall((16,), (True, False), CHOICE.windows))


def test_measured_calls_are_told_in_the_plan_s_order() -> None:
    """The forward's own is another: its third value is the plan's first."""
    replan = mock.Mock()
    calls = choice_of(replan)
    calls = replace(calls, order=[2, 0, 1])
    planned = Choice((True, False, False), CHOICE.windows)
    ran = replace(planned, offload=[planned.offload[at] for at in calls.order])
    assert ran.offload == [False, True, False]
    calls.step_begins([], ran)
    replan.step_begins.assert_called_once_with(signature=RanCall((), (True, False, False), CHOICE.windows))


def test_nothing_is_asked_once_measuring_is_over() -> None:
    replan = mock.Mock(clock=None)
    with mock.patch.object(executor, "in_backward", side_effect=AssertionError):
        assert choice_of(replan).step_begins([], CHOICE) is None
    assert choice_of(None).step_begins([], CHOICE) is None
    assert not replan.step_begins.called


@pytest.mark.parametrize("why", ["hooks", "in_backward", "compiled_autograd_active", "no plan", "size"])
def test_unusual_calls_are_not_measured(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replan = mock.Mock()
    calls = choice_of(replan, by_size=SimpleNamespace(is_planned=lambda args: why != "size"))
    if why in ("in_backward", "compiled_autograd_active"):
        monkeypatch.setattr(executor, why, lambda: True)
    choice = Choice((True, False)) if why == "no plan" else CHOICE
    if why == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert calls.step_begins([], choice) is None
    else:
        assert calls.step_begins([], choice) is None
    assert not replan.step_begins.called
