"""Profiles of GPUs that were not measured: an H200's measured rates, scaled by the ratio of the data sheets' peaks.

A GPU is taken to reach the part of its peak that an H200 reaches, product by product and copy size by copy size. Host
times and latencies stay the H200's. An H100's, made so, was within 4 % of the measured products, 7 % of attention and
2 % of memory (2026-11-27). Such a profile is for planning for a GPU that is not here: its ``source`` says "data sheet",
and on the GPU itself a measured one is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxoffload.machine.curve import CopyCurve
from fxoffload.machine.profile import DATA_SHEET, MachineProfile


@dataclass(frozen=True, kw_only=True)
class SheetLink:
    """The link to the host.

    name: of the link.
    peak_gb_per_s: 10^9 bytes per second each way, on paper.
    reached: the part of it that large copies reach: d2h, h2d, then d2h and h2d with both at once. None: as an H200's.
    """

    name: str
    peak_gb_per_s: float
    reached: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """Peaks on paper, dense (without sparsity), of one GPU in its SXM or superchip form.

    device_name: as the driver calls it.
    memory_gib: of its memory stacks.
    memory_gb_per_s: 10^9 bytes per second.
    half, tf32, float32: 10^12 FLOPs per second; ``half`` is of bfloat16 and float16.
    float8: the same; None: it has none.
    link: to the host.
    """

    device_name: str
    memory_gib: float
    memory_gb_per_s: float
    half: float
    tf32: float
    float32: float
    float8: float | None
    link: SheetLink


# 32 and 16 GT/s on 16 lanes, of which the coding takes 2 bits in 130.
PCIE5 = SheetLink(name="PCIe 5 x16", peak_gb_per_s=63.0)
# Qureshi et al., BaM (ASPLOS 2023), measured 25 GB/s of an A100's; both at once as the H200 loses by it.
PCIE4 = SheetLink(name="PCIe 4 x16", peak_gb_per_s=31.5, reached=(25 / 31.5, 25 / 31.5, 23 / 31.5, 23 / 31.5))
# Schieffer et al., "Harnessing Integrated CPU-GPU System Memory for HPC", arXiv 2407.07850: 297 GB/s to the host and
# 375 back. Both at once share the host's memory, of which STREAM took 486 GB/s there: 243 each way.
NVLINK_C2C = SheetLink(name="NVLink-C2C", peak_gb_per_s=450.0, reached=(297 / 450, 375 / 450, 243 / 450, 243 / 450))

# NVIDIA's data sheets: A100 (2021), GH200 (2023), H200 (2024), Blackwell (HGX B200, per GPU; 2024).
H200 = DataSheet(
    device_name="NVIDIA H200",
    memory_gib=141,
    memory_gb_per_s=4800,
    half=989,
    tf32=494.5,
    float32=67,
    float8=1979,
    link=PCIE5,
)
GH200 = replace(H200, device_name="NVIDIA GH200 480GB", memory_gib=96, memory_gb_per_s=4000, link=NVLINK_C2C)
B200 = DataSheet(
    device_name="NVIDIA B200",
    memory_gib=180,
    memory_gb_per_s=7700,
    half=2250,
    tf32=1125,
    float32=75,
    float8=4500,
    link=PCIE5,
)
A100 = DataSheet(
    device_name="NVIDIA A100-SXM4-80GB",
    memory_gib=80,
    memory_gb_per_s=2039,
    half=312,
    tf32=156,
    float32=19.5,
    float8=None,
    link=PCIE4,
)
A100_40 = replace(A100, device_name="NVIDIA A100-SXM4-40GB", memory_gib=40, memory_gb_per_s=1555)

# By the name that ``load_profile`` takes. A measured file of the same name in ``shipped/`` goes first.
SHEETS: Mapping[str, DataSheet] = {"a100": A100, "a100-40gb": A100_40, "b200": B200, "gh200": GH200}


def profile_from(sheet: DataSheet, measured: MachineProfile) -> MachineProfile:
    """The profile of the GPU of ``sheet``, from a ``measured`` one of an H200."""
    copies = {
        name: _scaled(getattr(measured, name), _copy_ratio(sheet.link, getattr(measured, name), i))
        for i, name in enumerate(("d2h", "h2d", "duplex_d2h", "duplex_h2d"))
    }
    tables = {
        name: _rates(getattr(measured, name), sheet)
        for name in ("matmul_tflop_per_s", "attention_forward_tflop_per_s", "attention_backward_tflop_per_s")
    }
    return replace(
        measured,
        device_name=sheet.device_name,
        driver=DATA_SHEET,
        torch_version=DATA_SHEET,
        device_memory_bytes=int(measured.device_memory_bytes * sheet.memory_gib / H200.memory_gib),
        memory_gb_per_s=measured.memory_gb_per_s * sheet.memory_gb_per_s / H200.memory_gb_per_s,
        source=DATA_SHEET,
        notes=f"From a data sheet, not measured: the rates of {measured.device_name} times the ratio of the peaks. "
        f"Link: {sheet.link.name}.",
        estimate_error=None,
        **copies,
        **tables,
    )


def _rates(measured: Mapping[str, float], sheet: DataSheet) -> dict[str, float]:
    """Of a table of TFLOP/s by dtype; "bfloat16 grouped" is a bfloat16."""
    found: dict[str, float] = {}
    for name, rate in measured.items():
        peak = name if name in ("float32", "tf32", "float8") else "half"
        here, there = getattr(sheet, peak), getattr(H200, peak)
        if here and there:
            found[name] = rate * here / there
    return found


def _copy_ratio(link: SheetLink, curve: CopyCurve, which: int) -> float:
    """How many times as fast large copies are as those of the measured ``curve``."""
    if link.reached is None:
        return link.peak_gb_per_s / H200.link.peak_gb_per_s
    return link.peak_gb_per_s * link.reached[which] / curve.gb_per_s()[-1]


def _scaled(curve: CopyCurve, ratio: float) -> CopyCurve:
    """The same latency; what the bytes take on top of it, ``ratio`` times as fast. To the nanosecond, as measured."""
    latency = curve.latency_ms
    return replace(curve, times_ms=tuple(round(latency + (t - latency) / ratio, 6) for t in curve.times_ms))
