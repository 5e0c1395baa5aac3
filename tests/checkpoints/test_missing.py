"""Missing parts are found: experts, layers, decoders, scales, also where the config counts none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, CheckpointError, UnsupportedCheckpointError
from fxoffload.checkpoints.errors import gaps, ranges
from tests.checkpoints.making import (
    FAMILY,
    FP8,
    TINY,
    Shape,
    State,
    as_layout,
    config_for,
    expert_state,
    other_state,
    save,
)

QWEN = FAMILY["qwen3_moe"]
PATTERN = "model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight"
BLOCK = "model.layers.0.mlp.experts"


def without(part: str) -> Callable[[State], None]:
    """Lose the tensors with ``part`` in their names."""
    return lambda state: [state.pop(name) for name in list(state) if part in name] and None


def lossy(
    folder: Path,
    change: Callable[[State], object],
    family: str = "qwen3_moe",
    shape: Shape = TINY,
    layout: str = "experts",
    **config: Any,
) -> Path:
    """A checkpoint that lost something before it was written; a config's value None takes the key away."""
    chosen = FAMILY[family]
    state = as_layout(chosen, expert_state(chosen, shape), layout, chosen.forms[0]) | other_state(shape)
    change(state)
    said = {name: value for name, value in (config_for(chosen, shape) | config).items() if value is not None}
    return save(folder, state, said)


def keep(state: State) -> None:
    """Lose nothing."""


def test_without_a_count_all_layers_have_as_many_experts(tmp_path: Path) -> None:
    source = lossy(tmp_path / "source", without("layers.1.mlp.experts.3."), num_experts=None)
    with pytest.raises(BrokenCheckpointError, match=f"found 4 in {BLOCK} and 3 in model.layers.1"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
@pytest.mark.parametrize("section", [None, "text_config"])
def test_with_a_pattern_the_config_counts_too(tmp_path: Path, name: str, section: str | None) -> None:
    counted: dict[str, Any] = {"num_experts": None, name: 4} if section is None else {section: {name: 4}}
    if section is not None:
        counted["num_experts"] = None
    whole = lossy(tmp_path / "whole", keep, model_type="own", **counted)
    checkpoints.inspect(whole, pattern=PATTERN)
    source = lossy(tmp_path / "source", without("experts.3."), model_type="own", **counted)
    with pytest.raises(BrokenCheckpointError, match=r"expected experts 0-3 \(config.json\), missing 3"):
        checkpoints.inspect(source, pattern=PATTERN)


@pytest.mark.parametrize("name", ["n_routed_experts", "num_local_experts"])
def test_the_number_of_experts_under_any_name(tmp_path: Path, name: str) -> None:
    """transformers saves Qwen3-MoE with another name than the one on the Hub."""
    counted = {"num_experts": None, name: 4}
    checkpoints.inspect(lossy(tmp_path / "whole", keep, **counted))
    with pytest.raises(BrokenCheckpointError, match=r"expected experts 0-3 \(config.json\), missing 3"):
        checkpoints.inspect(lossy(tmp_path / "source", without("experts.3."), **counted))


def test_two_numbers_of_experts(tmp_path: Path) -> None:
    source = lossy(tmp_path / "source", keep, num_experts=4, num_local_experts=2)
    with pytest.raises(BrokenCheckpointError, match="found num_experts 4, num_local_experts 2; remove"):
        checkpoints.inspect(source)


def omni(folder: Path, lost: str | None, **more: Any) -> Path:
    family = FAMILY["qwen3_omni_moe"]
    state = {}
    config: dict[str, Any] = {"model_type": "qwen3_omni_moe", **more}
    for name, shape in (("thinker", TINY), ("talker", replace(TINY, experts=3, hidden=4))):
        config[f"{name}_config"] = {"text_config": config_for(family, shape, model_type="own")}
        if name != lost:
            state |= expert_state(family, shape, prefix=f"{name}.model.layers.")
    return save(folder, state, config)


@pytest.mark.parametrize("lost", ["thinker", "talker"])
def test_a_decoder_that_the_config_describes_is_not_left_out(tmp_path: Path, lost: str) -> None:
    checkpoints.inspect(omni(tmp_path / "whole", None))
    with pytest.raises(BrokenCheckpointError, match=f"layers of {lost}.: expected experts in 0-1 .* none in 0-1"):
        checkpoints.inspect(omni(tmp_path / "source", lost))


def test_a_talker_that_is_switched_off_may_be_left_out(tmp_path: Path) -> None:
    """transformers writes the talker's default section next to a thinker that was saved without it."""
    checkpoints.inspect(omni(tmp_path / "source", "talker", enable_audio_output=False))


@pytest.mark.parametrize("model_type", ["qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"])
def test_a_decoder_of_omni_by_itself(tmp_path: Path, model_type: str) -> None:
    checkpoints.inspect(lossy(tmp_path / "whole", keep, model_type=model_type))
    with pytest.raises(BrokenCheckpointError, match=r"expected experts in 0-1 .* none in 1"):
        checkpoints.inspect(lossy(tmp_path / "source", without("layers.1.mlp"), model_type=model_type))


def test_the_layer_of_another_module_stands_for_none_of_the_decoder(tmp_path: Path) -> None:
    def move(state: State) -> None:
        for name in [name for name in state if "model.layers.1.mlp.experts" in name]:
            state[name.replace("model.layers", "model.visual.layers")] = state.pop(name)

    source = lossy(tmp_path / "source", move)
    with pytest.raises(BrokenCheckpointError, match=r"layers of model.layers.: expected experts in 0-1 .* none in 1"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("part", ["weight_scale_inv", "layers.1.mlp.experts.*.weight_scale_inv"])
def test_fp8_weights_without_their_scales(tmp_path: Path, part: str) -> None:
    layer, _, rest = part.rpartition("*")

    def lose(state: State) -> None:
        for name in [name for name in state if layer.rstrip("*") in name and name.endswith(rest.lstrip("."))]:
            del state[name]

    source = lossy(tmp_path / "source", lose, "deepseek_v3", FP8)
    with pytest.raises(BrokenCheckpointError, match=r"expected weight_scale_inv beside F8_E4M3 weights .*\[4, 4\]"):
        checkpoints.inspect(source)


def test_layers_that_were_not_quantized_need_no_scales(tmp_path: Path) -> None:
    def widen(state: State) -> None:
        without("layers.1.mlp.experts.3.up_proj.weight_scale_inv")(state)
        for name in [name for name in state if "layers.1.mlp.experts" in name]:
            if name.endswith("scale_inv"):
                del state[name]
            else:
                state[name] = torch.zeros(state[name].shape, dtype=torch.bfloat16)

    checkpoints.inspect(lossy(tmp_path / "source", widen, "deepseek_v3", FP8))


@pytest.mark.parametrize("layout", ["experts", "stacked", "fused"])
def test_biases_of_one_layer_lost(tmp_path: Path, layout: str) -> None:
    def lose(state: State) -> None:
        for name in [name for name in state if "layers.1.mlp.experts" in name and name.endswith("bias")]:
            del state[name]

    source = lossy(tmp_path / "source", lose, "gpt_oss", replace(TINY, bias=True), layout)
    with pytest.raises(BrokenCheckpointError, match=r"expected the same parameters in all layers of model.layers."):
        checkpoints.inspect(source)


@pytest.mark.parametrize("layout", ["experts", "stacked"])
def test_the_scales_of_down_have_its_blocks(tmp_path: Path, layout: str) -> None:
    def shrink(state: State) -> None:
        for name in [name for name in state if "down_proj" in name and "scale_inv" in name]:
            state[name] = torch.ones(*state[name].shape[:-2], 1, 1)

    source = lossy(tmp_path / "source", shrink, "deepseek_v3", FP8, layout)
    words = r"expected scales \[3, 2\] for a weight \[9, 5\] in blocks of \[4, 4\], found \[1, 1\] for down"
    with pytest.raises(BrokenCheckpointError, match=words):
        checkpoints.inspect(source)


@pytest.mark.parametrize(("names", "rows"), [(("gate_proj", "up_proj"), 5), (("down_proj",), 6)])
def test_a_bias_has_a_number_for_each_row(tmp_path: Path, names: tuple[str, ...], rows: int) -> None:
    def shrink(state: State) -> None:
        for name in [name for name in state if name.endswith("bias") and any(part in name for part in names)]:
            state[name] = torch.ones(3)

    source = lossy(tmp_path / "source", shrink, "gpt_oss", replace(TINY, bias=True))
    with pytest.raises(BrokenCheckpointError, match=rf"expected a bias \[{rows}\] for .* found \[3\]"):
        checkpoints.inspect(source)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("qwen3_moe", {"num_experts": "4"}, "expected num_experts to be a whole number, found '4'"),
        ("qwen3_moe", {"num_experts": True}, "expected num_experts to be a whole number, found True"),
        ("qwen3_moe", {"num_experts": -1}, "expected num_experts to be a whole number, found -1"),
        ("qwen3_moe", {"num_experts": 0}, "expected no experts (config.json), found 0-3 too"),
        ("qwen3_moe", {"num_hidden_layers": "2"}, "expected num_hidden_layers to be a whole number, found '2'"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 10**9},
            "expected num_hidden_layers to be at most 100000, found 1000000000",
        ),
        ("qwen3_moe", {"hidden_size": 6.0}, "expected hidden_size to be a whole number, found 6.0"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "expected mlp_only_layers to be a list of whole numbers, found 3"),
        ("deepseek_v3", {"moe_layer_freq": [1, 1]}, "expected moe_layer_freq to be a whole number, found [1, 1]"),
        ("qwen3_moe", {"model_type": ["a"]}, "expected config.json to have one of the model types"),
        (
            "qwen3_moe",
            {"quantization_config": {"weight_block_size": [0, 0]}},
            "expected weight_block_size to be two numbers above 0, found [0, 0]",
        ),
        (
            "qwen3_moe",
            {"quantization_config": {"weight_block_size": 128}},
            "expected weight_block_size to be a list of whole numbers, found 128",
        ),
    ],
)
def test_values_of_the_config_that_are_none(tmp_path: Path, family: str, config: dict, words: str) -> None:
    source = lossy(tmp_path / "source", keep, family, **config)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.inspect(source)
    assert words in str(caught.value)


def test_a_quantization_config_that_is_text(tmp_path: Path) -> None:
    checkpoints.inspect(lossy(tmp_path / "source", keep, quantization_config="x"))


@pytest.mark.parametrize("count", [20_000, 10**9])
def test_a_count_far_from_what_is_there_is_refused_at_once(tmp_path: Path, count: int) -> None:
    source = lossy(tmp_path / "source", keep, num_experts=count)
    begun = time.perf_counter()
    with pytest.raises(BrokenCheckpointError, match=f"missing 4-{count - 1};"):
        checkpoints.inspect(source)
    assert time.perf_counter() - begun < 2


def test_an_expert_of_a_number_far_from_the_others(tmp_path: Path) -> None:
    name = f"{BLOCK}.999999999.gate_proj.weight"
    source = lossy(tmp_path / "source", lambda s: s.update({name: s[f"{BLOCK}.0.gate_proj.weight"]}), num_experts=None)
    begun = time.perf_counter()
    with pytest.raises(BrokenCheckpointError, match=r"expected experts 0-999999999 .*, missing 4-999999999;"):
        checkpoints.inspect(source)
    assert time.perf_counter() - begun < 2


def test_ranges_and_gaps() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2, 5"
    assert ranges([]) == ""
    assert gaps([0, 1, 4, 9, -3], 8) == "2-3, 5-7"
    assert gaps([], 3) == "0-2"
    assert gaps([0, 1, 2], 3) == ""
    begun = time.perf_counter()
    assert ranges(range(0, 100_000, 2)).startswith("0, 2, 4")
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize("count", [None, 0])
def test_no_experts_at_all(tmp_path: Path, count: int | None) -> None:
    def empty(state: State) -> None:
        state.update({name: state[name][:0] for name in state if "mlp.experts" in name})

    source = lossy(tmp_path / "source", empty, layout="stacked", num_experts=count)
    with pytest.raises(BrokenCheckpointError, match=r"expected at least one expert, found shape .0, "):
        checkpoints.convert(source, tmp_path / "target", "fused")


def test_four_bits_under_the_name_of_a_weight(tmp_path: Path) -> None:
    def pack(state: State) -> None:
        for name in [name for name in state if ".experts." in name]:
            rows, columns = state[name].shape
            state[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(rows, 1, dtype=torch.uint8)

    source = lossy(tmp_path / "source", pack)
    with pytest.raises(UnsupportedCheckpointError, match="in U8, as weights packed below 8 bits are"):
        checkpoints.inspect(source)
