"""What a column of a published table shows of a record, as text; empty where it was not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.moe_convert import Row
from benchmarks.offload import budget_bytes
from benchmarks.rl.records import RlResult, Switching, Way
from benchmarks.rl.tables import step_row, stream_row
from benchmarks.schema import Memory, Probe, Record
from benchmarks.truth import slowest_step_ms

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Measured:
    """A record, with the numbers derived from it and its baselines."""

    record: Record
    derived: dict[str, Any]


Column = Callable[[Measured], str]


def _step(m: Measured) -> str:
    """Of several ranks the slowest."""
    return _number(slowest_step_ms(m.record.result) if m.record.result.step_ms else None)


def _step_with_quartiles(m: Measured) -> str:
    """Of several ranks the slowest; only the first has written its quartiles. Steps in a row have a mean."""
    found, stock = m.record.result.step_ms, m.record.result.stock
    in_a_row = stock is not None and stock.row_ms is not None
    if found is None or in_a_row or len(m.record.result.step_ms_by_rank) > 1:
        return _step(m)
    return f"{found.median:.1f} [{found.q1:.1f}, {found.q3:.1f}]"


def _forward(m: Measured) -> str:
    return _number(m.record.result.forward_ms.median if m.record.result.forward_ms else None)


def _backward(m: Measured) -> str:
    return _number(m.record.result.backward_ms.median if m.record.result.backward_ms else None)


def _peak(memory: Memory | None) -> str:
    return _gib(memory.peak_bytes if memory else None)


def _without_gradients(m: Measured) -> str:
    traced = m.record.result.traced_peak
    return _gib(traced.peak_without_returned_gradients_bytes if traced else None)


def _reserved(m: Measured) -> str:
    run = m.record.result.long_run
    return _number(run.reserved_vs_allocated if run else None, 3)


def _limited(m: Measured) -> str:
    run = m.record.result.limited_run
    return "" if run is None else "completes" if run.completed else "does not complete"


def _budget(m: Measured) -> str:
    """Reports from before 2026-11-22 have it in bytes for sweeps only, else as the variant says it."""
    found = m.record.result.budget_bytes
    return _gib(budget_bytes(m.record.variant) if found is None else found)


def _host(m: Measured) -> str:
    """Pinned by fxoffload; of others what the process has grown by since before the first step."""
    host, stats = m.record.result.host, m.record.result.stats_timed_steps
    if stats is not None and "host_bytes_reserved" in stats:
        return _gib(int(stats["host_bytes_reserved"]))
    if m.record.result.step_ms is None:
        return ""
    return _gib(max(host.max_rss_bytes - host.rss_before_first_step_bytes, 0) if host else None)


def _moved_down(m: Measured) -> str:
    """Counted by fxoffload; of peers what the profiler saw."""
    copies = m.record.result.copies
    counted = (m.record.result.stats_per_step or {}).get("bytes_offloaded", copies.d2h_bytes if copies else None)
    return _number(counted / 1e9 if counted is not None else None)


def _exposed(m: Measured) -> str:
    return _number((m.record.result.stats_per_step or {}).get("exposed_copy_ms"))


def _gradients(m: Measured) -> str:
    """Against the reference of the same run; empty where that was not told apart from rounding."""
    agree = m.derived.get("gradients_agree")
    return "" if agree is None else "agree" if agree else "DIFFER"


def _planned_step(m: Measured, which: str) -> str:
    plan = m.record.result.plan
    said = getattr(plan, which) if plan is not None else None
    return _number(said["step_ms"] if said else None)


def _moved(m: Measured, which: str) -> str:
    moved = (m.record.result.stats_per_step or {}).get(which)
    return _number(moved / 1e9 if moved is not None else None)


# -- longest -----------------------------------------------------------------------------------------------------------


def _ran(m: Measured) -> Probe | None:
    return max((p for p in m.record.result.probes if p.ran), key=lambda p: p.seq, default=None)


def _longest(m: Measured) -> str:
    probe = _ran(m)
    return "none" if probe is None else f"{probe.seq:,}"


def _probe_peak(m: Measured) -> str:
    probe = _ran(m)
    return _gib(max(probe.phase_peak_bytes.values(), default=None) if probe else None)


def _probe_first_step(m: Measured) -> str:
    probe = _ran(m)
    return _number(probe.first_step_ms / 1e3 if probe and probe.first_step_ms else None, 0)


def _next_length(m: Measured) -> str:
    """The shortest that was tried and did not run. A probe that the deadline cut off has no reason of its own."""
    ran = _ran(m)
    beyond = [p for p in m.record.result.probes if not p.ran and p.seq > (ran.seq if ran else 0)]
    if not beyond:
        return "not finished in the time given" if m.record.status == "timeout" else ""
    probe = min(beyond, key=lambda p: p.seq)
    why = f"out of memory in the {probe.failed_in}" if probe.failed_in else "not finished in the time given"
    return f"{probe.seq:,}: {why}"


# -- phases ------------------------------------------------------------------------------------------------------------


def _switching(m: Measured) -> Switching:
    rl = m.record.result.rl
    return (rl.switching if rl is not None else None) or Switching()


def _of_ranks(m: Measured, name: str, worst: Callable[[list[float]], float]) -> float | None:
    """The worst of all ranks; the first rank's own figures are in the other fields."""
    found = _switching(m)
    known = [value for row in found.by_rank if (value := row.get(name)) is not None]
    return worst(known) if known else getattr(found, name, None)  # a run that was cut off has only its own


def _first(seconds: float | None, rate: float | None) -> str:
    return "" if seconds is None or rate is None else f"{seconds:.2f} ({rate:.1f} GB/s)"


def _first_offload(m: Measured) -> str:
    rate = _of_ranks(m, "first_offload_gb_per_s", min)
    return _first(None if rate is None else _switching(m).moved_bytes / 1e9 / rate, rate)


def _way(m: Measured, name: str) -> str:
    way: Way | None = getattr(_switching(m), name)
    rate, of_link = (_of_ranks(m, f"{name}_{what}", min) for what in ("gb_per_s", "of_link"))
    if way is None or rate is None:
        return "" if way is None else f"{way.seconds.median:.3f}"
    link = "" if of_link is None else f" ({of_link:.3f} of the link)"
    return f"{_switching(m).moved_bytes / 1e9 / rate:.3f}{link}"


def _of_plain_copies(m: Measured) -> str:
    """Both ways, each by the rank that is furthest below what plain copies of the same memory reach there."""
    shares = []
    for name, way in (("offload", "d2h"), ("onload", "h2d")):
        rates = [(r.get(f"{name}_gb_per_s"), r.get(f"copies_alone_{way}_gb_per_s")) for r in _switching(m).by_rank]
        known = [mine / plain for mine, plain in rates if mine is not None and plain]
        if not known:
            return ""
        shares.append(f"{min(known):.2f}")
    return ", ".join(shares)


def _plain_copies(m: Measured) -> str:
    found = [_of_ranks(m, f"copies_alone_{way}_gb_per_s", min) for way in ("d2h", "h2d")]
    return ", ".join(f"{rate:.1f}" for rate in found if rate is not None)


def _around_log_probs(m: Measured) -> str:
    found, share = _switching(m).exposed, _of_ranks(m, "exposed_vs_serial", max)
    return "" if found is None or share is None else f"{share * found.serial_s:.3f} of {found.serial_s:.3f}"


def _first_forward(m: Measured) -> str:
    return _number(_of_ranks(m, "first_forward_fraction", max), 2)


def _not_free(m: Measured) -> str:
    known = [_of_ranks(m, name, max) for name in ("residue_bytes", "residue_later_bytes")]
    return ", ".join(f"{size / MIB:.0f}" for size in known if size is not None)


def _streamed(m: Measured) -> str:
    return _number(_of_ranks(m, "stream_of_link", min), 3)


def _bits(m: Measured) -> str:
    equal = _switching(m).bit_equal
    return "" if equal is None else "equal" if equal else "DIFFER"


def _of_rl(row: Callable[[RlResult], dict[str, str]], name: str) -> Column:
    """As the scenario's own table has it."""

    def column(m: Measured) -> str:
        found = row(m.record.result.rl or RlResult()).get(name, "-")
        return "" if found == "-" else found.replace("%", " %")

    return column


def _collective(kind: str, copies: str) -> Column:
    def column(m: Measured) -> str:
        rows = [r for r in m.record.result.collectives_beside if (r.kind, r.copies) == (kind, copies)]
        if copies == "none":
            return _number(rows[0].ms.median, 3) if rows else ""
        return _change(rows[0].vs_none.median if rows and rows[0].vs_none else None)

    return column


# By the kernel's name; without copies, then copies of each way against that.
_COLLECTIVES = {"all-gather": "AllGather", "reduce-scatter": "ReduceScatter"}

COLUMNS: dict[str, Column] = {
    "step ms": _step,
    "step ms [quartiles]": _step_with_quartiles,
    "fwd ms": _forward,
    "bwd ms": _backward,
    "against inductor": lambda m: _change(m.derived.get("step_vs_inductor")),
    "against eager": lambda m: _change(m.derived.get("step_vs_eager")),
    "host GiB": _host,
    "GB moved": _moved_down,
    "against checkpoint": lambda m: _change(m.derived.get("step_vs_checkpoint")),
    "budget GiB": _budget,
    "peak GiB": lambda m: _peak(m.record.result.memory),
    "without gradients": _without_gradients,
    "gradients": _gradients,
    "first step": lambda m: _peak(m.record.result.first_step_memory),
    "error of peak": lambda m: _percent(m.derived.get("predicted_peak_error")),
    "of peak, cal.": lambda m: _percent(m.derived.get("calibrated_peak_error")),
    "of time": lambda m: _percent(m.derived.get("predicted_step_error")),
    "of time, cal.": lambda m: _percent(m.derived.get("calibrated_step_error")),
    "reserved / allocated": _reserved,
    "limited to budget + 10 %": _limited,
    "exposed ms": _exposed,
    "predicted ms": lambda m: _planned_step(m, "predicted"),
    "calibrated ms": lambda m: _planned_step(m, "calibrated"),
    "plan s": lambda m: _number(m.record.result.plan.planning_s if m.record.result.plan else None),
    "compile s": lambda m: _number(m.record.result.compile_s),
    "with warm caches": lambda m: _number(m.record.result.warm.compile_s if m.record.result.warm else None),
    "compile, of inductor's": lambda m: _number(m.derived.get("compile_vs_inductor"), 2),
    "GB down": lambda m: _moved(m, "bytes_offloaded"),
    "GB up": lambda m: _moved(m, "bytes_reloaded"),
    "forward / bound": lambda m: _number(m.derived.get("forward_vs_bound"), 3),
    "backward / bound": lambda m: _number(m.derived.get("backward_vs_bound"), 3),
    "backward / bound of all bytes": lambda m: _number(m.derived.get("backward_vs_bound_of_all_bytes"), 3),
    "longest that trained": _longest,
    "peak of the process GiB": _probe_peak,
    "first step s": _probe_first_step,
    "next length": _next_length,
    "first offload, s": _first_offload,
    "first onload, s": lambda m: _first(_switching(m).first_onload_s, _switching(m).first_onload_gb_per_s),
    "steady offload, s": lambda m: _way(m, "offload"),
    "steady onload, s": lambda m: _way(m, "onload"),
    "plain copies of the same memory, GB/s: to the host, back": _plain_copies,
    "of plain copies: to the host, back": _of_plain_copies,
    "optimizer around log-probs: exposed of serial, s": _around_log_probs,
    "first forward after onload, of loading everything": _first_forward,
    "not free in the rollout, MiB: first cycle, at the end": _not_free,
    "host bytes / device bytes": lambda m: _number(_switching(m).host_vs_device, 3),
    "`stream_weights`, of the link": _streamed,
    "bits": _bits,
    "first whole step, s": _of_rl(step_row, "first step s"),
    "whole step, s": _of_rl(step_row, "step s"),
    "nothing to switch, s": _of_rl(step_row, "alone s"),
    "switching, s": _of_rl(step_row, "switching s"),
    "of the step": _of_rl(step_row, "of the step"),
    **{f"{phase}, s": _of_rl(step_row, f"{phase} s") for phase in ("rollout", "logprob", "train", "sync")},
    "stream, s": _of_rl(stream_row, "s"),
    "stream, GB/s": _of_rl(stream_row, "GB/s"),
    "stream, of the link": _of_rl(stream_row, "of link"),
    "above what was there, MiB": _of_rl(stream_row, "peak MiB"),
    "promised, MiB": _of_rl(stream_row, "promised MiB"),
    "stream, bits": _of_rl(stream_row, "bits"),
    **{f"{name}, ms": _collective(kind, "none") for name, kind in _COLLECTIVES.items()},
    **{
        f"{name}, copies {copies}": _collective(kind, copies)
        for name, kind in _COLLECTIVES.items()
        for copies in ("down", "up", "both")
    },
}


def _seconds(row: Row) -> str:
    found = row.seconds
    return f"{found.median:.2f} [{found.q1:.2f}, {found.q3:.2f}]" if found else row.reason


def _baseline(row: Row) -> str:
    return "" if row.share_of_baseline is None else f"{row.share_of_baseline:.0%} of {row.baseline}".replace("%", " %")


def _is_copy(row: Row) -> bool:
    """``cp`` is a child of the process whose memory was measured."""
    return row.variant.startswith("cp") or row.peak_rss_bytes is None


def _rss(row: Row) -> str:
    return "" if _is_copy(row) else _gib(row.peak_rss_bytes)


def _rss_above_imports(row: Row) -> str:
    if _is_copy(row) or row.peak_rss_bytes is None:
        return ""
    return f"{(row.peak_rss_bytes - row.samples[0].rss_before_bytes) / MIB:,.0f}"


CONVERSION_COLUMNS: dict[str, Callable[[Row], str]] = {
    "seconds [quartiles]": _seconds,
    "GB/s": lambda row: _number(row.gb_per_s, 2),
    "of its baseline's rate": _baseline,
    "peak RSS GiB": _rss,
    "above imports MiB": _rss_above_imports,
}


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / GIB:.2f}"


def _percent(value: float | None) -> str:
    """Signed, with one digit; what rounds to nothing has no sign."""
    if value is None:
        return ""
    text = f"{100 * value:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def _change(ratio: float | None) -> str:
    return "" if ratio is None else _percent(ratio - 1)
