"""The runs of the published tables of GPUs, as data, by their weight; ``run_suite`` takes them in turn.

Not among them: the rest of ``pinning``, and ``moe-convert``, which needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.stock.models import SHARDED_CASES, WHOLE_CASES


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks run``.

    Attributes:
        name: of its folder.
        settings: what follows ``--set``.
        variants: the scenario's own where empty.
        gpus: that it needs, all at once.
        seconds: that it takes on H200s with 16 cores each, peers included; no more is given to it.
        alone: nothing runs with it, as it measures the link and the host's memory.
        allocator: PYTORCH_ALLOC_CONF, where the caller has set none.
    """

    name: str
    scenario: str
    settings: str = ""
    variants: str = ""
    gpus: int = 1
    seconds: float = 300.0
    alone: bool = False
    allocator: str = "expandable_segments:True"


# What phases on several GPUs are told to set (docs/phases.md).
LARGE_PAGES = "expandable_segments:True,large_segment_size_mb:64"
AT_CHECKPOINT = "auto@activation_budget=1.02*checkpoint"
SHARDED = "host_budget=64GiB steps=8 warmup=1"
# Pieces that may be switched off (`fxoffload.environment.PIECES`): of a model that is one graph, and of one whose
# layers are compiled each on its own. The others guard, or switch everything off.
PIECES_OF_A_GRAPH = ("measured_costs", "calibration", "donation", "segment_reuse", "kernel_overlap", "prefetch")
PIECES_OF_LAYERS = ("tape_plan", "tape_recompute", "calibration", "pacing", "host_trim", "cross_graph_prefetch")


def without(pieces: Sequence[str]) -> str:
    """The default, whole and with each piece off in turn."""
    return ",".join(["inductor", "auto", *(f"auto@disable={piece}" for piece in pieces)])


SUITE = (
    Run("activations", "activations", "steps=5 warmup=1", seconds=1500),
    Run("plan", "plan", "steps=5 long_steps=20 memory_fraction=steps", seconds=1200),
    Run(
        "activations-36-layers",
        "activations",
        "layers=36 seq=8192 steps=5 warmup=1",
        f"eager,inductor,checkpoint,auto,{AT_CHECKPOINT},trl,trl_checkpoint,verl,verl_checkpoint",
        seconds=650,
    ),
    Run(
        "activations-moe",
        "activations",
        "case=moe compile=layers layers=16 steps=5 warmup=1",
        f"eager,inductor,checkpoint,auto,{AT_CHECKPOINT},trl,trl_checkpoint",
        seconds=450,
    ),
    Run(
        "activations-by-layer",
        "activations",
        "compile=layers steps=5 warmup=1",
        f"inductor,checkpoint,auto,{AT_CHECKPOINT}",
        seconds=300,
    ),
    Run("phases", "phases", "endurance=0 cycles_s=8", "fxoffload,verl,verl_checkout,packed", seconds=300, alone=True),
    Run("phases-fp32", "phases", "state=float32 endurance=0 cycles_s=6", "fxoffload", seconds=120, alone=True),
    Run("phases-endurance", "phases", "ranks=2 cycles_s=6", "fxoffload", gpus=2, seconds=200, alone=True),
    Run(
        "phases-2",
        "phases",
        "ranks=2 layers=32 endurance=0 cycles_s=4 ablate_overlap=true",
        "fxoffload,packed",
        gpus=2,
        seconds=180,
        alone=True,
        allocator=LARGE_PAGES,
    ),
    Run(
        "phases-4",
        "phases",
        "ranks=4 layers=64 endurance=0 cycles_s=4 ablate_overlap=true",
        "fxoffload,packed",
        gpus=4,
        seconds=240,
        alone=True,
        allocator=LARGE_PAGES,
    ),
    Run(
        "fsdp",
        "fsdp",
        f"{SHARDED} calibration_steps=18",
        "inductor,checkpoint,auto,auto@activation_budget=1.1*checkpoint,eager,verl,verl_checkpoint",
        gpus=2,
        seconds=450,
    ),
    Run(
        "fsdp-tensor-parallel",
        "fsdp",
        f"{SHARDED} calibration_steps=18 ranks=4 tensor_parallel=2",
        "inductor,checkpoint,auto,eager",
        gpus=4,
        seconds=350,
    ),
    # 209 s and 406 s on two H100s; checkpointing's row is an estimate.
    Run("fsdp-lengths", "fsdp-lengths", "host_budget=64GiB timeout_s=540", gpus=2, seconds=1200),
    Run("collectives", "collectives", gpus=2, seconds=90, alone=True),
    # What one GPU can show of the two before: rank 0 alone, and ranks that share it.
    Run(
        "fsdp-alone",
        "fsdp",
        f"{SHARDED} calibration_steps=18 process_group=fake",
        "inductor,checkpoint,auto@activation_budget=1.1*checkpoint,auto@activation_budget=1.1*checkpoint@disable=pacing,auto",
        seconds=300,
    ),
    Run(
        "fsdp-tensor-parallel-shared",
        "fsdp",
        "layers=6 seq=8192 host_budget=16GiB steps=5 warmup=1 calibration_steps=10 ranks=4 tensor_parallel=2 "
        "process_group=gloo",
        "inductor,checkpoint,auto,eager",
        seconds=350,
    ),
    # One case in a run, so that each fits in ten minutes. Not run yet: the seconds are a limit.
    *(Run(f"stock-{case}", "stock", f"case={case}", seconds=570) for case in WHOLE_CASES),
    *(Run(f"stock-{case}", "stock-fsdp", f"case={case}", gpus=2, seconds=570) for case in SHARDED_CASES),
    Run("ablation-stock", "stock", "case=qwen3 layers=4", without(PIECES_OF_A_GRAPH), seconds=290),
    Run(
        "ablation-layers",
        "activations",
        "case=moe compile=layers layers=8 seq=8192 steps=5 warmup=1 "
        "gradients=false allocator_trace=false copy_trace=false",
        without(PIECES_OF_LAYERS),
        seconds=260,
    ),
    Run("budget-sweep", "budget-sweep", seconds=650),
    Run("rl-step", "rl-step", "rollout_s=0.3 warmup=0", "fxoffload,verl,verl_checkout", seconds=220, alone=True),
    Run("weight-sync", "weight-sync", variants="stream,load_all", seconds=80, alone=True),
    Run("compile-time", "compile-time", seconds=1100),
    Run("overhead", "overhead", seconds=300, alone=True),
    Run("small-copies", "pinning", variants="small_copies", seconds=60, alone=True),
    Run(
        "max-seq",
        "max-seq",
        "timeout_s=1500",
        "inductor@lengths=16384+18432+20480,checkpoint@lengths=131072+147456+155648+163840,"
        "auto@activation_budget=0.94*free@host_budget=98GiB@lengths=245760+262144+278528+294912",
        seconds=6000,
    ),
    # Not run yet: where eager logits (three times in bfloat16) leave room is an estimate.
    Run(
        "max-seq-peers",
        "max-seq",
        "timeout_s=600",
        "trl_checkpoint@lengths=49152+65536+81920+98304,verl_checkpoint@lengths=49152+65536+81920+98304",
        seconds=1200,
    ),
)
