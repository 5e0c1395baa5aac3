"""What a measuring process does: the answer to a request. An exception ends it."""

from __future__ import annotations

import torch

from fxoffload.bench import steps, switches
from fxoffload.bench.records import Answer, Machine, Request


def measure(request: Request) -> Answer:
    if request.work is None:
        return _probe()
    if request.kind == "phases":
        return switches.measure(request.work)
    return steps.measure(request.work, request.kind, request.activation_budget)


def _probe() -> Machine:
    """The GPU that torch takes by default, and its free memory."""
    version = str(torch.__version__)  # a class of torch's, which who reads the answer need not import
    if not torch.cuda.is_available():
        return Machine(None, version)
    free, total = torch.cuda.mem_get_info()
    return Machine(torch.cuda.get_device_name(), version, free, total)
