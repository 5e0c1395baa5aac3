from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxoffload.errors import (
    FxOffloadError,
    OptionsError,
    PassError,
    SegmentCompileError,
    TokenLostError,
    UnsupportedError,
    VerificationError,
    in_brief,
    without_frames,
)
from fxoffload.torch_private.check_version import check_torch

ROOT = Path(__file__).parents[1]

ERRORS: list[tuple[FxOffloadError, type[Exception], str]] = [
    (OptionsError("policy is 'x'"), ValueError, "policy is 'x'"),
    (UnsupportedError("CUDA graphs"), NotImplementedError, "CUDA graphs"),
    (PassError("no layers", "annotate_layers"), RuntimeError, "pass annotate_layers: no layers"),
    (VerificationError("read after free"), AssertionError, "^read after free"),
    (VerificationError("read after free"), PassError, "^read after free"),
    (SegmentCompileError("boom", "model.layers.3"), RuntimeError, r"model\.layers\.3: boom"),
]


@pytest.fixture
def failing_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], str]:
    """Registers a backend that raises the given error, and returns its name."""
    from torch._dynamo.backends import registry

    registry.list_backends()  # fills the tables, once per process
    # Work on copies, so that the name is gone after the test.
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))

    def register(error: Exception) -> str:
        def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
            raise error

        registry.register_backend(backend, name="failing_backend")
        return "failing_backend"

    return register


@pytest.mark.parametrize(("error", "caught_as", "message"), ERRORS)
def test_errors_pass_through_dynamo(
    failing_backend: Callable[[Exception], str],
    error: Exception,
    caught_as: type[Exception],
    message: str,
) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend=failing_backend(error))
    with pytest.raises(caught_as, match=message) as caught:
        compiled(torch.ones(2))
    assert caught.value is error
    assert_survives_pickling(caught.value)  # with what Dynamo has hung onto it


@pytest.mark.parametrize("error", [error for error, *_ in ERRORS], ids=lambda error: type(error).__name__)
def test_frames_are_left_out_where_the_message_says_all(error: FxOffloadError) -> None:
    def raised() -> FxOffloadError:
        try:
            raise error from KeyError()
        except FxOffloadError as found:
            return found

    is_internal = isinstance(error, (PassError, SegmentCompileError))
    assert (without_frames(raised()).__traceback__ is not None) == is_internal
    assert (error.__cause__ is not None) == is_internal
    with torch._dynamo.config.patch(verbose=True):
        assert without_frames(raised()).__traceback__ is not None and error.__cause__ is not None


def test_dynamo_appends_no_advice(failing_backend: Callable[[Exception], str]) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend=failing_backend(OptionsError("policy is 'x'")))
    with pytest.raises(OptionsError) as caught:
        compiled(torch.ones(2))
    assert str(caught.value) == "policy is 'x'"


def test_other_errors_do_not_pass(failing_backend: Callable[[Exception], str]) -> None:
    """The reason for errors.py: when this fails, Dynamo has stopped to wrap and it can go."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend=failing_backend(ValueError("x")))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        compiled(torch.ones(2))


def assert_survives_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    for name in ("pass_name", "layer_name"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_token_lost_is_a_runtime_error() -> None:
    assert issubclass(TokenLostError, RuntimeError)
    assert_survives_pickling(TokenLostError("gone"))


@pytest.mark.slow
def test_the_import_starts_no_cuda() -> None:
    code = "import fxoffload.errors, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_in_brief_leaves_out_what_comes_behind_the_first_line() -> None:
    assert in_brief(ValueError("no\n%mm = call_function[target=mm]")) == "ValueError: no"
    assert in_brief(KeyError()) == "KeyError: "
    assert len(in_brief(RuntimeError("graph" * 1000))) < 330


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1234", "2.13.0+cpu", "3.0", "an unusual build"])
def test_torch_that_is_new_enough_is_accepted(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.9.0", "1.13.1"])
def test_an_older_torch_is_refused_before_anything_is_imported_that_it_lacks(version: str) -> None:
    with pytest.raises(ImportError, match=rf"expected torch 2\.11 or newer, found torch {re.escape(version)}: .*pip"):
        check_torch(version)
    imports = [
        n for n in ast.parse((ROOT / "fxoffload" / "__init__.py").read_text()).body if isinstance(n, ast.ImportFrom)
    ]
    own = [n for n in imports if (n.module or "").startswith("fxoffload")]
    assert [a.name for a in own[0].names] == ["torch_private"]
