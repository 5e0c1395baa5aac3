"""Any result file: read, named and rendered, whatever its scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import moe_convert
from benchmarks.moe_convert import MoeReport
from benchmarks.schema import Report, from_json
from benchmarks.tables import render as render_report

AnyReport = Report | MoeReport


def load(path: Path) -> AnyReport:
    """What ``run`` wrote to ``path``.

    Raises:
        ValueError: there is no such file, or ``run`` did not write it; the message names its content.
    """
    if not path.exists():
        raise ValueError(f"expected a result file, found no {path}")
    text = path.read_text()
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON that run wrote, found {path}, which is none: {error}") from error
    if not isinstance(found, dict) or "scenario" not in found:
        held = f"a list of {len(found)}" if isinstance(found, list) else ", ".join(list(found)[:3])
        raise ValueError(f"expected a report that run wrote, with a scenario and records; {path} holds {held}")
    try:
        return moe_convert.from_json(text) if found["scenario"] == moe_convert.NAME else from_json(Report, text)
    except (TypeError, KeyError) as error:
        raise ValueError(f"expected a report of this version of the harness, found {path}: {error}") from error


def render(report: AnyReport) -> str:
    """Its tables, claims and failures, in Markdown."""
    return moe_convert.render(report) if isinstance(report, MoeReport) else render_report(report)
