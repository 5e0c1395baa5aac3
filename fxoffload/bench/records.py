"""The request to a measuring process, its answer, and the whole report. Names end in their units."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["probe", "plain", "checkpoint", "fxoffload", "phases"]
Status = Literal["ok", "failed", "timeout", "skipped"]


@dataclass(frozen=True)
class BenchWork:
    """A decoder and its batch of one sequence. ``inner``: "inductor", or "aot_eager" where nothing is compiled."""

    device: str
    dtype: str
    layers: int
    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: str = "inductor"
    warmup: int = 8
    steps: int = 7
    cycles: int = 5


@dataclass(frozen=True)
class Request:
    """The input of one process. ``work``: None for a "probe". ``activation_budget``: None for fxoffload's default."""

    kind: Kind
    work: BenchWork | None = None
    activation_budget: int | None = None


@dataclass
class Machine:
    """The answer of a process of ``kind`` "probe". Memory is None without a GPU."""

    gpu: str | None
    torch: str
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass
class Spread:
    """Median and quartiles."""

    median: float
    q1: float
    q3: float


@dataclass
class Steps:
    """``peak_bytes``: above the bytes allocated before the steps; None on a CPU. ``gradient_norms``: by parameter.
    ``planned_*``: what fxoffload's plan says of itself and of plain Inductor."""

    first_step_s: float
    step_ms: Spread
    peak_bytes: int | None
    loss: float
    gradient_norms: list[float]
    planned_peak_bytes: int | None = None
    planned_baseline_peak_bytes: int | None = None
    smallest_budget_bytes: int | None = None


@dataclass
class Switches:
    """Parameters and optimizer state to the host and back; GB (1e9 bytes) a second. ``link_*``: one pinned copy."""

    moved_bytes: int
    first_offload_gb_per_s: float
    offload_gb_per_s: Spread
    onload_gb_per_s: Spread
    link_down_gb_per_s: float | None
    link_up_gb_per_s: float | None
    equal: bool


Answer = Machine | Steps | Switches


@dataclass
class BenchRow:
    """One process. ``reason`` says why there is no result."""

    name: str
    status: Status
    reason: str
    wall_s: float
    activation_budget: int | None = None
    steps: Steps | None = None
    switches: Switches | None = None


@dataclass
class Report:
    """What ``fxoffload bench --json`` writes. ``rehearsal``: without a GPU nothing here says anything about speed."""

    date: str
    fxoffload: str
    machine: Machine
    work: BenchWork
    rehearsal: bool
    rows: list[BenchRow] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)
