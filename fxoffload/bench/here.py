"""Measures in this process, for a rehearsal: a fresh process for each variant would import for most of its time.

There is no limit of time, and a failure that ends the process ends the rehearsal.
"""

from __future__ import annotations

import time

import torch

from fxoffload.bench.processes import Ended
from fxoffload.bench.records import Request
from fxoffload.bench.worker import measure
from fxoffload.errors import in_brief


def run(request: Request, limit_s: float) -> Ended:
    """As ``processes.run``; an exception is a reason."""
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
