"""The scenario moe-convert at toy size: every variant does its work, and the figures are those of the samples."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import moe_convert, moe_variants
from benchmarks.cli import app
from benchmarks.moe_data import write_checkpoint
from benchmarks.moe_variants import Sample, run_sample
from fxoffload import checkpoints

TOY = 2_000_000
SCALE = 32


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants in this process: each one's own imports torch, for seconds."""

    def run(name: str, source: Path, target: Path, answer: Path) -> None:
        run_sample(name, source, target, answer, time.time())

    def sample(variant: str, source: Path, folder: Path, *, keep: bool = True) -> Sample:
        run(variant, source, folder / "output", folder / "answer.json")
        if not keep:
            moe_convert.shutil.rmtree(folder / "output")
        return Sample(**json.loads((folder / "answer.json").read_text()))

    monkeypatch.setattr(moe_convert, "_sample", sample)
    monkeypatch.setattr(moe_convert.os, "sync", lambda: None)


def test_the_data_is_a_checkpoint_of_the_size_asked_for(tmp_path: Path) -> None:
    num_bytes = write_checkpoint(tmp_path / "data", TOY, SCALE)
    found = checkpoints.inspect(tmp_path / "data")
    assert (found.family, found.layout, found.num_bytes) == ("qwen3_moe", "experts", num_bytes)
    assert abs(num_bytes - TOY) < TOY / 2
    assert found.towers[0].num_experts == 128


@pytest.mark.parametrize("kind", sorted(moe_variants.WORK))
def test_every_variant_writes_the_weights(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_checkpoint(source, TOY, SCALE)
    if kind.startswith("split"):
        checkpoints.merge(source, tmp_path / "stacked")
        source = tmp_path / "stacked"
    run_sample(kind, source, target, tmp_path / "answer", time.time() - 5)
    sample = Sample(**json.loads((tmp_path / "answer").read_text()))
    assert sample.startup_s >= 5 and sample.seconds > 0
    assert sample.peak_rss_bytes >= sample.rss_before_bytes > 1 << 20
    if kind == "everything in RAM":
        assert sample.anonymous_bytes is not None
        assert (target / "model-0.safetensors").stat().st_size > TOY / 2
    else:
        assert checkpoints.verify(source, target).num_bytes == checkpoints.inspect(source).num_bytes


def test_a_whole_run_and_its_table(tmp_path: Path, in_process: None) -> None:
    words = [
        "run",
        "moe-convert",
        "--out",
        str(tmp_path),
        "--variants",
        "cp+merge, no fsync+cp of stacked+everything in RAM",
    ]
    for setting in (f"bytes={TOY}", f"scale={SCALE}", "in_ram_needs_gib=1e9", f"folder={tmp_path}"):
        words += ["--set", setting]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "moe-convert.json").read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert len(rows["merge, no fsync"]["samples"]) == 5
    assert "GiB available" in rows["everything in RAM"]["reason"]
    assert report["environment"]["torch"] and report["environment"]["filesystem"]
    seconds = {name: rows[name]["seconds"]["median"] for name in ("cp", "merge, no fsync")}
    assert rows["merge, no fsync"]["share_of_baseline"] == pytest.approx(seconds["cp"] / seconds["merge, no fsync"])
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "moe-convert.json")])
    assert "of cp" in shown.output and shown.output in done.output
    assert moe_convert.to_json(moe_convert.from_json(json.dumps(report))) == json.dumps(report, indent=1)
    assert [path.name for path in tmp_path.iterdir()] == ["moe-convert.json"]


@pytest.mark.slow
def test_a_variant_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "experts", TOY, SCALE)
    sample = moe_convert._sample("merge", tmp_path / "experts", tmp_path)
    assert sample.startup_s > 0.1
    assert checkpoints.inspect(tmp_path / "output").layout == "stacked"


def test_claims_are_worked_out_from_medians() -> None:
    def row(name: str, seconds: list[float], rss: int = 100) -> moe_convert.Row:
        return moe_convert.Row(name, samples=[Sample(value, 0.0, rss, 60) for value in seconds])

    rows = [
        row("cp", [1.0, 2.0, 30.0]),
        row("merge, no fsync", [9.0, 2.5, 1.0]),
        row("fuse, no fsync", [4.0] * 3, 2 << 30),
    ]
    report = moe_convert.MoeReport("moe-convert", {}, moe_convert.Protocol(), 5_000_000_000, rows)
    moe_convert._summarize(report)
    assert [row.gb_per_s for row in rows] == [2.5, 2.0, 1.25]
    assert [claim["held"] for claim in report.claims] == [True, False, False]
    assert report.claims[0]["measured"] == "80.0%"


@pytest.mark.parametrize(("words", "message"), [(["rounds=4"], "at least 5 rounds"), (["layers=3"], "unknown setting")])
def test_settings_that_are_not_accepted(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_convert.parse_protocol(words)
    with pytest.raises(ValueError, match="unknown variant 'mv'"):
        moe_convert.run(moe_convert.Protocol(), ["mv"], Path())
