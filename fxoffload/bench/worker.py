"""The answer to a request: in a measuring process, which an exception ends, or in this one."""

from __future__ import annotations

import time

import torch

from fxoffload.bench import steps, switches
from fxoffload.bench.processes import Ended
from fxoffload.bench.records import Answer, Machine, Request
from fxoffload.errors import in_brief


def measure(request: Request) -> Answer:
    if request.work is None:
        return _probe()
    if request.kind == "phases":
        return switches.measure(request.work)
    return steps.measure(request.work, request.kind, request.activation_budget)


def run_here(request: Request, limit_s: float) -> Ended:
    """As ``processes.run`` in this process, for a rehearsal: fresh ones would import for most of its time.

    There is no limit of time. An exception is a reason; a failure that ends the process ends the rehearsal.
    """
    start, threads = time.monotonic(), torch.get_num_threads()
    torch.compiler.reset()
    torch.set_num_threads(1)  # tensors are tiny, and threads that wait for each other take longer than the work
    try:
        answer = measure(request)
    except Exception as error:
        return Ended("failed", in_brief(error), time.monotonic() - start, None)
    finally:
        torch.set_num_threads(threads)
    return Ended("ok", "", time.monotonic() - start, answer)


def _probe() -> Machine:
    """The GPU that torch takes by default, and its free memory."""
    version = str(torch.__version__)  # a class of torch's, which who reads the answer need not import
    if not torch.cuda.is_available():
        return Machine(None, version)
    free, total = torch.cuda.mem_get_info()
    return Machine(torch.cuda.get_device_name(), version, free, total)
