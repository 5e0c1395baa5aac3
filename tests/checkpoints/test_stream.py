"""Bytes move by the kernel or through a buffer, by several workers at once, in bounded memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fxoffload import checkpoints
from fxoffload.checkpoints import move_bytes, plan_conversion, stream
from fxoffload.checkpoints.errors import BrokenCheckpointError
from fxoffload.checkpoints.move_bytes import ByteMover
from tests.checkpoints.making import (
    FAMILY,
    TINY,
    as_layout,
    assert_same,
    expert_state,
    listing,
    load,
    make,
    other_state,
)
from tests.marks import slow

ROOT = Path(__file__).parents[2]
QWEN = FAMILY["qwen3_moe"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's copies, counted."""
    done: list[int] = []
    copy = os.copy_file_range

    def counted(*args: int) -> int:
        done.append(copy(*args))
        return done[-1]

    monkeypatch.setattr(os, "copy_file_range", counted)
    return done


def merged_as_expected(source: Path, target: Path, **options: object) -> None:
    checkpoints.merge(source, target, **options)  # type: ignore[arg-type]
    assert_same(load(target), as_layout(QWEN, expert_state(QWEN, TINY), "stacked") | other_state(TINY))


def test_the_kernel_copies_every_byte(tmp_path: Path, copies: list[int]) -> None:
    source = make(tmp_path / "source")
    merged_as_expected(source, tmp_path / "target")
    beside = sum(len(content) for name, content in listing(source).items() if not name.startswith("model."))
    beside -= sum(len(content) for name, content in listing(source).items() if name.startswith("model-"))
    assert sum(copies) == sum(tensor.nbytes for tensor in load(source).values()) + beside


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_kernel_cannot_a_buffer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(move_bytes, "BUFFER_BYTES", 7)
    merged_as_expected(make(tmp_path / "source"), tmp_path / "target")


def test_copies_that_stop_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, turn = os.copy_file_range, iter(range(10**9))

    def short(source: int, target: int, count: int, *offsets: int) -> int:
        return 0 if next(turn) % 3 == 2 else copy(source, target, min(count, 5), *offsets)

    monkeypatch.setattr(os, "copy_file_range", short)
    merged_as_expected(make(tmp_path / "source"), tmp_path / "target")


def test_reads_and_writes_that_stop_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:11]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: pwrite(file, view[:5], offset))
    source = make(tmp_path / "source", "fused", "gpt_oss")
    checkpoints.split(source, tmp_path / "target")
    family = FAMILY["gpt_oss"]
    assert_same(load(tmp_path / "target"), expert_state(family, TINY) | other_state(TINY))


def test_long_copies_are_cut_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream, move_bytes):
        monkeypatch.setattr(module, "CHUNK_BYTES", 13)
    merged_as_expected(make(tmp_path / "source"), tmp_path / "target", workers=3)


def test_a_filesystem_that_reserves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    merged_as_expected(make(tmp_path / "source"), tmp_path / "target")


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345")
    (tmp_path / "out").touch()
    source, target = (os.open(tmp_path / name, os.O_RDWR) for name in ("short", "out"))
    with pytest.raises(BrokenCheckpointError, match="short, found its end"):
        ByteMover(lambda n: None, lambda: False).copy(source, 0, target, 0, 9)
    os.close(source)
    os.close(target)


def test_one_worker_reads_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier that only opens when one is inside a read and one inside a write at the same time."""
    preadv, pwrite = os.preadv, os.pwrite
    both = threading.Barrier(2, timeout=20)
    met = threading.Event()

    def meet(name: str, call: Callable) -> Callable:
        def waiting(*args: object) -> object:
            if not met.is_set() and threading.current_thread().name.startswith("fxoffload-convert"):
                both.wait()
                met.set()
            return call(*args)

        return waiting

    def first_reader(file: int, views: list, offset: int) -> int:
        # The second worker reads freely, so that it comes to its write.
        if threading.current_thread().name.endswith("_0"):
            return meet("read", preadv)(file, views, offset)
        return preadv(file, views, offset)

    def second_writer(file: int, view: memoryview, offset: int) -> int:
        if threading.current_thread().name.endswith("_1") and offset:
            return meet("write", pwrite)(file, view, offset)
        return pwrite(file, view, offset)

    def refuse(*args: int) -> int:
        raise OSError(errno.ENOSYS, "")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(os, "preadv", first_reader)
    monkeypatch.setattr(os, "pwrite", second_writer)
    source = make(tmp_path / "source")
    merged_as_expected(source, tmp_path / "target", workers=2)
    assert met.is_set()


def test_workers_are_few_where_experts_are_large() -> None:
    slices = move_bytes.Slice(1, 1, 0, 1, 1)
    piece = plan_conversion.ConversionPiece(Path("x"), 0, 200 << 20, slices, slices)
    step = stream.Reorder((piece,), 2, 100 << 20, 0)
    shard = stream.Shard("x", b"", ("x",), (step,), 100 << 20)
    assert stream._num_workers([shard], 8) == 1
    assert stream._num_workers([replace(shard, steps=(replace(step, pieces=(replace(piece, num_bytes=1),)),))], 8) == 5
    assert stream._num_workers([replace(shard, steps=())], 8) == 8


MEASURE = """
import json, resource, sys
import fxoffload.checkpoints as checkpoints
from fxoffload.checkpoints import move_bytes
source, target, layout, kernel, workers = sys.argv[1:]
move_bytes.ByteMover.use_kernel = kernel == "kernel"
# ru_maxrss survives exec: a forked child of a large pytest would begin with its peak.
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
checkpoints.convert(source, target, layout, fsync=False, workers=int(workers), verify=len(target) % 2 == 0)
print(json.dumps([before, peak()]))
"""

# Experts of 384 KiB each, 64 of them: a fused tensor of 48 MiB, three layers of 72 MiB.
WIDE = replace(TINY, experts=64, hidden=384, intermediate=512, layers=(0, 1, 2))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wide")
    found = {"qwen3_moe": make(folder / "qwen3_moe", "experts", "qwen3_moe", WIDE)}
    found["gpt_oss"] = make(folder / "gpt_oss", "fused", "gpt_oss", WIDE)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen3_moe", "kernel"), ("gpt_oss", "buffer"), slow("qwen3_moe", "buffer"), slow("gpt_oss", "kernel")],
)
def test_peak_memory(tmp_path: Path, wide: dict[str, Path], family: str, how: str) -> None:
    """The issue's bound is a fused tensor's inputs and output plus 1 GiB; the test asserts 24 MiB.

    216 MiB are converted. By the algebra of stream.py: 2 workers with a buffer of 4 MiB, or one expert's gate_up (768
    KiB) in and out; to verify, 2 workers with a part of a tensor (768 KiB) and its halves; the plan's 1,200 steps.
    Python and malloc keep the rest.
    """
    layout = "fused" if family == "qwen3_moe" else "experts"
    target = tmp_path / ("v" * (1 + len(str(tmp_path)) % 2))
    command = [sys.executable, "-c", MEASURE, str(wide[family]), str(target), layout, how, "2"]
    assert len(str(target)) % 2 == 0, "with the verification"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert sum(tensor.num_bytes for tensor in checkpoints.inspect(target).towers) == 3 * 64 * 3 * 384 * 512 * 2
    assert after - before < 24 << 20, f"{(after - before) / (1 << 20):.1f} MiB above the {before >> 20} MiB before"


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_elements_change_places_in_tiles(itemsize: int, rows: int) -> None:
    dtype = np.dtype(f"u{itemsize}")
    taken = np.arange(rows * 5, dtype=np.uint64).astype(dtype).reshape(rows, 5)
    for put in (np.zeros((5, rows), dtype).T, np.zeros((5, 2 * rows), dtype)[:, 1::2].T, np.zeros((rows, 5), dtype)):
        move_bytes._scatter(taken, put)
        assert torch.equal(torch.from_numpy(put.copy().view(np.uint8)), torch.from_numpy(taken.view(np.uint8)))
