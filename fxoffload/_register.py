"""Registers the backend where no installed entry point does it."""

from __future__ import annotations

from importlib.metadata import entry_points

BACKEND_NAME = "fxoffload"


def register_backend() -> None:
    """Make ``torch.compile(backend="fxoffload")`` work after ``import fxoffload``, installed or not. Where it is
    installed, Dynamo finds it by its entry point, and nothing of torch is imported here."""
    if entry_points(group="torch_dynamo_backends", name=BACKEND_NAME):
        return
    from torch._dynamo.backends import registry

    from fxoffload.backend import fxoffload

    if BACKEND_NAME not in registry._COMPILER_FNS:
        registry.register_backend(fxoffload, name=BACKEND_NAME)
