"""Writes the published tables into the documents, between ``<!-- table: NAME -->`` and ``<!-- end -->``.

``<!-- table: index -->`` is the list of all of them, with the commands that measured them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tabulate import tabulate

from benchmarks import moe_convert
from benchmarks.derived import case_label, derive
from benchmarks.load import load
from benchmarks.machine import ROOT
from benchmarks.published import TABLES, Rows, Table
from benchmarks.published_columns import COLUMNS, CONVERSION_COLUMNS, Measured
from benchmarks.reproduce import reproduce
from benchmarks.schema import Report, write_atomically

RESULTS = Path("benchmarks", "results")
INDEX = "index"
OPENING, CLOSING = re.compile(r"^<!-- table:(.*)-->$"), re.compile(r"^<!-- end -->$")

Line = dict[str, str]


def documents(root: Path = ROOT) -> list[Path]:
    """The documents that may hold tables."""
    named = [root / "README.md", root / "benchmarks" / "README.md", root / RESULTS / "README.md"]
    return named + sorted((root / "docs").glob("*.md"))


def differences(root: Path = ROOT) -> str:
    """What ``write`` would change, as a unified diff; "" where nothing.

    Raises:
        ValueError: a marker, a result file, a variant or a column is not as it has to be; the message says which.
    """
    return "".join(
        "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(path), f"{path}, as published"))
        for path, old, new in _fill(root)
    )


def write(root: Path = ROOT) -> list[Path]:
    """Fill all documents; the paths of those that changed. Raises as ``differences`` does, and then writes nothing."""
    changed = [(path, new) for path, old, new in list(_fill(root)) if new != old]
    for path, new in changed:
        write_atomically(path, new)
    return [path for path, _ in changed]


def fill(text: str, folder: Path, where: dict[str, Path], root: Path = ROOT) -> str:
    """``text`` of a document in ``folder`` with its tables as they should be. ``where``: the documents by table."""
    return "".join(part if name is None else _block(name, folder, where, root) for name, part in _split(text))


def render_table(table: Table, root: Path = ROOT) -> str:
    """One table, in Markdown."""
    lines = [line for rows in table.rows for line in _lines(table, rows, root)]
    if table.across:
        lines = [{"": name, **{line["variant"]: line[name] for line in lines}} for name in table.columns]
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)


def _fill(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each document with its text and what its text should be."""
    texts = {path: path.read_text() for path in documents(root)}
    where: dict[str, Path] = {}
    for path, text in texts.items():
        for name in (name for name, _ in _split(text, path) if name is not None):
            if name in where:
                raise ValueError(f"expected table {name!r} in one place, found it in {where[name]} and in {path}")
            where[name] = path
    nowhere = [table.name for table in TABLES if table.name not in where]
    if nowhere:
        raise ValueError(
            f"expected every table of published.py in a document, found none with <!-- table: {nowhere[0]} -->"
        )
    for path, text in texts.items():
        yield path, text, fill(text, path.parent, where, root)


def _split(text: str, path: Path | None = None) -> Iterator[tuple[str | None, str]]:
    """Text outside of blocks as (None, text), blocks as (name, text). A block's markers are lines of their own."""
    outside: list[str] = []
    inside: list[str] | None = None
    name = ""
    for number, line in enumerate(text.splitlines(True), 1):
        opened, closed = OPENING.match(line.rstrip("\n")), CLOSING.match(line.rstrip("\n"))
        if (opened and inside is not None) or (closed and inside is None):
            raise ValueError(
                f"{path or 'text'}:{number}: expected <!-- table: NAME --> and <!-- end --> in turn, "
                f"found {line.strip()}"
            )
        if opened:
            yield None, "".join(outside)
            outside, inside, name = [], [], opened[1].strip()
        (outside if inside is None else inside).append(line)
        if closed and inside is not None:
            yield name, "".join(inside)
            inside = None
    if inside is not None:
        raise ValueError(f"{path or 'text'}: expected <!-- end --> after <!-- table: {name} -->, found none")
    yield None, "".join(outside)


def _block(name: str, folder: Path, where: dict[str, Path], root: Path) -> str:
    found = {table.name: table for table in TABLES}
    if name == INDEX:
        body = _index(folder, where, root)
    elif name in found:
        body = render_table(found[name], root) + "\n\n" + _source(found[name], folder, root)
    else:
        raise ValueError(f"unknown table {name!r}; known: {', '.join([INDEX, *found])}")
    return f"<!-- table: {name} -->\n\n{body}\n\n<!-- end -->\n"


def _source(table: Table, folder: Path, root: Path) -> str:
    """Where the figures come from, linked from ``folder``."""
    files = dict.fromkeys(rows.file for rows in table.rows)
    links = [f"[{file}]({os.path.relpath(root / RESULTS / file, folder)})" for file in files]
    return f"From {', '.join(links)}."


def _index(folder: Path, where: dict[str, Path], root: Path) -> str:
    """Every table: the document with it, the files, and a command for each."""
    parts = []
    for table in TABLES:
        path = where[table.name]
        link = f"[{path.relative_to(root)}]({os.path.relpath(path, folder)})"
        parts.append(f"- `{table.name}`, in {link}:\n")
        commands = dict.fromkeys(reproduce(_load(root / RESULTS / rows.file)) for rows in table.rows)
        parts += [f"      {command}\n" for command in commands]
    return "\n".join(parts).rstrip("\n")


_load = lru_cache(maxsize=64)(load)


def _lines(table: Table, rows: Rows, root: Path) -> list[Line]:
    report = _load(root / RESULTS / rows.file)
    known = CONVERSION_COLUMNS if isinstance(report, moe_convert.MoeReport) else COLUMNS
    unknown = [column for column in table.columns if column not in known]
    if unknown:
        raise ValueError(f"table {table.name}: unknown column {unknown[0]!r}; known: {', '.join(known)}")
    lines = []
    converted = isinstance(report, moe_convert.MoeReport)
    for name, texts in _conversions(table, rows, report) if converted else _records(table, rows, report):
        of = {table.of: rows.of if not lines else ""} if table.of else {}
        lines.append({**of, "variant": name, **texts})
    return lines


def _conversions(table: Table, rows: Rows, report: moe_convert.MoeReport) -> list[tuple[str, Line]]:
    found = {row.variant: row for row in report.rows}
    names = _names(table, rows, list(found))
    return [
        (name, {column: CONVERSION_COLUMNS[column](found[label]) for column in table.columns})
        for label, name in names.items()
    ]


def _records(table: Table, rows: Rows, report: Report) -> list[tuple[str, Line]]:
    """A row that was not measured to its end says so after its name."""
    derived = {(row["case"], row["variant"]): row for row in derive(report.records, report.link)}
    cases = list(dict.fromkeys(case_label(record.case) for record in report.records))
    if rows.case not in cases and (rows.case or len(cases) > 1):
        raise ValueError(f"table {table.name}: expected a case of {rows.file}, one of {cases}, found {rows.case!r}")
    case = rows.case or cases[0]
    found = {record.variant.label: record for record in report.records if case_label(record.case) == case}
    lines = []
    for label, name in _names(table, rows, list(found)).items():
        record = found[label]
        measured = Measured(record, derived.get((case, label), {}))
        shown = name if record.status == "ok" else f"{name} ({record.status})"
        lines.append((shown, {column: COLUMNS[column](measured) for column in table.columns}))
    return lines


def _names(table: Table, rows: Rows, labels: list[str]) -> dict[str, str]:
    if not rows.names:
        return {label: label for label in labels}
    missing = [label for label in rows.names if label not in labels]
    if missing and not rows.where_there:
        raise ValueError(f"table {table.name}: expected {missing[0]!r} in {rows.file}, found {', '.join(labels)}")
    return {label: name for label, name in rows.names.items() if label in labels}
