"""The scenarios as data: what each answers, its default cases, variants and protocol."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scenario:
    name: str
    answers: str
    variants: str
    case_defaults: dict[str, list[str]] = field(default_factory=dict)
    protocol_defaults: dict[str, Any] = field(default_factory=dict)
    sweeps: bool = False  # one process for all variants of a case, and warm compile caches


# Baselines first: budgets are relative to their peaks. Eight budgets, from checkpointing's peak to Inductor's.
PLAN_BUDGETS = ("1.02*checkpoint", "4%", "8%", "16%", "30%", "45%", "65%", "85%")
TORCH_BUDGETS = ("0.1", "0.2", "0.35", "0.5", "0.75")
PLAN_VARIANTS = ",".join(
    [
        "inductor",
        "checkpoint",
        "auto",
        *(f"auto@activation_budget={budget}" for budget in PLAN_BUDGETS),
        *(f"torch_budget@{budget}" for budget in TORCH_BUDGETS),
        "keep_all",
        "offload_all",
    ]
)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="activations",
            answers="step time and peak memory of a whole-model compile, kept, checkpointed or offloaded",
            variants="inductor,checkpoint,keep_all,offload_all",
        ),
        Scenario(
            name="compile-time",
            answers="cold compile seconds by depth, and where they go",
            variants="inductor,keep_all",
            case_defaults={"layers": ["16", "36"], "seq": ["2048"]},
            protocol_defaults={"warmup": 1, "steps": 5, "allocator_trace": False, "copy_trace": False},
        ),
        Scenario(
            name="fsdp",
            answers="FSDP2 with layers compiled on their own: prefetch across graphs, on two devices",
            variants="inductor,checkpoint,keep_all,offload_all,offload_all@disable=cross_graph_prefetch",
            protocol_defaults={"ranks": 2, "allocator_trace": False, "calibration_steps": 14},
        ),
        Scenario(
            name="plan",
            answers="what the planner promises: budgets met, predictions true, below torch's own budgets",
            variants=PLAN_VARIANTS,
            protocol_defaults={"warmup": 1, "steps": 5, "calibration_steps": 8, "copy_trace": False},
            sweeps=True,
        ),
        Scenario(
            name="longest",
            answers="the longest sequence that trains with AdamW, and what limits it",
            variants="inductor,checkpoint,auto@activation_budget=0.92*free",
            case_defaults={"case": ["qwen3_8b"]},
            protocol_defaults={"copy_trace": False, "allocator_trace": False},
            sweeps=True,
        ),
    )
}


def find_scenario(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
