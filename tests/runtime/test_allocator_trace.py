"""Reading the allocator. Traces are tested through the clock, in ``test_step_clock``."""

from __future__ import annotations

import pytest
import torch

from fxoffload.runtime.profiler.allocator_trace import Block, Memory, cuda_blocks, cuda_memory


def test_the_allocator_is_read_by_its_nested_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def statistics(device: object) -> dict[str, dict[str, dict[str, int]]]:
        asked.append(device)
        return {
            "allocated_bytes": {"all": {"current": 3, "peak": 7, "allocated": 9, "freed": 6}},
            "allocation": {"all": {"current": 1, "peak": 2, "allocated": 5, "freed": 4}},
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    read = cuda_memory(torch.device("cuda", 1))
    assert read is not None
    assert read() == Memory(allocated=3, peak=7, num_allocations=5, num_frees=4, total=9)
    assert asked == [1]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert cuda_memory(torch.device("cuda", 1)) is None


@pytest.mark.parametrize("leaves_out", [True, False])
def test_blocks_follow_each_other_in_their_segment(monkeypatch: pytest.MonkeyPatch, leaves_out: bool) -> None:
    def block(state: str, size: int) -> dict[str, object]:
        return {"state": state, "size": size, "requested_size": size - 1}

    segments = [
        {"device": 0, "stream": 9, "address": 1, "blocks": [block("active_allocated", 99)]},
        {
            "device": 1,
            "stream": 5,
            "address": 1000,
            "blocks": [block("inactive", 10), block("active_allocated", 20), block("active_pending_free", 30)]
            + [block("active_allocated", 40)],
        },
    ]
    asked: list[bool | None] = []

    def with_option(mempool_id: object = None, include_traces: bool = True) -> list[dict[str, object]]:
        asked.append(include_traces)
        return segments

    def without(mempool_id: object = None) -> list[dict[str, object]]:
        asked.append(None)
        return segments

    monkeypatch.setattr(torch.cuda, "memory_snapshot", with_option if leaves_out else without)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    read = cuda_blocks(torch.device("cuda", 1))
    assert read is not None
    assert read() == [Block(5, 1010, 20), Block(5, 1060, 40)]
    assert asked == [False if leaves_out else None]
    for backend in ("pluggable", "cudaMallocAsync"):  # the second raises where it is asked for a snapshot
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert cuda_blocks(torch.device("cuda", 1)) is None
