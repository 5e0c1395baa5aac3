"""The published tables, as data: which rows of which result file, and which columns. ``publish`` writes them.

To publish a newer run, put its file into ``results/`` and change its name here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.suite import PIECES_OF_A_GRAPH, PIECES_OF_LAYERS

README_STACK = "2026-11-21-h200-plan-stack-sweep.json"
README_PHASES = "2026-11-22-h200-phases-yield.json"
README_FSDP, README_FSDP_PEERS = "2026-11-25-2xh200-fsdp.json", "2026-11-25-2xh100-fsdp-verl.json"
README_PEERS = "2026-11-22-h200-activations-peers.json"
README_STOCK = "2026-11-29-h200-stock-qwen3.json"
README_STOCK_TORCH = "2026-11-26-h200-stock-qwen3.json"
README_STOCK_LONG = "2026-11-30-h200-stock-llama-3b.json"
STOCK_FILES = "2026-{}.json"


@dataclass(frozen=True)
class Rows:
    """Rows of one file. ``names``: the variant's label in the file to what the table calls it, in the table's order;
    empty: all, by their labels. ``case``: where the file has several. ``of``: what tells these rows from others of the
    table. ``where_there``: labels that the file lacks are left out, otherwise they are an error."""

    file: str
    names: dict[str, str] = field(default_factory=dict)
    case: str = ""
    of: str = ""
    where_there: bool = False


@dataclass(frozen=True)
class Table:
    """``of``: heading of the column with each ``Rows.of``; "": none. ``across``: variants are columns."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Rows, ...]
    of: str = ""
    across: bool = False


BASELINES = {"inductor": "inductor", "checkpoint": "checkpoint"}
DEFAULT = {"auto": "auto (2 %)"}
POLICIES = {"keep_all": "keep_all", "offload_all": "offload_all"}


def _budgets(*sizes: str) -> dict[str, str]:
    return {f"auto@activation_budget={size}GiB": f"auto, {size} GiB" for size in sizes}


def _torch(*budgets: str) -> dict[str, str]:
    return {f"torch_budget@{b}": f"torch `activation_memory_budget` {b}" for b in budgets}


def _of_peak(part: str, peer: str, gib: str = "") -> dict[str, str]:
    size = f" ({gib} GiB)" if gib else ""
    return {f"auto@activation_budget={part}*{peer}": f"auto, {part}x {peer}'s peak{size}"}


AT_CHECKPOINT = _of_peak("1.02", "checkpoint")
PLAN = ("step ms", "against inductor", "peak GiB", "first step", "error of peak", "of time", "of time, cal.")
PLAN_LONG = (*PLAN, "reserved / allocated", "limited to budget + 10 %")
ACTIVATIONS = ("step ms", "fwd ms", "bwd ms", "peak GiB", "without gradients", "compile s")
STACK_CASE, LM_CASE = "stack 16x16384", "causal_lm 8x8192"
PHASES = (
    "first offload, s",
    "first onload, s",
    "steady offload, s",
    "steady onload, s",
    "optimizer around log-probs: exposed of serial, s",
    "first forward after onload, of loading everything",
    "not free in the rollout, MiB: first cycle, at the end",
    "host bytes / device bytes",
    "`stream_weights`, of the link",
    "bits",
)
STRATEGIES = {
    "fxoffload": "fxoffload",
    "verl": "verl's strategy",
    "verl_checkout": "verl's own functions",
    "packed": "packed",
    "pageable": "pageable",
    "module_to": "`Module.to`",
    "torch_memory_saver": "torch_memory_saver",
}
FSDP_BUDGET = {"auto@activation_budget=1.1*checkpoint": "auto, 6.67 GiB"}
WITH_COLLECTIVES = {"idle": "nothing", "matmul": "matrix products"}
EAGER_PEERS = {
    "eager": "eager",
    "eager_checkpoint": "eager + checkpointing",
    "save_on_cpu": "eager, torch's `save_on_cpu`",
    "trl": "eager, TRL's `OffloadActivations`",
    "trl_checkpoint": "eager, TRL's offloading + checkpointing (its default)",
    "eager_fsdp": "eager FSDP2 (one rank)",
    "verl": "eager FSDP2, verl's activation offloading",
    "verl_checkpoint": "eager FSDP2, verl's offloading + checkpointing",
}
PEERS = (
    "step ms [quartiles]",
    "against inductor",
    "against eager",
    "peak GiB",
    "without gradients",
    "GB moved",
    "host GiB",
    "gradients",
)
TORCH_OFFLOAD = Rows(
    "2026-11-22-h200-activations-torch.json", {"torch_offload": "torch's activation offloading, without its streams"}
)
RL_STEP = (
    "first whole step, s",
    "whole step, s",
    "nothing to switch, s",
    "switching, s",
    "of the step",
    *(f"{phase}, s" for phase in ("rollout", "logprob", "train", "sync")),
)
STREAM = (
    "stream, s",
    "stream, GB/s",
    "stream, of the link",
    "above what was there, MiB",
    "promised, MiB",
    "stream, bits",
)
CONVERSIONS = ("seconds [quartiles]", "GB/s", "of its baseline's rate", "peak RSS GiB", "above imports MiB")

_STOCK = {
    "inductor": "Inductor",
    "checkpoint": "Inductor + gradient_checkpointing",
    "auto": "fxoffload, default",
    "auto@activation_budget=1.05*checkpoint": "fxoffload, budget of 1.05x checkpointing's peak",
    "auto@activation_budget=1*smallest": "fxoffload, the smallest budget",
}
# 21,073,296,640 bytes are 1.1x checkpointing's peak.
FSDP_STOCK = {"auto@activation_budget=21073296640": "fxoffload, budget of 1.1x checkpointing's peak"}

_WHOLE = {"inductor": "Inductor", "auto": "fxoffload, default"}


def _without(pieces: Sequence[str]) -> dict[str, str]:
    return {f"auto@disable={piece}": f"without `{piece}`" for piece in pieces}


TABLES = (
    Table(
        "readme",
        ("step ms", "against inductor", "peak GiB", "error of peak", "of time"),
        (
            Rows(README_STOCK, _STOCK, of="Qwen3-8B, 8 layers"),
            Rows(STOCK_FILES.format("11-29-h200-stock-mistral"), _STOCK, of="Mistral, 12 layers"),
            Rows(STOCK_FILES.format("11-29-h200-stock-gemma-3"), _STOCK, of="Gemma-3, 12 layers", where_there=True),
            Rows(
                STOCK_FILES.format("11-30-2xh200-stock-fsdp"),
                _STOCK | FSDP_STOCK,
                of="FSDP2, two GPUs",
                where_there=True,
            ),
        ),
        of="model",
    ),
    Table(
        "readme-activations",
        ("budget GiB", "step ms [quartiles]", "against inductor", "peak GiB"),
        (
            Rows(
                README_STACK,
                {
                    "inductor": "Inductor",
                    "checkpoint": "Inductor + full checkpointing",
                    **_torch("0.2", "0.5", "0.75"),
                    "auto": "fxoffload, default",
                    "auto@activation_budget=1.02*checkpoint": "fxoffload, budget of 1.02x checkpointing's peak",
                    "auto@activation_budget=8GiB": "fxoffload, budget below it",
                    "auto@activation_budget=16GiB": "fxoffload, a larger budget",
                    "offload_all": 'fxoffload, `policy="offload_all"`',
                },
            ),
        ),
    ),
    Table(
        "readme-stock",
        ("step ms [quartiles]", "against inductor", "peak GiB", "error of peak", "of time", "of time, cal."),
        (
            Rows(README_STOCK, _STOCK, of="Qwen3-8B, 8 layers"),
            Rows(README_STOCK_TORCH, _torch("0.5"), of="the same, three days before"),
            Rows(README_STOCK_LONG, _STOCK, of="Llama 3.2-3B, 28 layers", where_there=True),
        ),
        of="model",
    ),
    Table(
        "stock-forms",
        ("step ms [quartiles]", "against inductor", "peak GiB", "error of peak", "of time", "of time, cal."),
        (Rows(README_STOCK, _STOCK, of="Qwen3-8B, 8 layers", where_there=True),)
        + tuple(
            Rows(STOCK_FILES.format(file), _STOCK, of=of, where_there=True)
            for file, of in {
                "12-01-h200-stock-qwen3-packed": "the same, packed",
                "11-29-h200-stock-qwen3-padded": "padded, 2 x 4,096",
                "11-30-h200-stock-qwen3-lora": "LoRA r=16",
                "11-29-h200-stock-qwen3-checkpointing": "`gradient_checkpointing=True`",
                "11-30-h200-stock-qwen3-rl": "a loss of RL in eager code",
                "11-29-h200-stock-mistral": "Mistral, 12 layers",
                "11-29-h200-stock-qwen3-moe": "Qwen3-MoE, 6 layers",
                "11-29-h200-stock-qwen3-moe-smallest": "the same, another run",
                "11-30-h200-stock-llama-3b": "Llama 3.2-3B, 28 layers",
            }.items()
        )
        + (
            Rows("2026-11-29-h200-stock-gemma-3.json", _STOCK, of="Gemma-3, 12 layers", where_there=True),
            Rows("2026-12-01-h200-stock-gpt-oss.json", _STOCK, of="gpt-oss, 4 layers, 2,048", where_there=True),
            Rows("2026-11-30-h200-stock-gpt2.json", _STOCK, of="GPT-2, 16 x 1,024", where_there=True),
            Rows("2026-11-30-h200-stock-t5.json", _STOCK, of="T5, 24 + 24 layers", where_there=True),
            Rows("2026-11-30-h200-stock-t5-6-layers.json", _STOCK, of="T5, 6 + 6 layers", where_there=True),
            Rows("2026-11-30-h200-stock-mistral-packed.json", _STOCK, of="Mistral, packed", where_there=True),
            Rows("2026-11-28-h200-stock-llama-3b-lora.json", _STOCK, of="Llama 3.2-3B, LoRA r=16", where_there=True),
            Rows(
                "2026-12-01-h200-stock-gemma-3-image.json",
                _STOCK,
                of="Gemma-3 with an image, 12 layers",
                where_there=True,
            ),
            Rows(
                "2026-11-30-2xh200-stock-fsdp.json",
                _STOCK | FSDP_STOCK,
                of="FSDP2, two GPUs, 16 layers",
                where_there=True,
            ),
        ),
        of="model",
    ),
    Table(
        "ablation",
        ("step ms [quartiles]", "against inductor", "peak GiB", "of time", "of time, cal."),
        (
            Rows(
                "2026-11-28-h200-ablation-stock.json",
                _WHOLE | _without(PIECES_OF_A_GRAPH),
                of="Qwen3-8B, 4 layers x 8,192 tokens",
            ),
            Rows(
                "2026-11-28-h200-ablation-layers.json",
                _WHOLE | _without(PIECES_OF_LAYERS[:3]),
                of="8 MoE layers, each compiled on its own",
            ),
        ),
        of="case",
    ),
    Table(
        "readme-peers",
        PEERS,
        (
            Rows(
                README_PEERS,
                {
                    "inductor": "Inductor",
                    "checkpoint": "Inductor + full checkpointing",
                    "auto": "fxoffload, default",
                    "auto@activation_budget=1.02*checkpoint": "fxoffload, 1.02x checkpointing's peak",
                    **EAGER_PEERS,
                },
            ),
            TORCH_OFFLOAD,
        ),
    ),
    Table("readme-phases", PHASES, (Rows(README_PHASES, STRATEGIES, where_there=True),), across=True),
    Table(
        "readme-fsdp",
        ("budget GiB", "step ms", "against inductor", "peak GiB", "GB moved", "host GiB", "gradients"),
        (
            Rows(
                README_FSDP,
                {
                    "inductor": "Inductor",
                    "checkpoint": "Inductor + full checkpointing",
                    "auto": "fxoffload, default",
                    "auto@activation_budget=1.1*checkpoint": "fxoffload, 1.1x checkpointing's peak",
                },
                of="two H200s",
            ),
            Rows(
                README_FSDP_PEERS,
                {
                    "inductor": "Inductor",
                    "checkpoint": "Inductor + full checkpointing",
                    "auto": "fxoffload, default",
                    "auto@activation_budget=1.1*checkpoint": "fxoffload, 1.1x checkpointing's peak",
                    "eager": "eager",
                    "verl": "eager, verl's activation offloading",
                    "verl_checkpoint": "the same + verl's checkpointing",
                },
                of="two H100s, with peers",
            ),
        ),
        of="run",
    ),
    Table(
        "plan-stack-sweep",
        (*PLAN_LONG, "plan s"),
        (
            Rows(
                "2026-11-21-h200-plan-stack-sweep.json",
                BASELINES
                | DEFAULT
                | _budgets("8")
                | _of_peak("1.02", "checkpoint", "9.13")
                | _budgets("10.5", "13", "16", "20", "25", "30")
                | _torch("0.2", "0.5", "0.75")
                | POLICIES,
            ),
        ),
    ),
    Table(
        "plan-moe24",
        PLAN,
        (Rows("2026-11-22-h200-plan-moe24-default-later.json", BASELINES | DEFAULT | _budgets("2.4")),),
    ),
    Table(
        "plan-stack65k",
        PLAN,
        (Rows("2026-11-22-h200-plan-stack65k-parts.json", BASELINES | _of_peak("0.25", "inductor", "21.39")),),
    ),
    Table(
        "longest",
        ("longest that trained", "peak of the process GiB", "first step s", "next length"),
        (
            Rows("2026-11-21-h200-longest-inductor.json", {"inductor@lengths=16384+18432+20480": "inductor"}),
            Rows("2026-11-21-h200-longest-checkpoint.json", {"checkpoint@lengths=147456+163840": "checkpoint"}),
            Rows(
                "2026-11-22-h200-longest-checkpoint-155648.json",
                {"checkpoint@lengths=155648": "checkpoint, third probe"},
            ),
            Rows(
                "2026-11-21-h200-longest-fxoffload.json",
                {"auto@activation_budget=0.94*free@host_budget=98GiB@lengths=262144+294912": "fxoffload"},
            ),
            Rows(
                "2026-11-21-h200-longest-fxoffload-278528.json",
                {"auto@activation_budget=0.94*free@host_budget=98GiB@lengths=278528": "fxoffload, third probe"},
            ),
        ),
    ),
    Table(
        "plan-causal-lm",
        ("step ms", "against inductor", "peak GiB", "of time", "limited to budget + 10 %"),
        (Rows("2026-11-21-h200-plan-causal-lm-9gib.json", BASELINES | _budgets("9")),),
    ),
    Table(
        "activations-peers",
        (*PEERS, "compile s"),
        (
            Rows(README_PEERS, BASELINES | DEFAULT | AT_CHECKPOINT | EAGER_PEERS, of="16 x 16,384"),
            replace(
                TORCH_OFFLOAD,
                names=TORCH_OFFLOAD.names | {"inductor": "inductor", "eager": "eager"},
                of="16 x 16,384, again",
            ),
            Rows(
                "2026-11-23-h200-activations-torch-streams.json",
                {
                    "inductor": "inductor",
                    "eager": "eager",
                    "torch_budget@0.5": "torch's `activation_memory_budget` 0.5",
                    "torch_offload_streams": "torch's activation offloading, on its streams",
                },
                of="16 x 16,384, a third time",
            ),
            Rows(
                "2026-11-22-h200-activations-36-layers.json",
                BASELINES | DEFAULT | AT_CHECKPOINT | {"eager": "eager"},
                of="36 x 8,192",
            ),
            Rows(
                "2026-11-22-h200-activations-36-layers-peers.json",
                {"inductor": "inductor"}
                | {k: EAGER_PEERS[k] for k in ("eager", "trl", "trl_checkpoint", "verl_checkpoint")},
                of="36 x 8,192, again",
            ),
            Rows(
                "2026-11-22-h200-activations-moe.json",
                BASELINES | DEFAULT | {"eager": "eager"},
                of="MoE, 16 x 8,192",
            ),
            Rows(
                "2026-11-22-h200-activations-moe-by-layer.json",
                BASELINES | DEFAULT | {k: EAGER_PEERS[k] for k in ("eager", "trl", "trl_checkpoint")},
                of="MoE, each layer compiled",
            ),
        ),
        of="layers x tokens",
    ),
    Table(
        "activations",
        ACTIVATIONS,
        tuple(
            Rows("2026-11-21-h200-activations.json", BASELINES | POLICIES, case=case, of=of)
            for case, of in ((STACK_CASE, "stack 16 x 16,384"), (LM_CASE, "causal_lm 8 x 8,192"))
        ),
        of="case",
    ),
    Table(
        "activations-by-layer",
        PEERS,
        (Rows("2026-11-24-h200-activations-by-layer.json", BASELINES | DEFAULT),),
    ),
    Table(
        "activations-bounds",
        ("GB down", "GB up", "forward / bound", "backward / bound", "backward / bound of all bytes"),
        tuple(
            Rows("2026-11-21-h200-activations.json", {"offload_all": "offload_all"}, case=case, of=of)
            for case, of in ((STACK_CASE, "stack"), (LM_CASE, "causal_lm"))
        ),
        of="case",
    ),
    Table(
        "compile-time",
        ("compile s", "compile, of inductor's", "with warm caches"),
        (
            *(
                Rows(
                    f"2026-11-22-h200-compile-time-{layers}.json",
                    {"inductor": "inductor"} | DEFAULT,
                    case=f"stack {layers}x2048",
                    of=layers,
                )
                for layers in ("8", "16")
            ),
            Rows(
                "2026-11-23-h200-compile-time-36.json",
                {"inductor": "inductor"} | DEFAULT,
                case="stack 36x2048",
                of="36",
            ),
            *(
                Rows(
                    "2026-11-21-h200-compile-time.json",
                    {"inductor": "inductor", "keep_all": "keep_all"},
                    case=f"stack {layers}x2048",
                    of=f"{layers}, `keep_all`",
                )
                for layers in ("16", "36")
            ),
        ),
        of="layers (2,048 tokens)",
    ),
    Table(
        "fsdp",
        (*PLAN[:5], "of peak, cal.", "of time, cal.", "exposed ms"),
        (
            Rows(README_FSDP, BASELINES | DEFAULT | FSDP_BUDGET, of="two H200s"),
            Rows(README_FSDP_PEERS, BASELINES | DEFAULT | FSDP_BUDGET, of="two H100s, beside verl"),
            Rows(
                "2026-11-25-2xh100-fsdp-recorded-again.json",
                DEFAULT | {"auto@activation_budget=7100000000": "auto, 6.61 GiB"},
                of="two H100s, another machine",
            ),
        ),
        of="run",
    ),
    Table(
        "collectives",
        tuple(
            f"{name}, {what}"
            for name in ("all-gather", "reduce-scatter")
            for what in ("ms", "copies down", "copies up", "copies both")
        ),
        (
            Rows("2026-11-25-2xh200-collectives.json", WITH_COLLECTIVES, of="two H200s"),
            Rows("2026-11-25-2xh100-collectives.json", WITH_COLLECTIVES, of="two H100s"),
        ),
        of="on",
    ),
    Table(
        "fsdp-shared",
        ("step ms", "against inductor", "peak GiB", "GB moved", "host GiB", "gradients"),
        (
            Rows(
                "2026-11-24-h200-fsdp-tensor-parallel-shared.json",
                BASELINES | DEFAULT,
                of="6 layers x 8,192 tokens",
            ),
            Rows(
                "2026-11-24-h200-fsdp-tensor-parallel-shared-later.json",
                {"inductor": "inductor"} | DEFAULT,
                of="3 layers x 4,096 tokens, `-later`",
            ),
        ),
        of="run",
    ),
    Table(
        "phases",
        PHASES,
        (
            Rows("2026-11-22-h200-phases-yield.json", {k: STRATEGIES[k] for k in ("fxoffload", "verl", "packed")}),
            Rows("2026-11-22-h200-phases-fp32.json", {"fxoffload": "fxoffload, fp32 state"}),
            Rows(
                "2026-11-23-2xh200-phases-copied-straight.json",
                {"fxoffload": "fxoffload, 2 GPUs, all of it each, pages of 64 MiB"},
            ),
            Rows("2026-11-22-2xh200-phases.json", {"fxoffload": "fxoffload, 2 GPUs, half of it each"}),
            Rows("2026-11-22-4xh200-phases.json", {"fxoffload": "fxoffload, 4 GPUs, a quarter each"}),
        ),
        across=True,
    ),
    Table("rl-step", RL_STEP, (Rows("2026-11-22-h200-rl-step.json", STRATEGIES, where_there=True),), across=True),
    Table(
        "weight-sync",
        STREAM,
        (
            Rows(
                "2026-11-22-h200-weight-sync.json",
                {
                    "stream": "`stream_weights`, from the host",
                    "stream_resident": "the same, from parameters on the device",
                    "load_all": "load everything, read, offload",
                },
            ),
        ),
    ),
    Table("moe-convert", CONVERSIONS, (Rows("2026-11-22-cpu-moe-convert.json"),)),
    Table(
        "moe-convert-cached",
        CONVERSIONS,
        (
            Rows("2026-11-22-cpu-moe-convert-cached-later.json", of="the latest"),
            Rows("2026-11-22-cpu-moe-convert-cached.json", of="before, with everything in RAM"),
        ),
        of="run",
    ),
)
