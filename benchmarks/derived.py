"""Rows computed from the records: ratios to the baselines, and how far from the link's and the compute's own bounds."""

from typing import Any

from benchmarks.activations.kinds import runs_eagerly
from benchmarks.gradients_agree import compare_gradients
from benchmarks.gradients_compare import max_relative_difference
from benchmarks.overhead_rows import overhead_row
from benchmarks.schema import Case, Record
from benchmarks.stock.models import is_stock
from benchmarks.stock.rows import stock_row
from benchmarks.truth import plan_row, slowest_step_ms

BASELINES = ("inductor", "checkpoint", "keep_all")
# What runs no Inductor is compared with these too.
EAGER_BASELINES = ("eager", "eager_fsdp")


def derive(records: list[Record], link: dict[str, float] | None) -> list[dict[str, Any]]:
    """One row per measured record, compared with the baselines of the same case."""
    rows = []
    for record in records:
        same_case = [r for r in records if r.case == record.case]
        if record.result.step_ms is None:
            if is_stock(record.case):  # a budget that was refused
                row = {"case": case_label(record.case), "variant": record.variant.label}
                rows.append(row | stock_row(record, same_case))
            continue
        peers = {r.variant.kind: r for r in same_case if r.variant.label == r.variant.kind}
        of_stock = stock_row(record, same_case) if is_stock(record.case) else {}
        rows.append(_row(record, peers, link) | overhead_row(record, same_case) | of_stock)
    return rows


def _row(record: Record, peers: dict[str, Record], link: dict[str, float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case_label(record.case), "variant": record.variant.label}
    baselines = BASELINES + (EAGER_BASELINES if runs_eagerly(record.variant.kind) else ())
    own_kind = (record.variant.kind,) if record.variant.kind not in baselines else ()
    for kind in baselines + own_kind:
        peer = peers.get(kind)
        if peer is not None and peer is not record:
            row.update(_ratios(record, peer, kind))
    row.update(compare_gradients(record, peers))
    row.update(plan_row(record.result))
    if record.result.warm is not None and record.result.warm.compile_s is not None:
        row["warm_compile_s"] = record.result.warm.compile_s
        row["warm_vs_cold_compile"] = _part(record.result.warm.compile_s, record.result.compile_s)
    inductor = peers.get("inductor")
    if inductor is not None and inductor is not record and inductor.result.losses and record.result.losses:
        theirs = inductor.result.losses[0]
        row["relative_loss_difference_vs_inductor"] = abs(record.result.losses[0] - theirs) / max(abs(theirs), 1e-30)
    for name, alone in record.result.collectives_without.items():
        beside = record.result.collectives.get(name)
        if beside is not None and beside.all_there_ms and alone.all_there_ms:
            row[f"{name}_all_there_vs_without_copies"] = beside.all_there_ms / alone.all_there_ms
        for way, kinds in record.result.collectives_idle.items():
            idle = kinds.get(name)
            if idle is not None and idle.all_there_ms and alone.all_there_ms:
                row[f"{name}_idle_copies_{way}_vs_without_copies"] = idle.all_there_ms / alone.all_there_ms
    if machines := record.result.machine_by_rank:
        row["slowest_rank_all_gather_gb_per_s"] = min(m.all_gather_gb_per_s for m in machines)
        rates = [m.matmul_bf16_tflop_per_s for m in machines if m.matmul_bf16_tflop_per_s is not None]
        row["slowest_rank_matmul_tflop_per_s"] = min(rates, default=None)
    if inductor is not None and record.result.stats_per_step is not None:
        row.update(_bounds(record, inductor, link))
    return row


def _ratios(record: Record, peer: Record, kind: str) -> dict[str, Any]:
    mine, theirs = record.result, peer.result
    row: dict[str, Any] = {}
    if mine.step_ms and theirs.step_ms:
        row[f"step_vs_{kind}"] = slowest_step_ms(mine) / slowest_step_ms(theirs)
    if mine.memory and theirs.memory and theirs.memory.peak_bytes:
        row[f"peak_vs_{kind}"] = mine.memory.peak_bytes / theirs.memory.peak_bytes
    if mine.traced_peak and theirs.traced_peak:
        without = theirs.traced_peak.peak_without_returned_gradients_bytes
        row[f"peak_without_returned_gradients_vs_{kind}"] = (
            mine.traced_peak.peak_without_returned_gradients_bytes / without if without else None
        )
    if kind == "inductor":
        for name, collective in mine.collectives.items():
            other = theirs.collectives.get(name)
            if other is not None and other.kernel_ms:
                row[f"{name}_kernel_ms_vs_inductor"] = collective.kernel_ms / other.kernel_ms
            if other is not None and other.all_there_ms and collective.all_there_ms:
                row[f"{name}_all_there_vs_inductor"] = collective.all_there_ms / other.all_there_ms
            if other is not None and other.lower_quartile_ms:
                row[f"{name}_lower_quartile_vs_inductor"] = collective.lower_quartile_ms / other.lower_quartile_ms
    if mine.compile_s is not None and theirs.compile_s:
        row[f"compile_vs_{kind}"] = mine.compile_s / theirs.compile_s
    if mine.warm is not None and theirs.warm is not None and mine.warm.compile_s and theirs.warm.compile_s:
        row[f"warm_compile_vs_{kind}"] = mine.warm.compile_s / theirs.warm.compile_s
    if kind in ("inductor", "keep_all") and mine.gradients and theirs.gradients:
        row[f"max_relative_gradient_difference_vs_{kind}"] = max_relative_difference(mine.gradients, theirs.gradients)
        row[f"repeated_gradient_difference_of_{kind}"] = theirs.gradient_repeat_difference
    return row


def _bounds(record: Record, inductor: Record, link: dict[str, float] | None) -> dict[str, Any]:
    """A phase can be no faster than Inductor's compute, nor than its bytes over the link measured alone."""
    result, stats = record.result, record.result.stats_per_step or {}
    row: dict[str, Any] = {}
    offloaded, reloaded = stats.get("bytes_offloaded", 0.0), stats.get("bytes_reloaded", 0.0)
    if offloaded:
        row["host_reserved_vs_bytes_offloaded"] = stats.get("host_bytes_reserved", 0.0) / offloaded
    if result.first_step_ms and result.step_ms:
        row["first_step_host_wait_ms"] = (result.stats_first_step or {}).get("host_wait_ms")
        row["second_step_vs_median"] = (result.second_step_ms or 0.0) / result.step_ms.median
        if row["first_step_host_wait_ms"] is not None:
            row["first_step_host_wait_vs_step"] = row["first_step_host_wait_ms"] / result.step_ms.median
    row["num_host_growths_in_timed_steps"] = (result.stats_timed_steps or {}).get("num_host_growths")
    if link is None or not offloaded:
        return row
    for phase, moved, rate in (
        ("forward", offloaded, link["d2h_gb_per_s"]),
        ("backward", reloaded, link["h2d_gb_per_s"]),
    ):
        measured, compute = getattr(result, f"{phase}_ms"), getattr(inductor.result, f"{phase}_ms")
        if measured is None or compute is None:
            continue
        link_ms = moved / rate / 1e6
        bound = max(compute.median, link_ms)
        row[f"{phase}_bound_ms"] = bound
        row[f"{phase}_bound_by"] = "link" if link_ms > compute.median else "compute"
        row[f"{phase}_vs_bound"] = measured.median / bound
        if row[f"{phase}_bound_by"] == "link":
            # The whole phase in the denominator: at most what the copies themselves reached (see copies).
            row[f"{phase}_gb_per_s_over_phase"] = moved / measured.median / 1e6
        if phase == "backward":
            # Offloaded values have to be there again, reloaded or taken back while its copy was still under way.
            row["backward_vs_bound_of_all_bytes"] = measured.median / max(compute.median, offloaded / rate / 1e6)
    if result.copies is not None:
        row["d2h_vs_link"] = result.copies.d2h_gb_per_s / link["d2h_gb_per_s"]
        row["h2d_vs_link"] = result.copies.h2d_gb_per_s / link["h2d_gb_per_s"]
    return row


def _part(value: float, of: float | None) -> float | None:
    return value / of if of else None


def case_label(case: Case) -> str:
    form = f"-{case.form}" if case.form else ""
    return f"{case.name}{form} {case.layers}x{case.seq}"
