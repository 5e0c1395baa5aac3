"""Reading the allocator. Traces are tested through the clock, in ``test_segment_clock``."""

from __future__ import annotations

import pytest
import torch

from fxoffload.runtime.allocator_trace import Memory, cuda_memory


def test_the_allocator_is_read_by_its_nested_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def statistics(device: object) -> dict[str, dict[str, dict[str, int]]]:
        asked.append(device)
        return {"allocated_bytes": {"all": {"current": 3, "peak": 7, "allocated": 9, "freed": 6}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    read = cuda_memory(torch.device("cuda", 1))
    assert read is not None
    assert read() == Memory(allocated=3, peak=7)
    assert asked == [1]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert cuda_memory(torch.device("cuda", 1)) is None
