"""The harness on a CPU: a whole run at toy sizes, and each computed number against one worked out by hand."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import collective_trace, measure
from benchmarks.allocator_trace import Arrival, _mark_arrivals, replay
from benchmarks.arguments import (
    SHARED_OPTIONS,
    expand_set,
    parse_cases,
    parse_protocol,
    parse_variants,
    split_settings,
)
from benchmarks.claims import check_claims
from benchmarks.cli import app
from benchmarks.collective_times import once_all_there, usual_sum
from benchmarks.collective_trace import summarize_collectives
from benchmarks.copy_trace import Interval, summarize_copies
from benchmarks.derived import derive
from benchmarks.gradients import digest_gradients
from benchmarks.gradients_compare import max_relative_difference
from benchmarks.launch import Exit, judge, run_variant
from benchmarks.quartiles import summarize
from benchmarks.schema import (
    Case,
    Collective,
    Digest,
    Protocol,
    Record,
    Report,
    Request,
    Result,
    Summary,
    Variant,
    from_json,
    to_json,
)
from benchmarks.steps import Stepper
from benchmarks.tables import render
from benchmarks.workloads import build_job
from fxoffload.compiled_graph import _override

CPU = torch.device("cpu")
TINY = Case(
    layers=2,
    seq=32,
    hidden=32,
    ffn=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    dtype="float32",
    device="cpu",
)
TINY_WORDS = [f"{name}={getattr(TINY, name)}" for name in ("layers", "seq", "hidden", "ffn", "heads", "kv_heads")]
TINY_WORDS += ["head_dim=8", "dtype=float32", "device=cpu", "link_mib=1", "link_copies=2"]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """One real run: a reference, fxoffload, and a variant that cannot work."""
    out = tmp_path_factory.mktemp("out")
    words = [*TINY_WORDS, "inner=aot_eager", "device_types=cpu", "min_bytes=1KiB"]
    variants = "eager,offload_all,offload_all@no_such_option=1"
    arguments = expand_set(["run", "activations", "--set", *words, "--variants", variants, "--out", str(out)])
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return json.loads((out / "activations.json").read_text()), done.output


def test_a_process_that_its_last_words_end_was_out_of_time() -> None:
    """On Python 3.12 the dump of stacks shortly before the time is up has ended processes."""
    results, dump = [Result(finished=["device", "build"])] * 2, "step\nTimeout (0:00:19)!\nThread 0x1:\n  File\n"
    assert judge(Exit([None, -11], False), results, ["", dump], 20.0) == (
        "timeout",
        "not finished after 20 s; finished phases: device, build",
    )
    status, reason = judge(Exit([None, -11], False), results, ["", "step\nSegmentation fault\n"], 20.0)
    assert (status, reason) == ("failed", "exit status -11 (SIGSEGV): Segmentation fault")
    for code, log in ((1, dump), (-9, dump), (-11, f"{dump}[benchmark] timed steps\n")):
        assert judge(Exit([0, code], False), results, ["", log], 20.0)[0] == "failed"


@pytest.mark.slow
def test_run_measures_every_variant_and_survives_the_failing_one(tiny_run: tuple[dict, str]) -> None:
    report, table = tiny_run
    by_label = {record["variant"]["label"]: record for record in report["records"]}
    assert by_label["eager"]["status"] == by_label["offload_all"]["status"] == "ok", table
    failed = by_label["offload_all@no_such_option=1"]
    assert failed["status"] == "failed"
    assert "no_such_option" in failed["reason"]
    assert "no_such_option" in table


@pytest.mark.slow
def test_run_records_what_it_claims(tiny_run: tuple[dict, str]) -> None:
    report, _ = tiny_run
    assert report["environment"]["torch"]
    assert len(report["environment"]["source_sha256"]) == 64
    assert report["link"]["d2h_gb_per_s"] > 0
    result = next(r["result"] for r in report["records"] if r["variant"]["label"] == "offload_all")
    assert len(result["step_ms"]["values"]) == result["num_timed_steps"] == Protocol().steps
    assert len(result["losses"]) == 2 + Protocol().warmup + report["protocol"]["calibration_steps"] + Protocol().steps
    assert len(set(result["losses"])) == 1, "the inputs are fixed and nothing updates the weights"
    assert result["stats_first_step"]["num_segments_compiled"] > 0
    assert result["stats_per_step"]["bytes_offloaded"] * result["num_timed_steps"] == pytest.approx(
        result["stats_timed_steps"]["bytes_offloaded"]
    )
    assert result["stats_timed_steps"]["bytes_offloaded"] > 0
    assert result["num_graphs_first_step"] == result["num_graphs_at_end"] == 1


@pytest.mark.slow
def test_run_gives_equal_gradients_names_across_variants(tiny_run: tuple[dict, str]) -> None:
    report, _ = tiny_run
    digests = {
        record["variant"]["label"]: {n: Digest(**d) for n, d in record["result"]["gradients"].items()}
        for record in report["records"]
        if record["status"] == "ok"
    }
    assert max_relative_difference(digests["offload_all"], digests["eager"]) < 1e-5
    assert "input0" in digests["eager"]


@pytest.mark.slow
def test_report_survives_json_and_shows_again(tiny_run: tuple[dict, str]) -> None:
    report = from_json(Report, json.dumps(tiny_run[0]))
    assert json.loads(to_json(report)) == tiny_run[0]
    assert "no_such_option" in render(report)


def test_variant_that_hangs_is_a_row_with_its_finished_phases() -> None:
    request = Request("activations", TINY, Variant("eager", "eager"), Protocol(timeout_s=0.5))
    record = run_variant(request, time_left_s=100.0)
    assert record.status == "timeout"
    assert "finished phases: none" in record.reason


def test_replayed_peaks_match_the_hand_count() -> None:
    """A gradient lives at an address that an activation had before it and a temporary has after it."""

    def alloc(address: int, size: int) -> dict:
        return {"action": "alloc", "addr": address, "size": size}

    def free(address: int, size: int) -> list[dict]:
        return [{"action": name, "addr": address, "size": size} for name in ("free_requested", "free_completed")]

    marker = 7
    events = [
        alloc(100, 10),  # activation: live 10
        alloc(200, 20),  # live 30, all of it without gradients
        *free(100, 10),  # live 20
        alloc(100, 15),  # the gradient: live 35, without 20
        alloc(900, marker),  # it arrives: live 42, without 27
        *free(900, marker),
        *free(100, 15),  # accumulated: live 20
        alloc(100, 8),  # live 28
        *free(555, 5),  # older than the trace: live 23
    ]
    result = replay(events, [Arrival(100, marker)])
    assert result.peak_bytes == 42
    assert result.gradients_at_peak_bytes == 15
    assert result.peak_without_gradients_bytes == 30
    assert result.gradients_bytes == 15
    assert (result.num_matched_by_marker, result.num_matched_by_last_allocation, result.num_unmatched) == (1, 0, 0)


def test_replay_counts_what_it_had_to_guess_or_miss() -> None:
    events = [{"action": "alloc", "addr": 1, "size": 4}, {"action": "alloc", "addr": 2, "size": 8}]
    result = replay(events, [Arrival(2, 99), Arrival(3, 98)])
    assert (result.num_matched_by_marker, result.num_matched_by_last_allocation, result.num_unmatched) == (0, 1, 1)
    assert (result.peak_bytes, result.peak_without_gradients_bytes) == (12, 4)


@pytest.mark.slow
def test_markers_see_every_gradient_and_cause_no_compilation() -> None:
    job = build_job(TINY, CPU)
    job.allocate_gradients()
    compilations = []

    def counting_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(graph)
        return graph.forward

    stepper = Stepper(job, torch.compile(job.module, backend=counting_backend), CPU)  # type: ignore[arg-type]
    stepper.step()
    arrivals: list[Arrival] = []
    hooked = _mark_arrivals(stepper, arrivals)
    stepper.step()
    assert len(arrivals) == len(job.leaves())
    assert len({arrival.marker_bytes for arrival in arrivals}) == len(arrivals)
    assert len(compilations) == 1
    for _, handle in hooked:
        handle.remove()
    stepper.step()
    assert len(arrivals) == len(job.leaves())


def test_quartiles() -> None:
    assert summarize([4.0, 1.0, 3.0, 2.0, 5.0]) == Summary(3.0, 2.0, 4.0, 1.0, 5.0, [4.0, 1.0, 3.0, 2.0, 5.0])
    assert summarize([2.0]).q1 == 2.0
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


def test_copies_are_rated_over_the_time_they_ran() -> None:
    down = [Interval(0, 1000), Interval(500, 1500), Interval(3000, 3500)]
    copies = summarize_copies(down, [], d2h_bytes=4_000_000, h2d_bytes=0)
    assert copies.d2h_busy_ms == 2.0
    assert copies.d2h_span_ms == 3.5
    assert copies.d2h_gb_per_s == 2.0
    assert copies.h2d_gb_per_s == 0.0


def test_collectives_are_told_apart_by_the_names_of_their_kernels() -> None:
    names = [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 1000),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 500, 2500),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 3000),
        ("Memcpy DtoH (Device -> Pinned)", 0, 9000),
        ("triton_poi_fused_add_0", 0, 100),
    ]
    events = [SimpleNamespace(name=n, time_range=SimpleNamespace(start=a, end=b)) for n, a, b in names]
    assert summarize_collectives([events]) == {
        "AllGather": Collective(2, 3.0, 2.5, pytest.approx(0.75), [1.0, 2.0], beside_copies=1.0),
        "ReduceScatter": Collective(1, 3.0, 3.0, 3.0, [3.0], beside_copies=1.0),
    }
    halved = Collective(1, 1.5, 1.25, pytest.approx(0.75), [1.0, 2.0], beside_copies=1.0)
    assert summarize_collectives([events], 2)["AllGather"] == halved
    even = [SimpleNamespace(name=names[0][0], time_range=SimpleNamespace(start=0, end=1000 * k)) for k in (1, 2, 3, 9)]
    assert summarize_collectives([even])["AllGather"].lower_quartile_ms == pytest.approx(1.25)


def test_traces_have_clocks_of_their_own() -> None:
    """The collectives of the second come after those of the first, and none of them ran at the same time."""

    def trace(*ms: float) -> list[SimpleNamespace]:
        kernel = "ncclDevKernel_AllGather_RING_LL"
        ranges = [SimpleNamespace(start=10_000 * i, end=10_000 * i + 1000 * t) for i, t in enumerate(ms)]
        return [SimpleNamespace(name=kernel, time_range=r) for r in ranges]

    found = summarize_collectives([trace(1.0, 2.0, 3.0, 4.0), trace(5.0, 6.0, 7.0, 8.0)], 2)["AllGather"]
    assert (found.count, found.kernel_ms, found.busy_ms) == (2, 9.0, 9.0)
    assert found.each_ms == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_collective_took_what_it_took_on_the_rank_that_came_last() -> None:
    ranks = [
        {"AllGather": Collective(2, 0, 0, 0, [5.0, 1.0, 2.0, 4.0]), "AllReduce": Collective(1, 0, 0, 0, [1.0, 1.0])},
        {"AllGather": Collective(2, 0, 0, 0, [1.0, 3.0, 2.5, 2.0]), "AllReduce": Collective(0.5, 0, 0, 0, [1.0])},
    ]
    assert once_all_there(ranks) == {"AllGather": [1.0, 1.0, 2.0, 2.0]}
    assert once_all_there([*ranks, {}]) == {}


def test_each_place_of_a_step_counts_with_its_median() -> None:
    assert usual_sum([1.0, 10.0, 2.0, 20.0, 9.0, 12.0], 2) == 2.0 + 12.0
    assert usual_sum([1.0, 2.0, 3.0], 1.5) is None, "steps of different collectives"
    assert usual_sum([], 0.0) is None


@pytest.mark.parametrize(("took", "held"), [(102.0, True), (104.0, False), (None, None)])
def test_copies_are_not_to_make_collectives_take_longer(took: float | None, held: bool | None) -> None:
    rows = [_record(Variant(k, k), 1.0, 1.0) for k in ("inductor", "offload_all", "keep_all")]
    for row, all_there in zip(rows, (90.0, took, 150.0), strict=True):
        row.result.collectives = {"AllGather": Collective(16, 200.0, 200.0, all_there_ms=all_there)}
        each = [50.0, 50.0] * 2
        row.result.collectives_without = {
            "AllGather": Collective(2, 200.0, 200.0, all_there_ms=100.0, each_all_there_ms=each)
        }
    rows[1].result.stats_per_step = {"bytes_offloaded": 1, "bytes_reloaded": 1, "host_bytes_reserved": 1}
    link = {"d2h_gb_per_s": 50.0, "h2d_gb_per_s": 50.0}
    report = Report("fsdp", {}, Protocol(), link, rows, derive(rows, link))
    found = [c for c in check_claims(report) if "collectives" in c["claim"]]
    assert [c["held"] for c in found] == [held]


@pytest.mark.parametrize(
    ("took", "each", "held"),
    [
        (102.0, [40.0, 60.0, 41.0, 61.0], True),
        (102.0, [40.0, 60.0, 42.0, 62.0], None),
        (102.0, [], None),
        (106.0, [40.0, 60.0, 41.0, 61.0], False),
        (106.0, [40.0, 60.0, 42.0, 62.0], None),
        (106.0, [], False),
    ],
)
def test_where_the_steps_without_copies_differ_the_claim_is_open(
    took: float, each: list[float], held: bool | None
) -> None:
    """Two steps without copies, of two collectives each. Other processes compute something else: they say nothing."""
    rows = [_record(Variant(f"auto@n={n}", "auto", {"n": n}), 1.0, 1.0) for n in range(2)]
    for row, alone in zip(rows, (100.0, 200.0), strict=True):
        known = [ms * alone / 100 for ms in each]
        row.result.collectives = {"AllGather": Collective(2, 200.0, 200.0, all_there_ms=took * alone / 100)}
        row.result.collectives_without = {
            "AllGather": Collective(2, 200.0, 200.0, all_there_ms=alone, each_all_there_ms=known)
        }
        row.result.stats_per_step = {"bytes_offloaded": 1, "bytes_reloaded": 1, "host_bytes_reserved": 1}
    link = {"d2h_gb_per_s": 50.0, "h2d_gb_per_s": 50.0}
    report = Report("fsdp", {}, Protocol(), link, rows, derive(rows, link))
    (found,) = [c for c in check_claims(report) if "collectives" in c["claim"]]
    assert found["held"] is held
    differ = {f"AllGather of auto@n={n}": pytest.approx(sum(each[2:]) / 100 - 1) for n in range(2)} if each else {}
    assert found["figures"]["halves of the steps without differ by"] == differ


def test_ways_of_taking_steps_are_traced_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, state = "ncclDevKernel_AllGather_RING_LL", {"copies": True}

    @contextlib.contextmanager
    def without() -> Iterator[None]:
        state["copies"] = False
        yield
        state["copies"] = True

    order: list[bool] = []

    def traced(_: object) -> list[SimpleNamespace]:
        order.append(state["copies"])
        end = 3000 if state["copies"] else 1000
        return [SimpleNamespace(name=kernel, time_range=SimpleNamespace(start=0, end=end))] * 3

    monkeypatch.setattr(collective_trace, "trace_collectives", traced)
    ways = {"plan": contextlib.nullcontext, "none": without}
    found = collective_trace.trace_in_turn(None, ways)  # type: ignore[arg-type]
    assert order == [True, False] * collective_trace.ROUNDS
    assert [found[way]["AllGather"].kernel_ms for way in ways] == [3.0, 1.0]


def test_how_much_of_collectives_is_beside_copies() -> None:
    def event(name: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    kernel, copy = "ncclDevKernel_AllGather_RING_LL", "Memcpy DtoH (Device -> Pinned)"
    first = [event(kernel, 0, 1000), event(copy, 500, 900), event(copy, 800, 5000), event("Memcpy DtoD", 0, 1000)]
    second = [event(kernel, 0, 1000), event(copy, 1000, 2000)]  # a trace with a clock of its own
    assert summarize_collectives([first])["AllGather"].beside_copies == pytest.approx(0.5)
    assert summarize_collectives([first, second])["AllGather"].beside_copies == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("took", "beside", "held"), [(102.0, 0.95, True), (104.0, 0.95, False), (102.0, 0.5, None), (None, 0.95, None)]
)
def test_idle_copies_are_not_to_make_collectives_take_longer(
    took: float | None, beside: float, held: bool | None
) -> None:
    row = _record(Variant("auto", "auto"), 1.0, 1.0)
    row.result.collectives = {"AllGather": Collective(16, 200.0, 200.0, all_there_ms=120.0)}
    row.result.collectives_without = {"AllGather": Collective(16, 200.0, 200.0, all_there_ms=100.0)}
    of_way = {"AllGather": Collective(16, 200.0, 200.0, all_there_ms=took, beside_copies=beside)}
    row.result.collectives_idle = {"down": of_way}
    report = Report("fsdp", {}, Protocol(), None, [row], derive([row], None))
    (found,) = [c for c in check_claims(report) if "nothing waits" in c["claim"]]
    assert found["held"] is held
    what = "AllGather beside copies down of auto"
    if took is not None and beside > 0.9:
        assert found["figures"]["ratios"] == {what: pytest.approx(took / 100)}
    elif took is not None:
        assert found["figures"]["does not count, beside copies for this part of the time"] == {what: beside}


def test_collectives_are_traced_beside_the_plan_s_copies_none_and_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class Idle:
        def __init__(self, device: torch.device, **ways: bool) -> None:
            told.append(ways)

        def queue(self, **how: object) -> None:
            told.append(how)

    def begins_with(_: Stepper) -> str:
        before = len(told)
        if stepper._begin is not None:
            stepper._begin()
        return f"{_override.policy} {len(told) - before}"

    def traced(_: Stepper, ways: dict[str, collective_trace.StepsContext]) -> dict[str, dict[str, str]]:
        found = {}
        for way, context in ways.items():
            with context():
                found[way] = {"AllGather": begins_with(stepper)}
        return found

    monkeypatch.setattr(measure, "IdleCopies", Idle)
    monkeypatch.setattr(measure, "trace_in_turn", traced)
    stepper = Stepper(None, lambda: torch.ones(()), torch.device("cpu"))  # type: ignore[arg-type]
    for kind, without, idle in (("auto", "keep_all 0", {"down": {"AllGather": "keep_all 1"}}), ("inductor", None, {})):
        request = Request("fsdp", TINY, Variant(kind, kind), Protocol(ranks=2))
        one = measure.Measurement(request, Result(step_ms=summarize([100.0])), torch.device("cpu"), lambda: stepper)
        one._stepper = stepper
        one.trace_collectives()
        assert one.result.collectives == {"AllGather": "None 0"}
        assert one.result.collectives_without.get("AllGather") == without
        assert one.result.collectives_idle == idle
    assert told == [{"down": True, "up": False}, {"down": True, "up": False, "ms": pytest.approx(110.0)}]


def test_steps_can_begin_with_something_else() -> None:
    order: list[str] = []
    job = SimpleNamespace(
        zero_gradients=lambda: order.append("zero"), inputs=(), finish_step=lambda: order.append("finish")
    )

    def module() -> torch.Tensor:
        order.append("module")
        return torch.ones((), requires_grad=True)

    stepper = Stepper(job, module, torch.device("cpu"))  # type: ignore[arg-type]
    with stepper.beginning_with(lambda: order.append("begin")):
        stepper.step()
    stepper.step()
    assert order == ["zero", "begin", "module", "finish", "zero", "module", "finish"]


def test_collectives_are_compared_with_inductors() -> None:
    inductor, mine = (_record(Variant(k, k), 1.0, 1.0) for k in ("inductor", "offload_all"))
    inductor.result.collectives = {"AllGather": Collective(16, 100.0, 100.0, 2.0)}
    mine.result.collectives = {"AllGather": Collective(16, 103.0, 103.0, 2.02), "AllReduce": Collective(1, 1.0, 1.0)}
    row = derive([inductor, mine], None)[1]
    assert row["AllGather_kernel_ms_vs_inductor"] == pytest.approx(1.03)
    assert row["AllGather_lower_quartile_vs_inductor"] == pytest.approx(1.01)
    assert "AllReduce_kernel_ms_vs_inductor" not in row


def test_bounds_take_the_slower_of_compute_and_link() -> None:
    inductor = _record(Variant("inductor", "inductor"), forward_ms=100.0, backward_ms=200.0)
    offload = _record(Variant("offload_all", "offload_all"), forward_ms=550.0, backward_ms=210.0)
    offload.result.stats_per_step = {"bytes_offloaded": 25e9, "bytes_reloaded": 5e9, "host_bytes_reserved": 25.5e9}
    row = derive([inductor, offload], {"d2h_gb_per_s": 50.0, "h2d_gb_per_s": 50.0})[1]
    assert (row["forward_bound_ms"], row["forward_bound_by"]) == (500.0, "link")
    assert (row["backward_bound_ms"], row["backward_bound_by"]) == (200.0, "compute")
    assert row["forward_vs_bound"] == pytest.approx(1.1)
    assert row["backward_vs_bound"] == pytest.approx(1.05)
    assert row["step_vs_inductor"] == pytest.approx(760 / 300)
    assert row["host_reserved_vs_bytes_offloaded"] == pytest.approx(1.02)


def _record(variant: Variant, forward_ms: float, backward_ms: float) -> Record:
    result = Result(
        forward_ms=summarize([forward_ms]),
        backward_ms=summarize([backward_ms]),
        step_ms=summarize([forward_ms + backward_ms]),
    )
    return Record("activations", TINY, variant, "ok", "", 1.0, result)


def test_gradient_digests_notice_what_sum_and_norm_miss() -> None:
    job = build_job(TINY, CPU)
    job.allocate_gradients()
    Stepper(job, job.module, CPU).step()
    before = digest_gradients(job, 0)
    leaf = job.leaves()["decoder.layers.0.mlp.up_proj.weight"]
    assert leaf.grad is not None
    leaf.grad.copy_(leaf.grad.flip(0))
    assert max_relative_difference(digest_gradients(job, 0), before) > 0.1
    with pytest.raises(ValueError, match="different names"):
        max_relative_difference({}, before)


def test_same_seed_same_model_other_rank_other_input() -> None:
    first, second = build_job(TINY, CPU), build_job(TINY, CPU, rank=1)
    pairs = zip(first.module.parameters(), second.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.inputs[0], second.inputs[0])


def test_settings() -> None:
    assert expand_set(["run", "x", "--set", "a=1", "b=2", "--out", "d"]) == [
        *("run", "x", "--set", "a=1", "--set", "b=2", "--out", "d")
    ]
    values = split_settings(["layers=16,36", "case=stack,causal_lm", "steps=9", "device_types=cpu"])
    cases = parse_cases(values, {"seq": ["2048"]})
    assert [(c.name, c.layers, c.seq) for c in cases] == [
        ("stack", 16, 2048),
        ("stack", 36, 2048),
        ("causal_lm", 16, 2048),
        ("causal_lm", 36, 2048),
    ]
    assert parse_protocol(values, {}).steps == 9
    variants = parse_variants("inductor,offload_all@in_flight_budget=1GiB@disable=a+b", values)
    assert variants[0].options == {}
    assert variants[1].options == {
        "policy": "offload_all",
        "device_types": ["cpu"],
        "in_flight_budget": "1GiB",
        "disable": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [(["layer=2"], "unknown setting layer"), (["layers"], "name=value"), (["name=x"], "unknown setting name")],
)
def test_mistyped_settings_are_refused_before_anything_runs(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_settings(settings)


def test_mistyped_variants_and_short_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown variant"):
        parse_variants("inducter", {})
    with pytest.raises(ValueError, match="take options"):
        parse_variants("inductor@x=1", {})
    with pytest.raises(ValueError, match="at least 5"):
        parse_protocol({"steps": ["4"]}, {})


def test_shared_options_are_the_backends() -> None:
    from fxoffload.options import Options

    of_one_variant = {"policy", "inductor", "activation_budget", "max_slowdown"}
    assert set(SHARED_OPTIONS) == {field.name for field in dataclasses.fields(Options)} - of_one_variant


def test_list_names_every_scenario() -> None:
    output = CliRunner().invoke(app, ["list"]).output
    assert all(
        name in output
        for name in ("activations", "compile-time", "fsdp", "plan", "max-seq", "budget-sweep", "overhead")
    )
