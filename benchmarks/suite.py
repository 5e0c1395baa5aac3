"""The runs behind the published tables, as data, in the order of their weight; ``run_suite`` takes them in turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks run``.

    Attributes:
        name: of its folder.
        settings: what follows ``--set``.
        variants: the scenario's own where empty.
        gpus: that it needs, all at once.
        seconds: that it takes on H200s with 16 cores each, peers included; no more is given to it.
    """

    name: str
    scenario: str
    settings: str = ""
    variants: str = ""
    gpus: int = 1
    seconds: float = 300.0


AT_CHECKPOINT = "auto@activation_budget=1.02*checkpoint"
SHARDED = "host_budget=64GiB steps=8 warmup=1"

SUITE = (
    Run("activations", "activations", "steps=5 warmup=1", seconds=1200),
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
    Run("phases", "phases", "endurance=0 cycles_s=8", "fxoffload,verl,packed", seconds=240),
    Run("phases-2", "phases", "ranks=2 layers=32 endurance=0 cycles_s=6", "fxoffload,packed", gpus=2, seconds=150),
    Run("phases-4", "phases", "ranks=4 layers=64 endurance=0 cycles_s=6", "fxoffload,packed", gpus=4, seconds=200),
    Run(
        "fsdp",
        "fsdp",
        f"{SHARDED} calibration_steps=18",
        "inductor,checkpoint,auto,auto@activation_budget=6.35GiB,eager,verl,verl_checkpoint",
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
    Run("budget-sweep", "budget-sweep", seconds=650),
    Run("rl-step", "rl-step", "rollout_s=0.3 warmup=0", "fxoffload,verl,packed", seconds=180),
    Run("weight-sync", "weight-sync", variants="stream,load_all", seconds=80),
    Run("compile-time", "compile-time", "layers=8,16,36", seconds=500),
    Run("overhead", "overhead", seconds=120),
    Run("max-seq", "max-seq", "lengths=65536,147456,262144,278528 probe_steps=0", seconds=1500),
)
