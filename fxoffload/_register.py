"""Registers the backend where no installed entry point has done it."""

from __future__ import annotations

BACKEND_NAME = "fxoffload"


def register_backend() -> None:
    """Make ``torch.compile(backend="fxoffload")`` work after ``import fxoffload``, installed or not."""
    from torch._dynamo.backends import registry

    from fxoffload.backend import fxoffload

    if BACKEND_NAME not in registry._COMPILER_FNS:
        registry.register_backend(fxoffload, name=BACKEND_NAME)
