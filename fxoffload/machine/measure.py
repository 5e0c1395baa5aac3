"""Measures a machine: about ten seconds on a GPU, one on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from fxoffload.errors import ProfileError
from fxoffload.machine import compute
from fxoffload.machine.clocks import CpuClock, CudaClock
from fxoffload.machine.copies import cpu_curves, cuda_curves
from fxoffload.machine.devices import identify, memory_bytes
from fxoffload.machine.profile import MachineProfile
from fxoffload.progress import working

log = logging.getLogger(__name__)


def measure(device: torch.device) -> MachineProfile:
    """Measure ``device`` (one that ``devices.resolve`` gave) now. The random generators are left as they are.

    Device and host memory that it used is free again afterwards, except cuBLAS's workspace, which belongs to torch.
    Raises ProfileError (a RuntimeError) where memory is short.
    """
    # A thread of its own, because what would disturb the measurement is set per thread: autocast, inference mode, a
    # default device, saved-tensor hooks, and AOTAutograd's fake tensors when a compile asks for a profile.
    line = working(f"measuring the link, matrix units and memory of {device}, once for this machine")
    with line, ThreadPoolExecutor(max_workers=1, thread_name_prefix="fxoffload-measure") as thread:
        return thread.submit(_measure, device).result()


def _measure(device: torch.device) -> MachineProfile:
    began = time.perf_counter()
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device:
            found = _measure_here(device)
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"expected 2 GiB of free memory on {device} to measure it, found less; call fxoffload.profile() before "
            f"the model is loaded, or set FXOFFLOAD_PROFILE to a profile's file ({error})"
        ) from None
    seconds = time.perf_counter() - began
    log.info("measured %s in %.1f s", found.device_name, seconds)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return dataclasses.replace(found, notes=f"Measured {today} by fxoffload.machine in {seconds:.1f} s. {found.notes}")


def _measure_here(device: torch.device) -> MachineProfile:
    if device.type == "cuda":
        clock = CudaClock(device)
        curves = cuda_curves(device, clock)
    else:
        clock = CpuClock()
        curves = cpu_curves(clock)
    forward, backward = compute.attention_rates(device, clock)
    identity = identify(device)
    return MachineProfile(
        **dataclasses.asdict(identity),
        device_memory_bytes=memory_bytes(device),
        **curves,
        matmul_tflop_per_s=compute.matmul_rates(device, clock),
        attention_forward_tflop_per_s=forward,
        attention_backward_tflop_per_s=backward,
        memory_gb_per_s=compute.memory_rate(device, clock),
        launch_overhead_us=compute.launch_overhead_us(device, clock),
        kernel_floor_us=compute.kernel_floor_us(device, clock),
        notes=f"Attention is causal scaled_dot_product_attention as torch {identity.torch_version} dispatches it.",
    )
