"""Private names of torch stand in fxoffload.torch_private alone, where each function says which versions need it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE = ROOT / "fxoffload" / "torch_private"
# In torch's documentation, whatever their names begin with.
DOCUMENTED = ("torch._dynamo.config", "torch._inductor.config", "torch._inductor.list_mode_options")
# These have nothing of torch's.
OF_OTHERS = {"check_version.py", "transformers.py"}
# Attributes that only torch's objects have, and how often they are read elsewhere: for each there is a function in
# torch_private (``storage_key``, ``version_of``, ``mutated_args``). These numbers only get smaller.
ATTRIBUTES = {"_cdata": 27, "_version": 7, "_schema": 2}


def is_private(name: str) -> bool:
    """Whether a dotted name of torch has a part with an underscore. ``torch.ops`` are operators, not an API."""
    if name.startswith("torch.ops.") or any(name == d or name.startswith(f"{d}.") for d in DOCUMENTED):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_of_torch(text: str) -> Iterator[str]:
    """The dotted names of torch that a file imports, or reads from what it imports."""
    known = dict(re.findall(r"import (torch[\w.]*) as (\w+)", text))
    aliases = {"torch": "torch", **{alias: module for module, alias in known.items()}}
    imported = re.findall(r"^\s*from (torch[\w.]*) import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE)
    for module, *several in imported:
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", "".join(several))):
            aliases[name] = f"{module}.{name}"
            yield f"{module}.{name}"
    yield from re.findall(r"^\s*import (torch[\w.]*)", text, re.MULTILINE)
    yield from re.findall(r"""["'](torch\.[\w.]+)["']""", text)  # of sys.modules
    if not re.search(rf"\b(?:{'|'.join(aliases)})\b[\w.]*\._[a-zA-Z]", text):
        return
    for node in ast.walk(ast.parse(text)):  # strings and comments only mention names
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join([aliases[node.id], *reversed(parts)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch._guards import tracing", {"torch._guards.tracing"}),
        ("def f():\n    from torch.fx import (\n        Graph,\n        _compat,\n    )", {"torch.fx._compat"}),
        ("sys.modules.get('torch._guards')", {"torch._guards"}),
        ("from torch import _guards as g", {"torch._guards"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch\ntorch._C._cuda_init()", {"torch._C", "torch._C._cuda_init"}),
        ("import torch.distributed as dist\ndist.c10d._store()", {"torch.distributed.c10d._store"}),
        ("from torch import nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("import torch\n'of torch._C'  # torch._C\nself._torch = torch.ops.aten._neg_view", set()),
        ("from torch._dynamo import config\nconfig.disable", set()),
    ],
)
def test_private_names_are_found(text: str, expected: set[str]) -> None:
    assert {name for name in names_of_torch(text) if is_private(name)} == expected


@pytest.fixture(scope="module")
def product() -> dict[str, str]:
    """The texts of all files but those of torch_private."""
    paths = [*(ROOT / "fxoffload").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    left_out = (PRIVATE, ROOT / "fxoffload" / "passes")
    return {str(p.relative_to(ROOT)): p.read_text() for p in paths if not any(p.is_relative_to(o) for o in left_out)}


def test_private_names_stand_in_torch_private_alone(product: dict[str, str]) -> None:
    private = {path: sorted({n for n in names_of_torch(text) if is_private(n)}) for path, text in product.items()}
    found = {path: names for path, names in private.items() if names}
    assert not found, "expected private names of torch in fxoffload/torch_private alone: move these there"


def test_fewer_private_attributes_are_read_elsewhere(product: dict[str, str]) -> None:
    text = "\n".join(product.values())
    found = {name: len(re.findall(rf"(?<!self)\.{name}\b", text)) for name in ATTRIBUTES}
    assert found == ATTRIBUTES, "more: call the function in torch_private; fewer: lower the number in ATTRIBUTES"


def test_torch_private_reads_nothing_else_of_this_package() -> None:
    for path in PRIVATE.glob("*.py"):
        others = re.findall(r"^\s*(?:from|import) fxoffload(?!\.torch_private\b).*", path.read_text(), re.MULTILINE)
        assert not others, path.name


def test_each_function_says_which_versions_need_it() -> None:
    for path in PRIVATE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, f"{path.name} holds more than one concern"
        for node in ast.parse(path.read_text()).body if path.name not in OF_OTHERS else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                doc = ast.get_docstring(node) or ""
                assert re.search(r"^Needed by (torch 2\.\d|all versions of torch)", doc, re.MULTILINE), (
                    f"{path.name}: {node.name} does not say 'Needed by torch 2.x to 2.y' in its docstring"
                )
