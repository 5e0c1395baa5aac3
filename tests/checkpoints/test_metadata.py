"""Metadata of files: kept, or reported as lost; and files that no other reader would take."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, CheckpointError, MismatchError, UnsupportedCheckpointError
from fxoffload.checkpoints.index import open_checkpoint
from fxoffload.cli.moe_tables import describe_conversion, print_inspection
from tests.checkpoints.making import (
    FAMILY,
    FP8,
    TINY,
    as_layout,
    assert_same,
    config_for,
    expert_state,
    load,
    make,
    save,
)
from tests.checkpoints.test_index import FIRST, rewrite_header, rewrite_index

SECOND = "model-00002-of-00003.safetensors"
SHARDS = (FIRST, SECOND, "model-00003-of-00003.safetensors")


def say(folder: Path, *metadata: object) -> None:
    """Put these into the headers of the shards in turn."""
    for shard, value in zip(SHARDS, metadata, strict=True):
        rewrite_header(folder / shard, lambda header, value=value: header.update(__metadata__=value))


def said(folder: Path) -> list[dict[str, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.append(file.metadata())
    return found


def test_metadata_of_the_shards_are_kept(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    say(source, {"format": "mlx", "by": "us"}, {"format": "mlx"}, {"format": "mlx"})
    done = checkpoints.merge(source, tmp_path / "target", shard_size=300, verify=True)
    assert said(tmp_path / "target") == [{"format": "mlx", "by": "us"}] * done.num_shards
    assert done.num_shards > 1
    assert done.notes == ()


def test_metadata_on_which_shards_differ_are_left_out_and_said(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    say(source, {"format": "pt", "part": "1"}, {"format": "mlx", "part": "2", "x": "y"}, None)
    done = checkpoints.merge(source, tmp_path / "target", verify=True)
    assert said(tmp_path / "target") == [{"format": "pt", "x": "y"}]
    assert done.notes == ("not kept: metadata on which the shards differ (format, part)",)
    assert "\nnote: not kept: metadata" in describe_conversion(done, tmp_path / "target")
    assert checkpoints.inspect(source).notes == done.notes
    console = Console(file=io.StringIO())
    print_inspection(checkpoints.inspect(source), console)
    assert "note: not kept: metadata on which the shards differ (format, part)\n" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("metadata", [{"a": {"b": 1}}, {"a": 1}, {"a": None}, "text", ["a"]])
def test_metadata_that_the_safetensors_library_does_not_read(tmp_path: Path, metadata: object) -> None:
    source = make(tmp_path / "source")
    say(source, {}, metadata, {})
    with pytest.raises(BrokenCheckpointError, match=f"{SECOND}: expected __metadata__ to be an object of texts"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {"format": "mlx", "by": "us"}, {"format": "pt", "by": "them"}])
def test_metadata_are_verified(tmp_path: Path, metadata: dict[str, str]) -> None:
    source, target = make(tmp_path / "source"), make(tmp_path / "target", "stacked")
    say(source, *[{"by": "us"}] * 3)
    say(target, *[{"format": "pt", "by": "us"}] * 3)
    checkpoints.verify(source, target)
    say(target, *[metadata] * 3)
    with pytest.raises(MismatchError, match=r"metadata of the shards differ in .*expected .*found .*convert again"):
        checkpoints.verify(source, target)


@pytest.mark.parametrize("metadata", [[1, 2], "abc", 7])
def test_an_index_whose_metadata_are_no_object(tmp_path: Path, metadata: object) -> None:
    source = make(tmp_path / "source")
    rewrite_index(source, lambda index: index.update(metadata=metadata))
    with pytest.raises(
        BrokenCheckpointError, match=f"expected metadata to be an object, found {re.escape(repr(metadata))}"
    ):
        checkpoints.inspect(source)


def test_metadata_of_the_index(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    rewrite_index(source, lambda index: index["metadata"].update(by="us", total_parameters=7, total_size=1))
    done = checkpoints.merge(source, tmp_path / "target")
    size = f"the index says total_size 1; the tensors have {done.num_bytes} bytes"
    assert done.notes == (size, "not kept: the index's metadata (by), as a single file has no index")
    several = checkpoints.merge(source, tmp_path / "several", shard_size=300)
    assert several.notes == (size,)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"by": "us", "total_parameters": 7, "total_size": done.num_bytes}


def test_a_dtype_that_is_not_known(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    rewrite_header(source / FIRST, lambda header: header[list(header)[-1]].update(dtype="I4"))
    with pytest.raises(UnsupportedCheckpointError, match=f"{source / FIRST}: .* of the dtypes BOOL, F4"):
        checkpoints.inspect(source)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path).endswith("assets"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        BrokenCheckpointError, match=r"source/assets: cannot be read .Permission denied.; expected every"
    ):
        checkpoints.merge(source, tmp_path / "target", verify=True)
    assert os.listdir(tmp_path) == ["source"]


def test_a_file_that_cannot_be_read_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source")
    monkeypatch.setattr(os, "access", lambda path, mode: not os.fspath(path).endswith("LICENSE"))
    with pytest.raises(BrokenCheckpointError, match=r"source/assets/LICENSE: cannot be read .Permission denied."):
        checkpoints.inspect(source)


def test_folders_that_link_to_each_other(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    for name, other in (("a", "b"), ("b", "a")):
        (source / name).mkdir()
        (source / name / "link").symlink_to(f"../{other}")
    with pytest.raises(BrokenCheckpointError, match=r"a/link/link: a link to a folder around it; remove it"):
        open_checkpoint(source)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x: cannot be read .File name too long.|found nothing"):
        checkpoints.inspect(tmp_path / ("x" * 300))


@pytest.mark.parametrize(("intermediate", "fits"), [(4, True), (5, False), (7, True), (1, True)])
def test_scales_that_transformers_does_not_load_fused_are_said(tmp_path: Path, intermediate: int, fits: bool) -> None:
    """Blocks of 4: gate and up of 5 rows have 2 + 2 rows of scales, where transformers makes ceil(10 / 4) = 3."""
    source = make(tmp_path / "source", "experts", "deepseek_v3", replace(FP8, intermediate=intermediate))
    assert checkpoints.convert(source, tmp_path / "stacked", "stacked").notes == ()
    notes = checkpoints.convert(source, tmp_path / "fused", "fused").notes
    assert notes == () if fits else "has 4 rows of scales, transformers expects 3" in notes[0]


@pytest.mark.parametrize(("family", "form"), [("qwen3_vl_moe", "transposed"), ("gpt_oss", "interleaved")])
def test_experts_without_features_in_forms_that_change_places(tmp_path: Path, family: str, form: str) -> None:
    source = make(tmp_path / "source", "experts", family, replace(TINY, intermediate=0))
    checkpoints.convert(source, tmp_path / "fused", "fused", form=form, verify=True)
    checkpoints.split(tmp_path / "fused", tmp_path / "back", verify=True)
    assert_same(load(tmp_path / "back"), load(source))


def test_what_a_pattern_does_not_check_is_said(tmp_path: Path) -> None:
    pattern = "model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight"
    family = FAMILY["qwen3_moe"]
    source = save(tmp_path / "source", expert_state(family, replace(TINY, layers=(0, 1, 3))), {"model_type": "own"})
    assert checkpoints.inspect(source, pattern=pattern).notes == (
        "not checked: which layers of model.layers. have experts, as a pattern does not say it; found 0-1, 3",
        "not checked: how many experts a layer of model.layers. has, as config.json does not say it; found 4 in each",
    )
    (source / "config.json").write_text(json.dumps(config_for(family, replace(TINY, layers=(0,))) | {"num_experts": 4}))
    assert len(checkpoints.inspect(source, pattern=pattern).notes) == 1


@pytest.mark.parametrize("model_type", ["mixtral", "minimax", "minimax_m2", "phimoe"])
@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_the_names_in_memory_of_the_mixtral_family(tmp_path: Path, model_type: str, layout: str) -> None:
    """state_dict() of transformers 5 has mlp.experts, its files block_sparse_moe.experts."""
    family = FAMILY["mixtral"]
    single = expert_state(family, TINY)
    in_memory = {
        name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in as_layout(family, single, layout).items()
    }
    source = save(tmp_path / "source", in_memory, config_for(family, TINY, model_type=model_type))
    checkpoints.split(source, tmp_path / "single", verify=True)
    assert_same(load(tmp_path / "single"), single)
    other = "fused" if layout == "stacked" else "stacked"
    checkpoints.convert(source, tmp_path / "other", other, verify=True)
    checkpoints.convert(tmp_path / "other", tmp_path / "back", layout, verify=True)
    assert_same(load(tmp_path / "back"), in_memory)


def test_experts_under_both_names_are_refused(tmp_path: Path) -> None:
    family = FAMILY["mixtral"]
    state = as_layout(family, expert_state(family, TINY), "fused")
    state = {name.replace("1.block_sparse_moe", "1.mlp"): tensor for name, tensor in state.items()}
    source = save(tmp_path / "source", state, config_for(family, TINY))
    with pytest.raises(CheckpointError, match=r"under one module, found block_sparse_moe\.experts.*; mlp\.experts"):
        checkpoints.inspect(source)


@pytest.mark.parametrize(
    ("before", "after"),
    [("experts.3.", "experts.03."), ("experts.3.", "experts.\u0663."), ("layers.1.mlp", "layers.01.mlp")],
)
def test_numbers_that_would_not_come_back_as_they_are(tmp_path: Path, before: str, after: str) -> None:
    family = FAMILY["qwen3_moe"]
    state = {name.replace(before, after): tensor for name, tensor in expert_state(family, TINY).items()}
    source = save(tmp_path / "source", state, config_for(family, TINY))
    with pytest.raises(CheckpointError, match=f"numbered 0, 1, 2 ..., found model.layers.*{after}"):
        checkpoints.inspect(source)
