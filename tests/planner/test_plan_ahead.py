"""``fxoffload.plan``: a plan without a GPU and without weights is the plan that ``torch.compile`` makes."""

from __future__ import annotations

import gc
import re
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fxoffload
from fxoffload.compiler import plan_ahead, planning
from fxoffload.compiler.plan_ahead import plan
from fxoffload.errors import BudgetError, OptionsError, UnsupportedError
from fxoffload.machine import load_profile
from fxoffload.plan_report.plan import Plan
from tests.capture import Tower, example_input

# As in training on the CPU rehearsal. Everything may move, and time is no object.
SMALL: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 1}
LONG: dict[str, Any] = {"max_slowdown": 5.0}
BATCH, SEQUENCE = 2, 16


@pytest.fixture(autouse=True)
def no_points_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes partitionings; tests/planner/test_planning.py asks for those of a frontier."""
    monkeypatch.setattr(planning, "DRAWN_POINTS", 3)


def qwen3(**changes: Any) -> nn.Module:
    """Three layers with tied embeddings, and attention that builds no mask."""
    pytest.importorskip("transformers")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from fxoffload.integrations.transformers import CAUSAL_ATTENTION

    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = Qwen3Config(
        **{**sizes, "head_dim": 8, "num_hidden_layers": 3, "use_cache": False, "tie_word_embeddings": True, **changes}
    )
    config._attn_implementation = CAUSAL_ATTENTION
    return Qwen3ForCausalLM(config).train()


def tokens(sequence: int = SEQUENCE, device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, sequence, dtype=torch.int64, device=device)
    return {"input_ids": ids, "labels": ids}


def compiled_plan(model: nn.Module, *args: Tensor, options: dict[str, Any], **kwargs: Tensor) -> Plan:
    """The plan that ``torch.compile`` makes, after a whole step."""
    chosen: dict[str, Any] = {**SMALL, "device_types": ("cpu",), **options}
    run = torch.compile(model, backend="fxoffload", options=chosen)
    output = run(*args, **kwargs)
    getattr(output, "loss", output).sum().backward()
    return fxoffload.plans()[-1]


def assert_same(found: Plan, expected: Plan) -> None:
    assert found.decisions == expected.decisions
    assert found.predicted == expected.predicted
    assert found.baseline == expected.baseline
    # A plan that is compiled searches less for it.
    assert 0.9 * expected.smallest_budget_bytes <= found.smallest_budget_bytes <= expected.smallest_budget_bytes
    assert found.boundaries == expected.boundaries


# -- the three forms ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_meta_fake_and_real_models_have_the_plan_that_is_compiled() -> None:
    real = qwen3()
    with torch.device("meta"):
        meta = qwen3()
    with FakeTensorMode():
        fake, fake_batch = qwen3(), tokens()
    plans = [
        plan(meta, tokens(device="meta"), **SMALL, **LONG),
        plan(fake, fake_batch, **SMALL, **LONG),
        plan(real, tokens(), **SMALL, **LONG),
    ]
    first = plans[0]
    assert plans[1] == plans[2] == first
    assert first.label == "Qwen3ForCausalLM" and first.loss == "inside"
    assert first.shape == f"input_ids {BATCH}x{SEQUENCE}, labels {BATCH}x{SEQUENCE}"
    assert first.device == "NVIDIA H200"
    assert str(first).startswith(f"plan ahead (Qwen3ForCausalLM), {first.shape}, NVIDIA H200\n")
    assert {"offload", "recompute"} & {d.action for d in first.decisions}
    assert_same(first, compiled_plan(real, **tokens(), options=LONG))


@pytest.mark.slow
def test_a_budget_is_met_and_is_the_one_that_is_compiled() -> None:
    model = qwen3()
    loose = plan(model, tokens(), **SMALL, **LONG)
    budget = (loose.smallest_budget_bytes + loose.baseline_peak_bytes) // 2
    found = plan(model, tokens(), activation_budget=budget, max_slowdown=9.0, **SMALL)
    assert found.predicted_peak_bytes <= budget == found.activation_budget
    assert found.max_slowdown == 9.0
    assert_same(found, compiled_plan(model, **tokens(), options={"activation_budget": budget, "max_slowdown": 9.0}))


@pytest.mark.slow
def test_a_slowdown_is_kept() -> None:
    model, batch = Tower(4), (example_input(),)
    found = plan(model, example_args=batch, max_slowdown=0.5, **SMALL)
    assert found.predicted_peak_bytes < found.baseline_peak_bytes
    assert found.predicted_step_ms <= 1.5 * found.baseline_step_ms
    assert plan(model, example_args=batch, **SMALL).max_slowdown == 0.02


@pytest.mark.slow
@pytest.mark.inductor
def test_the_segments_of_inductor_have_the_same_plan() -> None:
    model = Tower(3)
    found = plan(model, example_args=(example_input(),), min_bytes=1, **LONG)
    assert_same(found, compiled_plan(model, example_input(), options={**LONG, "inner": "inductor"}))


# -- nothing changes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model_stays_as_it_is_and_trains() -> None:
    model, batch = qwen3(), tokens()
    before = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    values = {name: (p.detach().clone(), p._version) for name, p in before.items()}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    plan(model, batch, **SMALL, **LONG)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(after[n] is p for n, p in before.items())
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert all(p.grad is None and p._version == values[n][1] for n, p in after.items())
    assert all(torch.equal(p, values[n][0]) for n, p in after.items())
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert all(not isinstance(t, FakeTensor) and not t.is_meta for t in (*after.values(), *batch.values()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    assert any(not torch.equal(p, values[n][0]) for n, p in after.items())


def test_nothing_of_full_size_is_allocated() -> None:
    """2 TiB of weights, and 32 TiB of activations."""
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(1 << 18, 1 << 18, bias=False) for _ in range(8))
        rows = torch.empty(1 << 22, 1 << 18)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.sin(layer(x))
            return x.sum()

    found = plan(Chain(), example_args=(rows,), recompute="default", **LONG)
    assert found.baseline_peak_bytes > 8 * 4 << 40
    assert found.shape == f"x {1 << 22}x{1 << 18}"


@pytest.mark.slow
def test_plans_lists_no_plan_ahead_and_nothing_stays() -> None:
    seen: list[weakref.ref[Any]] = []
    twins = plan_ahead._twins

    def watched(*args: Any) -> Any:
        found = twins(*args)
        seen.append(weakref.ref(found[0]))
        return found

    gc.collect()
    before = fxoffload.plans(), fxoffload.graphs()
    with mock.patch.object(plan_ahead, "_twins", watched):
        found = plan(Tower(3), example_args=(example_input(),), **SMALL, **LONG)
    assert found.simulation is not None
    assert (fxoffload.plans(), fxoffload.graphs()) == before
    gc.collect()
    assert [ref() for ref in seen] == [None]


@pytest.mark.slow
def test_code_that_is_compiled_stays_compiled_and_static() -> None:
    shapes: list[list[tuple[Any, ...]]] = []

    def watch(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, Tensor)])
        assert all(isinstance(n, int) for shape in shapes[-1] for n in shape)
        assert not any(isinstance(x, torch.SymInt) for x in inputs)
        return gm.forward

    model = Tower(3)
    run = torch.compile(model, backend=watch)
    run(example_input(4))
    plan(model, example_args=(example_input(5),), **SMALL, **LONG)
    run(example_input(4))
    assert len(shapes) == 1
    torch.compiler.reset()
    # A size that was planned with is not a first size: the next one is no reason for dynamic shapes.
    plan(model, example_args=(example_input(5),), **SMALL, **LONG)
    torch.compile(model, backend=watch)(example_input(6))
    assert len(shapes) == 2


@pytest.mark.slow
def test_settings_of_dynamo_do_not_matter_and_stay() -> None:
    from torch._dynamo import config

    model = Tower(3)
    with config.patch(suppress_errors=True, recompile_limit=1):
        run = torch.compile(model, backend="eager", dynamic=False)
        run(example_input(4))
        found = plan(model, example_args=(example_input(5),), **SMALL, **LONG)
        assert found.predicted_peak_bytes > 0
        assert (config.suppress_errors, config.recompile_limit) == (True, 1)


# -- planning targets --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_device_is_a_name_a_file_or_a_profile(tmp_path: Path) -> None:
    model, batch = Tower(3), (example_input(),)
    h200 = load_profile("h200")
    slower = replace(h200, device_name="half an H200", memory_gb_per_s=h200.memory_gb_per_s / 2, source="data sheet")
    file = tmp_path / "half.json"
    file.write_text(slower.to_json())
    by_name, by_file, by_profile = (
        plan(model, example_args=batch, device=d, **SMALL, **LONG) for d in ("h200", file, slower)
    )
    assert by_file == by_profile
    told = "half an H200 (profile from a data sheet, not measured)"
    assert (by_name.device, by_file.device) == ("NVIDIA H200", told)
    assert told in str(by_file) and told in by_file.to_json() and "data sheet" not in str(by_name)
    assert by_file.baseline_step_ms > by_name.baseline_step_ms


@pytest.mark.slow
def test_this_machine_s_host_memory_is_no_bound_but_a_host_budget_is() -> None:
    model, batch = Tower(4), (example_input(),)
    asked: dict[str, Any] = {**SMALL, **LONG, "recompute": "default"}
    with mock.patch("fxoffload.runtime.engine.default_host_budget_bytes", return_value=1):
        free = plan(model, example_args=batch, **asked)
        assert free == plan(model, example_args=batch, **asked, host_budget="1TiB")
        bound = plan(model, example_args=batch, **asked, host_budget=4096)
    assert free.predicted.bytes_offloaded > 4096 >= bound.predicted.bytes_offloaded


@pytest.mark.slow
def test_autocast_is_seen() -> None:
    model, batch = Tower(3), (example_input(),)
    wide = plan(model, example_args=batch, recompute="default", **SMALL, **LONG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = plan(model, example_args=batch, recompute="default", **SMALL, **LONG)
    # Without a GPU torch.autocast("cuda") stays off.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert plan(model, example_args=batch, recompute="default", **SMALL, **LONG) == narrow
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert max(d.nbytes for d in narrow.decisions) < max(d.nbytes for d in wide.decisions)


@pytest.mark.slow
def test_a_tensor_that_is_no_buffer_is_faked_too() -> None:
    class Scaled(Tower):
        def __init__(self) -> None:
            super().__init__(3)
            self.scale = torch.full((16,), 2.0)
            self.tables = {"shift": [torch.ones(16)]}

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale + self.tables["shift"][0])

    model = Scaled()
    scale = model.scale
    found = plan(model, example_args=(example_input(),), **SMALL, **LONG)
    assert model.scale is scale and not isinstance(scale, FakeTensor)
    assert found.label == "Scaled"


@pytest.mark.slow
def test_a_plan_within_a_fake_mode_of_the_caller() -> None:
    expected = plan(Tower(3), example_args=(example_input(),), **SMALL, **LONG)
    with FakeTensorMode():
        found = plan(Tower(3), example_args=(torch.empty(4, 8, 16),), **SMALL, **LONG)
    assert found == expected


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_budget_that_cannot_be_met_says_the_smallest() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(Tower(3), example_args=(example_input(),), activation_budget=1, **SMALL)
    error = caught.value
    assert 1 < error.smallest_bytes < (error.inductor_bytes or 0)
    assert "DYNAMO" not in str(error) and "Plain Inductor takes" in str(error)
    assert len(traceback.format_tb(error.__traceback__)) == 2, "this test, and plan()"


@pytest.mark.slow
def test_where_nothing_is_done_the_frontier_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    found = plan(Tower(3), example_args=(example_input(),), activation_budget="1GiB", **SMALL)
    assert "nothing is done" in found.summary and len(found.frontier) > 1
    assert found.smallest_budget_bytes == found.frontier[0].budget_bytes < found.predicted.peak_bytes
    assert re.search(r"activation_budget \w+ +peak \w+ +step ms +slowdown", str(found))


def test_an_error_of_the_model_names_its_line_and_not_those_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedError, match="must have same reduction dim") as caught:
        plan(Tower(3), example_args=(torch.ones(4, 8, 15),), **SMALL)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("\n") < 15 and "/torch/" not in text and "Dynamo" not in text
    assert not caplog.records


def test_unknown_devices_and_options() -> None:
    asked: dict[str, Any] = {"example_args": (example_input(),)}
    with pytest.raises(OptionsError, match=r"'h20'.*did you mean 'h200'"):
        plan(Tower(3), **asked, device="h20")
    with pytest.raises(OptionsError, match="unknown option 'polcy'"):
        plan(Tower(3), **asked, polcy="auto")
    with pytest.raises(OptionsError, match="plans nothing"):
        plan(Tower(3), **asked, policy="offload_all")
    with pytest.raises(OptionsError, match="device='h200'"):
        plan(Tower(3), **asked, profile="h200")
    with pytest.raises(OptionsError, match="segments disabled"):
        plan(Tower(3), **asked, disable=("segments",))


def test_planning_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_DISABLE", "planner")
    with pytest.raises(OptionsError, match="planner disabled"):
        plan(Tower(3), example_args=(example_input(),))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"example_kwargs": {"z": 1}}, r"Linear\.forward\(input: .*\) takes, found one with 0 .* 'z': "),
        ({}, "found one with 0 positional arguments and no keywords: missing a required argument: 'input'"),
        ({"example_args": (1, 2)}, "found one with 2 positional arguments and no keywords: too many"),
        ({"example_kwargs": torch.zeros(1)}, r"plan\(model, {'input_ids': ids}\), found Tensor; .* example_args="),
        ({"example_kwargs": torch.zeros(8, 2)}, r"keyword arguments of one call, .* found Tensor"),
        ({"example_kwargs": (torch.zeros(8, 2),)}, r"keyword arguments of one call, .* found tuple"),
        ({"example_kwargs": 3}, r"keyword arguments of one call, .* found int"),
        ({"example_args": torch.zeros(1)}, r"expected example_args=\(\.\.\.\), a tuple or a list, found Tensor"),
        ({"example_args": None}, r"expected example_args=\(\.\.\.\), a tuple or a list, found NoneType"),
        ({"optimizer": "adamw"}, r"expected a torch\.optim\.Optimizer, or None for AdamW's state, found str 'adamw'"),
    ],
)
def test_a_call_that_the_model_does_not_take(call: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fxoffload.plan(nn.Linear(2, 2), **call)


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module to plan, found function"):
        fxoffload.plan(lambda x: x, {})  # type: ignore[arg-type]


def test_a_model_without_tensors() -> None:
    class Constant(nn.Linear):
        def forward(self) -> int:  # type: ignore[override]
            return 3

    with pytest.raises(UnsupportedError, match=r"nothing in its call that torch\.compile could trace"):
        fxoffload.plan(Constant(2, 2), {})


def test_nothing_to_plan() -> None:
    x = example_input()
    with pytest.raises(UnsupportedError, match="parameters that require grad, found none"):
        plan(Tower(3).requires_grad_(False), example_args=(x,))
    with pytest.raises(UnsupportedError, match="none that may move"):
        plan(Tower(3), example_args=(x,), min_bytes="1GiB")
    with pytest.raises(UnsupportedError, match="two or more layers"):
        plan(nn.Linear(16, 16), example_args=(x,), **SMALL)

    class Detached(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(UnsupportedError, match="an output that requires grad"):
        plan(Detached(3), example_args=(x,), **SMALL)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedError, match="switched off"):
        plan(Tower(3), example_args=(x,), **SMALL)


def test_a_model_that_makes_tensors_elsewhere() -> None:
    class Elsewhere(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.ones(16, device="meta"))

    with pytest.raises(UnsupportedError, match="on the device of its inputs"):
        plan(Elsewhere(3), example_args=(example_input(),), **SMALL)


def test_a_model_that_cannot_be_copied() -> None:
    model = Tower(3)
    model.lines = (line for line in "ab")  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"copy\.deepcopy"):
        plan(model, example_args=(example_input(),), **SMALL)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="lazy"):
        plan(lazy, example_args=(example_input(),), **SMALL)
