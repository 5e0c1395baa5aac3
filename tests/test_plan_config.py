"""``fxoffload plan``: does a configuration of transformers fit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from fxoffload import plan_config as plan_config_module
from fxoffload.cli.app import app, main
from fxoffload.errors import BudgetError, OptionsError
from fxoffload.machine import shipped_names
from fxoffload.plan_config import plan_config
from fxoffload.tell import warn

pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EMBEDDING = 256 * 64
LAYER = 64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128 + 2 * 64 + 2 * 16
NUMBERS = 2 * EMBEDDING + 2 * LAYER + 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.slow
def test_a_configuration_is_planned(folder: Path) -> None:
    command = ["plan", str(folder), "--tokens", "1024", "--layers", "2", "--json"]
    found = CliRunner().invoke(app, [*command, "--plot", str(folder / "p.png"), "--trace", str(folder / "t.json")])
    assert found.exit_code == 0, found.output
    fit = json.loads(found.stdout)
    # The allocator rounds each tensor up.
    for what, nbytes in {"parameters": 2 * NUMBERS, "gradients": 2 * NUMBERS, "state": 4 * NUMBERS}.items():
        assert fit["lasting"][what] == pytest.approx(nbytes, rel=0.03), what
    inductor, checkpointing, ours = fit["rows"]
    assert checkpointing["step_bytes"] < inductor["step_bytes"]
    stays = fit["lasting"]["parameters"] + fit["lasting"]["state"]
    assert all(row["total_bytes"] == stays + row["step_bytes"] for row in fit["rows"])
    assert ours["total_bytes"] <= inductor["total_bytes"] and ours["fits"]
    assert ours["step_ms"] <= 1.02 * inductor["step_ms"]
    assert len(fit["frontier"]) > 1
    assert (folder / "p.png").stat().st_size > 1000 and (folder / "t.json").exists()


def test_what_does_not_fit_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, with adapters: base weights have no gradients and no state."""
    pytest.importorskip("peft")
    large = SimpleNamespace(peak_bytes=200 << 30, peak_without_gradients_bytes=190 << 30, step_ms=5.0)
    found = SimpleNamespace(
        device="a GPU",
        baseline=large,
        checkpointing=None,
        predicted=large,
        frontier=(),
        summary="nothing is done",
        floors=("the head's",),
    )
    monkeypatch.setattr(plan_config_module, "plan", lambda model, inputs, **_: found)
    fit = plan_config(folder, tokens=64, ranks=2, lora=4)
    assert 0 < fit.lasting.gradients < fit.lasting.parameters / 3
    assert fit.lasting.state == pytest.approx(2 * fit.lasting.gradients, rel=0.05)
    stays = fit.lasting.parameters + fit.lasting.gradients + fit.lasting.state
    assert [row.total_bytes - stays for row in fit.rows] == [190 << 30] * 2
    shown = CliRunner().invoke(app, ["plan", str(folder), "--ranks", "2", "--lora", "4"])
    assert shown.exit_code == 1
    assert shown.stdout.count("does not fit") == 2 and "on each of 2" in shown.stdout
    assert "- with every plan, the head's" in shown.stdout


@pytest.mark.filterwarnings("always")
def test_a_budget_that_no_plan_meets(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    error = BudgetError("expected at least 3.0 KiB", 3072, "layers_0", 9216, 6144)

    def plan(model: Any, inputs: Any, **_: Any) -> Any:
        warn("it bounds nothing")
        raise error

    monkeypatch.setattr(plan_config_module, "plan", plan)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    monkeypatch.setattr("sys.argv", ["fxoffload", "plan", str(folder), "--tokens", "64", "--budget", "1KiB", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": "expected at least 3.0 KiB",
        "smallest_budget_bytes": 3072,
        "inductor_peak_bytes": 9216,
        "checkpointing_peak_bytes": 6144,
    }
    assert err.splitlines()[-2:] == ["fxoffload: it bounds nothing", "fxoffload: expected at least 3.0 KiB"]
    assert "Traceback" not in err


@pytest.mark.parametrize(("asked", "share"), [("auto", 1.0), ("50%", 0.5)])
def test_a_budget_is_what_each_rank_leaves(
    asked: str, share: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    nothing = SimpleNamespace(peak_bytes=0, peak_without_gradients_bytes=0, step_ms=1.0)

    def plan(model: Any, inputs: Any, **objective: Any) -> Any:
        found.update(objective)
        return SimpleNamespace(baseline=nothing, checkpointing=None, predicted=nothing)

    monkeypatch.setattr(plan_config_module, "plan", plan)
    stays = plan_config(folder, tokens=64, ranks=2, activation_budget=asked).lasting
    left = int(0.9 * stays.device) - stays.parameters - stays.gradients - stays.state
    assert found["activation_budget"] == int(share * left)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam'; expected one of adamw, "),
        ({"dtype": "int4"}, "dtype is 'int4'; expected one of bfloat16, "),
        ({"device": "v100"}, "expected a machine profile's file or a shipped name, found 'v100' .*shipped are a100, "),
        ({"layers": 1}, "layers is 1; expected two or more"),
        ({"activation_budget": "12X"}, "activation_budget is '12X'; expected "),
        ({"path": Path("nowhere")}, "expected a folder with a config.json, or such a file, found none at nowhere"),
    ],
)
def test_bad_arguments(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        plan_config(**{"path": folder, "tokens": 16, **changes})


def test_the_help_names_all_devices() -> None:
    command = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    words = next(p.help for p in command.params if p.name == "device").replace(",", "").split()
    assert set(shipped_names()) <= set(words)


@pytest.mark.parametrize("content", ['{"model_type": "t5"}', '{"model_type": "none of them"}', "{}", "["])
def test_what_is_no_causal_language_model(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(OptionsError, match="transformers makes no causal language model of"):
        plan_config(path, tokens=16)
