"""Trains a small Qwen3 twice, keeping and offloading its activations, and compares the two.

Run by ``make demo``. On a GPU: bf16, 4096 tokens a sequence, Inductor. Without one: a rehearsal of the same steps on
the CPU with a tiny model, which says nothing about time or memory. Then it plans the model at its real size for an
H200, which need not be here, and draws that plan. Exits with 1 when a single bit differs.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# cuBLAS reads this when it starts; without it, it may choose another algorithm each run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tabulate import tabulate
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import fxoffload
from fxoffload.cli.plan import show
from fxoffload.integrations.transformers import CAUSAL_ATTENTION
from fxoffload.plan_config import plan_config
from fxoffload.sizes import format_bytes

NUM_STEPS = 4
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

OPTIONS: dict[str, Any] = {}
if ON_GPU:
    DTYPE, BATCH, SEQUENCE, VOCABULARY = torch.bfloat16, 2, 4096, 32_000
    HIDDEN, LAYERS, HEADS = 1024, 16, 16
else:
    DTYPE, BATCH, SEQUENCE, VOCABULARY = torch.float32, 2, 64, 512
    HIDDEN, LAYERS, HEADS = 64, 4, 4
    OPTIONS = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}


# Qwen3-8B, as its config.json has it. Of its 36 layers, which are alike, some are enough for a plan in half a minute.
REAL_SIZE = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
PLANNED_LAYERS, PLANNED_TOKENS = 4, 8192
# Ignored by git.
PICTURES = Path(__file__).parents[2] / "build" / "demo"


@dataclass(frozen=True)
class Result:
    losses: list[float]
    step_ms: float
    peak_mib: str  # "n/a" on the CPU
    stats: fxoffload.Stats
    tensors: dict[str, Tensor]  # final weights and gradients, on the CPU


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL_ATTENTION, dtype=DTYPE)
    return model.to(DEVICE).train()


def train(policy: str, initial: dict[str, Tensor]) -> Result:
    torch.compiler.reset()
    fxoffload.reset_stats()
    model = build_model()
    model.load_state_dict(initial)
    compiled = torch.compile(model, backend="fxoffload", options={**OPTIONS, "policy": policy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, times_ms = [], []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(DEVICE)
        if ON_GPU and step == 1:  # the first step compiles
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the whole step, which was queued on the same stream
        times_ms.append(1e3 * (time.perf_counter() - start))
    tensors = {f"{name} (weight)": p.detach().cpu() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        tensors[f"{name} (gradient)"] = p.grad.cpu()
    peak_mib = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}" if ON_GPU else "n/a"
    return Result(losses, statistics.median(times_ms[1:]), peak_mib, fxoffload.stats(), tensors)


def print_table(results: dict[str, Result]) -> None:
    runs = list(results.values())
    rows = [[f"loss, step {i + 1}", *(f"{r.losses[i]:.6f}" for r in runs)] for i in range(NUM_STEPS)]
    rows += [
        ["step, ms (median without the first)", *(f"{r.step_ms:.1f}" for r in runs)],
        ["peak, MiB", *(r.peak_mib for r in runs)],
        ["offloaded", *(format_bytes(r.stats.bytes_offloaded) for r in runs)],
        ["reloaded", *(format_bytes(r.stats.bytes_reloaded) for r in runs)],
        ["copies", *(r.stats.num_copies for r in runs)],
        ["host memory reserved", *(format_bytes(r.stats.host_bytes_reserved) for r in runs)],
        ["segments compiled", *(r.stats.num_segments_compiled for r in runs)],
        ["segments reused", *(r.stats.num_segments_reused for r in runs)],
    ]
    print(tabulate(rows, headers=["", *results], disable_numparse=True))


def plan_real_size() -> None:
    """Print the plan of an H200 for the real model, and draw it. No weights and no GPU are needed."""
    layers = f"{PLANNED_LAYERS} of its {REAL_SIZE.num_hidden_layers} layers"
    print(f"\nThe same model at its real size (Qwen3-8B, {layers}), planned for an H200 (half a minute) ...\n")
    PICTURES.mkdir(parents=True, exist_ok=True)
    REAL_SIZE.save_pretrained(PICTURES)
    found = plan_config(PICTURES, tokens=PLANNED_TOKENS, layers=PLANNED_LAYERS, device="h200")
    show(found)
    try:
        found.plan.plot(PICTURES / "plan.png")
        print(f"\npicture of memory over the step: {PICTURES / 'plan.png'}")
    except ImportError as error:
        print(f"\nno picture: {error}")


def main() -> int:
    where = torch.cuda.get_device_name() if ON_GPU else "CPU rehearsal: no time or memory claims"
    print(f"fxoffload demo, torch {torch.__version__}, {where}")
    if ON_GPU:
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory finds reads of it, but would be timed with the step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    initial = {name: value.cpu() for name, value in build_model().state_dict().items()}
    results = {}
    for policy in ("keep_all", "offload_all"):
        results[policy] = train(policy, initial)
        gc.collect()  # the model and its optimizer, before the next ones are built
        fxoffload.release_host_memory()
        torch.cuda.empty_cache()  # does nothing without a GPU
    print_table(results)
    keep, offload = results["keep_all"], results["offload_all"]
    differing = [n for n, t in keep.tensors.items() if not torch.equal(t, offload.tensors[n])]
    if keep.losses != offload.losses:
        differing.insert(0, "loss")
    print(f"gradients and weights identical: {'no' if differing else 'yes'}")
    if differing:
        print(f"different: {', '.join(differing[:8])} ({len(differing)} in all)")
    if not offload.stats.bytes_offloaded:
        print("offload_all offloaded nothing: the comparison says nothing")
    plan_real_size()
    return 1 if differing or not offload.stats.bytes_offloaded else 0


if __name__ == "__main__":
    sys.exit(main())
