"""Takes a tiny Mixtral through the three layouts of MoE checkpoints, and loads it from the last.

python docs/examples/moe_checkpoints.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from fxoffload import checkpoints


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "experts")
    checkpoints.merge(folder / "experts", folder / "stacked", verify=True)
    done = checkpoints.convert(folder / "stacked", folder / "fused", "fused", verify=True)
    for name in ("experts", "stacked", "fused"):
        found = checkpoints.inspect(folder / name)
        print(f"{name}: {found.num_tensors} tensors, {found.num_bytes} bytes, layout {found.layout}")
    if done.verification is not None:
        print(f"fingerprint of each: {done.verification.fingerprint}")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "fused").eval()
    weights, others = model.state_dict(), loaded.state_dict()
    print(
        f"weights equal: {weights.keys() == others.keys() and all(torch.equal(weights[n], others[n]) for n in weights)}"
    )
    # Kernels may round otherwise where memory is aligned otherwise, as that of a file may be.
    ids = torch.arange(20)[None]
    with torch.no_grad():
        print(f"logits close: {torch.allclose(model(ids).logits, loaded(ids).logits, atol=1e-5)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
