"""What the scenarios of phases measure. Every field is null where it was not measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Spread:
    """Median and quartiles over ``values``, which are in the order in which they were measured."""

    median: float
    q1: float
    q3: float
    values: list[float]


@dataclass
class Way:
    """One direction. ``of_link``: GB/s over that of the link, measured at the end of the same process."""

    seconds: Spread
    gb_per_s: float
    of_link: float | None = None


@dataclass
class Exposed:
    """The optimizer's state leaves for ``forwards`` log-prob forwards and is back for the optimizer's step after them.

    ``alone``: forwards and training step with nothing moving; ``around``: the same with the state leaving and coming.
    ``exposed_s`` is the difference of their medians; ``serial_s`` is leaving and coming alone. ``begin_offload_s`` and
    ``begin_onload_s``: how long the host is in the calls that begin both. ``without``: ``around`` with something
    switched off, by its name (``ablate_overlap``).
    """

    forwards: int
    logprob_s: float
    alone: Spread
    around: Spread
    offload_s: float
    onload_s: float
    serial_s: float
    exposed_s: float
    exposed_vs_serial: float | None
    begin_offload_s: float | None = None
    begin_onload_s: float | None = None
    without: dict[str, Spread] = field(default_factory=dict)


@dataclass
class FirstForward:
    """From the call that loads the parameters: the first layer's first matmul is done, and all are loaded."""

    first_matmul: Spread
    load_all: Spread
    fraction: float


@dataclass
class Endurance:
    """Cycles in a row. Every tenth is checked, after a bit of every tensor was changed on the device."""

    cycles: int
    bit_equal: bool
    rss_growth_bytes: int
    host_reserved_growth_bytes: int | None
    device_reserved_growth_bytes: int | None
    device_free_growth_bytes: int | None


@dataclass
class Streamed:
    """Weights handed to a reader that copies each on the device into one place; ``seconds`` of the whole model.

    ``peak_bytes``: device memory above the bytes before; ``promised_bytes``: two buckets and the largest.
    """

    tensors: int
    num_bytes: int
    seconds: Spread
    gb_per_s: float
    largest_bytes: int
    bucket_bytes: int | None = None
    peak_bytes: int | None = None
    promised_bytes: int | None = None
    equal: bool | None = None
    of_link: float | None = None


@dataclass
class WhereTimeWent:
    """Of one run under the profiler, which slows the host down; see ``overlap_trace``.

    Attributes:
        host_ms: until the calling thread had queued all of it.
        until_first_kernel_ms: since the beginning; None: there was no kernel.
        until_last_kernel_ms: the same.
        kernels_ms: in which kernels ran that are no collectives.
        collectives_ms: in which NCCL's kernels ran, waits for other ranks included.
        device_busy_ms: in which either ran.
        copies_ms: in which copies ran, by way.
        ours_on_host_ms: in which the calling thread was in a range of fxoffload's.
        ours_ms: of each such range, on any thread.
        cuda_calls_ms: of calls of CUDA, on any thread, until then, that took a millisecond in all.
    """

    host_ms: float
    until_first_kernel_ms: float | None
    until_last_kernel_ms: float | None
    kernels_ms: float
    collectives_ms: float
    device_busy_ms: float
    copies_ms: dict[str, float]
    ours_on_host_ms: float
    ours_ms: dict[str, float]
    cuda_calls_ms: dict[str, float]


@dataclass
class CopiesAlone:
    """See ``Switching.copies_alone``. Medians of three rounds."""

    d2h_gb_per_s: float
    h2d_gb_per_s: float


@dataclass
class Switching:
    """Of ``phases``: parameters, buffers and optimizer state leave the device and return.

    ``*_bytes`` of the device are this rank's. ``attach_s``: what the strategy does before the first cycle.
    ``residue_bytes``: free memory as the driver sees it after context, communicators and a warm-up kernel, minus free
    memory with everything away: after the first cycle, and after everything (``residue_later_bytes``).
    ``host_bytes``: what the strategy says it reserves, or else the growth of RSS; ``host_vs_device`` over the bytes
    that are away. ``traces``: of the log-probs and the training step alone and with the
    optimizer leaving and coming, and of a first forward, where asked for. ``by_rank``: every rank's main figures.
    """

    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    moved_bytes: int = 0
    attach_s: float | None = None
    first_offload_s: float | None = None
    first_onload_s: float | None = None
    first_offload_gb_per_s: float | None = None
    first_onload_gb_per_s: float | None = None
    offload: Way | None = None
    onload: Way | None = None
    bit_equal: bool | None = None
    exposed: Exposed | None = None
    first_forward: FirstForward | None = None
    free_before_parameters_bytes: int | None = None
    residue_bytes: int | None = None
    residue_later_bytes: int | None = None
    rss_before_bytes: int | None = None
    rss_away_bytes: int | None = None
    host_reserved_bytes: int | None = None
    host_bytes: int | None = None
    host_vs_device: float | None = None
    endurance: Endurance | None = None
    stream: Streamed | None = None
    copies_alone: CopiesAlone | None = None
    traces: dict[str, WhereTimeWent] = field(default_factory=dict)
    by_rank: list[dict[str, float | None]] = field(default_factory=list)


@dataclass
class RlStep:
    """Of ``rl-step``: a whole step, and the same work in the same process with nothing to switch.

    ``switching_s``: difference of the medians. ``phase_s``: seconds of the step's parts, switches included;
    ``phase_alone_s`` without. ``kv_bytes``: what the rollout allocated.
    """

    kv_bytes: int = 0
    forwards: int = 0
    matmuls: int = 0
    first_step_s: float | None = None
    step: Spread | None = None
    alone: Spread | None = None
    switching_s: float | None = None
    switching_share: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    phase_alone_s: dict[str, float] = field(default_factory=dict)


@dataclass
class RlResult:
    """What a process of these scenarios measured; ``pinning`` has rows."""

    switching: Switching | None = None
    stream: Streamed | None = None
    step: RlStep | None = None
    pinning: list[dict[str, Any]] = field(default_factory=list)
