"""Registers the backend where no installed entry point does it."""

from __future__ import annotations

from importlib.metadata import entry_points

BACKEND_NAME = "fxoffload"


def register_backend() -> None:
    """Make ``torch.compile(backend="fxoffload")`` work after ``import fxoffload``, installed or not. Where it is
    installed, Dynamo finds it by its entry point, and nothing of torch is imported here."""
    if entry_points(group="torch_dynamo_backends", name=BACKEND_NAME):
        return
    from fxoffload.backend import fxoffload
    from fxoffload.torch_private.dynamo_cache import add_backend

    add_backend(BACKEND_NAME, fxoffload)
