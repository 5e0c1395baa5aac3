"""Logging in a model breaks no graph: it runs after the graph, as often as in eager."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fxoffload.compiler.plan_ahead import plan
from fxoffload.plan_report.plan import Plan
from fxoffload.torch_private import dynamo_logging
from fxoffload.torch_private.dynamo_logging import logs_in_frame
from tests.capture import Tower, example_input, rehearsal_options

log = logging.getLogger("tests.model")


@functools.lru_cache(None)
def say_once(self: logging.Logger, message: str) -> None:
    """As transformers' ``logger.warning_once``."""
    self.warning(message)


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", say_once, raising=False)


def num_graphs(run: Callable[[Tensor], Tensor], times: int = 1) -> int:
    """Of ``run``, compiled with fxoffload and called."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, backend="fxoffload", options=rehearsal_options())
    x = torch.ones(3, requires_grad=True)
    for _ in range(times):
        torch.testing.assert_close(compiled(x), run(x))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "tests.model"]


def test_a_logger_s_methods_run_after_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    def inner(x: Tensor) -> Tensor:
        log.error("inlined, shape %s", x.shape)
        return x * 2

    def model(x: Tensor) -> Tensor:
        y = x.sin()
        log.warning("every step: %d", 3, extra={"a": 1})
        log.warning_once("once")  # type: ignore[attr-defined]
        log.debug("not shown")
        return inner(y).cos()

    say_once.cache_clear()
    caplog.set_level(logging.INFO)
    assert num_graphs(model) == 1
    assert said(caplog) == ["every step: 3", "once", "inlined, shape torch.Size([3])"] + [
        "every step: 3",  # in eager
        "inlined, shape torch.Size([3])",
    ]
    num_graphs(model, times=2)
    assert said(caplog).count("once") == 1 and said(caplog).count("every step: 3") == 6


def test_a_message_of_a_tensor_shows_what_it_is_where_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        log.warning("%s", y.tolist())
        log.warning("%s", y)
        return y.add_(1)

    assert num_graphs(model) > 1
    assert "tensor([2., 2., 2.]" in caplog.text and "tensor([3." not in caplog.text


def test_a_warning_is_of_its_line() -> None:
    def inner(x: Tensor) -> Tensor:
        warnings.warn("of the caller", FutureWarning, stacklevel=2)
        return x

    def model(x: Tensor) -> Tensor:
        warnings.warn("of the model", stacklevel=1)
        return inner(x.sin())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert num_graphs(model) == 1
    mine = [(str(w.message), w.category, w.filename, w.lineno) for w in caught if "of the" in str(w.message)]
    assert len(mine) == 4 and mine[:2] == mine[2:]  # in eager


def test_methods_that_return_something_and_ignored_ones_stay_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    def asks(x: Tensor) -> Tensor:
        y = x.sin()
        return y.cos() if log.isEnabledFor(logging.ERROR) else y

    def says(x: Tensor) -> Tensor:
        y = x.sin()
        log.warning("dropped")
        return y.cos()

    assert num_graphs(asks) == 2
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning}):
        torch.compile(says, backend="fxoffload", options=rehearsal_options())(torch.ones(3, requires_grad=True))
    assert "dropped" not in said(caplog)


def test_other_backends_are_as_before(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor) -> Tensor:
        y = x.sin()
        log.warning("breaks")
        return y.cos()

    counter = CompileCounterWithBackend("eager")
    torch.compile(model, backend=counter)(torch.ones(3))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_a_model_that_logs_is_planned_ahead(caplog: pytest.LogCaptureFixture) -> None:
    class Logs(Tower):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            log.warning("from the model")
            return y

    asked = dict(example_args=(example_input(),), inner="aot_eager", min_bytes=1, max_slowdown=5.0)
    found = plan(Logs(3), **asked)  # type: ignore[arg-type]
    assert not found.breaks
    assert found.decisions == plan(Tower(3), **asked).decisions  # type: ignore[arg-type]
    assert said(caplog) == []


def test_a_backend_hears_that_plain_inductor_would_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    def backend(gm: fx.GraphModule, example_inputs: object) -> fx.GraphModule:
        heard.append(logs_in_frame())
        return gm

    monkeypatch.setattr(dynamo_logging, "_backends", [*dynamo_logging._backends, (backend, True)])

    def says(x: Tensor) -> Tensor:
        log.warning("before")
        return x + 1

    torch.compile(says, backend=backend)(torch.ones(3))
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert heard == [True, False]
    assert not logs_in_frame()


class Returns(Tower):
    """Returns a loss, and logits that the loss was made of."""

    def __init__(self, *, logs: str, checkpoints: bool = False) -> None:
        super().__init__(3)
        self.logs, self.checkpoints = logs, checkpoints

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        for layer in self.layers:  # type: ignore[union-attr]
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits = self.head(x)
        if self.logs:
            log.warning(self.logs)
        return logits.square().mean(), logits

    def planned(self, **asked: Any) -> Plan:
        return plan(self, example_args=(example_input(),), inner="aot_eager", min_bytes=1, **asked)


@pytest.mark.slow
def test_zeros_for_logits_count_where_plain_inductor_makes_them() -> None:
    peaks = [Returns(logs=logs).planned(max_slowdown=5.0).baseline.peak_bytes for logs in ("a message", "")]
    assert peaks[0] < peaks[1]


@pytest.mark.slow
def test_in_place_of_checkpointing_a_plan_takes_no_room_for_zeros() -> None:
    """Nor has plain Inductor's step, which is one without checkpointing, its messages."""
    warning = "`use_cache=True` is incompatible with gradient checkpointing."
    found = [Returns(logs=logs, checkpoints=True).planned() for logs in ("a message", warning, "")]
    assert found[0].baseline.peak_bytes < found[1].baseline.peak_bytes == found[2].baseline.peak_bytes
    assert found[0].activation_budget == found[1].activation_budget == found[2].activation_budget is not None
