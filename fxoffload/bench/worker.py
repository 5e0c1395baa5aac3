"""A measuring process: reads a request, writes an answer, and lets an exception end it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from fxoffload.bench import steps, switches
from fxoffload.bench.records import Machine, Request, request_from_json


def serve(asked: Path, answer: Path) -> None:
    """Do the measurement that the file ``asked`` requests and write it to ``answer``."""
    answer.write_text(json.dumps(dataclasses.asdict(measure(request_from_json(asked.read_text())))))


def measure(request: Request) -> Any:
    if request.kind == "probe":
        return probe()
    if request.work is None:
        raise AssertionError(f"expected work for {request.kind}, found none")
    return switches.measure(request.work) if request.kind == "phases" else steps.measure(request)


def probe() -> Machine:
    """The GPU that torch takes by default, and its free memory."""
    if not torch.cuda.is_available():
        return Machine(None, torch.__version__)
    free, total = torch.cuda.mem_get_info()
    return Machine(torch.cuda.get_device_name(), torch.__version__, free, total)
