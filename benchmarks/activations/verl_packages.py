"""verl's packages without their ``__init__``, which need ray and more, while one file of a checkout is loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def bare_packages(checkout: Path, stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """``verl`` and ``verl.utils`` of a checkout, whose other modules (``verl.utils.device``) are the checkout's own.

    Args:
        stand_ins: by module of ``verl.utils``, the names that are taken from it; in place of the checkout's.
    """
    folder = checkout.expanduser() / "verl"
    package, utils = ModuleType("verl"), ModuleType("verl.utils")
    package.__path__, utils.__path__ = [str(folder)], [str(folder / "utils")]
    modules = [package, utils]
    for name, names in stand_ins.items():
        modules.append(ModuleType(f"verl.utils.{name}"))
        modules[-1].__dict__.update(names)
    before = {name: module for name, module in sys.modules.items() if _is_verls(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_verls(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_verls(name: str) -> bool:
    return name == "verl" or name.startswith("verl.")
