"""How far off a plan's estimates of segments were: its first numbers against its calibrated ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.stock.records import SegmentEstimate

# Of ops whose time is worth naming, by what their names contain.
_HEAVY = ("mm", "attention", "softmax", "embedding", "scatter", "index_put", "sort", "topk", "conv", "loss", "cumsum")
MOST_SEGMENTS = 12


def segment_estimates(texts: Mapping[str, str]) -> list[SegmentEstimate]:
    """The segments whose times differ most, in milliseconds; one for those of the same name and phase.

    Args:
        texts: the plan as JSON, "frozen" before it was calibrated and "calibrated" after that.
    """
    if "calibrated" not in texts:
        return []
    said, measured = (_times(json.loads(texts[name])) for name in ("frozen", "calibrated"))
    ops = _ops_of_segments()
    found = [
        SegmentEstimate(phase, segment, said[phase, segment], ms, ops.get((phase, _own_name(segment)), ""))
        for (phase, segment), ms in measured.items()
        if (phase, segment) in said
    ]
    return sorted(found, key=lambda s: -abs(s.estimated_ms - s.measured_ms))[:MOST_SEGMENTS]


def _times(plan: dict[str, Any]) -> dict[tuple[str, str], float]:
    total: Counter[tuple[str, str]] = Counter()
    for boundary in plan["boundaries"]:
        total[boundary["phase"], boundary["segment"]] += boundary["end_ms"] - boundary["begin_ms"]
    return dict(total)


def _own_name(segment: str) -> str:
    """Without the call in front that a plan over several graphs gives it ("call 3: layers_0")."""
    return segment.rpartition(" ")[2]


def _ops_of_segments() -> dict[tuple[str, str], str]:
    """Heavy ops of each segment that this process compiled, by phase and name."""
    import fxoffload

    found: dict[tuple[str, str], str] = {}
    for graph in fxoffload.graphs():
        for phase, outer in (("forward", graph.forward), ("backward", graph.backward)):
            if outer is None:
                continue
            for node in outer.graph.nodes:
                if node.op == "call_module":
                    found[phase, str(node.target)] = _heavy(getattr(outer.get_submodule(node.target), "ops", {}))
    return found


def _heavy(ops: Mapping[str, int]) -> str:
    heavy = {name: n for name, n in ops.items() if any(word in name for word in _HEAVY)}
    return ", ".join(f"{n} {name.removeprefix('aten.')}" for name, n in sorted(heavy.items(), key=lambda x: -x[1])[:5])
