"""Refuses a torch that is too old, before anything that such a torch lacks is imported. Imports no torch itself."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

MIN_TORCH = (2, 11)


def check_torch(found: str) -> None:
    """Accept a version, as in ``torch.__version__``: pre-releases and local builds by their number.

    Raises:
        ImportError: it is older than ``MIN_TORCH``.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        raise ImportError(
            f"expected torch {needed} or newer, found torch {found}: install one, for example with "
            f"pip install 'torch>={needed}'"
        )


def torch_version() -> str:
    """Of the torch that is imported, or would be; "" where that is not known."""
    if (imported := sys.modules.get("torch")) is not None:
        return str(getattr(imported, "__version__", ""))
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


check_torch(torch_version())
