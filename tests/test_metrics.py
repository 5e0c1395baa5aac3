"""``fxoffload.metrics()``: one flat dict for loggers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.counters import Stats, counters

OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "profile": "h200"}


def test_without_a_plan_it_is_the_stats() -> None:
    counters.add("bytes_offloaded", 3)
    counters.add_reason("calls_kept", "one", 2)
    counters.add_reason("calls_kept", "another", 3)
    found = fxoffload.metrics()
    assert all(type(number) is float for number in found.values())
    fields = {f"fxoffload/{name}" for name in vars(Stats())}
    assert found.keys() - {"fxoffload/device_peak_bytes"} == fields
    assert found["fxoffload/bytes_offloaded"] == 3.0 and found["fxoffload/calls_kept"] == 5.0


def test_a_plan_is_in_it_and_what_was_measured() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    fxoffload.compile(model, max_slowdown=1.0, **OPTIONS)(torch.ones(4096, 8)).sum().backward()
    plan, found = fxoffload.last_plan(), fxoffload.metrics()
    paper = plan.calibrated or plan.predicted
    assert found["fxoffload/planned_step_ms"] == paper.step_ms
    assert found["fxoffload/planned_exposed_ms"] == paper.exposed_ms
    assert found["fxoffload/planned_peak_bytes"] == float(paper.peak_bytes)
    assert ("fxoffload/measured_step_ms" in found) == (plan.measured_step_ms is not None)
    assert found["fxoffload/bytes_offloaded"] == float(fxoffload.stats().bytes_offloaded) > 0


def test_a_counter_that_went_still_reads_zero_and_says_so() -> None:
    with pytest.warns(UserWarning, match="always 0"):
        assert fxoffload.stats().bytes_kept_for_backward == 0
