"""Where Dynamo stops compiling: calls without gradients cost training nothing; what runs uncompiled is told."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxoffload
from fxoffload.compiler import session
from fxoffload.runtime.uncompiled_calls import NOT_TRACED, WITHOUT_GRADIENTS
from tests.marks import slow
from tests.support import Halves, Stack, batch, compiled, rehearsal

LIMIT = 2
LENGTHS = (5, 6, 7, 8)  # more than the limit


@pytest.fixture(autouse=True)
def low_limit() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=LIMIT):  # type: ignore[attr-defined]
        yield


def uncompiled() -> dict[str, int]:
    return dict(fxoffload.stats().calls_uncompiled)


def moved(step: Callable[[], Tensor]) -> int:
    """Bytes that one training step offloads."""
    before = fxoffload.stats().bytes_offloaded
    (step() ** 2).sum().backward()
    return fxoffload.stats().bytes_offloaded - before


def static(model: Any, **changes: Any) -> Any:
    """Compiled anew for each length."""
    return compiled(model, dynamic=False, **changes)


def messages(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in seen if "uncompiled" in str(w.message)]


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, slow(torch.inference_mode)])
def test_calls_without_gradients_do_not_use_up_the_limit_of_training(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    module = static(Stack(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with context():
                for length in LENGTHS:
                    module(batch(length=length))
            for length in LENGTHS[:LIMIT]:
                assert moved(lambda length=length: module(batch(length=length))) > 0
    # Two forms were compiled; the other two lengths ran uncompiled, twice each. Inference mode and lengths that
    # trained have forms of their own.
    assert uncompiled() == {WITHOUT_GRADIENTS + "recompile_limit": 4}
    (text,) = messages(seen)
    for part in ("Stack", r"recompile_limit (2)", "without gradients", "Training has a limit of its own"):
        assert part in text


def test_training_that_uses_up_its_limit_is_told_once_and_counted() -> None:
    module = static(Stack(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [moved(lambda length=length: module(batch(length=length))) > 0 for _ in range(2) for length in LENGTHS]
    assert found == [True, True, False, False] * 2
    assert uncompiled() == {"recompile_limit": 4}
    (text,) = messages(seen)
    for part in (
        "Stack",
        r"recompile_limit (2)",
        "with gradients",
        "offload nothing",
        "TORCH_LOGS=recompiles",
        "raise",
    ):
        assert part in text
    # Calls without gradients have their own limit.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        module(batch())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert uncompiled() == {"recompile_limit": 4}


def test_values_are_those_of_the_model_wherever_a_call_ends_up() -> None:
    model, reference = Stack(1), Stack(1)
    module = static(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in LENGTHS:
            with torch.no_grad():
                torch.testing.assert_close(module(batch(length=length)), reference(batch(length=length)))
            model.zero_grad()
            reference.zero_grad()
            for one in (module, reference):
                (one(batch(length=length)) ** 2).sum().backward()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_accumulated_limit_is_told() -> None:
    module = static(Stack(1))
    with (
        torch._dynamo.config.patch(accumulated_recompile_limit=1),  # type: ignore[attr-defined]
        pytest.warns(UserWarning, match="accumulated_recompile_limit"),
    ):
        for length in LENGTHS[:2]:
            module(batch(length=length)).sum().backward()
    assert uncompiled() == {"accumulated_recompile_limit": 1}


@pytest.mark.slow
def test_calls_without_gradients_do_not_use_up_the_accumulated_limit_of_training() -> None:
    module = static(Stack(1))
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=LIMIT):  # type: ignore[attr-defined]
        with torch.no_grad(), pytest.warns(UserWarning, match=r"own and goes on\. .*, or raise the limit"):
            for length in LENGTHS:
                module(batch(length=length))
        for length in LENGTHS[:LIMIT]:
            assert moved(lambda length=length: module(batch(length=length))) > 0
        with pytest.warns(UserWarning, match="calls with gradients: .*accumulated_recompile_limit"):
            assert moved(lambda: module(batch(length=LENGTHS[LIMIT]))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["fullgraph", slow("fail_on_recompile_limit_hit")])
def test_where_the_limit_is_an_error_training_still_has_its_own(fails: str) -> None:
    module = static(Stack(1), fullgraph=fails == "fullgraph")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=fails != "fullgraph"):  # type: ignore[attr-defined]
        with torch.no_grad():
            for length in LENGTHS[:LIMIT]:
                module(batch(length=length))
            with pytest.raises(Exception, match=r"Hard failure"):
                module(batch(length=LENGTHS[LIMIT]))
        for length in LENGTHS[:LIMIT]:
            assert moved(lambda length=length: module(batch(length=length))) > 0


@pytest.mark.slow
def test_a_raised_limit_begins_with_a_reset_and_a_reset_begins_anew() -> None:
    module = static(Stack(1))
    with pytest.warns(UserWarning, match=r"with gradients.*call torch\.compiler\.reset\(\) after raising it"):
        for length in LENGTHS:
            module(batch(length=length)).sum().backward()
    with torch._dynamo.config.patch(recompile_limit=8):  # type: ignore[attr-defined]
        assert moved(lambda: module(batch(length=LENGTHS[-1]))) == 0  # as with any backend
    torch.compiler.reset()
    assert moved(lambda: module(batch(length=LENGTHS[-1]))) > 0
    with pytest.warns(UserWarning, match="with gradients"):
        for length in LENGTHS:
            module(batch(length=length)).sum().backward()


def test_layers_that_share_code_are_told_together() -> None:
    model = Stack(2)
    for layer in model.layers:
        layer.compile(backend="fxoffload", dynamic=False, options=rehearsal())
    with pytest.warns(UserWarning) as seen:
        for length in LENGTHS:
            model(batch(length=length)).sum().backward()
    assert len(messages(list(seen))) == 1
    # The first layer's input needs no gradient: a length takes two forms.
    assert uncompiled() == {"recompile_limit": 2 * 3}


# -- toggles that a training loop has, each a form of the code ---------------------------------------------------------


class Adapted(Stack):
    """With an adapter that may be off, and checkpointing that may be on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.adapter = nn.Linear(16, 16)
        self.has_adapter = self.checkpoints = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x) + self.adapter(x) if self.has_adapter else self.head(x)


def _toggle(name: str) -> Callable[[Any, bool], None]:
    return lambda model, on: setattr(model, name, on)


TOGGLES: dict[str, Callable[[Any, bool], None]] = {
    "adapter": _toggle("has_adapter"),
    "checkpointing": _toggle("checkpoints"),
    "mode": lambda model, on: model.train(on),
}


@pytest.mark.parametrize("name", ["adapter", slow("checkpointing"), slow("mode")])
def test_what_a_loop_switches_keeps_training_offloaded(name: str) -> None:
    """Generation in one form of the model, a reference without gradients in the other, training in both."""
    model = Adapted()
    model.checkpoints = False
    module = static(model)
    for _ in range(2):
        for on in (True, False):
            TOGGLES[name](model, on)
            with torch.no_grad():
                module(batch())
            assert moved(lambda: module(batch())) > 0
    assert not uncompiled()


def test_actor_reference_and_critic_of_one_class() -> None:
    models = {name: Stack(1) for name in ("actor", "reference", "critic")}
    modules = {name: static(model) for name, model in models.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths without gradients that run uncompiled
        for length in LENGTHS:
            with torch.no_grad():
                for module in modules.values():
                    module(batch(length=length))
    for _ in range(2):
        for name in ("actor", "critic"):
            assert moved(lambda name=name: modules[name](batch())) > 0
    assert "recompile_limit" not in uncompiled()


@pytest.mark.slow
def test_autocast_switched_on_and_off() -> None:
    module = static(Stack(1))
    for _ in range(2):
        for enabled in (True, False):
            with torch.autocast("cpu", enabled=enabled, dtype=torch.bfloat16):
                with torch.no_grad():
                    module(batch())
                assert moved(lambda: module(batch()).float()) > 0
    assert not uncompiled()


# -- other reasons -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_stances_under_which_training_runs_uncompiled(stance: str) -> None:
    module = static(Stack(1))
    assert moved(lambda: module(batch())) > 0
    with pytest.warns(UserWarning) as seen, torch.compiler.set_stance(stance):
        for _ in range(2):
            assert moved(lambda: module(batch(length=9))) == 0
    (text,) = messages(list(seen))
    assert "Stack" in text
    assert f"set_stance('{stance}')" in text
    (count,) = uncompiled().values()
    assert count == 2
    assert moved(lambda: module(batch())) > 0


def test_dynamo_switched_off_for_a_while() -> None:
    model = Stack(1)
    module = static(model)
    with (
        pytest.warns(UserWarning, match="config.disable is set"),
        torch._dynamo.config.patch(disable=True),  # type: ignore[attr-defined]
    ):
        assert moved(lambda: module(batch())) == 0
    assert moved(lambda: module(batch())) > 0  # torch alone would skip this code for good


def test_a_first_step_whose_operations_are_counted() -> None:
    module = static(Stack(1))
    with pytest.warns(UserWarning, match="TorchDispatchMode is active"), FlopCounterMode(display=False):
        assert moved(lambda: module(batch())) == 0
    assert moved(lambda: module(batch())) > 0


def test_errors_that_are_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a pass fails")

    monkeypatch.setattr(session.CompileSession, "partition", fail)
    module = static(Stack(1))
    with (
        torch._dynamo.config.patch(suppress_errors=True),  # type: ignore[attr-defined]
        pytest.warns(UserWarning, match="suppress_errors") as seen,
    ):
        for _ in range(3):
            assert moved(lambda: module(batch())) == 0
    assert len(messages(list(seen))) == 1
    assert uncompiled() == {NOT_TRACED: 3}


def test_a_graph_break_that_leaves_nothing_compiled() -> None:
    def breaks(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(2):  # Dynamo gives up a frame that breaks in a loop
            torch._dynamo.graph_break()
            x = x * weight
        return x

    with pytest.warns(UserWarning, match="breaks.*graph_breaks"):
        static(breaks)(batch(), torch.ones(16, requires_grad=True)).sum().backward()
    assert uncompiled() == {NOT_TRACED: 1}


def test_another_backend_that_used_up_the_limit_of_the_same_code() -> None:
    other = torch.compile(Stack(1), backend="eager", dynamic=False)
    for length in LENGTHS:
        other(batch(length=length))
    module = static(Stack(1))
    with pytest.warns(UserWarning, match="another backend"):
        assert moved(lambda: module(batch())) == 0
    assert uncompiled() == {NOT_TRACED: 1}


def test_a_model_under_disable() -> None:
    model = torch.compiler.disable(Stack(1))

    def call(x: Tensor) -> Tensor:
        return model(x)

    with pytest.warns(UserWarning, match="call with gradients.*torch.compiler.disable"):
        assert moved(lambda: static(call)(batch())) == 0
    assert uncompiled() == {NOT_TRACED: 1}


def test_a_generator() -> None:
    def halves(x: Tensor) -> Iterator[Tensor]:
        yield from x.chunk(2)

    with pytest.warns(UserWarning, match="halves.*a generator"):
        static(halves)(batch())
    assert uncompiled() == {NOT_TRACED: 1}


# -- nothing to tell ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_compiled_is_not_counted() -> None:
    model = Halves(half=1)  # with a graph break
    frozen = static(Stack(1).requires_grad_(False))
    on_cpu = torch.compile(Stack(1), backend="fxoffload", options={"inner": "aot_eager"})
    no_grad = static(torch.no_grad()(Stack(1)))
    module = static(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*uncompiled")
        for _ in range(2):
            module(batch()).sum().backward()
            for one in (frozen, on_cpu, no_grad):
                one(batch())
            copy.deepcopy(frozen)(batch())
    assert not uncompiled()


def test_calls_in_which_autograd_records_nothing_are_not_counted() -> None:
    @torch.compiler.disable
    def disabled(x: Tensor) -> Tensor:
        return x * 2

    functions = [lambda x: 3, lambda x: x.shape[0], disabled, lambda x: disabled(x)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*uncompiled")
        for function in functions:
            static(function)(batch())
        with torch.compiler.set_stance("force_eager"):
            static(functions[0])(batch())
    assert not uncompiled()


def test_a_call_that_raises_is_not_counted() -> None:
    module = static(Stack(1))
    module(batch()).sum().backward()
    with pytest.raises(Exception, match="normalized_shape"):
        module(batch(width=3))
    assert not uncompiled()
