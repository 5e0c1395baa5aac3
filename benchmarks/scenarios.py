"""The scenarios as data: what each answers, its default cases, variants and protocol."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.stock.models import SHARDED_CASES, WHOLE_CASES


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

# Every way to have fewer saved activations, and ours at a few budgets; TRL, verl and torchtitan want a path (--set).
ACTIVATION_VARIANTS = ",".join(
    [
        *("eager", "inductor", "checkpoint", "auto", "auto@activation_budget=1.02*checkpoint"),
        *("eager_checkpoint", "trl", "trl_checkpoint", "eager_fsdp", "verl", "verl_checkpoint", "save_on_cpu"),
        *(f"torch_budget@{budget}" for budget in ("0.2", "0.5", "0.75")),
        *("torch_offload", "torch_offload_streams", "titan"),
        *("keep_all", "offload_all", "auto@activation_budget=20%", "auto@activation_budget=50%"),
    ]
)
SWEEP_VARIANTS = ",".join(
    [
        *("inductor", "checkpoint"),
        *(f"auto@activation_budget={budget}" for budget in ("1.02*checkpoint", "10%", "30%", "60%")),
        *(f"torch_budget@{budget}" for budget in ("0.1", "0.25", "0.5", "0.75")),
    ]
)
# Kernels of a few microseconds: the host is what a step waits for.
TINY_LAYERS = {
    "layers": ["8", "32"],
    "seq": ["64"],
    "hidden": ["64"],
    "ffn": ["128"],
    "heads": ["4"],
    "kv_heads": ["2"],
    "head_dim": ["16"],
}
# Work during the collectives of the scenario that has no model. Layers are sharded over ranks: one process each.
FSDP, FSDP_LENGTHS = "fsdp", "fsdp-lengths"
# Models of transformers as users train them, on one GPU, and sharded over ranks.
STOCK, STOCK_FSDP = "stock", "stock-fsdp"
STOCK_SCENARIOS = (STOCK, STOCK_FSDP)
STOCK_VARIANTS = ",".join(
    [
        *("inductor", "checkpoint", "torch_budget@0.5", "auto"),
        # "smallest": that the default's plan names.
        *(f"auto@activation_budget={budget}" for budget in ("1.05*checkpoint", "0.5*inductor", "1*smallest")),
    ]
)
# T5's 24 + 24 layers take Inductor 181 s to compile and run, and more where others compile next to it.
STOCK_PROTOCOL = {
    **{"warmup": 1, "steps": 10, "calibration_steps": 8, "timeout_s": 300.0},
    **{"allocator_trace": False, "copy_trace": False, "gradients": False},
}
COLLECTIVES, COLLECTIVES_BESIDE = "collectives", ("idle", "matmul")
# Names that reports of earlier versions carry.
RENAMED = {"longest": "max-seq"}

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="activations",
            answers="step time and peak memory, kept, checkpointed, offloaded; beside torch's own ways, TRL and verl",
            variants=ACTIVATION_VARIANTS,
            protocol_defaults={"calibration_steps": 8},
        ),
        Scenario(
            name="compile-time",
            answers="compile seconds by depth, with empty caches and with full ones, and where they go",
            variants="inductor,checkpoint,keep_all,auto",
            case_defaults={"layers": ["8", "16", "36"], "seq": ["2048"]},
            protocol_defaults={"warmup": 1, "steps": 5, "allocator_trace": False, "copy_trace": False, "warm": True},
        ),
        Scenario(
            name=FSDP,
            answers="FSDP2 with layers compiled on their own: prefetch across graphs, on two devices",
            variants="inductor,checkpoint,keep_all,offload_all,offload_all@disable=cross_graph_prefetch",
            protocol_defaults={"ranks": 2, "allocator_trace": False, "calibration_steps": 14},
        ),
        Scenario(
            name=FSDP_LENGTHS,
            answers="the same on batches of random lengths, other ones on every rank: what grows, what compiles again",
            variants="inductor,checkpoint,auto@activation_budget=1.1*checkpoint",
            protocol_defaults={
                **{"ranks": 2, "steps": 200, "warmup": 49, "calibration_steps": 4, "gradients": False},
                **{"allocator_trace": False, "copy_trace": False},
            },
        ),
        Scenario(
            name=COLLECTIVES,
            answers="what a layer's all-gathers and reduce-scatters take beside copies, without a model, on two GPUs",
            variants=",".join(COLLECTIVES_BESIDE),
            protocol_defaults={"ranks": 2, "steps": 12, "warmup": 1},
        ),
        Scenario(
            name="plan",
            answers="what the planner promises: budgets met, predictions true, below torch's own budgets",
            variants=PLAN_VARIANTS,
            protocol_defaults={"warmup": 1, "steps": 5, "calibration_steps": 8, "copy_trace": False},
            sweeps=True,
        ),
        Scenario(
            name=STOCK,
            answers="what plans promise of transformers' models as users train them: times, peaks, budgets, refusals",
            variants=STOCK_VARIANTS,
            case_defaults={"case": WHOLE_CASES},
            protocol_defaults=STOCK_PROTOCOL,
            sweeps=True,
        ),
        Scenario(
            name=STOCK_FSDP,
            answers="the same under FSDP2 with layers compiled on their own, head and loss in eager code, on two GPUs",
            variants="inductor,checkpoint,auto,auto@activation_budget=1.1*checkpoint,auto@activation_budget=1*smallest",
            case_defaults={"case": SHARDED_CASES},
            protocol_defaults={**STOCK_PROTOCOL, "ranks": 2, "calibration_steps": 14},
        ),
        Scenario(
            name="budget-sweep",
            answers="step time at a few budgets, fxoffload's and torch's own, in one process",
            variants=SWEEP_VARIANTS,
            protocol_defaults={"warmup": 1, "steps": 5, "calibration_steps": 8, "copy_trace": False},
            sweeps=True,
        ),
        Scenario(
            name="overhead",
            answers="host microseconds that the executor adds, per segment and per copy, in a step of tiny segments",
            # A graph in which nothing has min_bytes is left to plain Inductor, uncut.
            variants="inductor,keep_all@min_bytes=0,offload_all@min_bytes=0",
            case_defaults=TINY_LAYERS,
            protocol_defaults={"steps": 30, "warmup": 5, "allocator_trace": False, "copy_trace": False},
        ),
        Scenario(
            name="max-seq",
            answers="the longest sequence that trains with AdamW, and what limits it",
            variants="inductor,checkpoint,auto@activation_budget=0.92*free",
            case_defaults={"case": ["qwen3_8b"]},
            protocol_defaults={"copy_trace": False, "allocator_trace": False},
            sweeps=True,
        ),
        Scenario(
            name="pinning",
            answers="how fast host memory is pinned, by threads, chunks, huge pages and who touches it",
            variants="huge,small,staged,resize,room,give_back,small_copies",
            case_defaults={"case": ["rl"]},
        ),
        Scenario(
            name="phases",
            answers="parameters and optimizer state leave and return: first cycle, steady cycles, exposed, host bytes",
            variants="fxoffload,verl,pageable,packed",
            case_defaults={"case": ["rl"]},
            protocol_defaults={"steps": 5, "endurance": 100},
        ),
        Scenario(
            name="weight-sync",
            answers="weights from the host to a reader on the device: streamed, loaded whole, by parameter",
            variants="stream@bucket_bytes=128MiB,stream,stream@bucket_bytes=2GiB,stream_resident,load_all,per_parameter",
            case_defaults={"case": ["rl"]},
            protocol_defaults={"steps": 5},
        ),
        Scenario(
            name="rl-step",
            answers="a whole colocated step, and the seconds of it that are switching",
            variants="fxoffload,verl,pageable,packed,none",
            case_defaults={"case": ["rl"]},
            protocol_defaults={"steps": 5, "warmup": 1},
        ),
    )
}


def current_name(name: str) -> str:
    """The scenario's name today; another one where it was renamed."""
    return RENAMED.get(name, name)


def find_scenario(name: str) -> Scenario:
    """The scenario of that name, or of the name it had before.

    Raises:
        ValueError: there is none; the text lists what there is.
    """
    name = current_name(name)
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
