from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._logging._internal import trace_log

from tests.marks import draw_few, examples


def pytest_configure(config: pytest.Config) -> None:
    draw_few(quick="slow" in str(config.getoption("markexpr")))

    # pytest captures by adding handlers to every logger that does not propagate. With a handler, torch takes it that
    # TORCH_TRACE is set, and prints every graph at every stage of every compilation.
    trace_log.propagate = True

    # On a machine that is busy, anything may take longer than two seconds.
    os.environ.setdefault("FXOFFLOAD_PROGRESS", "0")

    # How long drawing an example takes says what else the machine does meanwhile. Tests on GPUs run without hypothesis.
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "any machine", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("any machine")

    # Many tests collect garbage, and so do compilations: half a second each time, where the half million objects that
    # torch keeps for good are looked at.
    for module in ("fxoffload", "torch._inductor.compile_fx"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()

    # Dynamo times the guards of all it compiles, for its log, and flushes the machine's caches first: with two
    # processes that takes a tenth of the time.
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # pyright: ignore[reportAttributeAccessIssue]
    # AOTAutograd prints every graph for its log too. It alone asks for the definitions of what a graph calls.
    printed = torch.fx.GraphModule.print_readable

    def print_readable(self: torch.fx.GraphModule, *args: Any, expanded_def: bool = False, **how: Any) -> str:
        return "" if expanded_def else printed(self, *args, **how)

    torch.fx.GraphModule.print_readable = print_readable  # pyright: ignore[reportAttributeAccessIssue]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_parameters(items)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    for item in items:
        # Keywords would hold the names of folders too.
        if item.get_closest_marker("gpu") and num_gpus < 1:
            item.add_marker(no_gpu)
        if dist := item.get_closest_marker("dist"):
            wanted = dist.kwargs.get("gpus", 2)
            if num_gpus < wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA devices; there are {num_gpus}"))


def mark_slow_parameters(items: list[pytest.Item]) -> None:
    """Gives ``slow`` to all parameters of a test but those that its mark ``slow_except`` names."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("slow_except"):
            parameters = item.callspec.id  # pyright: ignore[reportAttributeAccessIssue]
            missing.setdefault(item.nodeid.split("[")[0], set(mark.args)).discard(parameters)
            if parameters not in mark.args:
                item.add_marker(pytest.mark.slow)
    wrong = {test: names for test, names in missing.items() if names}
    some_were_asked_for = any("::" in argument for argument in items[0].config.args) if items else True
    if wrong and not some_were_asked_for:
        raise pytest.UsageError(f"expected parameters of tests in slow_except, found names of none: {wrong}")


_modules = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def forget_cached(request: pytest.FixtureRequest) -> Iterator[None]:
    """Caches of a test module end with it. Graphs of models are millions of objects, which the collector and searches
    for tensors would visit in every later test. Objects from before a module's first test are frozen, so these do not
    visit them either."""
    # What became garbage after it was frozen stays, and may hold a device's memory. To look at all of it takes seconds.
    if torch.cuda.is_available() or next(_modules) % 16 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    _made.clear()
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear") and function.__module__ == request.module.__name__:
            function.cache_clear()


_made: dict[Any, Any] = {}


@pytest.fixture
def same_code() -> Callable[..., Any]:
    """Makes something that compiles, or gives what the test before has made so, with its compiled code: such tests
    stand one after the other, and leave nothing behind that the next one minds."""

    def made(make: Callable[..., Any], *args: Any) -> Any:
        if (make, args) not in _made:
            _made[make, args] = make(*args)
        return _made[make, args]

    return made


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts without compiled code (but see ``same_code``), with counters at zero and no step begun."""
    import fxoffload
    from fxoffload.reset import reset

    if "same_code" in request.fixturenames and _made:
        fxoffload.reset_stats()
        yield
        return
    _made.clear()
    torch.compiler.reset()
    reset()  # also of steps that no compiled code began
    fxoffload.reset_stats()
    yield
    if not _made:
        torch.compiler.reset()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What destructors and threads that failed have printed."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: found.append(str(raised.object)))
    monkeypatch.setattr(threading, "excepthook", lambda raised: found.append(str(raised.thread)))
    return found
