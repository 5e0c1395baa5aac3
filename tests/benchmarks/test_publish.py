"""Published tables: the documents hold what the committed JSON says, and a document that does not is found out."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import publish
from benchmarks.arguments import expand_set, parse_protocol, split_settings
from benchmarks.cli import app
from benchmarks.load import load
from benchmarks.machine import ROOT
from benchmarks.moe_convert import parse_protocol as parse_conversions
from benchmarks.published import TABLES, Rows, Table
from benchmarks.published_columns import COLUMNS, Measured
from benchmarks.scenarios import SCENARIOS, find_scenario
from benchmarks.schema import Case, Memory, Protocol, Record, Report, Result, Scalar, Summary, Variant


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents in a folder of their own, with the same results."""
    for path in publish.documents(ROOT):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for file in {rows.file for table in TABLES for rows in table.rows}:
        (tmp_path / publish.RESULTS / file).symlink_to(ROOT / publish.RESULTS / file)
    return tmp_path


def test_the_documents_are_what_publish_would_write() -> None:
    found = publish.differences()
    assert not found, f"run python -m benchmarks publish; found\n{found}"


def test_results_hold_only_what_is_used() -> None:
    """By a table, a test, a comment or a sentence; the rest is in ``archive/`` or in git's history."""
    listing = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout
    texts = [(ROOT / name).read_text() for name in listing.split() if "results/archive" not in name]
    patterns = {name for text in texts for name in re.findall(r"20\d\d-\d\d-\d\d-[\w*-]+\.json", text)}
    if not patterns:
        pytest.skip("not a git checkout with tracked files")
    files = {path.name for path in (ROOT / publish.RESULTS).glob("*.json")}
    reports = {name.replace("-plans.json", ".json") for name in files}
    assert not [name for name in sorted(reports) if not any(fnmatch(name, pattern) for pattern in patterns)]


def test_the_command_checks_without_writing() -> None:
    done = CliRunner().invoke(app, ["publish", "--check"])
    assert done.exit_code == 0 and not done.output


@pytest.mark.slow
def test_a_figure_that_was_changed_by_hand_is_found_and_mended(copy: Path) -> None:
    page = copy / "docs" / "benchmarks.md"
    text = page.read_text()
    assert text.count("| Inductor + full checkpointing ") == 4
    page.write_text(text.replace("924.7 [922.7, 925.3]", "924.7 [900.0, 925.3]"))
    found = publish.differences(copy)
    assert "-| Inductor + full checkpointing" in found and "+| Inductor + full checkpointing" in found
    assert "900.0" in found
    assert publish.write(copy) == [page]
    assert page.read_text() == text
    assert publish.write(copy) == []


@pytest.mark.slow
def test_text_around_the_tables_is_left_alone(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text("before\n" + readme.read_text() + "behind, without a newline")
    assert publish.differences(copy) == ""


def test_published_figures_are_those_of_the_json() -> None:
    """One row by hand, straight from the file."""
    table = next(table for table in TABLES if table.name == "plan-stack-sweep")
    found = json.loads((ROOT / publish.RESULTS / table.rows[0].file).read_text())
    results = {row["variant"]["label"]: row["result"] for row in found["records"]}
    auto, inductor = results["auto"], results["inductor"]
    row = next(line for line in publish.render_table(table).splitlines() if line.startswith("| auto (2 %)"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    step = auto["step_ms"]["median"]
    assert cells[1] == f"{step:.1f}"
    assert cells[2] == f"{100 * (step / inductor['step_ms']['median'] - 1):+.1f} %"
    assert cells[3] == f"{auto['memory']['peak_bytes'] / 2**30:.2f}"
    assert cells[4] == f"{auto['first_step_memory']['peak_bytes'] / 2**30:.2f}"
    assert cells[6] == f"{100 * (auto['plan']['predicted']['step_ms'] / step - 1):+.1f} %"


def test_a_row_that_did_not_end_says_so() -> None:
    table = Table("x", ("first offload, s",), (Rows("2026-11-22-h200-phases.json"),), across=True)
    header = publish.render_table(table).splitlines()[0]
    assert "pageable (timeout)" in header and "fxoffload (" not in header


def test_columns_are_empty_where_nothing_was_measured() -> None:
    record = Record("plan", Case(), Variant("a", "auto"), "failed", "why", 0.0, Result())
    texts = {name: column(Measured(record, {})) for name, column in COLUMNS.items()}
    assert texts.pop("longest that trained") == "none"
    assert set(texts.values()) == {""}


def test_columns_have_the_units_they_say() -> None:
    result = Result(step_ms=Summary(100.0, 90.0, 110.0, 80.0, 120.0, []), memory=Memory(0, 3 << 29, 0, 0, 0))
    record = Record("plan", Case(), Variant("a", "auto"), "ok", "", 0.0, result)
    measured = Measured(record, {"step_vs_inductor": 0.99996, "predicted_step_error": -0.123})
    assert COLUMNS["peak GiB"](measured) == "1.50"
    assert COLUMNS["step ms [quartiles]"](measured) == "100.0 [90.0, 110.0]"
    assert COLUMNS["against inductor"](measured) == "0.0 %"
    assert COLUMNS["of time"](measured) == "-12.3 %"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: nothing-like-it -->\n<!-- end -->\n", "unknown table 'nothing-like-it'; known: index, readme,"),
        ("<!-- table: phases -->\n", "expected <!-- end --> after <!-- table: phases -->"),
        ("<!-- end -->\n", r"2: expected <!-- table: NAME --> and <!-- end --> in turn"),
        ("<!-- table: phases -->\n<!-- end -->\n", "expected table 'phases' in one place"),
    ],
)
def test_markers_that_are_wrong(copy: Path, text: str, message: str) -> None:
    (copy / "docs" / "z.md").write_text("first\n" + text)
    with pytest.raises(ValueError, match=message):
        publish.differences(copy)


def test_a_table_that_no_document_shows_is_an_error(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("<!-- table: readme -->\n", ""))
    with pytest.raises(ValueError, match="in turn"):
        publish.differences(copy)
    readme.write_text("no tables\n")
    with pytest.raises(ValueError, match="none with <!-- table: readme -->"):
        publish.differences(copy)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            Table("t", ("bits",), (Rows("2026-11-22-h200-phases.json", {"other": "o"}),)),
            "expected 'other' in .* found fx",
        ),
        (Table("t", ("bytes",), (Rows("2026-11-22-h200-phases.json"),)), "unknown column 'bytes'; known: step ms"),
        (Table("t", ("step ms",), (Rows("2026-11-21-h200-activations.json"),)), "expected a case of .* found ''"),
        (Table("t", ("step ms",), (Rows("no-such.json"),)), "found no .*no-such.json"),
    ],
)
def test_tables_that_do_not_fit_their_file(table: Table, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publish.render_table(table)


def test_labels_that_a_newer_file_lacks_are_left_out_where_asked() -> None:
    rows = Rows("2026-11-22-h200-phases.json", {"verl": "V", "module_to": "M"}, where_there=True)
    header = publish.render_table(Table("t", ("bits",), (rows,), across=True)).splitlines()[0]
    assert "V" in header and "M" not in header


def _report(command: str, scenario: str = "plan", **protocol: Any) -> Report:
    environment: dict[str, Scalar] = {"command": command, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return Report(scenario, environment, Protocol(**protocol), None, [])


def test_commands_lose_what_was_particular_to_one_call() -> None:
    command = "python -m benchmarks run plan --set verl=/y steps=9 --resume a.json --variants 'a,b c' --deadline-s 9"
    report = _report(f"{command} --out /x", steps=9, warmup=3, calibration_steps=4, copy_trace=False, timeout_s=77)
    assert publish.reproduce(report) == (
        "PYTORCH_ALLOC_CONF=expandable_segments:True python -m benchmarks run plan --set verl=PATH steps=9 "
        "warmup=3 calibration_steps=4 long_steps=0 memory_fraction=no --variants 'a,b c' --out DIR"
    )


def test_commands_name_what_is_no_longer_the_default() -> None:
    report = _report("python -m benchmarks run max-seq --out /x", "longest", lengths=[8, 16], copy_trace=False)
    said = publish.reproduce(report)
    assert "run max-seq --set probes=3 probe_steps=1 allocator_trace=true lengths=8,16 --out DIR" in said


@pytest.mark.parametrize("file", sorted({rows.file for table in TABLES for rows in table.rows}))
def test_commands_have_the_protocol_of_their_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as the command line reads it, today and where every default of a scenario is another one."""
    report = load(ROOT / publish.RESULTS / file)
    for changed in (False, True):
        if changed and isinstance(report, Report):
            scenario = find_scenario(report.scenario)
            others = {**scenario.protocol_defaults, "warmup": 17, "calibration_steps": 23, "probe_steps": 5}
            monkeypatch.setitem(SCENARIOS, scenario.name, replace(scenario, protocol_defaults=others))
        words = expand_set(shlex.split(publish.reproduce(report)))
        settings = [word for option, word in itertools.pairwise(words) if option == "--set"]
        if isinstance(report, Report):
            found = parse_protocol(split_settings(settings), find_scenario(report.scenario).protocol_defaults)
            assert replace(found, timeout_s=0.0, caches="") == replace(report.protocol, timeout_s=0.0, caches="")
        else:
            assert parse_conversions(settings) == report.protocol
        assert words[-2:] == ["--out", "DIR"]
