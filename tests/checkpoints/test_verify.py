"""The verification knows nothing of the plan: it finds what a wrong plan or a wrong disk does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fxoffload import checkpoints
from fxoffload.checkpoints import MismatchError, plan_conversion
from fxoffload.checkpoints.header import read_header
from fxoffload.checkpoints.slices import Slice
from tests.checkpoints.making import FP8, TINY, make

BLOCK = "model.layers.1.mlp.experts"


def shard_of(folder: Path, name: str) -> Path:
    index = folder / "model.safetensors.index.json"
    return folder / (json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors")


def change(folder: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = shard_of(folder, name)
    state = load_file(path)
    state[name] = how(state[name]).contiguous()
    save_file(state, path, metadata={"format": "pt"})


def flip(folder: Path, name: str, bit: int) -> None:
    """One bit of a tensor, counted from its start or (negative) its end."""
    path = shard_of(folder, name)
    tensor = next(t for t in read_header(path)[0] if t.name == name)
    data = bytearray(path.read_bytes())
    data[tensor.offset + bit // 8 % tensor.num_bytes] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_vl_moe"])
def test_the_fingerprint_is_the_same_in_every_layout(tmp_path: Path, family: str) -> None:
    shape = FP8 if family == "deepseek_v3" else replace(TINY, bias=family == "gpt_oss")
    folders = [make(tmp_path / layout, layout, family, shape) for layout in ("experts", "stacked", "fused")]
    proofs = {checkpoints.verify(first, second).fingerprint for first in folders for second in folders}
    assert len(proofs) == 1
    other = make(tmp_path / "other", "experts", family, replace(shape, experts=5))
    assert checkpoints.verify(other, other).fingerprint not in proofs


@pytest.mark.parametrize("layout", ["experts", "stacked", "fused"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("bit", [0, -1])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, layout: str, family: str, bit: int) -> None:
    source = make(tmp_path / "source", "experts" if layout != "experts" else "stacked", family)
    target = tmp_path / "target"
    checkpoints.convert(source, target, layout)
    name = {"experts": "3.down_proj.weight", "stacked": "down_proj", "fused": "gate_up_proj"}[layout]
    flip(target, f"{BLOCK}.{name}", bit)
    expert, projection = {"experts": (3, "down"), "stacked": (3 if bit else 0, "down"), "fused": (3 if bit else 0, "")}[
        layout
    ]
    projection = projection or ("up" if bit else "gate")
    with pytest.raises(
        MismatchError, match=rf"1 of \d+ tensors are different: {BLOCK}.{expert}.{projection}_proj.weight"
    ):
        checkpoints.verify(source, target)


def test_a_flipped_bit_elsewhere(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    checkpoints.merge(source, tmp_path / "target")
    flip(tmp_path / "target", "model.layers.0.mlp.gate.e_score_correction_bias", 3)
    with pytest.raises(MismatchError, match=r"different: model\.layers\.0\.mlp\.gate\.e_score_correction_bias"):
        checkpoints.verify(source, tmp_path / "target")


def swap_experts(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)[[0, 2, 1, 3]].view(tensor.dtype)


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([half.view(torch.int16) for half in tensor.chunk(2, 1)[::-1]], 1).view(tensor.dtype)


@pytest.mark.parametrize(("how", "count"), [(swap_experts, 4), (swap_halves, 8)])
def test_swapped_experts_and_swapped_projections(tmp_path: Path, how: Callable, count: int) -> None:
    source = make(tmp_path / "source")
    checkpoints.convert(source, tmp_path / "target", "fused")
    change(tmp_path / "target", f"{BLOCK}.gate_up_proj", how)
    with pytest.raises(MismatchError, match=rf"{count} of \d+ tensors are different: {BLOCK}"):
        checkpoints.verify(source, tmp_path / "target")


def test_other_dtypes_and_shapes_of_the_same_bytes(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    checkpoints.merge(source, tmp_path / "target")
    change(tmp_path / "target", "model.layers.0.self_attn.q_proj.weight", lambda t: t.view(torch.float16))
    with pytest.raises(MismatchError, match=r"expected BF16 \[6, 6\] sha256:\w+, found F16 \[6, 6\]"):
        checkpoints.verify(source, tmp_path / "target")


@pytest.mark.parametrize("missing", [True, False])
def test_tensors_that_only_one_has(tmp_path: Path, missing: bool) -> None:
    source, target = make(tmp_path / "a", "experts"), make(tmp_path / "b", "stacked")
    path = shard_of(target if missing else source, "model.counter")
    state = load_file(path)
    del state["model.counter"]
    save_file(state, path, metadata={"format": "pt"})
    index = path.parent / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.counter"]
    index.write_text(json.dumps(content))
    with pytest.raises(MismatchError, match=f"are {'missing' if missing else 'not in the source'}: model.counter"):
        checkpoints.verify(source, target)


@pytest.mark.parametrize(
    ("how", "words"), [(Path.unlink, "missing from"), (lambda p: p.write_text("x"), "different in")]
)
def test_other_files_are_compared(tmp_path: Path, how: Callable[[Path], object], words: str) -> None:
    source, target = make(tmp_path / "a", "experts"), make(tmp_path / "b", "stacked")
    how(target / "assets" / "LICENSE")
    with pytest.raises(MismatchError, match=f"{words} .*: assets/LICENSE"):
        checkpoints.verify(source, target)


def test_a_file_that_only_the_output_has(tmp_path: Path) -> None:
    source, target = make(tmp_path / "a", "experts"), make(tmp_path / "b", "stacked")
    (target / "assets" / "own.py").touch()
    with pytest.raises(MismatchError, match=r"found others in .*: assets/own\.py"):
        checkpoints.verify(source, target)


def up_first(shape: tuple[int, ...], projection: str, form: str | None) -> Slice:
    return right_slice(shape, {"gate": "up", "up": "gate"}.get(projection, projection), form)  # type: ignore[arg-type]


def not_turned(shape: tuple[int, ...], projection: str, form: str | None) -> Slice:
    found = right_slice(shape, projection, form)  # type: ignore[arg-type]
    turned = projection == "down" and form == "interleaved"
    return Slice(found.rows, found.columns, 0, found.columns, 1) if turned else found


right_slice = plan_conversion.slice_of


@pytest.mark.parametrize(("family", "wrong"), [("qwen3_moe", up_first), ("gpt_oss", up_first), ("gpt_oss", not_turned)])
def test_a_wrong_mapping_never_becomes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, wrong: Callable[..., Slice]
) -> None:
    source = make(tmp_path / "source", "experts", family)
    monkeypatch.setattr(plan_conversion, "slice_of", lambda *args: (wrong if args[2] else right_slice)(*args))
    with pytest.raises(MismatchError, match="tensors are different"):
        checkpoints.convert(source, tmp_path / "target", "fused", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.undo()
    checkpoints.convert(source, tmp_path / "target", "fused", verify=True)


def test_progress_counts_the_bytes_of_both(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    seen: list[tuple[str, int, int]] = []
    done = checkpoints.merge(source, tmp_path / "target", verify=True, progress=lambda *args: seen.append(args))
    assert seen[-1] == ("verify", 2 * done.num_bytes, 2 * done.num_bytes)
    converting = [entry for entry in seen if entry[0] == "convert"]
    assert converting[-1][1:] == (done.num_bytes, done.num_bytes)
    for stage in ("convert", "verify"):
        counts = [count for name, count, _ in seen if name == stage]
        assert counts == sorted(counts)
