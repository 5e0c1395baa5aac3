"""Every layout to every other, against torch's stack, cat and transpose, bit for bit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxoffload import checkpoints
from fxoffload.checkpoints.header import DTYPE_BITS
from fxoffload.checkpoints.index import open_checkpoint
from tests.checkpoints.making import (
    FAMILY,
    FP8,
    TINY,
    Shape,
    as_layout,
    assert_same,
    config_for,
    expert_state,
    listing,
    load,
    make,
    other_state,
    save,
)
from tests.marks import examples

LAYOUTS = ("experts", "stacked", "fused")
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.uint8)


@pytest.mark.parametrize("name", sorted(FAMILY))
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_family_from_every_layout_to_every_other(tmp_path: Path, name: str, before: str, after: str) -> None:
    family = FAMILY[name]
    shape = replace(TINY, bias=name == "gpt_oss")
    state = expert_state(family, shape)
    for form in family.forms if before == "fused" else (None,):
        source, target = tmp_path / f"source-{form}", tmp_path / f"target-{form}"
        others = other_state(shape)
        save(source, as_layout(family, state, before, form) | others, config_for(family, shape))
        done = checkpoints.convert(source, target, after, shard_size=200, workers=2)
        assert (done.source_layout, done.layout, done.family) == (before, after, name)
        assert done.num_shards > 3
        assert_same(load(target), as_layout(family, state, after, family.forms[0]) | others)


@pytest.mark.parametrize("form", FAMILY["qwen3_vl_moe"].forms)
def test_each_form_of_a_family_that_has_two(tmp_path: Path, form: str) -> None:
    family = FAMILY["qwen3_vl_moe"]
    source = make(tmp_path / "source", "experts", family.name)
    checkpoints.convert(source, tmp_path / "fused", "fused", form=form)
    assert_same(
        load(tmp_path / "fused"), as_layout(family, expert_state(family, TINY), "fused", form) | other_state(TINY)
    )
    assert checkpoints.inspect(tmp_path / "fused").form == form
    other = next(f for f in family.forms if f != form)
    checkpoints.convert(tmp_path / "fused", tmp_path / "other", "fused", form=other)
    checkpoints.convert(tmp_path / "other", tmp_path / "back", "fused", form=form, verify=True)
    assert_same(load(tmp_path / "back"), load(tmp_path / "fused"))


@pytest.mark.parametrize("intermediate", [4, 5, 7, 8])
def test_fp8_scales_move_with_their_weights(tmp_path: Path, intermediate: int) -> None:
    """Blocks of 4: with 5 and 7 rows the last block of gate is a part of one, and up begins a block of its own."""
    shape = replace(FP8, intermediate=intermediate)
    family = FAMILY["deepseek_v3"]
    source = make(tmp_path / "source", "experts", family.name, shape)
    checkpoints.convert(source, tmp_path / "fused", "fused")
    fused = load(tmp_path / "fused")
    rows = -(-intermediate // 4)
    assert fused["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 2 * rows, 3)
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.float8_e4m3fn
    checkpoints.convert(tmp_path / "fused", tmp_path / "stacked", "stacked")
    assert load(tmp_path / "stacked")["model.layers.1.mlp.experts.gate_proj_scale_inv"].shape == (4, rows, 3)
    checkpoints.convert(tmp_path / "stacked", tmp_path / "back", "experts")
    assert_same(load(tmp_path / "back"), load(source))


@pytest.mark.parametrize("scale", [(), (1,), (5, 1)])
def test_other_scales_are_stacked(tmp_path: Path, scale: tuple[int, ...]) -> None:
    """One number per tensor, as compressed-tensors has them, or one per row."""
    state = expert_state(FAMILY["qwen3_moe"], TINY)
    for number, name in enumerate(list(state)):
        rows = state[name].shape[0]
        size = (rows, 1) if len(scale) == 2 else scale
        state[name.replace(".weight", ".weight_scale")] = torch.full(size, number, dtype=torch.float32)
    source = save(tmp_path / "source", state, config_for(FAMILY["qwen3_moe"], TINY))
    checkpoints.convert(source, tmp_path / "stacked", "stacked", verify=True)
    assert load(tmp_path / "stacked")["model.layers.0.mlp.experts.up_proj_scale"].shape == (4, *scale)
    checkpoints.convert(tmp_path / "stacked", tmp_path / "back", "experts")
    assert_same(load(tmp_path / "back"), load(source))
    if scale:
        checkpoints.convert(source, tmp_path / "fused", "fused", verify=True)
        checkpoints.convert(tmp_path / "fused", tmp_path / "again", "experts")
        assert_same(load(tmp_path / "again"), load(source))
    else:
        with pytest.raises(NotImplementedError, match="convert to stacked instead"):
            checkpoints.convert(source, tmp_path / "fused", "fused")


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(FAMILY)),
    pair=st.sampled_from(PAIRS),
    experts=st.integers(1, 12),
    hidden=st.integers(1, 70),
    intermediate=st.integers(1, 70),
    layers=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    block=st.sampled_from([0, 3, 64]),
    shard_size=st.integers(1, 60_000),
    workers=st.integers(1, 3),
    num_shards=st.integers(1, 4),
)
def test_round_trip(
    name: str,
    pair: tuple[str, str],
    experts: int,
    hidden: int,
    intermediate: int,
    layers: int,
    dtype: torch.dtype,
    bias: bool,
    block: int,
    shard_size: int,
    workers: int,
    num_shards: int,
) -> None:
    family, (before, after) = FAMILY[name], pair
    shape = Shape(experts, hidden, intermediate, tuple(range(layers)), dtype, bias, block)
    state = expert_state(family, shape)
    form = family.forms[0]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        original = as_layout(family, state, before, form) | other_state(shape)
        save(folder / "a", original, config_for(family, shape), num_shards)
        checkpoints.convert(folder / "a", folder / "b", after, shard_size=shard_size, workers=workers, fsync=False)
        assert_same(load(folder / "b"), as_layout(family, state, after, form) | other_state(shape))
        done = checkpoints.convert(folder / "b", folder / "c", before, workers=workers, fsync=False, verify=True)
        assert_same(load(folder / "c"), original)
        proof = checkpoints.verify(folder / "a", folder / "b")
        assert done.verification is not None
        assert proof.fingerprint == done.verification.fingerprint


def test_other_files_are_copied_byte_for_byte_and_the_config_is_untouched(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    (source / "tool.sh").write_text("true\n")
    (source / "tool.sh").chmod(0o755)
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    (source / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    checkpoints.merge(source, tmp_path / "target")

    def side(folder: Path) -> dict[str, bytes]:
        files = listing(folder).items()
        return {
            n: c
            for n, c in files
            if not n.startswith((".git", "model-")) and n not in ("model.safetensors.index.json",)
        }

    copied = side(tmp_path / "target")
    copied.pop("model.safetensors")
    assert copied == side(source)
    assert {"config.json", "tokenizer.json", "assets/LICENSE", "consolidated.safetensors"} <= copied.keys()
    assert (tmp_path / "target" / "tool.sh").stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "target" / ".git").exists()


def test_links_are_followed_and_copied_as_files(tmp_path: Path) -> None:
    """Hugging Face's cache holds links to blobs."""
    blobs = make(tmp_path / "blobs")
    source = tmp_path / "snapshot"
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    (source / "twice").symlink_to(blobs / "assets")
    checkpoints.merge(source, tmp_path / "target", verify=True)
    assert (tmp_path / "target" / "twice" / "LICENSE").exists()
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    assert (tmp_path / "target" / "assets" / "LICENSE").read_bytes() == (blobs / "assets" / "LICENSE").read_bytes()
    assert_same(load(tmp_path / "target"), as_layout(FAMILY["qwen3_moe"], load(source), "stacked"))


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    family = FAMILY["mixtral"]
    state = expert_state(family, TINY)
    save(tmp_path / "source", state, config_for(family, TINY), num_shards=1)
    checkpoints.convert(tmp_path / "source", tmp_path / "target", "fused")
    assert (tmp_path / "target" / "model.safetensors").exists()
    assert not (tmp_path / "target" / "model.safetensors.index.json").exists()
    assert_same(load(tmp_path / "target"), as_layout(family, state, "fused"))


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    source = make(tmp_path / "source", shape=replace(TINY, layers=tuple(range(6))))
    checkpoints.merge(source, tmp_path / "target", shard_size="0.5kB")
    state = load(tmp_path / "target")
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    held: dict[str, list[int]] = {}
    for name, shard in index["weight_map"].items():
        held.setdefault(shard, []).append(state[name].nbytes)
    assert len(held) > 5
    assert all(sum(sizes) <= 500 or len(sizes) == 1 for sizes in held.values())
    assert sorted(held) == [f"model-{n:05d}-of-{len(held):05d}.safetensors" for n in range(1, len(held) + 1)]


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    """Odd numbers of fp8 between float32 scales, float16 and an int64: loaders that map files want them aligned."""
    family = FAMILY["deepseek_v3"]
    source = make(tmp_path / "source", "experts", family.name, replace(FP8, intermediate=5, experts=3))
    checkpoints.convert(source, tmp_path / "fused", "fused", shard_size=1500)
    checkpoints.split(tmp_path / "fused", tmp_path / "back")
    tensors = [t for name in ("fused", "back") for t in open_checkpoint(tmp_path / name).tensors.values()]
    assert [t.name for t in tensors if t.num_bytes and t.offset % (DTYPE_BITS[t.dtype] // 8)] == []
