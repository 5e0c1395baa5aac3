"""A peer's module: from the installed package, or one file of a checkout whose path was given."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from benchmarks.activations.available import NotAvailable


def load_module(package: str, module: str, path: str, stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """``package.module``: of the checkout at ``path`` where that is given, else as it is installed.

    Of a checkout only that file runs, not the ``__init__`` files above it, which import a whole trainer.

    Args:
        stand_ins: modules put in place of those that the file imports, by name, while it is loaded from a checkout.

    Raises:
        NotAvailable: neither is there; the text says what to give.
    """
    name = f"{package}.{module}"
    if path:
        with _in_place(stand_ins or {}):
            return _from_file(name, Path(path).expanduser() / Path(*name.split(".")).with_suffix(".py"), package)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotAvailable(
            f"{name} cannot be imported ({error}): install {package}, or give a checkout with --set {package}=PATH"
        ) from error


def _from_file(name: str, file: Path, package: str) -> ModuleType:
    if not file.is_file():
        raise NotAvailable(f"expected a checkout of {package} that has {file}, found no such file")
    spec = importlib.util.spec_from_file_location(f"_checkout_of_{name.replace('.', '_')}", file)
    if spec is None or spec.loader is None:
        raise AssertionError(f"expected {file} to be importable")
    found = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(found)
    except ImportError as error:
        raise NotAvailable(f"{file} cannot be imported: {error}") from error
    return found


@contextlib.contextmanager
def _in_place(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
