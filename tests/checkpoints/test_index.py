"""Files that contradict each other are errors before anything is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, CheckpointError
from fxoffload.checkpoints.header import build_header, read_header
from tests.checkpoints.making import make

FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def rewrite_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def rewrite_header(path: Path, change: Callable[[dict], object]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def shift(header: dict) -> None:
    """Every tensor one byte further on, past the end of the file."""
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 1 for offset in entry["data_offsets"]]


def grow(header: dict) -> None:
    next(entry for entry in header.values() if 0 not in entry.get("shape", [0]))["shape"].append(2)


def overlap(header: dict) -> None:
    """The last tensor at the place of another one of its size."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: entry["data_offsets"])
    entries[-1]["data_offsets"] = next(
        e["data_offsets"]
        for e in entries[:-1]
        if e["data_offsets"][1] - e["data_offsets"][0]
        == entries[-1]["data_offsets"][1] - entries[-1]["data_offsets"][0]
    )


def truncate(path: Path, by: int = 1) -> None:
    os.truncate(path, path.stat().st_size - by)


@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (lambda f: (f / FIRST).unlink(), f"expected 3 shards, 1 missing: {FIRST}"),
        (lambda f: truncate(f / FIRST), "the file is truncated"),
        (lambda f: os.truncate(f / FIRST, 5), "truncated or no safetensors file"),
        (lambda f: os.truncate(f / FIRST, 0), "truncated or no safetensors file"),
        (lambda f: os.truncate(f / FIRST, 100), "truncated or no safetensors file"),
        (lambda f: (f / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "no safetensors file"),
        (lambda f: (f / FIRST).open("ab").write(b"x") and None, "longer than its header says"),
        (lambda f: rewrite_header(f / FIRST, shift), "the header lies"),
        (lambda f: rewrite_header(f / FIRST, grow), "bytes, found"),
        (lambda f: rewrite_header(f / FIRST, overlap), "the header lies"),
        (lambda f: rewrite_header(f / FIRST, lambda h: h.update(bad=[1])), "header cannot be read"),
        (lambda f: rewrite_index(f, lambda i: i["weight_map"].popitem()), "in it but not said to be"),
        (
            lambda f: rewrite_index(f, lambda i: i["weight_map"].update(ghost=FIRST)),
            "said to be in it but not there: ghost",
        ),
        (
            lambda f: rewrite_index(
                f, lambda i: i["weight_map"].update({"model.empty": "model-00002-of-00003.safetensors"})
            ),
            "the index lies",
        ),
        (lambda f: rewrite_index(f, lambda i: i["weight_map"].update(x="../model.safetensors")), "in the same folder"),
        (lambda f: rewrite_index(f, lambda i: i.pop("weight_map")), "expected a weight_map"),
        (lambda f: (f / INDEX).write_text("{"), "expected JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object, found list"),
        (lambda f: (f / "model-00009-of-00009.safetensors").write_bytes(b"x"), "name every shard, found others"),
        (lambda f: (f / INDEX).unlink(), "3 files without an index"),
        (lambda f: (f / "assets" / "up").symlink_to(f), "a link to a folder around it"),
        (lambda f: (f / "gone.json").symlink_to("nowhere"), "dangling link"),
    ],
)
def test_broken_files(tmp_path: Path, breaking: Callable[[Path], object], words: str) -> None:
    source = make(tmp_path / "source")
    breaking(source)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checkpoints.merge(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", [FIRST, INDEX, "config.json", "tokenizer.json", "assets/LICENSE"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, name: str) -> None:
    source = make(tmp_path / "source")

    def touch(stage: str, done: int, total: int) -> None:
        os.utime(source / name, ns=(0, 0))

    with pytest.raises(BrokenCheckpointError, match=f"{Path(name).name} changed while being read"):
        checkpoints.merge(source, tmp_path / "target", progress=touch)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["modeling_custom.py", "assets/vocabulary.txt"])
def test_a_file_that_comes_to_be_while_the_source_is_read(tmp_path: Path, name: str) -> None:
    """It would be missing in the target, unnoticed."""
    source = make(tmp_path / "source")

    def add(stage: str, done: int, total: int) -> None:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("")

    with pytest.raises(BrokenCheckpointError, match=f"{name} changed while being read"):
        checkpoints.merge(source, tmp_path / "target", progress=add)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_headers_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6).reshape(2, 3), "a": torch.ones(()), "c": torch.zeros(0, 4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt", "x": "y"})
    found, metadata = read_header(tmp_path / "theirs")
    assert metadata == {"format": "pt", "x": "y"}
    data = (tmp_path / "theirs").read_bytes()
    content = b"".join(data[t.offset : t.offset + t.num_bytes] for t in found)
    header = build_header([(t.name, t.dtype, t.shape) for t in found], metadata)
    assert len(header) % 8 == 0
    (tmp_path / "ours").write_bytes(header + content)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
