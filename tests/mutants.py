"""Mutants: the package with one small mistake each, and whether the tests notice.

    python -m tests.mutants --number 40 --seed 0 --out mutants.json

Mistakes are drawn from ``runtime/`` and the simulator: a comparison that is off by one or turned around, "and" for
"or", a sign, a condition without its "not", a constant, a call that is left out. Each runs in a copy of the tree, under
the quick tests of what it belongs to; what these miss runs under the slow ones too. A test run that hangs has noticed.
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
TESTS = (
    "tests/runtime",
    "tests/planner/test_simulate.py",
    "tests/planner/test_schedule.py",
    "tests/planner/test_agreement.py",
    "tests/oracle/test_events.py",
    "tests/test_memory_algebra.py",
    "tests/semantics/test_aliases.py",
    "tests/semantics/test_hooks.py",
    "tests/semantics/test_order.py",
    "tests/semantics/test_pipelines.py",
    "tests/semantics/test_default_windows.py",
    "tests/semantics/test_donation.py",
    "tests/planner/test_chain_planning.py",
    "tests/planner/test_gaps.py",
    "tests/planner/test_chain_replan.py",
    "tests/planner/test_measured_sizes.py",
    "tests/planner/test_chain_trim.py",
    "tests/planner/test_keep_all_for_a_while.py",
    "tests/test_reset.py",
)
LIMIT_S = 900.0

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
        shutil.copytree(
            ROOT, tree / "tree", symlinks=True, ignore=shutil.ignore_patterns(".venv*", ".git", "results", "*.pyc")
        )
        yield tree / "tree"


def _noticed_by(tree: Path, marks: str, tests: Sequence[str] = TESTS) -> str | None:
    """The first test that fails, or "a hang"; None: none does."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, "-m", marks, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "a hang"
    if ended.returncode == 0:
        return None
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit status {ended.returncode}"


def _run(tree: Path, mutant: Mutant, *, with_slow: bool) -> dict[str, object]:
    file = tree / mutant.path
    source = file.read_text()
    file.write_text(source[: mutant.start] + mutant.after + source[mutant.end :])
    began = time.monotonic()
    try:
        quick = _noticed_by(tree, "not (gpu or slow)")
        slow = _noticed_by(tree, "slow and not gpu") if quick is None and with_slow else None
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
    parser.add_argument("--no-slow", action="store_true", help="what the quick tests miss is not tried under the slow")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="none is begun after that")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chosen = random.Random(args.seed).sample(mutants(), args.number)
    free, ends = list(_trees(args.jobs)), time.monotonic() + args.deadline_s
    found: list[dict[str, object]] = []

    def one(mutant: Mutant) -> None:
        if time.monotonic() > ends:
            return
        tree = free.pop()
        try:
            found.append(_run(tree, mutant, with_slow=not args.no_slow))
        finally:
            free.append(tree)
        print(json.dumps(found[-1]), flush=True)
        args.out.write_text(json.dumps({"seed": args.seed, "tests": TESTS, "mutants": found}, indent=1) + "\n")

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
