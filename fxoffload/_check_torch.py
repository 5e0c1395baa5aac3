"""Refuses a torch that is too old, before anything that such a torch lacks is imported."""

from __future__ import annotations

import re

import torch

MIN_TORCH = (2, 11)


def check_torch(version: str) -> None:
    """Accept ``version``, as in ``torch.__version__``: pre-releases and local builds by their number.

    Raises:
        ImportError: it is older than ``MIN_TORCH``.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        raise ImportError(
            f"expected torch {needed} or newer, found torch {version}: install one, for example with "
            f"pip install 'torch>={needed}'"
        )


check_torch(torch.__version__)
