"""Does a model of transformers fit: a plan from its configuration, and the memory on the device outside the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxoffload.compiler.plan_ahead import plan
from fxoffload.errors import OptionsError
from fxoffload.machine.shelf import load_profile
from fxoffload.memory_budget import DEVICE_FRACTION, Lasting, lasting
from fxoffload.plan_report.plan import Plan
from fxoffload.planner.plan import Prediction
from fxoffload.sizes import parse_budget, share_of

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "none": None,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class FitRow:
    """One way to train. Bytes on each device; ``step_ms`` by estimate.

    Attributes:
        name: of the way.
        step_ms: forward and backward.
        step_bytes: the most that a step adds. Gradients are in it, as many as there are by then. With ranks, whose
            parts of them stay: all of these.
        total_bytes: that, parameters and optimizer state.
    """

    name: str
    step_ms: float
    step_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Fit:
    """Whether it fits.

    Attributes:
        model: a description of the planned model.
        lasting: parameters, gradients and state on each device.
        rows: plain Inductor, checkpointing (where the model has it), the plan.
        plan: that was made.
    """

    model: str
    lasting: Lasting
    rows: tuple[FitRow, ...]
    plan: Plan

    def fits(self, row: FitRow) -> bool:
        """Whether it leaves the device a tenth of its memory, as ``activation_budget`` does."""
        return row.total_bytes <= DEVICE_FRACTION * self.lasting.device

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{**asdict(row), "fits": self.fits(row)} for row in self.rows]
        points = [asdict(point) for point in self.plan.frontier]
        return {
            "model": self.model,
            "device": self.plan.device,
            "lasting": asdict(self.lasting),
            "rows": rows,
            "frontier": points,
        }


def plan_config(
    path: Path,
    *,
    tokens: int,
    batch: int = 1,
    layers: int | None = None,
    device: str = "h200",
    lora: int | None = None,
    optimizer: str = "adamw",
    ranks: int = 1,
    dtype: str = "bfloat16",
    **objective: Any,
) -> Fit:
    """Plan a causal language model of transformers from its configuration, without weights and without a GPU.

    Args:
        path: a folder with a config.json, or such a file.
        tokens: in each row of the batch.
        batch: rows.
        layers: instead of as many as the configuration says.
        device: a shipped profile or a profile's file.
        lora: rank of adapters on all linear layers; None: all is trained.
        optimizer: one of ``OPTIMIZERS``, with torch's defaults.
        ranks: that share parameters, gradients and state evenly, as FSDP does. The parameters that it gathers for a
            layer are not counted.
        dtype: one of ``DTYPES``, of parameters.
        objective: ``activation_budget`` or ``max_slowdown``; 2 % where neither is given. "auto" and "80%" are of what
            parameters, gradients and state leave of each device.

    Raises:
        OptionsError: a bad argument, or a configuration that transformers does not take.
        BudgetError, UnsupportedError: see ``fxoffload.plan``.
    """
    _check(optimizer, OPTIMIZERS, "optimizer")
    _check(dtype, DTYPES, "dtype")
    # These raise before seconds go by.
    load_profile(device)
    asked = {name: value for name, value in objective.items() if value is not None} or {"max_slowdown": 0.02}
    budget = parse_budget(asked.get("activation_budget", 1), "activation_budget")
    if layers == 1:
        raise OptionsError("layers is 1; expected two or more: with one layer there is nothing to choose from")
    model = _model(path, layers, DTYPES[dtype])
    if lora is not None:
        model = _with_lora(model, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = OPTIMIZERS[optimizer]
    whole = lasting(model, None if kind is None else kind(trained), device)  # type: ignore[call-arg]
    shared = Lasting(whole.device, whole.parameters // ranks, whole.gradients // ranks, whole.state // ranks)
    has_checkpointing = bool(getattr(model, "supports_gradient_checkpointing", False))
    if has_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.20 and later
        (enable or model.gradient_checkpointing_enable)()  # type: ignore[operator]
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    # The cache is for generation; with checkpointing on transformers would switch it off, and say so.
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if isinstance(budget, str):
        asked["activation_budget"] = int(share_of(budget) * shared.room().left_bytes())
    found = plan(model.train(), inputs, device=device, **asked)
    predictions = {
        "Inductor": found.baseline,
        "Inductor + checkpointing": found.checkpointing,
        "fxoffload": found.predicted,
    }
    rows = tuple(_row(name, p, shared, ranks) for name, p in predictions.items() if p is not None)
    count = sum(p.numel() for p in model.parameters())
    words = f"{type(model).__name__}, {count / 1e9:.2f}e9 parameters, {batch} x {tokens} tokens"
    return Fit(words, shared, rows, found)


def _row(name: str, step: Prediction, shared: Lasting, ranks: int) -> FitRow:
    # One device has the gradients that its graph returns, where they are at the peak; ranks keep their parts of them.
    adds = step.peak_without_gradients_bytes + shared.gradients if ranks > 1 else step.peak_bytes
    return FitRow(name, step.step_ms, adds, shared.parameters + shared.state + adds)


def _check(value: str, known: Mapping[str, object], what: str) -> None:
    if value not in known:
        raise OptionsError(f"{what} is {value!r}; expected one of {', '.join(known)}")


def _model(path: Path, layers: int | None, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise OptionsError(
            "planning a configuration needs transformers; install it with pip install 'fxoffload[transformers]'"
        ) from error
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise OptionsError(f"expected a folder with a config.json, or such a file, found none at {path}")
    try:
        config = AutoConfig.from_pretrained(path)
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionsError(f"transformers makes no causal language model of {path}: {error}") from error


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise OptionsError("adapters need peft; install it with pip install peft") from error
    adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return get_peft_model(model, adapters)  # type: ignore[arg-type]
