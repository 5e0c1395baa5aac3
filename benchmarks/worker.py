"""The measuring process: reads a request, measures, writes a result. It never raises for what a variant did."""

import faulthandler
import sys
from pathlib import Path

import torch

from benchmarks.link import measure_link
from benchmarks.machine import describe_process
from benchmarks.phases import Phases
from benchmarks.rl.variants import SCENARIOS as PHASE_SCENARIOS
from benchmarks.scenarios import COLLECTIVES, FSDP, FSDP_LENGTHS, STOCK_FSDP
from benchmarks.schema import Request, Result, from_json

# The parent kills at the timeout; a dump shortly before it puts the hanging line into the record's log.
DUMP_BEFORE_TIMEOUT_S = 8.0


def serve(asked: Path, answer: Path) -> bool:
    """Measure ``asked`` into ``answer``; True when nothing failed."""
    request = from_json(Request, asked.read_text())
    faulthandler.dump_traceback_later(max(1.0, request.protocol.timeout_s - DUMP_BEFORE_TIMEOUT_S), file=sys.stderr)
    result = Result()
    phases = Phases(result, answer)
    device = torch.device(request.case.device)
    if device.type == "cuda":
        device = torch.device("cuda", _device_index(request))
    phases.required("device", lambda: _open_device(device, result))
    if request.scenario == "link":
        phases.required("link", lambda: _link(request, device, result))
    elif request.scenario in PHASE_SCENARIOS:
        _measure_phases(request, device, result, phases)
    elif request.scenario == COLLECTIVES:
        _measure_collectives(request, device, result, phases)
    elif request.scenario in (FSDP, FSDP_LENGTHS, STOCK_FSDP):
        _measure_sharded(request, device, result, phases)
    else:
        _measure_single(request, device, result, phases)
    faulthandler.cancel_dump_traceback_later()
    return not result.failures


def _measure_single(request: Request, device: torch.device, result: Result, phases: Phases) -> None:
    # Imported here because transformers takes seconds that the link's process need not spend.
    from benchmarks import ranks
    from benchmarks.measure import Measurement
    from benchmarks.overhead import OverheadMeasurement
    from benchmarks.single import build_stepper

    measurement = OverheadMeasurement if request.scenario == "overhead" else Measurement
    try:
        measurement(request, result, device, lambda: build_stepper(request, device)).run(phases)
    finally:
        ranks.close()


def _measure_sharded(request: Request, device: torch.device, result: Result, phases: Phases) -> None:
    from benchmarks import ranks, sharded
    from benchmarks.changing_lengths.measure import ChangingLengths
    from benchmarks.measure import Measurement

    changing = request.scenario == FSDP_LENGTHS
    if request.scenario == STOCK_FSDP:
        from benchmarks.stock.apply import build_sharded
        from benchmarks.stock.measure import ShardedStockMeasurement

        measurement, build = ShardedStockMeasurement, lambda: build_sharded(request, device)
    else:
        measurement = ChangingLengths if changing else Measurement
        build = lambda: sharded.build_stepper(request, device, dynamic=changing)  # noqa: E731
    phases.required("process group", lambda: ranks.join(request, device))
    measurement(request, result, device, build).run(phases)
    phases.required("ranks", lambda: ranks.gather_ranks(request, result))
    phases.required("leave", ranks.leave)


def _measure_collectives(request: Request, device: torch.device, result: Result, phases: Phases) -> None:
    from benchmarks.collectives.measure import CollectivesBeside

    CollectivesBeside(request, device, result).run(phases)


def _measure_phases(request: Request, device: torch.device, result: Result, phases: Phases) -> None:
    from benchmarks.rl.serve import measure

    measure(request, device, result, phases)


def _device_index(request: Request) -> int:
    """One device each; only ranks that meet by Gloo may share."""
    return request.rank % torch.cuda.device_count() if request.protocol.process_group == "gloo" else request.rank


def _open_device(device: torch.device, result: Result) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result.software = describe_process()


def _link(request: Request, device: torch.device, result: Result) -> None:
    result.link = measure_link(device, request.protocol)
