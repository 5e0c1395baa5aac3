"""Plans the training of a model that this machine could not hold, for a GPU that it does not have.

    python docs/examples/plan_ahead.py [FOLDER]

Prints the plan of a few Qwen3-8B layers at 16,384 tokens on an H200. Writes it to FOLDER (by default a temporary one)
as JSON, and as a trace for ui.perfetto.dev.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import fxoffload
from fxoffload.integrations.transformers import CAUSAL_ATTENTION

LAYERS, TOKENS = 3, 16_384


def main(folder: Path) -> None:
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32_000,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=CAUSAL_ATTENTION
        ).train()
        ids = torch.empty(1, TOKENS, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = fxoffload.plan(model, inputs, device="h200", max_slowdown=0.02)
    print(plan)
    (folder / "plan.json").write_text(plan.to_json())
    plan.save_trace(folder / "trace.json")
    print(f"\nwritten: {folder / 'plan.json'}, {folder / 'trace.json'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
