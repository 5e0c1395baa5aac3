"""Each tower of a checkpoint has its layout: they are read, shown and converted one by one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, LayoutError
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
    other_state,
    save,
)
from tests.marks import slow

SMALL = replace(TINY, experts=3, hidden=4, intermediate=2, layers=(0,))


@dataclass(frozen=True)
class Part:
    """Layers with experts under one prefix; ``layout`` is how they are published."""

    prefix: str
    layout: str
    shape: Shape = TINY
    form: str | None = None


@dataclass(frozen=True)
class Published:
    """A model as it is on the Hub, or as a tool left it."""

    family: str
    parts: tuple[Part, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    def state(self, layout: str | None = None) -> State:
        """In the layouts of the parts, or all in ``layout``."""
        family = FAMILY[self.family]
        state = other_state(TINY)
        for seed, part in enumerate(self.parts):
            single = expert_state(family, part.shape, seed, part.prefix)
            chosen = layout or part.layout
            form = (part.form if layout is None else None) or family.forms[0]
            state |= as_layout(family, single, chosen, form)
        return state

    def save(self, folder: Path) -> Path:
        family = FAMILY[self.family]
        return save(folder, self.state(), config_for(family, self.parts[0].shape, **self.config))


def omni(layouts: tuple[str, str]) -> Published:
    text = {
        "thinker_config": {"text_config": config_for(FAMILY["qwen3_omni_moe"], TINY)},
        "talker_config": {"text_config": config_for(FAMILY["qwen3_omni_moe"], SMALL)},
    }
    parts = (Part("thinker.model.layers.", layouts[0]), Part("talker.model.layers.", layouts[1], SMALL))
    return Published("qwen3_omni_moe", parts, text)


def multimodal(prefix: str, layout: str, form: str | None = None) -> Published:
    config = {
        "text_config": config_for(FAMILY["qwen3_vl_moe"], TINY),
        "vision_config": {"hidden_size": SMALL.hidden, "num_experts": SMALL.experts, "num_hidden_layers": 1},
    }
    parts = (Part("model.language_model.layers.", "fused", TINY, form), Part(prefix, layout, SMALL))
    return Published("qwen3_vl_moe", parts, config)


MTP = replace(TINY, layers=(0,))
AFTER = replace(FP8, layers=(2,))
NUM_LAYERS = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
PUBLISHED = {
    "Qwen3.5-MoE": Published(
        "qwen3_5_moe", (Part("model.language_model.layers.", "fused"), Part("mtp.layers.", "experts", MTP))
    ),
    "Qwen3-Next, merged but for MTP": Published(
        "qwen3_next", (Part("model.layers.", "stacked"), Part("mtp.layers.", "experts", MTP))
    ),
    "MTP within the model": Published(
        "qwen3_next", (Part("model.layers.", "experts"), Part("model.mtp.layers.", "fused", MTP))
    ),
    "MTP layers of another name": Published(
        "qwen3_moe", (Part("model.layers.", "fused"), Part("model.mtp_layers.", "experts", MTP))
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3", (Part("model.layers.", "fused", FP8), Part("model.layers.", "experts", AFTER)), NUM_LAYERS
    ),
    "GLM-4.5": Published(
        "glm4_moe", (Part("model.layers.", "experts", FP8), Part("model.layers.", "stacked", AFTER)), NUM_LAYERS
    ),
    "Mixtral, fused but for MTP": Published(
        "mixtral", (Part("model.layers.", "fused"), Part("mtp.layers.", "experts", MTP))
    ),
    "Qwen3-Omni": omni(("experts", "fused")),
    "Qwen3-Omni, the other way": omni(("stacked", "experts")),
    "text and vision": multimodal("model.visual.blocks.", "experts"),
    "text and vision tower": multimodal("vision_tower.encoder.layers.", "stacked"),
    "two forms of the fused layout": multimodal("model.visual.layers.", "fused", "concatenated"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect_shows_the_layout_of_each(tmp_path: Path, name: str) -> None:
    model = PUBLISHED[name]
    found = checkpoints.inspect(model.save(tmp_path / "source"))
    shown = {(t.prefix, t.layers): (t.layout, t.form, t.num_experts) for t in found.towers}
    forms = FAMILY[model.family].forms
    assert shown == {
        (part.prefix, part.shape.layers): (
            part.layout,
            (part.form or forms[0]) if part.layout == "fused" else None,
            part.shape.experts,
        )
        for part in model.parts
    }
    assert found.layout == ("mixed" if len({part.layout for part in model.parts}) > 1 else model.parts[0].layout)


@pytest.mark.parametrize("to", ["experts", "stacked", "fused"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tower_is_brought_to_what_is_asked_and_back(tmp_path: Path, name: str, to: str) -> None:
    model = PUBLISHED[name]
    source = model.save(tmp_path / "source")
    done = checkpoints.convert(source, tmp_path / "one", to, verify=True, fsync=False)
    assert_same(load(tmp_path / "one"), model.state(to))
    assert {tower.layout for tower in checkpoints.inspect(tmp_path / "one").towers} == {to}
    assert done.verification is not None
    assert done.layout == to and done.source_layout == checkpoints.inspect(source).layout
    if len({part.layout for part in model.parts}) == 1:
        return  # two forms of one layout: there is one form for all
    first, *rest = model.parts
    towers = {part.prefix if part.prefix != first.prefix else f"{part.prefix}2.": part.layout for part in rest}
    back = checkpoints.convert(
        tmp_path / "one", tmp_path / "back", first.layout, towers=towers, verify=True, fsync=False
    )
    assert_same(load(tmp_path / "back"), model.state())
    assert checkpoints.verify(source, tmp_path / "back") == done.verification == back.verification


@pytest.mark.parametrize(
    "layouts",
    [slow(pair) if "stacked" in pair else pair for pair in itertools.permutations(("experts", "stacked", "fused"), 2)],
)
def test_merge_and_split_take_a_mixture(tmp_path: Path, layouts: tuple[str, str]) -> None:
    model = Published("qwen3_next", (Part("model.layers.", layouts[0]), Part("mtp.layers.", layouts[1], MTP)))
    source = model.save(tmp_path / "source")
    if "experts" in layouts:
        checkpoints.merge(source, tmp_path / "stacked", verify=True)
        assert_same(load(tmp_path / "stacked"), model.state("stacked"))
    checkpoints.split(source, tmp_path / "experts", verify=True)
    assert_same(load(tmp_path / "experts"), model.state("experts"))


def test_a_tower_that_is_not_there(tmp_path: Path) -> None:
    source = PUBLISHED["DeepSeek-V3"].save(tmp_path / "source")
    for name in ("mtp.", "model.layers.0.", "model.layers.2.mlp"):
        with pytest.raises(LayoutError, match=r"source: expected a tower of model.layers., model.layers.2., or how"):
            checkpoints.convert(source, tmp_path / "target", "fused", towers={name: "experts"})
    with pytest.raises(checkpoints.CheckpointError, match="expected a layout of experts, stacked, fused, found 'x'"):
        checkpoints.convert(source, tmp_path / "target", "fused", towers={"model.": "x"})


def test_where_all_towers_are_as_asked_there_is_nothing_to_do(tmp_path: Path) -> None:
    source = PUBLISHED["Qwen3.5-MoE"].save(tmp_path / "source")
    with pytest.raises(LayoutError, match="is in the layout mixed already; there is nothing to do"):
        checkpoints.convert(source, tmp_path / "target", "fused", towers={"mtp.": "experts"})
    checkpoints.convert(source, tmp_path / "target", "experts", towers={"": "stacked", "mtp.": "experts"})
    assert [t.layout for t in checkpoints.inspect(tmp_path / "target").towers] == ["stacked", "experts"]


def test_the_form_is_of_the_towers_that_are_fused(tmp_path: Path) -> None:
    source = PUBLISHED["text and vision"].save(tmp_path / "source")
    with pytest.raises(LayoutError, match=r"found 'concatenated' for experts, stacked; leave it out"):
        towers = {"model.visual.": "stacked"}
        checkpoints.convert(source, tmp_path / "target", "experts", form="concatenated", towers=towers)
    towers = {"model.visual.": "fused"}
    checkpoints.convert(source, tmp_path / "target", "experts", form="concatenated", towers=towers, verify=True)
    assert {t.form for t in checkpoints.inspect(tmp_path / "target").towers} == {"concatenated", None}


@pytest.mark.parametrize(("name", "value"), [("num_experts", 0), ("num_experts", None)])
def test_a_tower_without_experts(tmp_path: Path, name: str, value: int | None) -> None:
    """A dense talker with a thinker that has experts; a config that does not count is noted."""
    config = {part: dict(section) for part, section in omni(("experts", "experts")).config.items()}
    config["talker_config"] = {"text_config": config_for(FAMILY["qwen3_omni_moe"], SMALL, **{name: value})}
    model = Published("qwen3_omni_moe", (Part("thinker.model.layers.", "experts"),), config)
    source = model.save(tmp_path / "source")
    notes = checkpoints.inspect(source).notes
    assert notes == (("not checked: whether talker. lost experts, as config.json counts none of it",) * (value is None))
    checkpoints.merge(source, tmp_path / "target", verify=True)
    assert_same(load(tmp_path / "target"), model.state("stacked"))


def test_an_encoder_is_checked_against_its_own_config(tmp_path: Path) -> None:
    model = PUBLISHED["text and vision"]
    source = model.save(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for key, words in (
        ("num_experts", r"expected experts 0-6 \(config.json\), missing 3-6"),
        ("hidden_size", r"\[I, 7\]"),
    ):
        changed = {**config, "vision_config": {**config["vision_config"], key: 7}}
        (source / "config.json").write_text(json.dumps(changed))
        with pytest.raises(BrokenCheckpointError, match=rf"source: model.visual.blocks.*{words}"):
            checkpoints.inspect(source)
    del config["vision_config"]
    (source / "config.json").write_text(json.dumps(config))
    (note,) = checkpoints.inspect(source).notes
    assert "not checked: how many experts a layer of model.visual.blocks. has" in note


def test_experts_under_names_that_no_tower_has_are_named(tmp_path: Path) -> None:
    model = PUBLISHED["Qwen3.5-MoE"]
    state = model.state() | {"model.router.experts.0.bank.weight": other_state(TINY)["model.empty"]}
    source = save(tmp_path / "source", state, config_for(FAMILY["qwen3_5_moe"], TINY))
    (note,) = checkpoints.inspect(source).notes
    assert "1 tensors under 'experts' whose names are not those of qwen3_5_moe (model.router.experts.0" in note
    assert note in checkpoints.split(source, tmp_path / "target", verify=True).notes


def test_each_tower_has_its_module_too(tmp_path: Path) -> None:
    """A Mixtral whose decoder is as transformers holds it in memory, and whose MTP layer is as in files."""
    model = PUBLISHED["Mixtral, fused but for MTP"]
    state = {
        name if name.startswith("mtp.") else name.replace("block_sparse_moe", "mlp"): tensor
        for name, tensor in model.state().items()
    }
    source = save(tmp_path / "source", state, config_for(FAMILY["mixtral"], TINY))
    checkpoints.split(source, tmp_path / "target", verify=True)
    assert_same(load(tmp_path / "target"), model.state("experts"))
