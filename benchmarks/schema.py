"""Requests to a measuring process and its answers: typed, and JSON in both directions."""

import dataclasses
import json
import os
import secrets
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.changing_lengths.records import LengthsRun
from benchmarks.rl.records import RlResult
from benchmarks.stock.records import StockRun

Scalar = str | int | float | bool | None
Status = Literal["ok", "partial", "failed", "timeout", "skipped"]
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """The work of one step. Sizes are those of the H200 runs; ``--set`` makes them small for a rehearsal.

    ``compile``: "whole", or "layers": each decoder layer on its own, the rest eager (sweeps and ``activations``), or
    "no" (scenarios of phases only). Of these only: ``state`` (the optimizer state's dtype), ``parallel`` ("no",
    "fsdp2"), ``micro_batches`` of a training step. Of ``stock`` only: ``form``, how the model is trained (see
    ``stock/models.py``); its case's name has it.
    """

    name: str = "stack"
    layers: int = 16
    seq: int = 16384
    batch: int = 1
    hidden: int = 4096
    ffn: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 16
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0
    experts: int = 0
    experts_per_token: int = 0
    compile: str = "whole"
    state: str = "bfloat16"
    parallel: str = "no"
    micro_batches: int = 1
    form: str = ""


@dataclass(frozen=True)
class Variant:
    """One way to run the case. ``options`` go to the fxoffload backend as they are, but for a budget that is relative
    to a peak of the same run (see budgets.py). ``lengths`` are what ``max-seq`` tries with this variant."""

    label: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


# "": NCCL between GPUs, Gloo between processes on the CPU. "gloo": on GPUs too, which ranks may share; its collectives
# go through the host, so times say little. "fake": torch's stand-in, one process that is rank 0 of a group with no
# other process; FSDP's buffers and streams are real, collectives take no time and gradients mean nothing.
PROCESS_GROUPS = ("", "gloo", "fake")


@dataclass(frozen=True)
class Protocol:
    """How a variant is measured: first step, second step, ``warmup`` steps, then ``steps`` timed ones.

    Of sweeps only: ``calibration_steps`` (at most this many steps more until a plan is calibrated), ``long_steps`` (for
    reserved against allocated memory). Also ``memory_fraction`` ("no", "steps", "whole": see limits.py) and ``caches``
    (folder of compile caches that outlives the run; "": a fresh one). Of ``max-seq``: ``lengths`` in ascending order,
    ``probes`` of them at most, ``probe_steps`` timed steps each after the first. ``warm``: each variant once more in a
    second process with the compile caches of the first. ``fsdp`` only: ``tensor_parallel`` of the ``ranks`` share each
    layer; ``process_group``: how they meet (``PROCESS_GROUPS``). ``fsdp-lengths`` only: ``shortest`` batch in tokens;
    the case's ``seq`` is the longest.

    Of the scenarios of phases only: ``cycles_s`` (no steady cycle or step but the first begins later), ``endurance``
    (cycles in a row that are checked for bits and growth; 0: none). ``logprob_s``: the log-prob phase takes at least
    that. ``bucket``: of ``stream_weights``. ``rollout_s`` and ``kv_fraction`` (of the free memory): of ``rl-step``.
    ``pin_gib``: of ``pinning``. ``trace_overlap``: where the time during copies went, by one run each under the
    profiler (``phases``). ``ablate_overlap``: the optimizer around log-probs also without each mechanism for it
    (``phases``).
    """

    warmup: int = 2
    steps: int = 7
    timeout_s: float = 300.0
    ranks: int = 1
    tensor_parallel: int = 1
    process_group: str = ""
    shortest: int = 1024
    gradients: bool = True
    allocator_trace: bool = True
    copy_trace: bool = True
    link_mib: int = 256
    link_copies: int = 20
    warm: bool = False
    calibration_steps: int = 0
    long_steps: int = 0
    memory_fraction: str = "no"
    caches: str = ""
    lengths: list[int] = field(default_factory=list)
    probes: int = 3
    probe_steps: int = 1
    cycles_s: float = 20.0
    endurance: int = 0
    logprob_s: float = 0.5
    bucket: str = "512MiB"
    rollout_s: float = 1.0
    kv_fraction: float = 0.9
    pin_gib: float = 8.0
    trace_overlap: bool = False
    ablate_overlap: bool = False

    @property
    def num_processes(self) -> int:
        return 1 if self.process_group == "fake" else self.ranks


@dataclass(frozen=True)
class Request:
    """The whole input of one measuring process."""

    scenario: str
    case: Case
    variant: Variant
    protocol: Protocol
    rank: int = 0
    rendezvous: str = ""


@dataclass(frozen=True)
class SweepRequest:
    """The whole input of a process that measures many variants of a case. ``peaks``: by label, measured before it."""

    scenario: str
    case: Case
    variants: list[Variant]
    protocol: Protocol
    time_left_s: float
    peaks: dict[str, int] = field(default_factory=dict)


@dataclass
class Summary:
    """Order statistics of one measure over the timed steps."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    values: list[float]


@dataclass
class Memory:
    """Device memory over the timed steps, from the caching allocator's own counters."""

    before_bytes: int
    peak_bytes: int
    max_reserved_bytes: int
    num_alloc_retries: int
    num_ooms: int


@dataclass
class TracedPeak:
    """Peaks replayed from the allocator's trace of one extra step (see allocator_trace.py)."""

    peak_bytes: int
    peak_without_returned_gradients_bytes: int
    returned_gradients_at_peak_bytes: int
    returned_gradients_bytes: int
    num_events: int
    num_gradients: int
    num_matched_by_marker: int
    num_matched_by_last_allocation: int
    num_unmatched: int
    allocator_peak_bytes: int
    replay_error: float
    agrees_within_1_percent: bool


@dataclass
class Copies:
    """Memcpy activity of one extra step, from the profiler: the copy engines' own times."""

    d2h_bytes: int
    h2d_bytes: int
    d2h_count: int
    h2d_count: int
    d2h_busy_ms: float
    h2d_busy_ms: float
    d2h_span_ms: float
    h2d_span_ms: float
    d2h_gb_per_s: float
    h2d_gb_per_s: float


@dataclass
class Collective:
    """NCCL's kernels of one kind in an extra step, from the profiler; the average of a few.

    ``kernel_ms``: their times summed up, in which a kernel waits for its peers. ``busy_ms``: time in which at least one
    ran. ``lower_quartile_ms``: of one kernel, a fourth of them are no longer. ``each_ms``: all of them, in the order in
    which they began. ``each_all_there_ms``: the same, each of the rank where it was shortest, which came last and did
    not wait (empty: not known). ``all_there_ms``: of these, summed up over a step, the median over all steps of each.
    ``beside_copies``: the part of ``busy_ms`` in which copies from or to the host ran too, on this rank. Files from
    2026-11-23-2xh200-fsdp-bursts.json to 2026-11-25-2xh200-fsdp.json have means there. They mix up the steps of two
    traces, so that ranks were compared at different collectives."""

    count: float
    kernel_ms: float
    busy_ms: float
    lower_quartile_ms: float = 0.0
    each_ms: list[float] = field(default_factory=list)
    each_all_there_ms: list[float] = field(default_factory=list)
    all_there_ms: float | None = None
    beside_copies: float = 0.0


@dataclass
class RankMachine:
    """What one rank of several has without a model: a slow peer, or a slow way to it, slows all of them.

    ``all_gather_gb_per_s``: of the bytes gathered over all ranks, once they were there; ``matmul_bf16_tflop_per_s``: of
    its GPU (None on a CPU)."""

    all_gather_gb_per_s: float
    matmul_bf16_tflop_per_s: float | None = None


@dataclass
class CollectiveBeside:
    """Collectives of one kind during copies of one way, back to back (see ``collectives/``).

    ``kind``: "AllGather", "ReduceScatter"; ``copies``: "none", "down", "up", "both"; ``nbytes``: of the whole tensor.
    ``ms``: of one, once all ranks had come to it; ``vs_none``: by round, the median over that of the same round without
    copies (None: these are without); ``d2h_gb_per_s``, ``h2d_gb_per_s``: of the copies meanwhile.
    """

    kind: str
    copies: str
    nbytes: int
    ms: Summary
    vs_none: Summary | None = None
    d2h_gb_per_s: float | None = None
    h2d_gb_per_s: float | None = None


@dataclass
class Host:
    """Host memory of the measuring process."""

    rss_before_first_step_bytes: int
    rss_after_bytes: int
    max_rss_bytes: int
    machine_available_before_first_step_bytes: int
    machine_available_after_bytes: int


@dataclass
class Digest:
    """One gradient, reduced in float64: its sum, its norm, and its projection on a fixed random direction. The
    projections of its ``parts`` on theirs add up to that (see gradients_compare.py; "" in older reports)."""

    sum: float
    norm: float
    probe: float
    parts: str = ""


@dataclass
class PlanFacts:
    """What ``fxoffload.plans()`` said, by when.

    ``predicted`` and ``baseline`` were written down after the first step (that is when a plan is first seen),
    ``calibrated`` before the timed steps. The dicts are those of ``Plan.to_json``; its whole text goes to another file.
    """

    num_plans: int
    frozen_after_steps: int
    summary: str
    predicted: dict[str, Any]
    baseline: dict[str, Any]
    smallest_budget_bytes: int
    graph: int = -1
    floors: list[str] = field(default_factory=list)
    frontier: list[dict[str, Any]] = field(default_factory=list)
    planning_s: float | None = None
    num_drafts: int | None = None
    calibrated_after_steps: int | None = None
    calibrated: dict[str, Any] | None = None
    calibrated_baseline: dict[str, Any] | None = None
    prediction_changed_later: bool | None = None
    smallest_budget_at_end_bytes: int | None = None
    measured_peak_bytes: int | None = None
    loss: str = "inside"
    measured_step_ms: float | None = None
    measured_exposed_ms: float | None = None
    between_steps_ms: float | None = None
    calibrated_between_steps_ms: float | None = None
    texts: dict[str, str] = field(default_factory=dict)


@dataclass
class LongRun:
    """Many steps from an empty cache: how much more the allocator reserves than is allocated."""

    num_steps: int
    memory: Memory | None
    step_ms: Summary
    reserved_vs_allocated: float | None


@dataclass
class LimitedRun:
    """Steps under ``set_per_process_memory_fraction``: does the variant live within its budget and ten percent?"""

    mode: str
    fraction: float
    limit_bytes: int
    num_steps: int = 0
    completed: bool = False
    reason: str = ""
    step_ms: float | None = None
    max_reserved_bytes: int | None = None
    num_alloc_retries: int | None = None


@dataclass
class Probe:
    """One sequence length: whether whole training steps of it run, and their needs. Peaks are absolute.

    ``num_steps``: how many ended; all that were asked for where it ``ran`` (0 in reports of before). ``failed_in``: the
    phase of the step after them that did not.
    """

    seq: int
    ran: bool = False
    reason: str = ""
    failed_in: str = ""
    num_steps: int = 0
    first_step_ms: float | None = None
    step_ms: float | None = None
    phase_ms: dict[str, float] = field(default_factory=dict)
    allocated_before_bytes: int | None = None
    peak_bytes: int | None = None
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    max_reserved_bytes: int | None = None
    num_alloc_retries: int | None = None
    allocated_at_failure_bytes: int | None = None
    largest_blocks_at_failure: list[list[int]] = field(default_factory=list)
    loss: float | None = None
    plan: PlanFacts | None = None
    stats: dict[str, float] | None = None


@dataclass
class WarmStart:
    """The same variant in a second process whose compile caches the first one filled; as the fields of ``Result``."""

    status: Status
    reason: str
    wall_s: float
    first_step_ms: float | None = None
    second_step_ms: float | None = None
    compile_s: float | None = None
    compile_times_s: dict[str, float] = field(default_factory=dict)
    compile_shares: dict[str, float] = field(default_factory=dict)
    dynamo_counters: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Overhead:
    """A step on the host's clock (see overhead.py), in microseconds, and how many segments and copies it has."""

    host_us: Summary
    forward_us: Summary
    cpu_us: Summary
    tail_us: Summary
    num_segment_calls: int
    num_copies: float


@dataclass
class Result:
    """What a measuring process writes, field by field as its phases finish."""

    finished: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_available: str = ""
    software: dict[str, Scalar] = field(default_factory=dict)
    parameter_bytes: int = 0
    gradient_buffer_bytes: int = 0
    first_step_ms: float | None = None
    second_step_ms: float | None = None
    compile_s: float | None = None
    compile_times_s: dict[str, float] = field(default_factory=dict)
    compile_shares: dict[str, float] = field(default_factory=dict)
    dynamo_counters: dict[str, dict[str, int]] = field(default_factory=dict)
    num_graphs_first_step: int = 0
    num_graphs_at_end: int = 0
    num_timed_steps: int = 0
    step_ms: Summary | None = None
    forward_ms: Summary | None = None
    backward_ms: Summary | None = None
    host_wall_ms: Summary | None = None
    losses: list[float] = field(default_factory=list)
    memory: Memory | None = None
    traced_peak: TracedPeak | None = None
    copies: Copies | None = None
    collectives: dict[str, Collective] = field(default_factory=dict)
    # fxoffload's: of steps of the same process that keep everything
    collectives_without: dict[str, Collective] = field(default_factory=dict)
    # the same steps, while copies that nothing waits for go "down" to the host all the while
    collectives_idle: dict[str, dict[str, Collective]] = field(default_factory=dict)
    collectives_beside: list[CollectiveBeside] = field(default_factory=list)
    host: Host | None = None
    stats_first_step: dict[str, float] | None = None
    stats_timed_steps: dict[str, float] | None = None
    stats_per_step: dict[str, float] | None = None
    gradients: dict[str, Digest] = field(default_factory=dict)
    gradient_repeat_difference: float | None = None
    gradient_repeat_differences: dict[str, float] = field(default_factory=dict)
    step_ms_by_rank: list[float] = field(default_factory=list)
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    machine_by_rank: list[RankMachine] = field(default_factory=list)
    link: dict[str, float] | None = None
    budget_bytes: int | None = None
    first_step_memory: Memory | None = None
    plan: PlanFacts | None = None
    long_run: LongRun | None = None
    limited_run: LimitedRun | None = None
    leaked_bytes: int | None = None
    probes: list[Probe] = field(default_factory=list)
    warm: WarmStart | None = None
    overhead: Overhead | None = None
    changing_lengths: LengthsRun | None = None
    optimizer_ms: Summary | None = None
    stock: StockRun | None = None
    rl: RlResult | None = None

    @property
    def was_measured(self) -> bool:
        """Whether what the process was started for was measured, though something after it may have failed."""
        rl = self.rl
        if self.step_ms is not None or self.collectives_beside:
            return True
        return (
            self.link is not None if rl is None else bool(rl.stream or rl.pinning or _has_cycles(rl) or _has_steps(rl))
        )


def _has_cycles(rl: RlResult) -> bool:
    return rl.switching is not None and rl.switching.offload is not None


def _has_steps(rl: RlResult) -> bool:
    return rl.step is not None and rl.step.step is not None


@dataclass
class Record:
    """One row: the request, the outcome, and the measurements until then."""

    scenario: str
    case: Case
    variant: Variant
    status: Status
    reason: str
    wall_s: float
    result: Result
    log_tail: str = ""


@dataclass
class Report:
    """One JSON file."""

    scenario: str
    environment: dict[str, Scalar]
    protocol: Protocol
    link: dict[str, float] | None
    records: list[Record]
    derived: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)


def to_json(value: Any) -> str:
    """The JSON text of a dataclass of this module."""
    return json.dumps(dataclasses.asdict(value), indent=1)


def from_json(cls: type[T], text: str) -> T:
    """The dataclass that ``to_json`` wrote."""
    return decode(cls, json.loads(text))


def decode(kind: Any, value: Any) -> Any:
    """``value`` (parsed JSON) as ``kind``: dataclasses, lists, dicts, optionals and scalars."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: decode(hints[name], item) for name, item in value.items()})
    if origin is list:
        return [decode(arguments[0], item) for item in value]
    if origin is dict:
        return {key: decode(arguments[1], item) for key, item in value.items()}
    if origin is types.UnionType and value is not None:
        dataclass_arms = [arm for arm in arguments if dataclasses.is_dataclass(arm) or typing.get_origin(arm) is dict]
        return decode(dataclass_arms[0], value) if dataclass_arms else value
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` at once, so that a killed process leaves the previous version whole."""
    # Not fxoffload.files, which would import torch. The name cannot be guessed, so that no link lies there.
    temporary = path.with_name(f".{secrets.token_hex(16)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
