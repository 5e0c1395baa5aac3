from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxoffload.environment import PIECES
from fxoffload.options import Options

ROOT = Path(__file__).parents[1]


def test_defaults_are_normalised() -> None:
    options = Options()
    assert options.policy == "auto"
    assert options.activation_budget is None
    assert options.max_slowdown is None
    assert options.profile is None
    assert options.recompute == "auto"
    assert options.checkpoints == "plan"
    assert options.on_error == "raise"
    assert options.min_bytes == 2**20
    assert options.host_budget is None
    assert options.in_flight_budget is None
    assert options.prefetch_budget is None
    assert options.inner == "inductor"
    assert options.inductor == ()
    assert options.device_types == ("cuda",)
    assert options.disable == ()


def test_sizes_become_bytes() -> None:
    options = Options(
        min_bytes=0, host_budget="64GiB", in_flight_budget="1GB", prefetch_budget=7, activation_budget="12 GiB"
    )
    assert options.activation_budget == 12 * 2**30
    assert options.min_bytes == 0
    assert options.host_budget == 64 * 2**30
    assert options.in_flight_budget == 10**9
    assert options.prefetch_budget == 7


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy", "offload-all", r"did you mean 'offload_all'.*auto, offload_all, keep_all"),
        ("policy", None, "policy is None"),
        ("on_error", "ignore", "raise, fallback"),
        ("inner", "eager", "inductor, aot_eager"),
        ("min_bytes", -1, "min_bytes is -1"),
        ("host_budget", 0, "host_budget is 0"),
        ("in_flight_budget", "1 gigabyte", "in_flight_budget is '1 gigabyte'"),
        ("prefetch_budget", True, "prefetch_budget is True"),
        ("activation_budget", "12 gigs", "activation_budget is '12 gigs'"),
        ("activation_budget", 0, "activation_budget is 0"),
        ("max_slowdown", -0.1, r"max_slowdown is -0.1; expected a fraction .* such as 0.02"),
        ("max_slowdown", float("nan"), "max_slowdown is nan"),
        ("max_slowdown", float("inf"), "max_slowdown is inf"),
        ("max_slowdown", "2%", "max_slowdown is '2%'"),
        ("max_slowdown", True, "max_slowdown is True"),
        ("profile", "h300", "did you mean 'h200'"),
        ("profile", "", "profile is ''"),
        ("profile", 7, "profile is 7; expected a shipped profile's name"),
        ("profile", "/no/such/file.json", "shipped are a100, "),
        ("recompute", "all", "recompute is 'all'.*auto, default, cheap"),
        ("device_types", ("cuda", "xpu"), "device_types is .*cuda, cpu"),
        ("device_types", (), "one or more of"),
        ("device_types", "cpu", r"expected a tuple of names, for example \('cuda',\)"),
        ("disable", ("prefech",), "did you mean 'prefetch'"),
        ("disable", "prefetch", "expected a tuple of names"),
        ("disable", (1,), "expected a tuple of names"),
        ("inductor", "max_autotune", "inductor is 'max_autotune'; expected a mapping"),
        ("inductor", {"max_autotun": True}, "did you mean 'max_autotune'"),
        ("inductor", {"max_autotune": "yes"}, "max_autotune is 'yes', a str; expected bool"),
    ],
)
def test_a_bad_value_says_what_is_accepted(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.from_torch_compile(None, {field: value})


@pytest.mark.parametrize("field", ["activation_budget", "max_slowdown"])
@pytest.mark.parametrize("policy", ["keep_all", "offload_all"])
def test_an_objective_needs_a_plan(field: str, policy: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is set and policy is '{policy}', which plans nothing"):
        Options.from_torch_compile(None, {field: 1, "policy": policy})


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    shipped = ROOT / "fxoffload" / "machine" / "shipped" / "h200.json"
    mine = tmp_path / "mine.json"
    mine.write_text(shipped.read_text())
    assert Options(profile=mine).profile == str(mine)  # type: ignore[arg-type]
    assert Options(max_slowdown=0).max_slowdown == 0.0
    mine.write_text("{}")
    with pytest.raises(ValueError, match=r"mine\.json"):
        Options(profile=str(mine))


def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="did you mean 'policy'") as caught:
        Options.from_torch_compile(None, {"polcy": "auto"})
    for field in dataclasses.fields(Options):
        assert field.name in str(caught.value)
    with pytest.raises(ValueError, match="options is a list"):
        Options.from_torch_compile(None, ["policy"])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [None, "default"])
def test_from_torch_compile_without_a_mode(mode: str | None) -> None:
    assert Options.from_torch_compile(mode, None) == Options()
    ours = Options(policy="keep_all")
    assert Options.from_torch_compile(mode, ours) is ours
    assert Options.from_torch_compile(mode, {"policy": "keep_all"}) == ours


def test_a_mode_becomes_inductor_options() -> None:
    found = Options.from_torch_compile("max-autotune-no-cudagraphs", None).inductor_config()
    assert found["max_autotune"] is True
    assert "triton.cudagraphs" not in found
    own = {"inductor": {"max_autotune": False, "epilogue_fusion": False}}
    found = Options.from_torch_compile("max-autotune-no-cudagraphs", own).inductor_config()
    assert found["max_autotune"] is False
    assert found["epilogue_fusion"] is False


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_are_refused(mode: str) -> None:
    with pytest.raises(NotImplementedError, match=f"mode '{mode}' uses CUDA graphs.*no-cudagraphs"):
        Options.from_torch_compile(mode, None)


def test_the_cuda_graphs_option_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"triton\.cudagraphs uses CUDA graphs"):
        Options(inductor={"triton.cudagraphs": True})
    assert Options(inductor={"triton.cudagraphs": False}).inductor_config() == {"triton.cudagraphs": False}


def test_an_unknown_mode_lists_those_accepted() -> None:
    with pytest.raises(ValueError, match=r"unknown mode 'fast'.*max-autotune-no-cudagraphs") as caught:
        Options.from_torch_compile("fast", None)
    assert "reduce-overhead" not in str(caught.value)


def test_inductor_options_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="only those that act on the joint graph"):
        Options(inner="aot_eager", inductor={"max_autotune": True})


def test_options_are_frozen_and_hashable() -> None:
    mine: dict[str, Any] = {"max-autotune": True, "_micro_pipeline_tp": False}
    options = Options(inductor=mine)
    mine["max-autotune"] = False
    assert options.inductor == (("_micro_pipeline_tp", False), ("max_autotune", True))
    options.inductor_config()["max_autotune"] = False
    assert options.inductor_config()["max_autotune"] is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.policy = "keep_all"  # type: ignore[misc]
    again = Options(inductor={"max_autotune": True, "_micro_pipeline_tp": False})
    assert again == options
    assert hash(again) == hash(options)
    assert dataclasses.replace(options, policy="keep_all").inductor == options.inductor


OTHER_VALUES: dict[str, Any] = {
    "policy": "keep_all",
    "activation_budget": "1GiB",
    "max_slowdown": 0.1,
    "profile": "h200",
    "recompute": "cheap",
    "checkpoints": "obey",
    "on_error": "fallback",
    "min_bytes": 0,
    "host_budget": "1GiB",
    "in_flight_budget": 1,
    "prefetch_budget": 1,
    "inner": "aot_eager",
    "inductor": {"max_autotune": True},
    "device_types": ("cpu", "cuda"),
    "disable": ("verify",),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Options)])
def test_two_values_give_two_keys(field: str) -> None:
    other = Options(**{field: OTHER_VALUES[field]})
    assert other != Options()
    assert other.cache_key() != Options().cache_key()


def test_equal_options_give_one_key() -> None:
    one = Options(min_bytes="1MiB", device_types=("cuda", "cpu"), disable=PIECES)
    two = Options(min_bytes=2**20, device_types=("cpu", "cuda"), disable=reversed(PIECES))
    assert one.cache_key() == two.cache_key()


def test_the_key_tells_inductor_values_apart() -> None:
    keys = {
        Options(inductor=value).cache_key()
        for value in (
            {"max_autotune": True},
            {"max_autotune": False},
            {"max_autotune_gemm_backends": "ATEN"},
            {"post_grad_custom_pre_pass": lambda graph: None},
            {"post_grad_custom_pre_pass": lambda graph: None, "max_autotune": True},
        )
    }
    assert len(keys) == 5


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process() -> None:
    code = (
        "from fxoffload.options import Options\n"
        "print(Options(host_budget='1GiB', disable=('verify', 'offload'),"
        " inductor={'max_autotune': True}).cache_key())"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    mine = Options(host_budget="1GiB", disable=("offload", "verify"), inductor={"max_autotune": True})
    assert found.stdout.strip() == mine.cache_key()
