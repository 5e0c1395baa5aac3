"""Mutants: the package with one small mistake each, and whether the tests notice.

    pip install pytest-cov
    python -m pytest -m "not (gpu or slow)" --cov=fxoffload --cov-context=test tests/runtime tests/planner
    python -m tests.mutants --coverage .coverage --number 40 --out mutants.json

The first command leaves ``.coverage`` after 4 minutes; with all tests it takes hours. The second takes half an hour.

Mistakes are drawn from the run time and the simulator. A comparison is off by one or turned around, "and" stands for
"or", a sign or a constant is another, a "not" or a call is left out. Each runs in a copy of the tree, under
tests that execute its line: first those of ``make test``, then the slow ones. Slow tests that the coverage was recorded
without are not tried. A test run that hangs has noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("fxoffload/runtime", "fxoffload/planner/simulate.py", "fxoffload/planner/program.py")
MOST_TESTS = 60
LIMIT_S = 300.0

_OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_TEXT = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}


@dataclass(frozen=True)
class Mutant:
    """``before`` at characters ``start`` to ``end`` of a file becomes ``after``. Lines count from 1."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str


class _Finder(ast.NodeVisitor):
    """Finds all mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.found: list[Mutant] = []
        self._begins = [0]
        for text in source.encode().splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(text))
        self._bytes = source.encode()

    def _at(self, line: int, column: int) -> int:
        return len(self._bytes[: self._begins[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.expr | ast.stmt, start: int, end: int, after: str) -> None:
        self.found.append(Mutant(self.path, node.lineno, start, end, self.source[start:end], after))

    def _between(self, node: ast.expr, left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        """Replace an operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self.source.find(before, start, end)
        if at >= 0:
            self._add(node, at, at + len(before), after)

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            self._between(node, left, right, _TEXT[type(op)], _OTHER[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(node, left, right, f" {before} ", f" {after} ")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        signs = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
        if type(node.op) in signs:
            self._between(node, node.left, node.right, *signs[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self._span(node)
            self._add(node, start, end, self.source[slice(*self._span(node.operand))])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, *self._span(node), str(not node.value))
        elif type(node.value) is int:
            self._add(node, *self._span(node), str(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Constant):
            return  # a docstring
        text = ast.unparse(node)
        if isinstance(call, ast.Call) and not text.startswith(("log.", "warn(", "background.warn", "super().")):
            self._add(node, *self._span(node), "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def mutants() -> list[Mutant]:
    """All that there are."""
    found: list[Mutant] = []
    for place in MUTATED:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            source = file.read_text()
            finder = _Finder(str(file.relative_to(ROOT)), source)
            finder.visit(ast.parse(source))
            found += finder.found
    return found


def _trees(number: int) -> Iterator[Path]:
    for _ in range(number):
        tree = Path(tempfile.mkdtemp(prefix="mutant-"))
        shutil.copytree(ROOT, tree / "tree", symlinks=True, ignore=shutil.ignore_patterns(".venv*", ".git", "*.pyc"))
        yield tree / "tree"


def _tests_of_lines(path: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line) -> tests that execute it, of those that there are. ``path``: of coverage's data, with contexts."""
    from coverage import CoverageData

    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    there = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines())
    data = CoverageData(basename=str(path))
    data.read()
    found: dict[tuple[str, int], list[str]] = {}
    for file in data.measured_files():
        if "fxoffload/" not in file:
            continue  # of passes/
        name = file[file.rindex("fxoffload/") :]
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.split("|")[0] for context in contexts}
            found[name, line] = sorted(tests & there)
    return found


def _noticed_by(tree: Path, marks: str, tests: Sequence[str]) -> str | None:
    """The first test that fails, or "a hang"; None: none does."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, "-m", marks, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "a hang"
    if ended.returncode in (0, 5):  # none is left
        return None
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit status {ended.returncode}"


def _run(tree: Path, mutant: Mutant, tests: Sequence[str]) -> dict[str, object]:
    file = tree / mutant.path
    source = file.read_text()
    file.write_text(source[: mutant.start] + mutant.after + source[mutant.end :])
    began = time.monotonic()
    try:
        quick = _noticed_by(tree, "not (gpu or slow)", tests)
        slow = _noticed_by(tree, "slow and not gpu", tests) if quick is None else None
    finally:
        file.write_text(source)
    found = quick or slow
    if found is not None and (failed := re.match(r"FAILED (\S+::.*?)(?: - |$)", found)):
        # A test that fails without the mistake too says nothing.
        noise = _noticed_by(tree, "not gpu", [failed[1]])
    else:
        noise = None
    return {
        **asdict(mutant),
        "quick": quick,
        "slow": slow,
        "is_noise": noise is not None,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Which small mistakes do the tests notice?")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--coverage", type=Path, required=True, help="with contexts")
    parser.add_argument("--without", nargs="*", default=(), help="files whose lines are others than in the coverage")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="none is begun after that")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chooser, tests_of = random.Random(args.seed), _tests_of_lines(args.coverage)
    every = [m for m in mutants() if tests_of.get((m.path, m.line)) and Path(m.path).name not in args.without]
    chosen = chooser.sample(every, args.number)
    free, ends = list(_trees(args.jobs)), time.monotonic() + args.deadline_s
    found: list[dict[str, object]] = []

    def one(mutant: Mutant) -> None:
        if time.monotonic() > ends:
            return
        tree = free.pop()
        try:
            tests = tests_of[mutant.path, mutant.line]
            tests = random.Random(args.seed).sample(tests, min(len(tests), MOST_TESTS))
            found.append(_run(tree, mutant, tests))
        finally:
            free.append(tree)
        print(json.dumps(found[-1]), flush=True)
        args.out.write_text(json.dumps({"seed": args.seed, "mutants": found}, indent=1) + "\n")

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, chosen))
    for tree in free:
        shutil.rmtree(tree.parent, ignore_errors=True)
    found = [m for m in found if not m["is_noise"]]
    quick, slow = (sum(m[k] is not None for m in found) for k in ("quick", "slow"))
    print(f"{len(found)} mutants: {quick} noticed by the quick tests, {slow} more by the slow ones")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
