"""Counters of everything that fxoffload did in this process."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.tell import warn


@dataclass(frozen=True)
class Stats:
    """A snapshot. Counters count since the start of the process or the last ``fxoffload.reset_stats()``.

    Attributes:
        bytes_offloaded: bytes copied from the device to the host.
        bytes_reloaded: bytes copied from the host to the device.
        bytes_reclaimed: offloaded bytes that the backward took back before their memory on the device was given up, so
            that they were not copied back.
        num_copies: copies started, both directions (one per storage).
        host_bytes_reserved: host memory held by the arenas now (pinned, on a GPU machine).
        host_bytes_in_use: bytes of it that hold offloaded values now.
        host_wait_ms: time the host stood still because memory was not pinned yet.
        host_paced_ms: time the host waited for the device, so that copies during FSDP2's collectives are fast.
        num_host_growths: times an arena pinned another chunk.
        bytes_host_trimmed: host memory given back because only the steps before a plan over several graphs needed it.
        exposed_copy_ms: time the compute stream stood still for copies (reading it waits for the device).
        num_segments_compiled: segments compiled.
        num_segments_reused: segments that reused the code of an identical one.
        num_prefetch_misses: reloads that had not been started when they were needed.
        num_wrong_predictions: backwards of compiled graphs that began while reloads for another one's were next. A plan
            knows the order; without one, graphs that ran before are expected next, the latest first.
        bytes_kept_host_full: bytes that stayed on the device because the host budget was used up.
        calls_kept: forward calls that kept everything, by reason.
        calls_uncompiled: calls of compiled functions that Dynamo ran uncompiled, wholly or in part, by reason. Either a
            recompile limit is used up, or, where autograd records something, the reason why no compiled graph ran.
        bytes_skipped: saved bytes of compiled graphs that are no candidates, by reason (size hints at compile time).
        num_fallbacks: graphs that compiled as plain Inductor because of ``on_error="fallback"``.
        num_plain_graphs: training graphs left to plain Inductor: nothing in them could be offloaded or was worth it,
            their tensors are on another device (the CPU), or on_error="fallback".
        num_ops_measured: heavy operators that were timed on the device for a plan, without those found in the cache.
        num_segments_measured: compiled segments that were run on made-up inputs before a first step.
        measuring_ms: time that this took, while graphs were compiled.
        costs_estimated: operators and segments whose estimate is used because they were not measured, by reason.
        num_groups_on_tape: forward calls whose saved values wait for their backward now.
    """

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    bytes_reclaimed: int = 0
    num_copies: int = 0
    host_bytes_reserved: int = 0
    host_bytes_in_use: int = 0
    host_wait_ms: float = 0.0
    host_paced_ms: float = 0.0
    num_host_growths: int = 0
    bytes_host_trimmed: int = 0
    exposed_copy_ms: float = 0.0
    num_segments_compiled: int = 0
    num_segments_reused: int = 0
    num_prefetch_misses: int = 0
    num_wrong_predictions: int = 0
    bytes_kept_host_full: int = 0
    calls_kept: Mapping[str, int] = field(default_factory=dict)
    calls_uncompiled: Mapping[str, int] = field(default_factory=dict)
    bytes_skipped: Mapping[str, int] = field(default_factory=dict)
    num_fallbacks: int = 0
    num_plain_graphs: int = 0
    num_ops_measured: int = 0
    num_segments_measured: int = 0
    measuring_ms: float = 0.0
    costs_estimated: Mapping[str, int] = field(default_factory=dict)
    num_groups_on_tape: int = 0

    @property
    def bytes_kept_for_backward(self) -> int:
        """Always 0, since ``policy="offload_all"`` offloads every candidate. Warns."""
        warn("stats().bytes_kept_for_backward is always 0: policy 'offload_all' offloads every candidate")
        return 0


class Counters:
    """The mutable side. One instance, ``counters``; thread-safe (autograd runs the backward on another thread)."""

    def __init__(self) -> None:
        self._lock = ForkSafeRLock()
        self._counts: dict[str, float] = defaultdict(int)
        self._by_reason: dict[str, Counter[str]] = {
            name: Counter() for name in ("calls_kept", "calls_uncompiled", "bytes_skipped", "costs_estimated")
        }

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter of ``Stats``."""
        with self._lock:
            self._counts[name] += amount

    def add_reason(self, name: str, reason: str, amount: int = 1) -> None:
        """Add to a counter of ``Stats`` that is split by reason."""
        with self._lock:
            self._by_reason[name][reason] += amount

    def reset(self) -> None:
        """Set every counter to zero."""
        with self._lock:
            self._counts.clear()
            for counter in self._by_reason.values():
                counter.clear()

    def snapshot(self, **gauges: int | float) -> Stats:
        """The counters together with ``gauges``, which the engines know."""
        with self._lock:
            reasons = {k: dict(v) for k, v in self._by_reason.items()}
            return Stats(**dict(self._counts), **reasons, **gauges)  # type: ignore[arg-type]


counters = Counters()
