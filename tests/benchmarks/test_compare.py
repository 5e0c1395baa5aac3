"""Two runs side by side: ratios worked out by hand, for every committed scenario, and what makes the command fail."""

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.compare import compare, parse_percent, render
from benchmarks.load import load
from benchmarks.machine import ROOT
from benchmarks.measures import rows
from benchmarks.rl.records import RlResult
from benchmarks.schema import Case, Memory, Protocol, Record, Report, Result, Summary, Variant, to_json
from benchmarks.tables import render as render_table

RESULTS = ROOT / "benchmarks" / "results"
NO_REPORTS = ("-plans", "-bench", "-ablation", "2026-11-22-h200-pinning")
REPORTS = sorted(path for path in RESULTS.glob("*.json") if not path.stem.endswith(NO_REPORTS))


def summary(median: float, spread: float = 1.0) -> Summary:
    return Summary(median, median - spread, median + spread, median - spread, median + spread, [median])


def record(label: str, step_ms: float | None, peak_gib: float = 1.0, case: Case = Case()) -> Record:  # noqa: B008
    if step_ms is None:
        return Record("activations", case, Variant(label, label), "failed", "why", 0.0, Result())
    memory = Memory(0, int(peak_gib * 2**30), 0, 0, 0)
    return Record(
        "activations", case, Variant(label, label), "ok", "", 0.0, Result(step_ms=summary(step_ms), memory=memory)
    )


def report(*records: Record, **environment: str) -> Report:
    return Report("activations", {"torch": "2.11", **environment}, None, None, list(records))  # type: ignore[arg-type]


def test_ratios_and_quartiles_by_hand() -> None:
    before = report(record("slower", 100.0), record("noise", 100.0), record("faster", 100.0, 2.0))
    after = report(record("slower", 104.0), record("noise", 101.5), record("faster", 50.0, 1.0))
    found = {(pair.row.variant, pair.before.name): pair for pair in compare(before, after).pairs}
    slower, noise = found["slower", "step ms"], found["noise", "step ms"]
    assert slower.ratio == pytest.approx(1.04) and slower.worse_by == pytest.approx(0.04) and slower.outside_quartiles
    assert noise.outside_quartiles is False, "[99, 101] and [100.5, 102.5] overlap"
    faster, peak = found["faster", "step ms"], found["faster", "peak GiB"]
    assert faster.worse_by == pytest.approx(-0.5) and faster.outside_quartiles
    assert peak.ratio == pytest.approx(0.5) and peak.outside_quartiles is None
    assert found["slower", "peak GiB"].ratio == 1.0


def test_worse_lists_what_is_worse_by_more_than_the_limit_and_what_was_lost() -> None:
    before = report(record("a", 100.0), record("b", 100.0), record("c", 100.0))
    after = report(record("a", 104.0), record("b", 102.0), record("c", None))
    found = compare(before, after)
    worse = found.worse(0.03)
    assert worse == ["stack 16x16384 a: step ms worse by 4.0%", "stack 16x16384 c: ok became failed"]
    assert found.worse(0.05) == worse[1:]
    assert not compare(after, before).worse(0.03)


def test_more_tokens_are_better() -> None:
    path = RESULTS / "2026-11-21-h200-longest-inductor.json"
    before, after = load(path), load(path)
    assert isinstance(after, Report)
    for probe in after.records[0].result.probes:
        probe.seq //= 2
    pair = next(p for p in compare(before, after).pairs if p.before.name == "longest that trained")
    assert (pair.before.value, pair.ratio, pair.worse_by) == (18432, 0.5, 0.5)


def test_rows_are_matched_by_the_whole_case() -> None:
    small = Case(layers=4)
    before = report(record("a", 100.0), record("a", 10.0, case=small), record("b", 1.0))
    after = report(record("a", 20.0, case=small), record("d", 1.0), record("a", 100.0), torch="2.13")
    found = compare(before, after)
    steps = [(p.row.case_name, p.ratio) for p in found.pairs if p.before.name == "step ms"]
    assert steps == [("stack 16x16384", 1.0), ("stack 4x16384", 2.0)]
    assert [(letter, row.variant) for letter, row in found.alone] == [("A", "b"), ("B", "d")]
    text = render(found)
    assert "only in A: stack 16x16384 b (ok)" in text and "torch: 2.11 in A, 2.13 in B" in text
    with pytest.raises(ValueError, match="found stack 16x16384 b in A and stack 4x16384 a in B"):
        compare(report(record("b", 1.0)), report(record("a", 1.0, case=small)))


def test_nothing_before_and_something_now_is_worse() -> None:
    path = RESULTS / "2026-11-22-h200-phases.json"
    before, after = load(path), load(path)
    assert isinstance(before, Report)
    rl = before.records[0].result.rl
    assert rl is not None and rl.switching is not None
    rl.switching.residue_bytes = 0
    assert any("not free in the rollout MiB worse" in line for line in compare(before, after).worse(0.03))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_every_committed_run_equals_itself(path: Path) -> None:
    found = load(path)
    measured = [row for row in rows(found) if row.measures]
    assert measured or all(row.status != "ok" for row in rows(found))
    same = compare(found, copy.deepcopy(found))
    assert len(same.pairs) == sum(len(row.measures) for row in measured)
    assert all(pair.ratio == 1.0 for pair in same.pairs)
    assert not same.worse(0.0) and not same.alone and not same.notes
    assert render(same).count("| equal") == len(same.pairs)


def test_rows_of_pinning_are_told_apart() -> None:
    made = report(record("huge", None))
    row = {"gib": 1.0, "huge": True, "threads": 2, "chunk_mib": 4, "touch": "own", "touch_gbs": None, "all_gbs": 9.0}
    made.records[0].result.rl = RlResult(pinning=[{**row, "bad": 0}, {**row, "threads": 4, "bad": 0}])
    measures = rows(made)[0].measures
    assert list(measures) == [
        "gib 1.0, huge True, threads 2, chunk_mib 4, touch own: all_gbs",
        "gib 1.0, huge True, threads 4, chunk_mib 4, touch own: all_gbs",
    ]
    assert all(measure.more_is_better for measure in measures.values())


def test_columns_of_some_scenarios_and_claims_are_shown_where_there_are_any() -> None:
    made = report(record("a", 100.0), record("b", 100.0))
    made.protocol = Protocol()
    assert "warm compile s" not in render_table(made) and "gradients" not in render_table(made)
    base = {"case": "stack 16x16384", "variant": "b"}
    made.derived = [{**base, "warm_compile_s": 4.5, "host_us": 812.0, "gradients_agree": False}]
    made.claims = [{"case": "stack 16x16384", "claim": "gradients agree", "held": False, "figures": {"disagree": "b"}}]
    text = render_table(made)
    header, _, a, b = (line.split("|") for line in text.splitlines() if line.startswith("|"))
    shown = {name.strip(): (one.strip(), two.strip()) for name, one, two in zip(header, a, b, strict=True)}
    assert shown["warm compile s"] == ("-", "4.50") and shown["host us"] == ("-", "812.0")
    assert shown["gradients"] == ("-", "DIFFER") and "us/copy" not in shown
    assert "- NOT held: gradients agree (disagree b)" in text
    assert {"warm compile s", "host us"} < set(rows(made)[1].measures)


def test_the_command_and_its_exit_status(tmp_path: Path) -> None:
    paths = []
    for name, step_ms in (("a", 100.0), ("b", 104.0)):
        paths.append(str(tmp_path / f"{name}.json"))
        made = json.loads(to_json(report(record("v", step_ms))))
        made["protocol"] = {}
        Path(paths[-1]).write_text(json.dumps(made))
    done = CliRunner().invoke(app, ["compare", *paths])
    assert done.exit_code == 0 and "1.040" in done.output and "worse, outside the quartiles" in done.output
    done = CliRunner().invoke(app, ["compare", *paths, "--fail-above", "3%"])
    assert done.exit_code == 1 and "step ms worse by 4.0%" in done.output
    assert CliRunner().invoke(app, ["compare", *paths, "--fail-above", "5%"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", *paths, "--fail-above", "3"]).exit_code == 2


def test_percentages() -> None:
    assert parse_percent("3%") == parse_percent(" 3.0 %") == pytest.approx(0.03)
    for text in ("3", "-1%", "x%", "nan%", "inf%"):
        with pytest.raises(ValueError, match="expected a percentage such as 3%"):
            parse_percent(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is none"),
        ("[1, 2]", "holds a list of 2"),
        ('{"a b c": {}}', "with a scenario and records; .* holds a b c"),
        ('{"scenario": "plan", "environment": {}, "more": 1}', "of this version of the harness"),
    ],
)
def test_files_that_are_no_report(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(ValueError, match="expected a result file, found no"):
        load(tmp_path / "none.json")
