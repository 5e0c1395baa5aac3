"""The family and the layout are read from config and keys; what does not fit is an error that says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxoffload import checkpoints
from fxoffload.checkpoints import (
    BrokenCheckpointError,
    CheckpointError,
    LayoutError,
    UnknownFamilyError,
    UnsupportedCheckpointError,
)
from fxoffload.checkpoints.check_experts import expected_layers
from tests.checkpoints.making import (
    FAMILY,
    FP8,
    TINY,
    Shape,
    State,
    as_layout,
    assert_same,
    config_for,
    expert_state,
    load,
    make,
    other_state,
    save,
)

QWEN = FAMILY["qwen3_moe"]
BLOCK = "model.layers.0.mlp.experts"


def broken(folder: Path, change: Callable[[State], object], layout: str = "experts", shape: Shape = TINY) -> Path:
    """A Qwen3-MoE checkpoint whose tensors were changed before they were written."""
    state = as_layout(QWEN, expert_state(QWEN, shape), layout) | other_state(shape)
    change(state)
    return save(folder, state, config_for(QWEN, shape))


def refuse(folder: Path, error: type[Exception], *words: str, to: str = "stacked") -> str:
    """The conversion is refused with these words, in this order, and nothing is left next to the source."""
    with pytest.raises(error, match="(?s)" + ".*".join(re.escape(word) for word in words)) as caught:
        checkpoints.convert(folder, folder.with_name("target"), to)
    assert isinstance(caught.value, ValueError)
    assert str(folder) in str(caught.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(caught.value)


def test_a_mixture_of_layouts_lists_the_keys_of_each(tmp_path: Path) -> None:
    def mix(state: State) -> None:
        fused = as_layout(QWEN, expert_state(QWEN, replace(TINY, layers=(1,))), "fused")
        for name in [name for name in state if name.startswith("model.layers.1.mlp.experts")]:
            del state[name]
        state.update(fused)

    refuse(
        broken(tmp_path / "source", mix),
        LayoutError,
        "mixture",
        f"experts: {BLOCK}.0.down_proj.weight",
        "fused: model.layers.1.mlp.experts.gate_up_proj",
    )


def test_a_block_that_is_stacked_and_fused_is_a_mixture(tmp_path: Path) -> None:
    source = broken(
        tmp_path / "source", lambda s: s.update({f"{BLOCK}.gate_up_proj": torch.zeros(4, 10, 6)}), "stacked"
    )
    refuse(source, LayoutError, "mixture", f"stacked: {BLOCK}.gate_proj", f"fused: {BLOCK}.gate_up_proj", to="experts")


def test_one_stacked_projection_among_single_experts_is_a_mixture(tmp_path: Path) -> None:
    source = broken(tmp_path / "source", lambda s: s.update({f"{BLOCK}.down_proj": torch.zeros(4, 6, 5)}))
    refuse(source, LayoutError, "mixture", "experts: ", f"stacked: {BLOCK}.down_proj")


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {}, None, {"model_type": "x", "text_config": {"model_type": "y"}}]
)
def test_an_unknown_family_lists_the_known_ones_and_the_keys(tmp_path: Path, config: dict | None) -> None:
    source = save(tmp_path / "source", expert_state(QWEN, TINY), config)
    message = refuse(source, UnknownFamilyError, "qwen2_moe", "gpt_oss", "found", f"keys: {BLOCK}.0", "--pattern")
    for model_type in ((config or {}).get("model_type"), (config or {}).get("text_config", {}).get("model_type")):
        assert model_type is None or repr(model_type) in message


def test_a_known_family_whose_experts_have_other_names(tmp_path: Path) -> None:
    mixtral = FAMILY["mixtral"]
    source = save(tmp_path / "source", expert_state(mixtral, TINY), config_for(QWEN, TINY))
    refuse(
        source,
        UnknownFamilyError,
        "layers.N.mlp.experts.0.gate_proj.weight",
        "found none",
        "block_sparse_moe",
        "--pattern",
    )


def test_a_pattern_describes_an_unknown_family(tmp_path: Path) -> None:
    own = replace(QWEN, module="ffn.pool", projections=("in_a", "in_b", "out"), model_types=("own",))
    state = expert_state(own, TINY, prefix="decoder.blocks.") | other_state(TINY)
    source = save(tmp_path / "source", state, {"model_type": "own"})
    pattern = "decoder.blocks.{layer}.ffn.pool.{expert}.{in_a|in_b|out}.weight"
    checkpoints.convert(source, tmp_path / "fused", "fused", pattern=pattern, verify=True)
    assert_same(load(tmp_path / "fused"), as_layout(own, state, "fused"))
    checkpoints.convert(tmp_path / "fused", tmp_path / "stacked", "stacked", pattern=pattern)
    checkpoints.split(tmp_path / "stacked", tmp_path / "back", pattern=pattern)
    assert_same(load(tmp_path / "back"), state)
    assert checkpoints.inspect(source, pattern=pattern).family == "pattern"


@pytest.mark.parametrize(
    "pattern",
    [
        "experts",
        "a.{layer}.b.{expert}.{x|y}.weight",
        "a.{layer}.b.{expert}.{x|y|z}",
        "a.{layer}.b.{expert}.{x|x|y}.weight",
    ],
)
def test_a_pattern_that_says_too_little(tmp_path: Path, pattern: str) -> None:
    source = make(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"expected (a pattern such as|three different names)"):
        checkpoints.merge(source, tmp_path / "target", pattern=pattern)


def test_nested_configs_and_towers_with_experts_of_their_own(tmp_path: Path) -> None:
    """Qwen3-Omni: thinker and talker differ in everything, and only their own sections describe them."""
    omni = FAMILY["qwen3_omni_moe"]
    thinker, talker = TINY, replace(TINY, experts=3, hidden=4, intermediate=2, layers=(0,))
    state = expert_state(omni, thinker, prefix="thinker.model.layers.")
    state |= expert_state(omni, talker, seed=5, prefix="talker.model.layers.")
    config = {"model_type": "qwen3_omni_moe"}
    for name, shape in (("thinker", thinker), ("talker", talker)):
        config[f"{name}_config"] = {"text_config": config_for(omni, shape, model_type="own")}  # type: ignore[assignment]
    source = save(tmp_path / "source", state, config)
    found = checkpoints.inspect(source)
    assert [(t.prefix, t.layers, t.num_experts, t.shape) for t in found.towers] == [
        ("talker.model.layers.", (0,), 3, (2, 4)),
        ("thinker.model.layers.", (0, 1), 4, (5, 6)),
    ]
    checkpoints.merge(source, tmp_path / "target", verify=True)
    config["talker_config"]["text_config"]["num_experts"] = 4  # type: ignore[index]
    save(source, state, config)
    with pytest.raises(BrokenCheckpointError, match=r"talker.*expected experts 0-3 \(config.json\), missing 3"):
        checkpoints.inspect(source)


def test_the_section_is_where_the_model_type_is(tmp_path: Path) -> None:
    config = {"model_type": "kimi_vl", "text_config": config_for(FAMILY["deepseek_v3"], TINY, first_k_dense_replace=0)}
    prefix = "language_model.model.layers."
    source = save(tmp_path / "source", expert_state(QWEN, TINY, prefix=prefix), config)
    found = checkpoints.inspect(source)
    assert (found.family, found.towers[0].prefix) == ("deepseek_v3", prefix)


@pytest.mark.parametrize("outer", ["qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe"])
def test_the_count_is_where_the_text_model_is(tmp_path: Path, outer: str) -> None:
    """The model type is outside, the number of experts and the rules for layers inside."""
    family = FAMILY[outer]
    inner = config_for(family, TINY, model_type=f"{outer}_text")
    source = save(tmp_path / "source", expert_state(family, TINY), {"model_type": outer, "text_config": inner})
    checkpoints.inspect(source)
    for name, value, words in (
        ("num_experts", 5, "expected experts 0-4 \\(config.json\\), missing 4"),
        ("num_hidden_layers", 3, "expected experts in 0-2"),
    ):
        config = {"model_type": outer, "text_config": {**inner, name: value}}
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(BrokenCheckpointError, match=words):
            checkpoints.inspect(source)


@pytest.mark.parametrize(
    ("rule", "config", "expected"),
    [
        ("all", {}, {0, 1, 2, 3, 4, 5}),
        ("sparse_step", {}, {0, 1, 2, 3, 4, 5}),
        ("sparse_step", {"mlp_only_layers": [0, 3]}, {1, 2, 4, 5}),
        ("sparse_step", {"decoder_sparse_step": 2}, {1, 3, 5}),
        ("sparse_step", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1, 5}),
        ("first_dense", {"first_k_dense_replace": 3}, {3, 4, 5}),
        ("first_dense", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, {2, 4}),
        ("first_dense", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, {2, 3, 4, 5}),
        ("unchecked", {}, None),
    ],
)
def test_which_layers_have_experts(rule: str, config: dict, expected: set[int] | None) -> None:
    assert expected_layers(rule, {"num_hidden_layers": 6, **config}) == expected


def test_layers_that_the_config_says_are_dense_are_left_alone(tmp_path: Path) -> None:
    shape = replace(TINY, layers=(1, 3))
    more = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [4]}
    state = expert_state(QWEN, shape) | other_state(shape)
    source = save(tmp_path / "source", state, config_for(QWEN, shape, **more))
    checkpoints.merge(source, tmp_path / "target", verify=True)
    found = load(tmp_path / "target")
    assert_same(found, as_layout(QWEN, state, "stacked"))
    assert_same(
        {"x": found["model.layers.7.mlp.gate_proj.weight"]}, {"x": state["model.layers.7.mlp.gate_proj.weight"]}
    )


def test_layers_of_multi_token_prediction_are_converted_too(tmp_path: Path) -> None:
    """DeepSeek V3 stores its MTP layer as one layer more than the config counts."""
    family = FAMILY["deepseek_v3"]
    shape = replace(FP8, layers=(3, 4, 5))
    more = {"num_hidden_layers": 5, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    state = expert_state(family, shape) | other_state(shape)
    source = save(tmp_path / "source", state, config_for(family, shape, **more))
    checkpoints.convert(source, tmp_path / "target", "fused", verify=True)
    assert_same(load(tmp_path / "target"), as_layout(family, state, "fused"))
    assert checkpoints.inspect(source).towers[0].layers == (3, 4, 5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_hidden_layers": 4}, ("expected experts in 0-3", "none in 2-3")),
        ({"mlp_only_layers": [1]}, ("expected experts in 0 only", "found some in 1")),
        ({"num_experts": 5}, ("expected experts 0-4 (config.json), missing 4",)),
        ({"num_experts": 3}, ("expected experts 0-2 (config.json), found 3 too",)),
        ({"hidden_size": 7}, ("expected gate [I, 7] (hidden_size of config.json), found [5, 6]",)),
    ],
)
def test_a_config_that_the_experts_contradict(tmp_path: Path, more: dict, words: tuple[str, ...]) -> None:
    source = save(tmp_path / "source", expert_state(QWEN, TINY), config_for(QWEN, TINY, **more))
    refuse(source, BrokenCheckpointError, *words)


def test_without_a_count_in_the_config_numbers_must_have_no_gap(tmp_path: Path) -> None:
    state = expert_state(QWEN, TINY)
    config = config_for(QWEN, TINY)
    del config["num_experts"]
    del state[f"{BLOCK}.1.up_proj.weight"]
    refuse(
        save(tmp_path / "source", state, config), BrokenCheckpointError, "up weight: expected experts 0-3", "missing 1;"
    )


def replaced(name: str, tensor: torch.Tensor) -> Callable[[State], None]:
    return lambda state: state.update({name: tensor})


def removed(*names: str) -> Callable[[State], None]:
    return lambda state: [state.pop(name) for name in names] and None


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "layout", "words"),
    [
        (removed(f"{BLOCK}.2.gate_proj.weight"), "experts", ("gate weight: expected experts 0-3", "missing 2;")),
        (removed(f"{BLOCK}.up_proj"), "stacked", (f"{BLOCK}: expected up too, found down, gate",)),
        (removed(f"{BLOCK}.down_proj"), "fused", (f"{BLOCK}: expected down too, found gate_up",)),
        (replaced(f"{BLOCK}.0.up_proj.weight", torch.zeros(5, 6)), "experts", ("one dtype", "F32 in", "BF16 in")),
        (replaced(f"{BLOCK}.3.up_proj.weight", torch.zeros(6, 6).to(BF16)), "experts", ("one shape", "[6, 6]")),
        (replaced(f"{BLOCK}.gate_proj", torch.zeros(3, 5, 6).to(BF16)), "stacked", ("expected 4 experts", "[3, 5, 6]")),
        (
            replaced(f"{BLOCK}.gate_proj", torch.zeros(4, 4, 6).to(BF16)),
            "stacked",
            ("gate and up weight of one shape",),
        ),
        (replaced(f"{BLOCK}.down_proj", torch.zeros(4, 6, 4).to(BF16)), "stacked", ("down [H, I]", "[6, 4]")),
        (replaced(f"{BLOCK}.gate_up_proj", torch.zeros(4, 9, 6).to(BF16)), "fused", ("one of the forms", "[4, 9, 6]")),
        (replaced(f"{BLOCK}.gate_up_proj_bias", torch.zeros(4, 9)), "fused", ("as many rows for gate as for up",)),
        (
            replaced(f"{BLOCK}.0.up_proj.bias", torch.zeros(5)),
            "experts",
            ("up bias: expected experts 0-3", "missing 1-3"),
        ),
        (replaced(f"{BLOCK}.up_proj_bias", torch.zeros(4, 5)), "stacked", ("expected bias for gate, up and down",)),
        (replaced(f"{BLOCK}.0.up_proj.lora_A.weight", torch.zeros(5)), "experts", ("lora_A",)),
        (replaced(f"{BLOCK}.0.gate.weight", torch.zeros(5)), "experts", (f"found {BLOCK}.0.gate.weight",)),
    ],
)
def test_experts_that_do_not_fit_together(
    tmp_path: Path, change: Callable[[State], None], layout: str, words: tuple[str, ...]
) -> None:
    source = broken(tmp_path / "source", change, layout)
    refuse(source, CheckpointError, *words, to="stacked" if layout == "experts" else "experts")


def test_gate_and_up_of_two_dtypes_cannot_be_fused_but_stacked(tmp_path: Path) -> None:
    def widen(state: State) -> None:
        state.update({name: t.float() for name, t in state.items() if ".experts." in name and "up_proj" in name})

    source = broken(tmp_path / "source", widen)
    refuse(source, BrokenCheckpointError, "gate and up of one dtype", "BF16 in", "F32 in", to="fused")
    checkpoints.merge(source, tmp_path / "stacked", verify=True)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "weight_packed", "weight.absmax", "weight.quant_state.nf4"])
def test_four_bit_experts_are_refused(tmp_path: Path, suffix: str) -> None:
    def pack(state: State) -> None:
        for name in [name for name in state if ".experts." in name]:
            state[name.replace("weight", suffix)] = state.pop(name).view(torch.int16).to(torch.int32)

    refuse(broken(tmp_path / "source", pack), NotImplementedError, "packed below 8 bits", suffix)


def test_mxfp4_is_refused(tmp_path: Path) -> None:
    family = FAMILY["gpt_oss"]
    state: State = {
        f"model.layers.0.mlp.experts.{name}": torch.zeros(size, dtype=torch.uint8)
        for name, size in (("gate_up_proj_blocks", (4, 64, 1, 16)), ("gate_up_proj_scales", (4, 64, 1)))
    }
    state |= other_state(TINY)
    config = config_for(family, TINY, quantization_config={"quant_method": "mxfp4"})
    refuse(
        save(tmp_path / "source", state, config),
        UnsupportedCheckpointError,
        "'mxfp4'",
        "gate_up_proj_blocks",
        to="experts",
    )


@pytest.mark.parametrize("layout", ["experts", "stacked", "fused"])
def test_nothing_to_do_is_said(tmp_path: Path, layout: str) -> None:
    refuse(make(tmp_path / "source", layout), LayoutError, f"in the layout {layout} already", to=layout)


def test_merge_and_split_expect_their_layout(tmp_path: Path) -> None:
    single, stacked = make(tmp_path / "single"), make(tmp_path / "stacked", "stacked")
    with pytest.raises(LayoutError, match=r"expected the layout experts, found stacked; .*convert"):
        checkpoints.merge(stacked, tmp_path / "target")
    with pytest.raises(LayoutError, match="expected the layout stacked or fused, found experts"):
        checkpoints.split(single, tmp_path / "target")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"to": "merged"}, "expected a layout of experts, stacked, fused, found 'merged'"),
        ({"to": "fused", "form": "sideways"}, "expected a form of concatenated, transposed, interleaved"),
        ({"to": "fused", "form": "interleaved"}, "expected a form of qwen3_moe's fused layout"),
        ({"to": "stacked", "form": "concatenated"}, "for stacked"),
        ({"to": "stacked", "shard_size": "5 gigs"}, "shard_size is '5 gigs'"),
        ({"to": "stacked", "workers": 0}, "at least 1 worker, found 0"),
    ],
)
def test_arguments_that_are_not_accepted(tmp_path: Path, arguments: dict, words: str) -> None:
    source = make(tmp_path / "source")
    with pytest.raises(ValueError, match=words):
        checkpoints.convert(source, tmp_path / "target", **arguments)


def test_shared_experts_and_routers_are_not_experts(tmp_path: Path) -> None:
    found = checkpoints.inspect(make(tmp_path / "source"))
    assert found.towers[0].num_bytes == 2 * 4 * 3 * 5 * 6 * 2
    assert found.bytes_by_dtype["F32"] == 4 * 4


@pytest.mark.parametrize("source_layout", ["experts", "fused"])
def test_what_has_no_transpose_is_not_transposed(tmp_path: Path, source_layout: str) -> None:
    """A scale of three dimensions: reversed, it is not the transposed matrix."""
    family = FAMILY["gpt_oss"]
    state = expert_state(family, TINY)
    for name in list(state):
        state[f"{name}_scale"] = torch.zeros(2, 3, 2)
    if source_layout == "fused":
        state = as_layout(family, state, "fused", "interleaved")
    source = save(tmp_path / "source", state, config_for(family, TINY))
    to = "fused" if source_layout == "experts" else "stacked"
    refuse(source, UnsupportedCheckpointError, "source: expected at most two dimensions of an expert's", to=to)
