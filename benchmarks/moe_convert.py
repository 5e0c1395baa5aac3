"""The scenario ``moe-convert``: converting a MoE checkpoint against copying its files, in the same run.

Rounds, in each every variant once, so that other load of the machine falls on all of them. Before each: the disk has
taken earlier writes, and the source is in the page cache.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

from benchmarks.machine import ROOT, describe_run
from benchmarks.moe_variants import WORK, Sample
from benchmarks.quartiles import summarize
from benchmarks.schema import Scalar, Summary, write_atomically

NAME = "moe-convert"
ANSWERS = "converting a MoE checkpoint against cp of the same files: seconds, GB/s, peak RAM"
FROM_STACKED = ("cp of stacked", "split, no fsync")
# What each is compared with: the copy of the same files that is as safe on the disk.
BASELINES = {
    "merge, no fsync": "cp",
    "fuse, no fsync": "cp",
    "split, no fsync": "cp of stacked",
    "merge": "cp, synced",
    "everything in RAM": "cp",
}
LEAST_SHARE = 0.7
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Protocol:
    """``bytes`` of weights, ``rounds`` timed after ``warmup``; ``scale`` divides the model's sides, for rehearsals.

    ``in_ram_needs_gib``: "everything in RAM" is left out where less is available.
    """

    bytes: int = 8_000_000_000
    rounds: int = 5
    warmup: int = 1
    scale: int = 1
    in_ram_needs_gib: float = 14.0
    folder: str = ""


@dataclasses.dataclass
class Row:
    """All samples of one variant. ``share_of_baseline`` is its GB/s over that of ``baseline``."""

    variant: str
    reason: str = ""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    seconds: Summary | None = None
    gb_per_s: float | None = None
    peak_rss_bytes: int | None = None
    baseline: str | None = None
    share_of_baseline: float | None = None


@dataclasses.dataclass
class MoeReport:
    """One JSON file."""

    scenario: str
    environment: dict[str, Scalar]
    protocol: Protocol
    num_bytes: int
    rows: list[Row]
    claims: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def parse_protocol(settings: Iterable[str]) -> Protocol:
    """``name=value`` words. Raises ValueError for an unknown name or too few rounds."""
    kinds = {field.name: field.type for field in dataclasses.fields(Protocol)}
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in kinds or not text:
            raise ValueError(f"unknown setting {setting!r}; known: {', '.join(kinds)}")
        values[name] = kinds[name](text)  # type: ignore[operator]
    protocol = Protocol(**values)
    if protocol.rounds < 5:
        raise ValueError(f"medians are taken over at least 5 rounds; found rounds={protocol.rounds}")
    return protocol


def run(protocol: Protocol, variants: list[str], out: Path) -> MoeReport:
    """Measure, and write ``out/moe-convert.json`` after every round."""
    unknown = [variant for variant in variants if variant not in WORK]
    if unknown:
        raise ValueError(f"unknown variant {unknown[0]!r}; expected names with + between them, of {' + '.join(WORK)}")
    from benchmarks.moe_data import write_checkpoint  # imports torch, which the list of scenarios can do without

    out.mkdir(parents=True, exist_ok=True)
    report = MoeReport(NAME, describe_run(), protocol, 0, [Row(variant) for variant in variants])
    with tempfile.TemporaryDirectory(prefix="fxoffload-moe-", dir=protocol.folder or None) as text:
        folder = Path(text)
        report.environment.update(_describe_disk(folder))
        report.num_bytes = write_checkpoint(folder / "experts", protocol.bytes, protocol.scale)
        if any(variant in FROM_STACKED for variant in variants):
            _sample("merge", folder / "experts", folder)
            (folder / "output").rename(folder / "stacked")
        for number in range(protocol.warmup + protocol.rounds):
            for row in report.rows:
                sample = _round(row, protocol, folder)
                if sample is not None and number >= protocol.warmup:
                    row.samples.append(sample)
            _summarize(report)
            write_atomically(out / f"{NAME}.json", to_json(report))
            print(f"round {number} of {protocol.warmup + protocol.rounds}", file=sys.stderr, flush=True)
    return report


def to_json(report: MoeReport) -> str:
    return json.dumps(dataclasses.asdict(report), indent=1)


def from_json(text: str) -> MoeReport:
    """What ``to_json`` wrote."""
    found = json.loads(text)
    for row in found["rows"]:
        row["samples"] = [Sample(**sample) for sample in row["samples"]]
        row["seconds"] = row["seconds"] and Summary(**row["seconds"])
    found["rows"] = [Row(**row) for row in found["rows"]]
    found["protocol"] = Protocol(**found["protocol"])
    return MoeReport(**found)


def render(report: MoeReport) -> str:
    """A Markdown table, and the claims below."""
    rows = []
    for row in report.rows:
        if row.seconds is None or row.peak_rss_bytes is None:
            rows.append({"variant": row.variant, "s": row.reason})
            continue
        # cp is a child of the process that was measured.
        copied = row.variant.startswith("cp")
        above = row.peak_rss_bytes - row.samples[0].rss_before_bytes
        rows.append(
            {
                "variant": row.variant,
                "s": f"{row.seconds.median:.2f} [{row.seconds.q1:.2f}, {row.seconds.q3:.2f}]",
                "GB/s": f"{row.gb_per_s:.2f}",
                "of its baseline": ""
                if row.share_of_baseline is None
                else f"{row.share_of_baseline:.0%} of {row.baseline}",
                "peak RSS GiB": "" if copied else f"{row.peak_rss_bytes / GIB:.2f}",
                "above imports GiB": "" if copied else f"{above / GIB:.2f}",
            }
        )
    size = f"{report.num_bytes / 1e9:.2f} GB, {report.protocol.rounds} rounds, medians [quartiles]"
    claims = "\n".join(f"- {claim['claim']}: held {claim['held']} ({claim['measured']})" for claim in report.claims)
    return "\n\n".join([f"### {report.scenario}", size, tabulate(rows, headers="keys", tablefmt="github"), claims])


def _round(row: Row, protocol: Protocol, folder: Path) -> Sample | None:
    available = psutil.virtual_memory().available / GIB
    if row.variant == "everything in RAM" and available < protocol.in_ram_needs_gib:
        row.reason = f"{available:.1f} GiB available, {protocol.in_ram_needs_gib} wanted"
        return None
    source = folder / ("stacked" if row.variant in FROM_STACKED else "experts")
    os.sync()
    for path in source.iterdir():
        _read(path)
    return _sample(row.variant, source, folder, keep=False)


def _sample(variant: str, source: Path, folder: Path, *, keep: bool = True) -> Sample:
    target, answer = folder / "output", folder / "answer.json"
    words = ["_moe", variant, str(source), str(target), str(answer), repr(time.time())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    subprocess.run([sys.executable, "-m", "benchmarks", *words], check=True, cwd=ROOT, env=env)
    if not keep:
        shutil.rmtree(target)
    return Sample(**json.loads(answer.read_text()))


def _read(path: Path) -> None:
    """Into the page cache."""
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _summarize(report: MoeReport) -> None:
    by_name = {row.variant: row for row in report.rows}
    for row in report.rows:
        if row.samples:
            row.seconds = summarize([sample.seconds for sample in row.samples])
            row.gb_per_s = report.num_bytes / 1e9 / row.seconds.median
            row.peak_rss_bytes = max(sample.peak_rss_bytes for sample in row.samples)
    report.claims = []
    for variant, baseline in BASELINES.items():
        row, other = by_name.get(variant), by_name.get(baseline)
        if row is None or other is None or row.gb_per_s is None or other.gb_per_s is None:
            continue
        row.baseline, row.share_of_baseline = baseline, row.gb_per_s / other.gb_per_s
        if variant != "everything in RAM":
            report.claims.append(
                {
                    "claim": f"{variant}: at least {LEAST_SHARE:.0%} of {baseline}",
                    "held": row.share_of_baseline >= LEAST_SHARE,
                    "measured": f"{row.share_of_baseline:.1%}",
                }
            )
    largest = [(row.peak_rss_bytes or 0) - row.samples[0].rss_before_bytes for row in report.rows if _is_ours(row)]
    if largest:
        claim = "peak RSS of fxoffload above its imports is below 1 GiB"
        report.claims.append(
            {"claim": claim, "held": max(largest) < GIB, "measured": f"{max(largest) / 2**20:.0f} MiB"}
        )


def _is_ours(row: Row) -> bool:
    return bool(row.samples) and row.variant.startswith(("merge", "fuse", "split"))


def _describe_disk(folder: Path) -> dict[str, Scalar]:
    """The filesystem that is written to, the cores' load before, and how much may be written ahead of the disk."""
    described: dict[str, Scalar] = {"load_average_before": os.getloadavg()[0]}
    best = max(
        (p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
    )
    described["filesystem"] = best.fstype
    for name in ("dirty_ratio", "dirty_background_ratio"):
        path = Path(f"/proc/sys/vm/{name}")
        described[name] = int(path.read_text()) if path.exists() else None
    described["ram_available_bytes"] = psutil.virtual_memory().available
    return described
