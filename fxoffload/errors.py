"""Exceptions that reach the user with their own type.

Note [errors through Dynamo]: Dynamo turns whatever a backend raises into ``BackendCompilerFailed``,
a RuntimeError, so ``except ValueError`` around the first call of a compiled model would not catch
our ValueError. Only subclasses of ``ShortenTraceback`` pass. Dynamo re-raises those with
``from None``, which drops ``__cause__``: a message must hold the reason in its own words.

Importing this module imports ``torch._dynamo`` (about a second) and starts no CUDA context.
"""

from __future__ import annotations

from typing import Any

from fxoffload.torch_private.dynamo_errors import ShortenTraceback, is_verbose


def in_brief(error: BaseException) -> str:
    """The type of an error and the first line of its text, for a message about something else: torch's errors may print
    whole graphs."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"


class FxOffloadError(ShortenTraceback):
    """Base of the errors that a backend call raises; see Note [errors through Dynamo].

    Attributes:
        given: the arguments. Dynamo appends to ``args`` that the error be reported to PyTorch.
    """

    def __init__(self, *args: object) -> None:
        # Dynamo keeps the traceback whole, until the backend says where its frames begin.
        super().__init__(*args, first_useful_frame=None)
        self.given = args

    def __str__(self) -> str:
        return str(self.given[0]) if self.given else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not __dict__: Dynamo hangs its tracer there, which cannot be pickled (torch 2.11).
        return type(self), self.given


class OptionsError(FxOffloadError, ValueError):
    """An option, a mode or an environment variable has a value that is not accepted."""


class UnsupportedError(FxOffloadError, NotImplementedError):
    """An honest limit: the request is valid, and fxoffload does not do it."""


class NoPlanError(FxOffloadError, LookupError):
    """There is no plan yet, or none will be made."""


class PassError(FxOffloadError, RuntimeError):
    """A pass could not do its work.

    ``pass_name`` is the pass that failed, for example ``"cut_segments"``.
    """

    def __init__(self, message: str, pass_name: str) -> None:
        # Both are positional arguments of the exception, so that it survives pickling.
        super().__init__(message, pass_name)
        self.pass_name = pass_name

    def __str__(self) -> str:
        return f"pass {self.pass_name}: {self.given[0]}"


class VerificationError(PassError, AssertionError):
    """A pass produced a graph that is not safe to run: a bug in fxoffload, please report it.

    The verifier found it, so the message says which node breaks which rule.
    """

    def __init__(self, message: str, pass_name: str = "verify_transfers") -> None:
        super().__init__(message, pass_name)

    def __str__(self) -> str:
        return str(self.given[0])


class SegmentCompileError(FxOffloadError, RuntimeError):
    """The inner compiler failed on one segment.

    ``layer_name`` is the layer the segment was cut from, for example ``"model.layers.3"``.
    """

    def __init__(self, message: str, layer_name: str) -> None:
        super().__init__(message, layer_name)
        self.layer_name = layer_name

    def __str__(self) -> str:
        return f"segment of {self.layer_name}: {self.given[0]}"


class ProfileError(FxOffloadError, RuntimeError):
    """There is no machine profile to plan with, and none may or can be measured now."""


class TokenLostError(RuntimeError):
    """A backward received something else than the tokens that its forward saved.

    Raised while the backward runs, outside Dynamo.
    """


class ModifiedInputError(RuntimeError):
    """A tensor that a forward saved was modified in place before its backward, as autograd itself would say.

    Raised while the backward runs, outside Dynamo.
    """


class BudgetError(FxOffloadError, ValueError):
    """An activation budget that no plan can meet.

    Attributes:
        smallest_bytes: the smallest budget that can be met.
        segment: where that much is needed.
        inductor_bytes: the peak of plain Inductor's step; None: unknown.
        checkpointing_bytes: the peak under the model's own activation checkpointing; None: unknown, or there is none.
    """

    def __init__(
        self,
        message: str,
        smallest_bytes: int,
        segment: str,
        inductor_bytes: int | None = None,
        checkpointing_bytes: int | None = None,
    ) -> None:
        super().__init__(message, smallest_bytes, segment, inductor_bytes, checkpointing_bytes)
        self.smallest_bytes = smallest_bytes
        self.segment = segment
        self.inductor_bytes = inductor_bytes
        self.checkpointing_bytes = checkpointing_bytes


def without_frames(error: FxOffloadError) -> FxOffloadError:
    """``error`` without the frames of torch and of this package, where its message says all: the options, the model or
    the budget are to be changed. Failures inside of fxoffload keep their frames, as all do under
    ``TORCHDYNAMO_VERBOSE=1``."""
    if is_verbose() or isinstance(error, (PassError, SegmentCompileError)):
        return error
    error.__cause__ = None
    return error.with_traceback(None)
