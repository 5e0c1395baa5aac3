"""``torch.compiler.reset()``: compiled code is forgotten whole, whenever it comes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import step_member
from fxoffload.compiler.plan_chain import plan_chain
from fxoffload.reset import reset as forget
from fxoffload.runtime import background
from fxoffload.runtime.engine import engine_for
from fxoffload.torch_private.compiled_code import num_graphs_compiled
from tests.support import Observed, Stack, assert_equal, assert_nothing_held, batch, compiled, effects, rehearsal

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
RESETS = {"torch.compiler": torch.compiler.reset, "torch._dynamo": torch._dynamo.reset}


@pytest.fixture(params=RESETS)
def reset(request: pytest.FixtureRequest) -> Callable[[], None]:
    return RESETS[request.param]


def per_layer(model: Stack, **changes: Any) -> Stack:
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(**changes))
    return model


def step(model: nn.Module, call: Callable[[Tensor], Tensor], between: Callable[[], object] = lambda: None) -> Observed:
    model.zero_grad()
    loss = (call(batch()) ** 2).sum()
    between()
    loss.backward()
    return {"loss": loss.detach(), **effects(model)}


# -- torch calls us while it walks through something -----------------------------------------------------------------


@pytest.mark.slow
def test_dynamo_finds_the_backend_alone_and_resets_it_before_it_ran(tmp_path: Path) -> None:
    """As installed, in a program that does not import fxoffload, with a first compilation that fails in Dynamo."""
    info = tmp_path / "fxoffload-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fxoffload\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nfxoffload = fxoffload.backend:fxoffload\n")
    code = f"""
import sys
sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}
import torch
def attempt(backend):
    try:
        torch.compile(lambda x: x @ torch.ones(5, 3), backend=backend)(torch.ones(2, 4))
    except torch._dynamo.exc.TorchRuntimeError:
        pass
assert "fxoffload" in torch._dynamo.list_backends()
assert "fxoffload" not in sys.modules
attempt("eager")
attempt("fxoffload")
before = set(sys.modules)
torch.compiler.reset()
assert set(sys.modules) == before, "a reset imports modules"
import fxoffload
torch.compile(lambda x: x.sin(), backend="fxoffload", options={{"inner": "aot_eager"}})(torch.ones(2))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=300)


# -- a reset forgets -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_graphs_and_plans_are_gone_though_somebody_holds_the_model(reset: Callable[[], None]) -> None:
    model = Stack(3)
    module = compiled(model, policy="auto", profile="h200", max_slowdown=9.0)
    for _ in range(2):  # torch forgets at a reset whom it asked to forget
        step(model, module)
        assert fxoffload.graphs()
        assert fxoffload.plans()
        reset()
        assert not fxoffload.graphs()
        assert not fxoffload.plans()


@pytest.mark.slow
def test_a_forward_left_behind_is_no_part_of_the_next_step() -> None:
    model = per_layer(Stack(2), policy="auto", profile="h200")
    left = model(batch())
    torch.compiler.reset()
    for _ in range(2):
        step(model, model)
        assert not fxoffload.plans()
    step(model, model)  # two steps have told that they are alike
    assert fxoffload.plans()
    left.sum().backward()


def test_the_device_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        torch.compile(Stack(1), backend="fxoffload", options={"inner": "aot_eager"})(batch())
        torch.compile(Stack(1), backend="fxoffload", options={"inner": "aot_eager"})(batch())
        torch.compiler.reset()
    assert caplog.text.count("the model is on the CPU") == 2


def test_what_is_compiled_behind_a_reset_is_seen_as_new() -> None:
    """Dynamo counts from zero again: phases look for compiled functions when the count has changed."""
    counts = []
    for _ in range(2):
        torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
        counts.append(num_graphs_compiled())
        torch.compiler.reset()
    assert counts[0] != counts[1]


# -- in the middle of a step -----------------------------------------------------------------------------------------


def whole(model: Stack) -> Callable[[Tensor], Tensor]:
    return compiled(model)


def planned(model: Stack) -> Callable[[Tensor], Tensor]:
    windows: dict[str, Any] = dict.fromkeys(("in_flight_budget", "prefetch_budget"))
    return compiled(model, policy="auto", profile="h200", recompute="default", max_slowdown=9.0, **windows)


def layers(model: Stack) -> Callable[[Tensor], Tensor]:
    return per_layer(model)


def layers_planned(model: Stack) -> Callable[[Tensor], Tensor]:
    return per_layer(model, policy="auto", profile="h200", activation_budget="20KiB")


@pytest.mark.slow_except("layers")
@pytest.mark.parametrize("compile_it", [whole, planned, layers, layers_planned])
@pytest.mark.filterwarnings("ignore:expected an activation_budget")
def test_a_backward_behind_a_reset_is_right(compile_it: Callable[[Stack], Callable[[Tensor], Tensor]]) -> None:
    model = Stack(3)
    module = compile_it(model)
    found = [step(model, module) for _ in range(4)]  # the last follow a plan, where there is one for several graphs
    assert fxoffload.stats().bytes_offloaded
    assert bool(fxoffload.plans()) == (compile_it in (planned, layers_planned))
    found.append(step(model, module, torch.compiler.reset))
    found += [step(model, module) for _ in range(4)]
    assert_nothing_held()
    reference = Stack(3)
    expected = step(reference, reference)
    for one in found:
        for name, value in expected.items():
            torch.testing.assert_close(one[name], value)
    assert_equal(found[4], found[3])


def test_a_forward_that_waits_across_a_reset_and_other_steps() -> None:
    model, other = Stack(3), Stack(3)
    expected = step(other, other)
    loss = (per_layer(model)(batch()) ** 2).sum()
    torch.compiler.reset()
    step(other, compiled(other))
    torch.compiler.reset()
    gc.collect()
    loss.backward()
    found = {"loss": loss.detach(), **effects(model)}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    assert_nothing_held()


# -- plans in the making ---------------------------------------------------------------------------------------------


def test_a_plan_in_the_making_says_nothing_after_a_reset() -> None:
    model = per_layer(Stack(3), policy="auto", profile="h200", activation_budget="1KiB")
    begun, go_on = threading.Event(), threading.Event()
    ends: list[object] = []

    def plan(*args: Any) -> Any:
        begun.set()
        go_on.wait(60)
        try:
            return plan_chain(*args)  # would warn that the budget is too small
        except BaseException as error:
            ends.append(type(error))
            raise

    calls = engine_for(CPU).calls
    with (
        warnings.catch_warnings(record=True) as seen,
        mock.patch.object(calls.plans, "in_background", True),
        mock.patch.object(step_member, "plan_chain", plan),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, model)
        waits = threading.Thread(target=step, args=(model, model))
        waits.start()
        assert begun.wait(60)
        planning = next(thread for thread in threading.enumerate() if thread.name == "fxoffload-chain-plan")
        torch.compiler.reset()
        go_on.set()
        planning.join(60)
        waits.join(60)
    assert ends == [background.PlanCancelled]
    assert not [w for w in seen if "activation_budget" in str(w.message)]
    assert not fxoffload.plans()


def test_a_plan_that_waits_for_its_turn_is_not_begun() -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait(60)

    threads = [background.start_planning(first, name="first")]
    assert begun.wait(60)
    threads.append(background.start_planning(made.append, "before", name="second"))
    forget()
    threads.append(background.start_planning(made.append, "after", name="third"))
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert made == ["after"]


def test_a_plan_warns_as_long_as_it_is_wanted() -> None:
    found: list[str] = []

    def plan(cancel: bool) -> None:
        if cancel:
            forget()
        background.warn("something")
        found.append("went on")

    for cancel in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            background.start_planning(plan, cancel, name="plan").join()
        found += [str(w.message) for w in seen]
    assert found == ["went on", "something"]
