"""``fxoffload.compile``: torch.compile with this backend, and options that are checked at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxoffload._register import BACKEND_NAME
from fxoffload.options import Options


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """``torch.compile(model, backend="fxoffload", options=options)``, with its options checked here, not in the first
    call.

    Args:
        model: a module or a function; None gives a decorator.
        mode: of Inductor, for example "max-autotune-no-cudagraphs".
        fullgraph: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        **options: see ``fxoffload.Options``: ``activation_budget="12GiB"``, ``max_slowdown=0.05``, ...

    Returns:
        What ``torch.compile`` returns: for a module, a module of the same parameters.

    Raises:
        OptionsError: (a ValueError) an unknown option or mode, or a value that is not accepted.
        UnsupportedError: (a NotImplementedError) a mode or an option that uses CUDA graphs.
        TypeError: the model is no module and no function.
    """
    if model is not None and not callable(model):
        raise TypeError(f"expected a module or a function to compile, found {type(model).__name__} {model!r}")
    chosen = Options.from_torch_compile(mode, options)
    return torch.compile(model, fullgraph=fullgraph, dynamic=dynamic, backend=BACKEND_NAME, options=chosen)  # type: ignore[call-overload]
