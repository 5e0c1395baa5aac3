"""Remakes the golden files, and prints what changes: ``python -m tests.oracle.make [WORD ...]``.

With words, only plans of cases whose names have one of them are remade. Budgets stay those of the golden file.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.oracle import events, golden, simulations
from tests.oracle.cases import BATCHES, SHARE, Batch
from tests.oracle.outcome import changes, compare


def plans(words: Sequence[str]) -> None:
    """Of all batches that have a case with one of the words."""
    known = {case["name"]: case for case in golden.read(golden.PLANS)}
    found: dict[str, Any] = {}
    order = [name for batch in BATCHES for name in batch.objectives]
    for batch in BATCHES:
        if words and not any(w in name for w in words for name in batch.objectives):
            continue
        print(f"-- {batch.made}", flush=True)
        options = _options(batch, known)
        for name, numbers in batch.run(options).items():
            if numbers is None:
                raise RuntimeError(f"{name}: expected a plan, found none")
            found[name] = {"name": name, "made": batch.made, "options": options[name], "numbers": numbers}
            _print(name, known.get(name), found[name])
        now = {**known, **found}
        golden.write(golden.PLANS, [now[name] for name in order if name in now])


def _options(batch: Batch, known: Mapping[str, Any]) -> dict[str, Any]:
    """With budgets in bytes."""
    asked = {n: dict(known[n]["options"] if n in known else o) for n, o in batch.objectives.items()}
    if not any(SHARE in o for o in asked.values()):
        return asked
    (free,) = batch.run({"": {"max_slowdown": 0.5}}).values()
    assert free is not None
    least, most = free["smallest_budget_bytes"], free["plain_peak_bytes"]
    for options in asked.values():
        if SHARE in options:
            options["activation_budget"] = round(least + options.pop(SHARE) * (most - least))
    return asked


def _print(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    if before is None:
        return print(f"{name}: new")
    lines = changes(before["numbers"], now["numbers"])
    found = compare(before["numbers"], now["numbers"], now["options"].get("activation_budget"))
    kind = "WORSE" if found.worse else "better" if found.better else "same"
    print("\n    ".join([f"{name}: {kind}", *lines]), flush=True)


def texts(path: Any, found: list[dict[str, Any]]) -> None:
    """Files that are compared as they are."""
    known = {case["name"]: case for case in golden.read(path)}
    for case in found:
        print(f"{path.stem}: {case['name']}: {'same' if known.get(case['name']) == case else 'CHANGED'}", flush=True)
    golden.write(path, found)


def main(words: Sequence[str]) -> None:
    """Everything, or plans of some cases."""
    os.environ["FXOFFLOAD_PROGRESS"] = "0"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not words:
        texts(golden.SIMULATIONS, [simulations.run(name) for name in simulations.NAMES])
        texts(
            golden.EVENTS,
            [{"name": name, "made": s.made, "log": events.run(name)} for name, s in events.SCRIPTS.items()],
        )
    plans(words)


if __name__ == "__main__":
    main(sys.argv[1:])
