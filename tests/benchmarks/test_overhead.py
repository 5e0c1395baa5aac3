"""Scenarios about the harness's own clocks on a CPU: host time per segment and copy, and warm compiles."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import launch
from benchmarks.arguments import parse_cases, parse_variants
from benchmarks.derived import derive
from benchmarks.overhead import OverheadMeasurement, summarize_host_times
from benchmarks.overhead_rows import overhead_row
from benchmarks.phases import Phases
from benchmarks.scenarios import SCENARIOS
from benchmarks.schema import Case, Protocol, Record, Request, Result, Variant, to_json
from benchmarks.single import build_stepper
from benchmarks.steps import HostTime

CPU = torch.device("cpu")
TINY = Case(layers=3, seq=16, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, dtype="float32", device="cpu")
PROTOCOL = Protocol(warmup=1, steps=5)


@pytest.mark.slow
def test_host_times_of_real_steps(tmp_path: Path) -> None:
    """Segments and copies are counted per step: one forward and one backward call of each."""
    shared = {"inner": ["aot_eager"], "device_types": ["cpu"]}
    records = []
    for variant in parse_variants("eager,keep_all@min_bytes=0,offload_all@min_bytes=0", shared):
        request = Request("overhead", TINY, variant, PROTOCOL)
        result = Result()
        phases = Phases(result, tmp_path / "result.json")
        OverheadMeasurement(request, result, CPU, lambda request=request: build_stepper(request, CPU)).run(phases)
        assert not result.failures
        records.append(Record("overhead", TINY, variant, "ok", "", 1.0, result))
        torch._dynamo.reset()
    eager, keep, offload = (record.result.overhead for record in records)
    assert eager is not None and keep is not None and offload is not None
    assert eager.num_segment_calls == eager.num_copies == 0
    assert keep.num_segment_calls >= 2 * TINY.layers and keep.num_copies == 0
    assert offload.num_copies >= 2 * TINY.layers and offload.num_copies == int(offload.num_copies)
    assert all(
        o.host_us.median >= o.forward_us.median > 0 and len(o.host_us.values) == 5 for o in (eager, keep, offload)
    )
    rows = {row["variant"]: row for row in derive(records, None)}
    found = rows["offload_all@min_bytes=0"]
    assert found["host_us_over_keep_all"] == offload.host_us.median - keep.host_us.median
    assert found["host_us_over_keep_all_per_copy"] == found["host_us_over_keep_all"] / offload.num_copies


def test_what_is_subtracted_is_in_the_name() -> None:
    def record(kind: str, host_s: float, segments: int, copies: float, tail_s: float = 0.0) -> Record:
        times = [HostTime(host_s, host_s / 2, host_s, tail_s)]
        result = Result(overhead=summarize_host_times(times, segments, copies))
        return Record("overhead", TINY, Variant(f"{kind}@x", kind), "ok", "", 1.0, result)

    inductor = record("inductor", 0.001, 0, 0)
    keep, offload = record("keep_all", 0.0015, 10, 0), record("offload_all", 0.0021, 10, 20, tail_s=0.001)
    rows = [overhead_row(r, [inductor, keep, offload]) for r in (inductor, keep, offload)]
    assert not any("over" in name for name in rows[0])
    assert rows[1]["host_us_over_inductor_per_segment"] == pytest.approx(50.0)
    assert "host_us_over_inductor_per_segment" not in rows[2], "copies are in that difference"
    assert rows[2]["host_us_over_keep_all_per_copy"] == pytest.approx(30.0)
    assert [row["host_bound"] for row in rows] == [True, True, False]
    assert overhead_row(dataclasses.replace(keep, result=Result()), [inductor]) == {}


class _Done:
    """A process that ended at once, without an error."""

    pid = 0

    def poll(self) -> int:
        return 0


@pytest.mark.parametrize(("warm", "names"), [(True, ["cold", "warm"]), (False, ["cold"])])
def test_a_warm_start_has_the_caches_of_the_cold_one(
    monkeypatch: pytest.MonkeyPatch, warm: bool, names: list[str]
) -> None:
    started: list[tuple[Path, Path]] = []

    def start(words: list[str], log: Path, caches: Path, ranks: int = 1) -> _Done:
        Path(words[2]).write_text(to_json(Result(first_step_ms=100.0 / len([*started, 0]), compile_s=1.0)))
        started.append((Path(words[1]).parent, caches))
        return _Done()

    monkeypatch.setattr(launch, "start_process", start)
    monkeypatch.setattr(launch, "end_session", lambda _: None)
    request = Request("compile-time", TINY, Variant("inductor", "inductor"), Protocol(warm=warm))
    record = launch.run_variant(request, 100.0)
    assert [folder.name for folder, _ in started] == names
    assert len({caches for _, caches in started}) == 1
    assert record.status == "ok" and record.result.first_step_ms == 100.0
    if warm:
        assert record.result.warm is not None and record.result.warm.first_step_ms == 50.0
    else:
        assert record.result.warm is None


def test_default_variants_and_cases_of_every_scenario_of_steps_parse() -> None:
    for name in ("activations", "budget-sweep", "compile-time", "fsdp", "max-seq", "overhead", "plan"):
        scenario = SCENARIOS[name]
        assert parse_variants(scenario.variants, {}) and parse_cases({}, scenario.case_defaults)
