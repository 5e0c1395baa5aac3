"""Peers as variants, on a CPU: each runs, or its row names the missing part; wrong gradients are recognized."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.activations.around import around_step
from benchmarks.activations.available import NotAvailable
from benchmarks.activations.kinds import PEERS, is_checkpointed, runs_eagerly
from benchmarks.activations.load import load_module
from benchmarks.activations.torch_offload import TagAll
from benchmarks.arguments import expand_set, parse_cases, parse_variants, split_settings
from benchmarks.budgets import with_budget_in_bytes
from benchmarks.claims import check_claims
from benchmarks.cli import app
from benchmarks.copy_trace import sum_copies
from benchmarks.derived import derive
from benchmarks.gradients import _digest
from benchmarks.gradients_agree import ALLOWED, EPS, claim_gradients_agree, compare_gradients
from benchmarks.gradients_compare import NUM_PARTS, max_relative_difference, pack_parts, unpack_parts
from benchmarks.hf_models import HF_MODELS
from benchmarks.schema import Case, Digest, Protocol, Record, Report, Request, Result, Variant, from_json
from benchmarks.single import apply, build_stepper
from benchmarks.steps import Stepper
from benchmarks.workloads import build_job, decoder_layers
from tests.benchmarks.peer_checkouts import write_trl, write_verl

CPU = torch.device("cpu")
SIZES = {"layers": 3, "seq": 32, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
TINY = Case(**SIZES, dtype="float32", device="cpu")
WORDS = [f"{name}={size}" for name, size in SIZES.items()] + ["dtype=float32", "device=cpu", "link_mib=1"]
WORDS += ["link_copies=2", "case=causal_lm", "vocab=64"]


@pytest.fixture(scope="module")
def peers_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """One real run: verl's API right and wrong, and a peer that is not there."""
    folder = tmp_path_factory.mktemp("peers")
    right, wrong = write_verl(folder / "right"), write_verl(folder / "wrong", factor=1.5)
    variants = f"eager,verl,verl@path={wrong},trl@path={folder / 'nothing'}"
    arguments = ["run", "activations", "--set", *WORDS, f"verl={right}", "--variants", variants, "--out", str(folder)]
    done = CliRunner().invoke(app, expand_set(arguments))
    assert done.exit_code == 0, done.output
    return from_json(Report, (folder / "activations.json").read_text()), done.output


@pytest.mark.slow
def test_peers_run_or_say_what_they_lack(peers_run: tuple[Report, str]) -> None:
    report, table = peers_run
    *ran, missing = report.records
    assert [record.status for record in ran] == ["ok"] * 3, table
    assert missing.status == "skipped"
    assert "expected a checkout of trl" in missing.reason and missing.reason in table
    assert missing.result.step_ms is None


@pytest.mark.slow
def test_gradients_are_compared_and_wrong_ones_found(peers_run: tuple[Report, str]) -> None:
    report, _ = peers_run
    rows = {row["variant"]: row for row in report.derived}
    wrong = report.records[2].variant.label
    assert rows["verl"]["gradients_compared_with"] == "eager"
    assert rows["verl"]["gradient_difference"] == 0.0 and rows["verl"]["gradients_agree"] is True
    assert rows[wrong]["gradients_agree"] is False and rows[wrong]["gradient_difference"] > 0.1
    assert rows[wrong]["gradient_ratio"] > 1e4 and rows[wrong]["gradient_worst"] in report.records[0].result.gradients
    (claim,) = report.claims
    assert rows[wrong]["gradient_worst"] in claim["figures"]["farthest"] and "farthest" in peers_run[1]
    assert claim["held"] is False and claim["figures"]["disagree"] == [wrong]


def _record(kind: str, probe: float, repeat: float = 0.0, dtype: str = "float32") -> Record:
    result = Result(gradients={"w": Digest(0.0, 1.0, probe)}, gradient_repeat_difference=repeat)
    case = dataclasses.replace(TINY, dtype=dtype)
    return Record("activations", case, Variant(kind, kind), "ok", "", 1.0, result)


def test_noise_of_the_comparison() -> None:
    eager, inductor = _record("eager", 0.0, repeat=0.001), _record("inductor", 0.01)
    both = {"eager": eager, "inductor": inductor}
    # The same kernels: only what atomics leave open.
    assert compare_gradients(_record("trl", 0.001 * ALLOWED), both)["gradients_agree"]
    assert not compare_gradients(_record("trl", 0.0011 * ALLOWED), both)["gradients_agree"]
    # Other fusions: what eager and Inductor differ by in this run.
    assert compare_gradients(_record("torch_offload", 0.01 + 0.01 * ALLOWED), both)["gradient_noise"] == 0.01
    assert not compare_gradients(_record("torch_offload", 0.011 + 0.01 * ALLOWED), both)["gradients_agree"]
    # Without eager: rounding.
    alone = compare_gradients(_record("keep_all", 0.5), {"inductor": inductor})
    assert alone["gradient_noise"] == EPS["float32"] * (1 + TINY.layers)
    assert alone["gradients_agree"] is None, "an estimate cannot condemn"
    # The reference is compared with the other one; where nothing is there, nothing is said.
    assert compare_gradients(inductor, both)["gradients_compared_with"] == "eager"
    assert compare_gradients(inductor, {"inductor": inductor}) == {}
    assert not compare_gradients(_record("trl", float("nan")), both)["gradients_agree"]


LAYERS, ELEMENTS = ("early", "late", "small"), (4096, 4096, 48)


def _noisy(kind: str, seed: int, noise: dict[str, float], repeat: dict[str, float] | None = None) -> Record:
    """A record whose gradients are the same ones plus its own noise, relative to each gradient's norm."""
    common = torch.Generator().manual_seed(99)
    own = torch.Generator().manual_seed(seed)
    digests, repeats = {}, {}
    for index, (name, size) in enumerate(zip(LAYERS, ELEMENTS, strict=True)):
        gradient = torch.randn(size, generator=common, dtype=torch.float64)
        error = torch.randn(size, generator=own, dtype=torch.float64)
        gradient += error * noise[name]
        digests[name] = _digest(gradient, index)
        repeats[name] = (repeat or {}).get(name, 0.0)
    result = Result(gradients=digests, gradient_repeat_differences=repeats)
    result.gradient_repeat_difference = max(repeats.values())
    case = dataclasses.replace(TINY, dtype="bfloat16")
    return Record("activations", case, Variant(kind, kind), "ok", "", 1.0, result)


def test_each_parameter_is_judged_by_its_own_noise() -> None:
    """A parameter's error is found below the noise of another one, which the worst parameter's noise would hide."""
    noise = {"early": 0.1, "late": 0.01, "small": 0.03}
    exact = dict.fromkeys(LAYERS, 0.0)
    both = {"eager": _noisy("eager", 1, exact), "inductor": _noisy("inductor", 2, noise)}
    for seed in range(3, 23):
        row = compare_gradients(_noisy("keep_all", seed, noise), both)
        assert row["gradients_agree"], row
        assert row["gradient_ratio"] < 2.5 and row["gradient_worst"] in LAYERS
    wrong = compare_gradients(_noisy("keep_all", 23, {**noise, "late": 0.08}), both)
    assert wrong["gradient_worst"] == "late" and wrong["gradients_agree"] is False
    assert 0.05 < wrong["gradient_difference"] < 0.1, "less than the noise of the other parameter"
    assert wrong["gradient_ratio"] == wrong["gradient_difference"] / wrong["gradient_noise"] > ALLOWED


def test_eager_peers_are_held_to_the_bits_of_parameters_whose_step_repeats_them() -> None:
    """With half an eps to spare, as a peer's copy of a weight may choose another kernel."""
    atomics = {"early": 0.03, "late": 0.0, "small": 0.001}
    repeat = {"early": 0.04, "late": 0.0, "small": 0.001}
    eager = {"eager": _noisy("eager", 1, atomics, repeat)}
    row = compare_gradients(_noisy("trl", 2, atomics, repeat), eager)
    assert row["gradients_agree"] is True and row["gradient_ratio"] < 1.5, row
    allowed = ALLOWED * EPS["bfloat16"] / 2
    for factor, agree in ((0.8, True), (1.3, False)):
        row = compare_gradients(_noisy("trl", 3, {**atomics, "late": factor * allowed}, repeat), eager)
        assert row["gradients_agree"] is agree and row["gradient_worst"] == "late", row
        assert row["gradient_noise"] == EPS["bfloat16"] / 2


def test_what_was_not_repeated_is_not_condemned_and_what_is_not_finite_is() -> None:
    noise = dict.fromkeys(LAYERS, 0.02)
    eager = {"eager": _noisy("eager", 1, noise)}
    unknown = _noisy("trl", 2, noise)
    unknown.result.gradient_repeat_difference = None
    assert compare_gradients(unknown, eager)["gradients_agree"] is None
    broken = _noisy("trl", 3, {**noise, "late": float("nan")}, {"late": float("inf")})
    row = compare_gradients(broken, eager)
    assert row["gradients_agree"] is False and row["gradient_worst"] == "late"


@pytest.mark.parametrize("rows", [70, 700])  # small, and split into parts
def test_parts_of_a_gradient_estimate_the_norm_of_a_difference(rows: int) -> None:
    """Of one parameter alone, where a single projection is as often as not off by more than half."""
    generator = torch.Generator().manual_seed(5)
    found = []
    mine = theirs = Digest(0.0, 0.0, 0.0)
    for seed in range(40):
        gradient = torch.randn(rows, 33, generator=generator)
        error = 1e-3 * torch.randn(rows, 33, generator=generator)
        mine, theirs = _digest(gradient + error, seed), _digest(gradient, seed)
        found.append(max_relative_difference({"w": mine}, {"w": theirs}) / (error.norm() / gradient.norm()).item())
        assert sum(unpack_parts(mine.parts)) == pytest.approx(mine.probe, abs=1e-3)
    assert min(found) > 0.6 and max(found) < 1.5 and sum(found) / 40 == pytest.approx(1.0, abs=0.06)
    assert max_relative_difference({"w": mine}, {"w": mine}) == 0.0
    alone = dataclasses.replace(mine, parts="")  # of a report of before
    assert max_relative_difference({"w": alone}, {"w": theirs}) == pytest.approx(
        max(abs(mine.norm - theirs.norm), abs(mine.probe - theirs.probe)) / theirs.norm
    )


def test_an_error_in_one_element_of_a_norm_is_seen() -> None:
    generator = torch.Generator().manual_seed(6)
    gradient = torch.randn(128, generator=generator)
    wrong = gradient.clone()
    wrong[7] += 0.5
    for seed in range(20):
        found = max_relative_difference({"w": _digest(wrong, seed)}, {"w": _digest(gradient, seed)})
        assert 0.6 < found * gradient.norm().item() / 0.5 < 1.5


def test_parts_survive_what_float32_cannot_hold() -> None:
    values = [1e300, -1e300, float("nan"), *[0.0] * (NUM_PARTS - 3)]
    large, small, broken, *rest = unpack_parts(pack_parts(values))
    assert large == float("inf") == -small and broken != broken and not any(rest)


def test_claim_names_what_disagrees() -> None:
    rows = [{"variant": "a", "gradients_agree": True}, {"variant": "b"}]
    assert claim_gradients_agree(rows)["held"] is True
    assert claim_gradients_agree(rows[1:])["held"] is None
    farther = {"variant": "d", "gradients_agree": True, "gradient_ratio": 1.25, "gradient_worst": "w"}
    nearer = {**farther, "variant": "e", "gradient_ratio": 0.5}
    assert claim_gradients_agree([farther, nearer])["figures"]["farthest"] == "1.2x in w of d"
    undecided = claim_gradients_agree([*rows, {"variant": "c", "gradients_agree": None}])
    assert undecided["held"] is None and undecided["figures"]["undecided"] == ["c"]
    records = [_record("eager", 0.0), _record("save_on_cpu", 0.2)]
    for record in records:
        record.result.step_ms = None
    report = Report("activations", {}, Protocol(), None, records, derive(records, None))
    assert check_claims(report)[0]["held"] is None, "a variant that was not timed has no row"


def test_trl_of_a_checkout_wraps_the_step_as_its_trainers_do(tmp_path: Path) -> None:
    path = str(write_trl(tmp_path))
    job = build_job(TINY, CPU)
    job.allocate_gradients()
    variant = Variant("trl", "trl", {"path": path, "max_fwd_stash_size": 7})
    around = around_step(variant, job, torch.device("cuda", 0))
    manager = around()
    assert manager is around() and manager.model is job.module.decoder  # type: ignore[attr-defined]
    assert manager.max_fwd_stash_size == 7  # type: ignore[attr-defined]
    Stepper(job, job.module, CPU, around).step()
    assert manager.num_packed > TINY.layers  # type: ignore[attr-defined]
    assert not any(name == "trl" or name.startswith("trl.") for name in sys.modules), "its __init__ did not run"
    with pytest.raises(NotAvailable, match="the case is on the CPU"):
        around_step(variant, job, CPU)


def test_what_a_peer_copied_is_read_from_the_trace() -> None:
    names = [("Memcpy DtoH (Device -> Pinned)", 5), ("Memcpy HtoD (Pinned -> Device)", 7), ("Memcpy DtoD", 100)]
    events = [{"cat": "gpu_memcpy", "name": name, "args": {"bytes": size}} for name, size in names]
    events += [events[0], {"cat": "kernel", "name": "Memcpy DtoH", "args": {"bytes": 1}}, {"name": "process_name"}]
    assert sum_copies({"traceEvents": events}) == {"bytes_offloaded": 10.0, "bytes_reloaded": 7.0}


def test_titan_says_what_it_lacks(tmp_path: Path) -> None:
    variant = Variant("titan", "titan", {"path": str(tmp_path)})
    request = Request("activations", TINY, variant, Protocol())
    with pytest.raises(NotAvailable, match="on the CPU"):
        build_stepper(request, CPU)
    with pytest.raises(NotAvailable, match=r"expected a checkout of torchtitan|offload_ops, which torch .* lacks"):
        build_stepper(request, torch.device("cuda", 0))


def test_a_peer_that_is_nowhere_says_what_to_give() -> None:
    with pytest.raises(NotAvailable, match="--set no_such_peer=PATH"):
        load_module("no_such_peer", "module", "")


def test_checkpointing_in_eager_and_back() -> None:
    job = build_job(TINY, CPU)
    job.allocate_gradients()
    calls: list[torch.nn.Module] = []
    decoder_layers(job.module)[0].mlp.register_forward_pre_hook(lambda module, _: calls.append(module))
    for kind, times in (("eager_checkpoint", 2), ("eager", 1)):
        calls.clear()
        apply(Request("plan", TINY, Variant(kind, kind), Protocol()), Variant(kind, kind), job, CPU).step()
        assert len(calls) == times
    with pytest.raises(ValueError, match="changes the model for good"):
        apply(Request("plan", TINY, Variant("verl", "verl"), Protocol()), Variant("verl", "verl"), job, CPU)


def test_torchs_offloading_is_asked_for_everything_large() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    large, small = (graph.call_function(torch.sin, (x,)) for _ in range(2))
    for node, size in ((x, 1024), (large, 256), (small, 255)):
        node.meta["val"] = torch.empty(size)
    tag = TagAll(1024)
    tag(graph)
    assert [node.meta.get("should_offload") for node in (x, large, small)] == [None, True, None]
    assert tag.num_tagged == 1 and tag.uuid() != TagAll(1).uuid()


@pytest.mark.slow
@pytest.mark.inductor
def test_torchs_offloading_moves_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._activation_offloading import activation_offloading as builtin
    from torch._inductor.utils import fresh_cache

    from benchmarks.activations.torch_offload import offload_everything

    chosen: list[str] = []
    choose = builtin.choose_offload_sets

    def spy(forward: torch.fx.GraphModule, *rest: object) -> bool:
        done = choose(forward, *rest)  # type: ignore[arg-type]
        chosen.extend(node.name for node in forward.graph.nodes if node.meta.get("saved_for_offloading"))
        return done

    monkeypatch.setattr(builtin, "choose_offload_sets", spy)
    torch.manual_seed(0)
    weight = torch.randn(32, 32, requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        return ((x @ weight).sin() @ weight).sum()

    x = torch.randn(32, 32)
    work(x).backward()
    expected = weight.grad
    weight.grad = None
    # A cached graph was partitioned before, and is not again.
    with fresh_cache(), offload_everything(Variant("torch_offload", "torch_offload", {"min_bytes": "1KiB"})):
        torch.compile(work)(x).backward()
    assert chosen, "nothing that is saved was offloaded"
    assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-3)  # type: ignore[arg-type]
    torch._dynamo.reset()


def test_options_of_peers() -> None:
    values = split_settings(["trl=/checkouts/trl", "verl=/checkouts/verl"])
    trl, verl, other = parse_variants("trl@use_streams=false@max_fwd_stash_size=9,verl@path=/b=c,save_on_cpu", values)
    assert trl.options == {"path": "/checkouts/trl", "use_streams": False, "max_fwd_stash_size": 9}
    assert verl.options == {"path": "/b=c"} and other.options == {}
    with pytest.raises(ValueError, match="unknown option stash of trl; known: use_pin_memory"):
        parse_variants("trl@stash=1", {})


def test_every_peer_says_what_it_is() -> None:
    assert all(peer.says for peer in PEERS.values())
    assert runs_eagerly("eager") and runs_eagerly("verl") and not runs_eagerly("inductor")
    assert is_checkpointed("checkpoint") and is_checkpointed("trl_checkpoint") and not is_checkpointed("trl")


def test_relative_budgets_of_processes_of_their_own() -> None:
    (variant,) = parse_variants("auto@activation_budget=50%", {})
    found = with_budget_in_bytes(variant, {"checkpoint": 100, "inductor": 300})
    assert (found.label, found.options["activation_budget"]) == (variant.label, 200)
    assert with_budget_in_bytes(variant, {}) is variant


# -- models by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HF_MODELS)
def test_models_by_name_train_at_any_size(name: str) -> None:
    words = ["layers=6" if name.startswith("Gemma") else "layers=2", "seq=32", "hidden=32", "ffn=64", "heads=4"]
    words += ["kv_heads=2", "head_dim=8", "vocab=64", "dtype=float32", "device=cpu", f"case={name}"]
    words += ["experts=4", "experts_per_token=2"] if "A3B" in name else []
    (case,) = parse_cases(split_settings(words), {})
    job = build_job(case, CPU)
    job.allocate_gradients()
    assert len(decoder_layers(job.module)) == case.layers
    loss = Stepper(job, job.module, CPU).step().loss
    assert loss == pytest.approx(torch.log(torch.tensor(64.0)).item(), rel=0.5)
    norms = {n: leaf.grad.norm().item() for n, leaf in job.leaves().items() if leaf.grad is not None}
    assert all(norm > 0 for n, norm in norms.items() if "experts" not in n), norms


def test_published_values_that_are_no_sizes() -> None:
    config = {name: _config(name) for name in HF_MODELS}
    assert config["Gemma-3-12B"].layer_types.count("full_attention") == 1
    assert config["Gemma-3-12B"].sliding_window == 1024 and config["Gemma-3-12B"].tie_word_embeddings
    assert config["Llama-3.1-8B"].rope_parameters["rope_type"] == "llama3"
    assert config["Qwen3-30B-A3B"].norm_topk_prob
    assert not any(config[name].tie_word_embeddings for name in HF_MODELS if not name.startswith("Gemma"))


def _config(name: str):
    small = dataclasses.replace(HF_MODELS[name].case, layers=6, hidden=32, ffn=32, heads=4, kv_heads=2, head_dim=8)
    small = dataclasses.replace(small, vocab=64, device="cpu", dtype="float32", experts=small.experts and 4)
    return build_job(
        dataclasses.replace(small, experts_per_token=small.experts and 2, seq=8), CPU
    ).module.decoder.config
