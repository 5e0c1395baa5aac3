"""A newcomer's first steps: the import, ``fxoffload.compile``, and messages about values that cannot be meant."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
import fxoffload.errors
from fxoffload import tell
from fxoffload.runtime import engine
from fxoffload.runtime.host_memory.limits import describe_host_memory, describe_locked_memory

REHEARSED: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    return done.stdout


def test_help_imports_no_torch() -> None:
    # As where the package is installed: Dynamo finds the backend by its entry point.
    code = """
import importlib.metadata as metadata, sys
metadata.entry_points = lambda **params: ["fxoffload"]
from typer.testing import CliRunner
from fxoffload.cli.app import app
for line in ("--help", "--version", "moe --help", "moe merge --help", "bench --help", "plan --help", "doctor --help"):
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 0, found.output
    print(found.output.splitlines()[0])
print("torch" in sys.modules)
"""
    lines = run(code).splitlines()
    assert re.fullmatch(r"fxoffload \d+\.\d+\.\d+, torch \d+\.\d+.*", lines[1])
    assert lines[-1] == "False"


def test_all_names_are_there_and_hide_no_module() -> None:
    folder = Path(fxoffload.__file__).parent
    for name in fxoffload._LATE:
        assert getattr(fxoffload, name).__name__ if name != "PIECES" else fxoffload.PIECES
        assert not any((folder / file).exists() for file in (f"{name}.py", f"{name}/__init__.py"))
    assert set(fxoffload._LATE) <= set(dir(fxoffload))
    assert fxoffload.phases.PhaseManager.__name__ == "PhaseManager"
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = fxoffload.plam  # pyright: ignore[reportAttributeAccessIssue]


def test_compile_checks_its_options_at_once() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(fxoffload.OptionsError, match=r"'activaton_budget' \(did you mean 'activation_budget'\?\)"):
        fxoffload.compile(model, activaton_budget="1GB")
    with pytest.raises(fxoffload.OptionsError, match="activation_budget is '12 parsecs'"):
        fxoffload.compile(model, activation_budget="12 parsecs")
    with pytest.raises(fxoffload.OptionsError, match="unknown mode 'max-autotun'"):
        fxoffload.compile(model, mode="max-autotun")
    with pytest.raises(fxoffload.UnsupportedError, match="mode 'reduce-overhead' uses CUDA graphs"):
        fxoffload.compile(model, mode="reduce-overhead")
    with pytest.raises(TypeError, match="expected a module or a function to compile, found str 'gpt2'"):
        fxoffload.compile("gpt2")  # pyright: ignore[reportArgumentType]


def test_compile_is_torch_compile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = fxoffload.compile(model, policy="offload_all", **REHEARSED)
    assert isinstance(compiled, nn.Module) and dict(compiled.named_parameters()).keys() != {}
    compiled(torch.ones(2, 4)).sum().backward()
    assert fxoffload.stats().bytes_offloaded > 0

    @fxoffload.compile(policy="offload_all", fullgraph=True, **REHEARSED)
    def double(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    double(torch.ones(2, 4, requires_grad=True)).backward()


@pytest.mark.parametrize("compile", [fxoffload.compile, partial(torch.compile, backend="fxoffload")])
def test_a_budget_that_is_too_small_is_told_without_torchs_frames(compile: Any) -> None:
    options: dict[str, Any] = {**REHEARSED, "activation_budget": 1000, "profile": "h200"}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    compiled = compile(model, options=options) if isinstance(compile, partial) else compile(model, **options)
    with pytest.raises(fxoffload.errors.BudgetError) as caught:
        compiled(torch.ones(64, 8))
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == Path(__file__).name and files[-1] == "backend.py"
    assert set(files[1:-1]) == {"eval_frame.py", "module.py"} and len(files) <= 6
    assert str(caught.value).endswith("Raise the budget, or make the batch smaller")


def test_where_there_is_no_plan() -> None:
    with pytest.raises(LookupError, match=r"expected a plan, found none: .* the CPU is none by default"):
        fxoffload.last_plan()


def test_sizes_without_a_b() -> None:
    assert fxoffload.Options(activation_budget="12G") == fxoffload.Options(activation_budget="12GB")


def test_a_slowdown_in_percent_is_told() -> None:
    with pytest.warns(UserWarning, match="6 times as long. It is a fraction; for 5 % write 0.05"):
        assert fxoffload.Options(max_slowdown=5).max_slowdown == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxoffload.Options(max_slowdown=1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: fxoffload.Options(max_slowdown=5),
        lambda: fxoffload.compile(nn.Linear(2, 2), max_slowdown=5),
        lambda: torch.compile(nn.Linear(2, 2), backend="fxoffload", options={"max_slowdown": 5, "inner": "aot_eager"})(
            torch.ones(1, 2)
        ),
    ],
)
def test_warnings_show_the_users_line(ask: Any) -> None:
    with pytest.warns(UserWarning, match="max_slowdown is 5") as found:
        ask()
    places = {(w.filename, w.lineno) for w in found if "max_slowdown" in str(w.message)}
    assert places == {(__file__, ask.__code__.co_firstlineno)}


def test_a_warning_of_a_thread_has_a_line_too() -> None:
    with pytest.warns(UserWarning, match="in the background") as found:
        threading.Thread(target=tell.warn, args=("in the background",)).run()
        thread = threading.Thread(target=tell.warn, args=("in the background",))
        thread.start()
        thread.join()
    assert [Path(w.filename).name for w in found] == [Path(__file__).name, "threading.py"]


def test_auto_on_the_cpu_says_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxoffload.compile(nn.Linear(4, 4), activation_budget="auto", inner="aot_eager")
    compiled(torch.ones(2, 4)).sum().backward()
    said = [
        r.getMessage() for r in caplog.records if "activation_budget='auto' is of what parameters" in r.getMessage()
    ]
    assert len(said) == 1 and "fxoffload.plan(model, inputs, device='h200', activation_budget='auto')" in said[0]


def test_a_budget_above_the_memory_is_told_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = fxoffload.compile(model, activation_budget="900TB", profile="h200", **REHEARSED)
    with pytest.warns(UserWarning, match=r"NVIDIA H200, 139\.\d GiB, found .*: it bounds nothing") as found:
        for batch in (2, 3, 5):
            compiled(torch.ones(batch, 4)).sum().backward()
    assert len([w for w in found if "bounds nothing" in str(w.message)]) == 1


def test_more_host_memory_than_there_is_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.CopyEngine, "host_budget_bytes", lambda self, budgets: 4 << 20)
    there = re.escape(f"(host memory: {describe_host_memory()}; ulimit -l: {describe_locked_memory()})")
    with pytest.warns(UserWarning, match=rf"at most 4\.0 MiB, .* {there}, found 931\.3 GiB: 4\.0 MiB are reserved"):
        fxoffload.reserve_host_memory("1TB", "cpu")
    assert fxoffload.stats().host_bytes_reserved <= 4 << 20
    fxoffload.release_host_memory()
