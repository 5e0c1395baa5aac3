"""Weights outside the index: converted where they are the model's, and named where they are not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, MismatchError
from fxoffload.checkpoints.extras import LARGE_BYTES, PROBED_BYTES
from fxoffload.cli.moe_tables import describe_conversion, describe_verification
from tests.checkpoints.making import (
    FAMILY,
    TINY,
    State,
    as_layout,
    assert_same,
    config_for,
    expert_state,
    listing,
    load,
    other_state,
    random_tensor,
    save,
)
from tests.checkpoints.test_index import rewrite_index

NEXT = FAMILY["qwen3_next"]
MAIN = expert_state(NEXT, TINY)
MTP = expert_state(NEXT, replace(TINY, layers=(0,)), 7, "mtp.layers.")
HEAD = {"mtp.fc.weight": random_tensor((3, 6), torch.bfloat16, torch.Generator().manual_seed(9))}


def model(folder: Path, num_shards: int = 3) -> Path:
    """A checkpoint whose MTP layer is in a file that the index does not name."""
    save(folder, MAIN | other_state(TINY), config_for(NEXT, TINY), num_shards)
    save_file(MTP | HEAD, folder / "mtp.safetensors", metadata={"format": "pt", "of": "mtp"})
    return folder


def load_indexed(folder: Path) -> State:
    """What a loader sees that reads only what the index names."""
    beside = folder / "mtp.safetensors"
    beside.rename(folder.parent / "away")
    try:
        return load(folder)
    finally:
        (folder.parent / "away").rename(beside)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("to", ["stacked", "fused"])
def test_what_belongs_to_the_model_is_converted_in_a_file_of_its_own(tmp_path: Path, to: str, num_shards: int) -> None:
    source = model(tmp_path / "source", num_shards)
    found = checkpoints.inspect(source)
    assert found.extra_files == ("mtp.safetensors",) and "mtp.safetensors" not in found.other_files
    assert [tower.prefix for tower in found.towers] == ["model.layers.", "mtp.layers."]
    done = checkpoints.convert(source, tmp_path / "target", to, verify=True, shard_size=600)
    said = "the index does not name mtp.safetensors, whose 13 tensors are the model's: they are converted"
    assert said in done.notes[0] and said in found.notes[0] and said in describe_conversion(done, "target")
    assert_same(load_indexed(tmp_path / "target"), as_layout(NEXT, MAIN, to) | other_state(TINY))
    assert_same(load_file(tmp_path / "target" / "mtp.safetensors"), as_layout(NEXT, MTP, to) | HEAD)
    with safe_open(tmp_path / "target" / "mtp.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "of": "mtp"}
    checkpoints.split(tmp_path / "target", tmp_path / "back", verify=True)
    assert_same(load_file(tmp_path / "back" / "mtp.safetensors"), load_file(source / "mtp.safetensors"))
    assert checkpoints.verify(source, tmp_path / "back").num_tensors == len(MAIN | MTP | HEAD | other_state(TINY))


def change(name: str, number: int = 0) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        path = folder / name
        data = bytearray(path.read_bytes())
        data[-1 - number] ^= 1
        path.write_bytes(data)

    return flip


def test_a_flipped_bit_in_it_is_found(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    checkpoints.merge(source, tmp_path / "target")
    change("mtp.safetensors")(tmp_path / "target")
    with pytest.raises(MismatchError, match=r"1 of \d+ tensors are different: mtp\."):
        checkpoints.verify(source, tmp_path / "target")


def test_its_metadata_are_compared(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    checkpoints.merge(source, tmp_path / "target")
    save_file(load_file(tmp_path / "target" / "mtp.safetensors"), tmp_path / "target" / "mtp.safetensors")
    with pytest.raises(MismatchError, match=r"the metadata of mtp.safetensors differ in of\. of: expected 'mtp'"):
        checkpoints.verify(source, tmp_path / "target")


def test_what_is_beside_the_index_of_one_is_not_in_the_index_of_the_other(tmp_path: Path) -> None:
    """Loaders would not read it there."""
    source, target = model(tmp_path / "source"), model(tmp_path / "target")
    names = dict.fromkeys(MTP | HEAD, "mtp.safetensors")
    rewrite_index(target, lambda index: index["weight_map"].update(names))
    with pytest.raises(MismatchError, match=r"found mtp.fc.weight, mtp.layers.0.mlp.experts outside it in one"):
        checkpoints.verify(source, target)


def test_experts_half_in_the_index_are_missing_there(tmp_path: Path) -> None:
    """A loader would not find the others; nor do we take them for the model's."""
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    rest = {key: tensor for key, tensor in MAIN.items() if key != name}
    source = save(tmp_path / "source", rest, config_for(NEXT, TINY))
    save_file({name: MAIN[name]}, source / "fix.safetensors")
    with pytest.raises(BrokenCheckpointError, match=r"source.*: model.layers.0.* up weight: expected .* missing 3;"):
        checkpoints.merge(source, tmp_path / "target")


def test_several_files_beside_the_index(tmp_path: Path) -> None:
    """Experts of one layer in two of them: stacked, they are in the first."""
    source = save(tmp_path / "source", MAIN, config_for(NEXT, TINY))
    halves = [{name: tensor for name, tensor in MTP.items() if ("gate" in name) == first} for first in (True, False)]
    for number, half in enumerate(halves):
        save_file(half, source / f"mtp-{number}.safetensors")
    checkpoints.convert(source, tmp_path / "target", "fused", verify=True)
    found = [load_file(path) for path in sorted((tmp_path / "target").glob("mtp*"))]
    assert_same({name: tensor for part in found for name, tensor in part.items()}, as_layout(NEXT, MTP, "fused"))
    checkpoints.split(tmp_path / "target", tmp_path / "back", verify=True)
    save_file(halves[0], source / "mtp-2.safetensors")
    with pytest.raises(
        BrokenCheckpointError, match=r"mtp-2.*expected one file with mtp.* found it in mtp-0.safetensors"
    ):
        checkpoints.inspect(source)


def renamed(state: State, before: str, after: str) -> State:
    return {name.replace(before, after, 1): tensor for name, tensor in state.items()}


SECOND_COPY = r"it holds what the index has too \(model.layers"
OTHER_NAMES = r"its tensors have other names than the model's"
FOREIGN: dict[str, tuple[State | None, str]] = {
    "consolidated.safetensors": (renamed(MAIN, "model.", ""), OTHER_NAMES),
    "consolidated.00.pth": (None, "it is no safetensors file"),
    "pytorch_model.bin": (None, "it is no safetensors file"),
    "mtp.pt": (None, "it is no safetensors file"),
    "model-Q4_K_M.gguf": (None, "it is no safetensors file"),
    "model.fp16.safetensors": (MAIN, SECOND_COPY),
    "ema.safetensors": ({"model.layers.0.mlp.experts.0.up_proj.weight": MAIN[next(iter(MAIN))]}, SECOND_COPY),
    "original/consolidated.safetensors": (MAIN, "it is in a folder of its own"),
    "original/consolidated.00.pth": (None, "it is no safetensors file"),
    "checkpoint-500/mtp.safetensors": (MTP, "it is in a folder of its own"),
    "adapter_model.safetensors": (
        renamed(MAIN, "model.", "base_model.model.model."),
        OTHER_NAMES,
    ),
    "lora.safetensors": (
        {"mtp.layers.0.mlp.experts.0.up_proj.lora_A.weight": MTP["mtp.layers.0.mlp.experts.0.up_proj.weight"]},
        "it holds other than weights, biases and scales of experts",
    ),
    "head.safetensors": (HEAD, "it holds no experts"),
    "torn.safetensors": (None, "it cannot be read: .*torn.safetensors: expected a safetensors header"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_does_not_belong_is_copied_and_named_everywhere(tmp_path: Path, name: str) -> None:
    state, reason = FOREIGN[name]
    source = save(tmp_path / "source", MAIN, config_for(NEXT, TINY))
    path = source / name
    path.parent.mkdir(exist_ok=True)
    if state is None:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    else:
        save_file(state, path)
    found = checkpoints.inspect(source)
    assert list(found.foreign_weights) == [name] and name in found.other_files and found.extra_files == ()
    done = checkpoints.merge(source, tmp_path / "target", verify=True)
    assert (tmp_path / "target" / name).read_bytes() == path.read_bytes()
    for notes in (found.notes, done.notes):
        assert [name in note for note in notes].count(True) == 1
        assert re.search(rf"not converted, but copied as it is: {re.escape(name)}, as {reason}", "\n".join(notes))
    assert done.verification is not None
    again = checkpoints.verify(source, tmp_path / "target")
    assert again.notes == done.verification.notes
    assert f"compared byte by byte, and not as tensors of the model: {name}" in describe_verification(again)
    assert name in describe_conversion(done, "target")
    change(name)(tmp_path / "target")
    with pytest.raises((MismatchError, BrokenCheckpointError), match=re.escape(name)):
        checkpoints.verify(source, tmp_path / "target")


def test_files_of_another_index(tmp_path: Path) -> None:
    """Converted, they would not be what their index says."""
    source = model(tmp_path / "source")
    other = {"metadata": {}, "weight_map": dict.fromkeys(MTP | HEAD, "mtp.safetensors")}
    (source / "mtp.safetensors.index.json").write_text(json.dumps(other))
    assert checkpoints.inspect(source).foreign_weights == {
        "mtp.safetensors": "mtp.safetensors.index.json names it, the index of another checkpoint"
    }
    before = listing(source)
    checkpoints.merge(source, tmp_path / "target", verify=True)
    assert listing(tmp_path / "target")["mtp.safetensors"] == before["mtp.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        *("training_args.bin", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "checkpoint-500/optimizer.pt"),
        *("rng_state_0.pth", "tokenizer.model", "README.md"),
    ],
)
def test_what_is_no_weights_is_not_named(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "source", MAIN, config_for(NEXT, TINY))
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"x")
    assert checkpoints.inspect(source).foreign_weights == {}
    assert checkpoints.inspect(source).notes == ()


def large(path: Path, num_bytes: int = LARGE_BYTES, beginning: bytes = b"PK\x03\x04") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(beginning)
    os.truncate(path, num_bytes)


def test_a_large_binary_file_is_named_whatever_its_name(tmp_path: Path) -> None:
    source = save(tmp_path / "source", MAIN, config_for(NEXT, TINY))
    names = {"rust_model.ot", "a.pte", "a.tflite", "a.engine", "a.mar", "original/a.zip", "a.ckpt.tar"}
    names |= {"a.ckpt-1.data-00000-of-00001", "model.safetensors.bak", "weights"}
    for name in names:
        large(source / name)
    reason = "it is a large binary file of another format, which may hold weights"
    found = checkpoints.inspect(source)
    assert found.foreign_weights == dict.fromkeys(names, reason)
    (note,) = found.notes
    assert note.startswith("not converted, but copied as it is: a.ckpt-1.data") and note.endswith(f", as {reason}")


def test_a_file_that_is_small_or_text_or_a_picture_is_not_named(tmp_path: Path) -> None:
    source = save(tmp_path / "source", MAIN, config_for(NEXT, TINY))
    large(source / "spiece.model", LARGE_BYTES - 1)
    large(source / "tokenizer.json", beginning=b"x" * PROBED_BYTES)
    for name in ("optimizer.pt", "rng_state_0.pth", "assets/demo.mp4", "assets/photo.PNG", "assets/voice.wav"):
        large(source / name)
    assert checkpoints.inspect(source).foreign_weights == {}


def test_a_destination_with_such_a_file_can_be_replaced(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    checkpoints.merge(source, tmp_path / "target")
    checkpoints.convert(source, tmp_path / "target", "fused", overwrite=True, verify=True)
    assert checkpoints.inspect(tmp_path / "target").layout == "fused"


def test_the_metadata_of_two_indexes_are_compared(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    rewrite_index(source, lambda index: index["metadata"].update(by="us", total_parameters=1))
    checkpoints.merge(source, tmp_path / "several", shard_size=300, verify=True)
    rewrite_index(tmp_path / "several", lambda index: index["metadata"].update(by="them"))
    with pytest.raises(MismatchError, match=r"metadata of the index differ in by\. by: expected 'us', found 'them'"):
        checkpoints.verify(source, tmp_path / "several")
    done = checkpoints.merge(source, tmp_path / "single", verify=True)
    assert done.verification is not None
    assert done.verification.notes == ("not compared: the index's metadata, as a single file has no index",)
