"""The golden files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PLANS, SIMULATIONS, EVENTS = (FOLDER / f"{name}.json" for name in ("plans", "simulations", "events"))


def read(path: Path) -> list[dict[str, Any]]:
    """The cases of a file; none where it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write(path: Path, cases: list[dict[str, Any]]) -> None:
    """One case an object, one field a line."""
    objects = []
    for case in cases:
        fields = [f" {json.dumps(k)}: {_text(v)}" for k, v in case.items()]
        objects.append("{\n" + ",\n".join(fields) + "\n}")
    path.write_text("[\n" + ",\n".join(objects) + "\n]\n", encoding="utf-8")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[\n  " + ",\n  ".join(json.dumps(v) for v in value) + "\n ]"
    return json.dumps(value)
