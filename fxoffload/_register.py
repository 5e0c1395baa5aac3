"""Registers the backend where no installed entry point has done it."""

from __future__ import annotations

BACKEND_NAME = "fxoffload"


def register_backend() -> None:
    """Make ``torch.compile(backend="fxoffload")`` work after ``import fxoffload``, installed or not."""
    from torch._dynamo.backends import registry

    from fxoffload.backend import fxoffload

    # Where Dynamo has found our entry point, it registers the backend when that is loaded; to register it twice fails.
    found_by_dynamo = registry._BACKENDS.get(BACKEND_NAME) is not None
    if BACKEND_NAME not in registry._COMPILER_FNS and not found_by_dynamo:
        registry.register_backend(fxoffload, name=BACKEND_NAME)
