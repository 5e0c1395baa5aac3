"""One word for one thing: old words stay out of names, and no two classes have one name."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Out, in any name, and what stands for it: see "Words" in docs/concepts.md.
OUT = {
    "tape": "step, save order",
    "site": "tracked graph",
    "beside": "extra memory",
    "lent": "first arguments, the caller's",
    "follower": "observer",
    "recipe": "variant maker",
    "movable": "candidate",
    "goal": "objective",
    "draft": "partitioning, variant",
    "alternative": "variant",
}
# Out in names of classes and files.
OUT_OF_CLASSES = {"held", "alone", "again", "shown", "words", "part", "option", "item"}
# Names that others know: a counter of ``fxoffload.stats()``, a path beside a destination, torch's own words.
ALLOWED = {"num_groups_on_tape", "_is_mount_point", "beside", "_beside", "recipe", "RuntimeOptions", "PhaseOptions"}
ALLOWED |= {"ConvertOptions", "Options", "OptionsError", "_Part", "site-packages"}


def files() -> list[Path]:
    return [
        p for d in ("fxoffload", "passes") for p in sorted((ROOT / d).rglob("*.py")) if "fxoffload/passes" not in str(p)
    ]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def words_of(name: str) -> set[str]:
    found = {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return found | {w.removesuffix("s") for w in found}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Of functions, classes, arguments, attributes and variables that are bound there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_old_words_are_out_of_names() -> None:
    found = []
    for path in files():
        names = [path.stem, *names_in(parsed(path))]
        found += [f"{path.relative_to(ROOT)}: {n}" for n in names if n not in ALLOWED and words_of(n) & OUT.keys()]
    assert not found, f"old words, with those that stand for them ({OUT}): {sorted(set(found))}"


def test_class_names_are_unique() -> None:
    where = defaultdict(list)
    for path in files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(ROOT)))
                assert node.name in ALLOWED or not words_of(node.name) & OUT_OF_CLASSES, f"{path}: class {node.name}"
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}
    assert len(where) > 300


def test_what_is_out_is_found() -> None:
    assert words_of("TapePlanning") & OUT.keys() and words_of("_find_drafts") & OUT.keys()
    assert not words_of("website") & OUT.keys()
    assert list(names_in(ast.parse("def f(goal): self.site = x"))) == ["f", "goal", "site"]
