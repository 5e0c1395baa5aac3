"""Scenario ``fsdp`` on a CPU: two processes that share layers, and its refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import sharded
from benchmarks.arguments import parse_protocol
from benchmarks.launch import run_variant
from benchmarks.schema import Case, Protocol, Request, Variant

CPU = torch.device("cpu")
TINY = Case(
    layers=2, seq=32, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, dtype="float32", device="cpu", vocab=64
)
PROTOCOL = Protocol(ranks=2, tensor_parallel=2, warmup=0, steps=5, allocator_trace=False, copy_trace=False)
OFFLOAD_ALL = {"policy": "offload_all", "inner": "aot_eager", "device_types": ["cpu"], "min_bytes": "1KiB"}


def request_of(kind: str = "eager", case: Case = TINY, protocol: Protocol = PROTOCOL, **options: object) -> Request:
    return Request("fsdp", case, Variant(kind, kind, options), protocol)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_share_each_layer() -> None:
    eager = run_variant(request_of(), 200.0)
    ours = run_variant(request_of("offload_all", **OFFLOAD_ALL), 200.0)
    for record in (eager, ours):
        assert record.status == "ok", record.log_tail
        assert len(record.result.step_ms_by_rank) == 2
        assert len(record.result.machine_by_rank) == 2
        assert all(
            m.all_gather_gb_per_s > 0 and m.matmul_bf16_tflop_per_s is None for m in record.result.machine_by_rank
        )
    assert ours.result.stats_per_step is not None and ours.result.stats_per_step["bytes_offloaded"] > 0
    assert set(ours.result.gradients) == set(eager.result.gradients)
    for name, found in ours.result.gradients.items():
        expected = eager.result.gradients[name]
        assert found.norm == pytest.approx(expected.norm, rel=1e-4), name
        assert found.probe == pytest.approx(expected.probe, rel=1e-3, abs=1e-5 * expected.norm), name


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_process_stands_for_two_ranks() -> None:
    """Torch's fake process group: half of each parameter is here, and there is no other rank."""
    alone = dataclasses.replace(PROTOCOL, tensor_parallel=1, process_group="fake")
    record = run_variant(request_of("offload_all", protocol=alone, **OFFLOAD_ALL), 200.0)
    assert record.status == "ok", record.log_tail
    assert len(record.result.step_ms_by_rank) == 1
    assert record.result.machine_by_rank == []
    assert record.result.stats_per_step is not None and record.result.stats_per_step["bytes_offloaded"] > 0
    assert record.result.gradients == {}, "gradients of ranks that are not there were compared"


@pytest.mark.parametrize(("text", "message"), [("nccl", "expected process_group to be one of gloo, fake")])
def test_a_process_group_that_is_not_known(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_protocol({"process_group": [text]}, {})


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of(protocol=dataclasses.replace(PROTOCOL, ranks=3)), "multiple of tensor_parallel, found ranks=3"),
        (request_of(protocol=dataclasses.replace(PROTOCOL, tensor_parallel=0)), "multiple of tensor_parallel"),
        (request_of(case=dataclasses.replace(TINY, kv_heads=1)), "does not divide 4 and 1 heads"),
        (request_of(case=dataclasses.replace(TINY, name="causal_lm")), "runs the case stack only; found causal_lm"),
        (request_of("titan"), "runs in scenario activations only"),
    ],
)
def test_what_it_has_no_way_to_run(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharded.build_stepper(request_, CPU)
