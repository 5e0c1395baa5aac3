"""The known families, as data: how each names its experts, and where its config says which layers have them.

Sources: the configuration, modeling and conversion_mapping modules of transformers 5.23 and the files that its
``save_pretrained`` writes; tests/checkpoints/test_transformers.py builds each family and compares logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Projection = Literal["gate", "up", "down"]
Form = Literal["concatenated", "transposed", "interleaved"]
Layers = Literal["all", "sparse_step", "first_dense", "unchecked"]

PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")

# What configs call the number of a layer's experts. transformers 5 saves some families under another name than the Hub.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# What an expert's linear layer may hold, and how the name ends once experts share a tensor.
PARAMETERS = {
    "weight": "",
    "bias": "_bias",
    "weight_scale_inv": "_scale_inv",
    "weight_scale": "_scale",
    "input_scale": "_input_scale",
    "activation_scale": "_activation_scale",
}

# How ``gate_up_proj`` of one expert is stored, [rows, columns], for I intermediate and H hidden features.
FORMS: dict[Form, str] = {
    "concatenated": "[2I, H], gate first; down [H, I]",
    "transposed": "[H, 2I], gate first; down [I, H]",
    "interleaved": "[H, 2I], columns gate, up, gate, up ...; down [I, H]",
}


@dataclass(frozen=True)
class Tower:
    """The decoder or encoder with ``prefix`` in its keys, at their beginning or after a dot.

    ``section`` is the dotted path of its part of the config. ``optional``: the config does not say which of its layers
    have experts. ``switch``: the config's key that is false where a checkpoint leaves out a tower that its config
    describes.
    """

    prefix: str
    section: str | None = None
    optional: bool = False
    switch: str | None = None


def _towers(*decoders: Tower, parts: str = "") -> tuple[Tower, ...]:
    """Those that any model may have, and ``decoders``; the first that fits a key counts.

    Layers of multi-token prediction have experts as the decoder's have. An encoder has its own, and its config at the
    dotted path ``parts``.
    """
    encoders = (
        ("visual.", "vision"),
        ("vision_tower.", "vision"),
        ("vision_model.", "vision"),
        ("audio_tower.", "audio"),
    )
    return (
        Tower("mtp.", optional=True),
        *(Tower(prefix, f"{parts}{kind}_config", optional=True) for prefix, kind in encoders),
        *decoders,
    )


@dataclass(frozen=True)
class Family:
    """How one architecture stores its experts.

    ``module`` follows ``layers.{layer}.`` in the keys, or another list's name and number. ``other_module`` may stand
    there instead where experts share a tensor: transformers' name for it in memory, where the files have another one.
    ``projections`` are the names of gate, up and down in the layout of one tensor per expert. ``forms`` are those of
    the fused layout, the one to write first. A tower's section is where the model type was found, unless it says so.
    """

    name: str
    model_types: tuple[str, ...]
    layers: Layers = "all"
    module: str = "mlp.experts"
    other_module: str | None = None
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    forms: tuple[Form, ...] = ("concatenated",)
    towers: tuple[Tower, ...] = _towers(Tower(""))
    # Set by a pattern: literal text before ``layers.{layer}.``, with the numbers of layers under another name.
    stem: str | None = None


FAMILIES = (
    Family("qwen2_moe", ("qwen2_moe",), "sparse_step"),
    Family("qwen3_moe", ("qwen3_moe",), "sparse_step"),
    Family("qwen3_next", ("qwen3_next",), "sparse_step"),
    Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text")),
    Family(
        # The Hub's files are transposed, those that transformers 5 saves are not, and it reads both.
        "qwen3_vl_moe",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "sparse_step",
        forms=("transposed", "concatenated"),
    ),
    Family(
        "qwen3_omni_moe",
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_talker"),
        "sparse_step",
        towers=_towers(
            Tower("thinker.", "thinker_config.text_config"),
            Tower("talker.", "talker_config.text_config", switch="enable_audio_output"),
            Tower("", "text_config"),
            parts="thinker_config.",
        ),
    ),
    Family(
        # Parts of it that were saved by themselves.
        "qwen3_omni_moe_text",
        ("qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"),
        "sparse_step",
    ),
    Family("deepseek_v2", ("deepseek_v2",), "first_dense"),
    Family("deepseek_v3", ("deepseek_v3", "deepseek_v32", "kimi_k2"), "first_dense"),
    Family("glm4_moe", ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), "first_dense"),
    Family("glm4v_moe", ("glm4v_moe", "glm4v_moe_text"), "first_dense"),
    Family("dots1", ("dots1",), "first_dense"),
    Family("olmoe", ("olmoe", "flex_olmo")),
    Family(
        "mixtral",
        ("mixtral", "minimax", "minimax_m2", "phimoe"),
        module="block_sparse_moe.experts",
        other_module="mlp.experts",
        projections=("w1", "w3", "w2"),
    ),
    Family("gpt_oss", ("gpt_oss",), forms=("interleaved",)),
)
