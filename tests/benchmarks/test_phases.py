"""The scenarios of phases at toy size on the CPU: whole runs, and what each strategy and figure is made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks.activations.available import NotAvailable
from benchmarks.arguments import expand_set
from benchmarks.cli import app
from benchmarks.machine import ROOT
from benchmarks.rl.checksums import change_a_bit, checksums
from benchmarks.rl.claims import check_phase_claims
from benchmarks.rl.job import RlJob
from benchmarks.rl.make_strategy import make_strategy
from benchmarks.rl.measure_small_copies import measure_small_copies
from benchmarks.rl.mixed_adamw import MixedAdamW
from benchmarks.rl.plot import draw
from benchmarks.rl.records import Endurance, Exposed, FirstForward, RlResult, Spread, Streamed, Switching, Way
from benchmarks.rl.strategy import EVERYTHING, Strategy
from benchmarks.rl.variants import parse_variants
from benchmarks.schema import Case, Protocol, Record, Report, Request, Result, Variant, from_json, to_json
from benchmarks.tables import render
from benchmarks.worker import serve

MIB = 1 << 20
CPU = torch.device("cpu")
TINY = Case(
    name="causal_lm",
    layers=2,
    seq=16,
    hidden=32,
    ffn=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=64,
    dtype="float32",
    state="float32",
    device="cpu",
    compile="no",
    parallel="fsdp2",
    micro_batches=2,
)
SHORT = Protocol(
    warmup=0, steps=5, link_mib=1, link_copies=2, logprob_s=0.005, rollout_s=0.005, bucket="32KiB", pin_gib=1 / 64
)
OF_CASE = ("layers", "seq", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "dtype", "state", "device")
OF_PROTOCOL = ("link_mib", "link_copies", "logprob_s", "bucket")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """Through the command line, in processes of their own: ours, a peer, and one that is not installed."""
    out = tmp_path_factory.mktemp("out")
    words = [f"{name}={getattr(TINY, name)}" for name in OF_CASE]
    words += [f"{name}={getattr(SHORT, name)}" for name in OF_PROTOCOL] + ["endurance=11"]
    variants = "fxoffload,packed,torch_memory_saver"
    arguments = ["run", "phases", "--set", *words, "--variants", variants, "--out", str(out)]
    done = CliRunner().invoke(app, expand_set(arguments))
    assert done.exit_code == 0, done.output
    return from_json(Report, (out / "phases.json").read_text()), done.output


@pytest.mark.slow
def test_a_run_measures_everything_and_survives_what_is_not_installed(whole_run: tuple[Report, str]) -> None:
    report, table = whole_run
    by_label = {record.variant.label: record for record in report.records}
    assert [by_label[label].status for label in ("fxoffload", "packed")] == ["ok", "ok"], table
    assert by_label["torch_memory_saver"].status == "failed"
    assert "not installed" in table
    for label in ("fxoffload", "packed"):
        rl = by_label[label].result.rl
        assert rl is not None and rl.switching is not None
        found = rl.switching
        assert found.bit_equal
        assert found.offload is not None and len(found.offload.seconds.values) == SHORT.steps
        assert found.onload is not None and found.onload.of_link is not None
        assert found.optimizer_bytes == 2 * found.parameter_bytes
        assert found.exposed is not None and found.first_forward is not None
        assert found.endurance is not None and found.endurance.cycles == 11 and found.endurance.bit_equal
        assert found.copies_alone is not None and found.copies_alone.h2d_gb_per_s > 0
        assert found.residue_bytes is None, "a CPU has no driver to ask"
        assert (found.stream is not None) is (label == "fxoffload")


def test_claims_of_a_rehearsal_are_open(whole_run: tuple[Report, str]) -> None:
    report, table = whole_run
    assert {claim["variant"] for claim in report.claims} == {"fxoffload"}
    assert [claim["held"] for claim in report.claims] == [None] * 10
    assert table.count("**open**") == 10


def test_a_report_survives_json_and_is_drawn(whole_run: tuple[Report, str], tmp_path: Path) -> None:
    report, _ = whole_run
    again = from_json(Report, to_json(report))
    assert again == report
    assert "packed" in render(again)
    draw(again, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000
    report = dataclasses.replace(report, records=[])
    with pytest.raises(ValueError, match="found none"):
        draw(report, tmp_path / "none.png")


def measure(
    folder: Path, scenario: str, label: str, protocol: Protocol = SHORT, case: Case = TINY
) -> tuple[RlResult, Result]:
    """In this process, as the worker does it; fails with what failed there."""
    (variant,) = parse_variants(scenario, label)
    asked, answer = folder / "asked.json", folder / "answer.json"
    asked.write_text(to_json(Request(scenario, case, variant, protocol, rendezvous=str(folder / "store"))))
    try:
        serve(asked, answer)
    finally:
        if dist.is_initialized():  # it failed on the way: the next test makes a group of its own
            dist.destroy_process_group()
    result = from_json(Result, answer.read_text())
    assert not result.failures, result.failures
    assert result.rl is not None
    return result.rl, result


@pytest.mark.parametrize("label", ["verl", "pageable", "module_to", "fxoffload@pin=false"])
def test_every_strategy_goes_through_all_of_phases(label: str, tmp_path: Path) -> None:
    """``cycles_s=0``: strategies that are slow take one cycle only."""
    protocol = dataclasses.replace(SHORT, cycles_s=0.0, endurance=2)
    rl, result = measure(tmp_path, "phases", label, protocol)
    found = rl.switching
    assert found is not None and found.offload is not None and found.exposed is not None
    assert len(found.offload.seconds.values) == len(found.exposed.alone.values) == 1
    assert found.bit_equal and found.endurance is not None and found.endurance.bit_equal
    assert found.offload.gb_per_s == pytest.approx(found.moved_bytes / 1e9 / found.offload.seconds.median)
    assert result.link is not None
    assert found.offload.of_link == pytest.approx(found.offload.gb_per_s / result.link["d2h_gb_per_s"])
    assert found.exposed.exposed_s == pytest.approx(found.exposed.around.median - found.exposed.alone.median)


@pytest.mark.parametrize("label", ["stream@bucket_bytes=8KiB", "stream_resident", "load_all", "per_parameter"])
def test_every_way_of_weight_sync_delivers_the_bits(label: str, tmp_path: Path) -> None:
    rl, _ = measure(tmp_path, "weight-sync", label)
    found = rl.stream
    assert found is not None and found.equal
    assert len(found.seconds.values) == SHORT.steps
    # 2 layers of 11 tensors each, embedding, final norm and head; a stream may hand out buffers too.
    assert found.tensors >= 25
    assert (found.promised_bytes is not None) is label.startswith("stream")
    if label.startswith("stream@"):
        assert found.promised_bytes == 2 * 8192 + found.largest_bytes


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fxoffload", "verl", "none"])
def test_an_rl_step_is_taken_apart(label: str, tmp_path: Path) -> None:
    rl, _ = measure(tmp_path, "rl-step", label)
    found = rl.step
    assert found is not None and found.step is not None and found.alone is not None
    assert set(found.phase_s) == set(found.phase_alone_s) == {"rollout", "logprob", "train", "sync"}
    assert found.switching_s == pytest.approx(found.step.median - found.alone.median)
    assert found.first_step_s is not None and found.kv_bytes > 0


def test_layers_may_be_compiled_and_states_may_be_wider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile itself is not under test: the layers run eagerly; that they were asked to compile is counted."""
    asked: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: asked.append(module))
    case = dataclasses.replace(TINY, compile="layers", dtype="bfloat16")
    rl, _ = measure(tmp_path, "rl-step", "packed", case=case)
    assert rl.step is not None and rl.step.step is not None
    assert len(asked) == TINY.layers


def test_pinning_measures_steps_while_memory_goes_and_storages_that_are_had_again(tmp_path: Path) -> None:
    rows, _ = measure(tmp_path, "pinning", "give_back")
    assert [row["give_back"] for row in rows.pinning] == ["none", "thread", "resting", "between"]
    assert all(row["longest_step_ms"] >= row["step_ms"] > 0 and row["steps"] >= 8 for row in rows.pinning)
    assert all(row["unregister_ms"] > 0 and row["bad"] == 0 for row in rows.pinning)
    rows, _ = measure(tmp_path, "pinning", "room")
    assert [(row["room_mib"], row["n"]) for row in rows.pinning] == [(mib, 4) for mib in (0, 128, 256, 1024)]
    assert all(row["alloc_ms"] > 0 for row in rows.pinning)


def test_small_copies_wait_for_nothing_on_a_cpu() -> None:
    with pytest.raises(NotAvailable, match="found a CPU"):
        measure_small_copies(torch.device("cpu"))


@pytest.mark.parametrize("kind", ["huge", "small", "staged", "resize"])
def test_pinning_writes_the_rows_of_the_published_file(kind: str, tmp_path: Path) -> None:
    published = json.loads((ROOT / "benchmarks/results/2026-11-22-h200-pinning.json").read_text())
    columns = {frozenset(row) for row in published}
    rl, _ = measure(tmp_path, "pinning", kind)
    assert {frozenset(row) for row in rl.pinning} <= columns
    if kind in ("huge", "small"):
        assert {row["touch"] for row in rl.pinning} >= {"first", "none"}
        assert all(row["huge"] is (kind == "huge") and row["bad"] == 0 for row in rl.pinning)
    elif kind == "resize":
        assert [row["resize_mib"] for row in rl.pinning] == [2, 16, 64]


@pytest.fixture
def job() -> RlJob:
    return RlJob(dataclasses.replace(TINY, parallel="no"), CPU, 0, 1, Strategy().allocating)


def test_packed_frees_storages_and_brings_the_bits_back(job: RlJob) -> None:
    strategy = make_strategy(Variant("packed", "packed"))
    strategy.attach(job)
    before, storages = checksums(job.tensors(*EVERYTHING)), job.storages(*EVERYTHING)
    num_bytes = job.num_bytes(*EVERYTHING)
    strategy.offload(*EVERYTHING)
    strategy.offload(*EVERYTHING)
    assert {storage.nbytes() for storage in storages} == {0}
    assert num_bytes <= (strategy.host_bytes() or 0) <= num_bytes + 512 * len(storages)
    strategy.onload("optimizer")
    assert job.num_bytes("params") == 0
    strategy.onload(*EVERYTHING)
    assert checksums(job.tensors(*EVERYTHING)) == before


def test_per_tensor_copies_are_fresh_and_made_once_each_way(job: RlJob) -> None:
    strategy = make_strategy(Variant("verl", "verl"))
    strategy.attach(job)
    places: list[dict[str, int]] = []
    for move in (strategy.offload, strategy.offload, strategy.onload, strategy.onload):
        move(*EVERYTHING)
        places.append({name: tensor.data_ptr() for name, tensor in job.tensors(*EVERYTHING).items()})
    assert places[0] == places[1] and places[2] == places[3]
    assert all(places[0][name] != places[2][name] for name in places[0])


def test_checksums_see_moved_bytes_and_single_bits() -> None:
    tensor = torch.arange(16, dtype=torch.int16)
    odd = torch.arange(7, dtype=torch.uint8)
    before = checksums({"tensor": tensor, "odd": odd})
    assert checksums({"tensor": tensor.roll(4), "odd": odd})["tensor"] != before["tensor"]
    change_a_bit({"tensor": tensor, "odd": odd})
    after = checksums({"tensor": tensor, "odd": odd})
    assert after["tensor"] != before["tensor"] and after["odd"] != before["odd"]
    change_a_bit({"tensor": tensor, "odd": odd})
    assert checksums({"tensor": tensor, "odd": odd}) == before


def test_mixed_adamw_is_adamw() -> None:
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    optimizers = [MixedAdamW([mine], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)]
    for _ in range(3):
        mine.grad = torch.randn(5, 3)
        theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(mine, theirs, atol=1e-6)
    half = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    optimizer = MixedAdamW([half], lr=0.1)
    optimizer.step()
    assert optimizer.state[half]["exp_avg"].dtype is torch.float32


def _spread(median: float) -> Spread:
    return Spread(median, median, median, [median] * 5)


EXPOSED = Exposed(10, 0.6, _spread(1.0), _spread(1.01), 0.1, 0.1, 0.2, 0.01, 0.05)
STREAMED = Streamed(25, 10, _spread(0.1), 50.0, 3, 4, 10, 11, True, 0.93)


def _good() -> Switching:
    """A row in which everything is held, on two ranks."""
    row: dict[str, float | None] = {
        "first_offload_gb_per_s": 11.0,
        "offload_of_link": 0.97,
        "onload_of_link": 0.96,
        "exposed_vs_serial": 0.05,
        "first_forward_fraction": 0.1,
        "residue_bytes": 100.0 * MIB,
        "residue_later_bytes": 200.0 * MIB,
        "host_vs_device": 1.01,
        "bit_equal": 1.0,
        "endured": 1.0,
    }
    return Switching(
        bit_equal=True,
        offload=Way(_spread(0.4), 53.0, 0.97),
        exposed=EXPOSED,
        first_forward=FirstForward(_spread(0.01), _spread(0.1), 0.1),
        endurance=Endurance(100, True, 0, 0, 0, 0),
        stream=STREAMED,
        by_rank=[dict(row), dict(row)],
    )


def _claims(found: Switching) -> dict[str, bool | None]:
    case = dataclasses.replace(TINY, device="cuda")
    record = Record("phases", case, Variant("fxoffload", "fxoffload"), "ok", "", 1.0, Result(rl=RlResult(found)))
    report = Report("phases", {}, dataclasses.replace(SHORT, ranks=2), None, [record])
    return {claim["claim"].split(":")[0]: claim["held"] for claim in check_phase_claims(report)}


def test_claims_hold_for_the_worst_rank_only() -> None:
    assert set(_claims(_good()).values()) == {True}
    # (field of one rank, value that is too bad, claims that are then not held)
    for field, value, claims in (
        ("first_offload_gb_per_s", 9.9, {"first offload, GB/s"}),
        ("onload_of_link", 0.94, {"steady onload, of the link", "each of 2 GPUs at once, of its link"}),
        ("exposed_vs_serial", 0.11, {"optimizer around log-probs, exposed of serial"}),
        ("first_forward_fraction", 0.16, {"first forward, of loading everything"}),
        ("residue_later_bytes", 301.0 * MIB, {"not free in rollout, bytes"}),
        ("host_vs_device", 1.03, {"host bytes over device bytes"}),
        ("endured", 0.0, {"100 cycles"}),
    ):
        found = _good()
        found.by_rank[1][field] = value
        assert {claim for claim, held in _claims(found).items() if held is False} == claims, field


@pytest.mark.parametrize(
    ("changes", "claim", "held"),
    [
        ({"stream": None}, "stream_weights, of the link", None),
        ({"endurance": Endurance(100, True, 0, 1, 0, 0)}, "100 cycles", False),
        ({"endurance": Endurance(20, True, 0, 0, 0, 0)}, "100 cycles", None),
        ({"endurance": None}, "100 cycles", None),
        ({"bit_equal": False, "endurance": None}, "100 cycles", False),
        ({"exposed": dataclasses.replace(EXPOSED, logprob_s=0.4)}, "optimizer around log-probs, exposed", None),
        ({"stream": dataclasses.replace(STREAMED, peak_bytes=12)}, "stream_weights, of the link", False),
        ({"stream": dataclasses.replace(STREAMED, equal=False)}, "stream_weights, of the link", False),
        ({"by_rank": []}, "each of 2 GPUs at once", None),
    ],
)
def test_claims_are_open_where_something_is_missing(changes: dict[str, Any], claim: str, held: bool | None) -> None:
    claims = _claims(dataclasses.replace(_good(), **changes))
    (found,) = [value for name, value in claims.items() if name.startswith(claim)]
    assert found is held


def test_variants_are_those_of_their_scenario() -> None:
    plain, options = parse_variants("phases", "verl,fxoffload@pin=false@host_limit=10GiB")
    assert (plain.kind, plain.options) == ("verl", {})
    assert options.options == {"pin": False, "host_limit": "10GiB"}
    with pytest.raises(ValueError, match="unknown variant 'none' of phases; known: fxoffload, verl"):
        parse_variants("phases", "none")
    with pytest.raises(ValueError, match="take options"):
        parse_variants("phases", "verl@pin=false")
    with pytest.raises(ValueError, match="option=value"):
        parse_variants("weight-sync", "stream@512MiB")


def test_cases_that_cannot_be_are_refused() -> None:
    for changes, message in (
        ({"compile": "whole"}, "compile=layers"),
        ({"parallel": "ddp"}, "parallel=fsdp2"),
        ({"state": "float16"}, "state=float32"),
        ({"name": "stack"}, "causal_lm"),
    ):
        with pytest.raises(ValueError, match=message):
            RlJob(dataclasses.replace(TINY, **{"parallel": "no", **changes}), CPU, 0, 1, Strategy().allocating)
