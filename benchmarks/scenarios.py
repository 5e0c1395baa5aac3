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
            protocol_defaults={"ranks": 2, "allocator_trace": False},
        ),
    )
}


def find_scenario(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
