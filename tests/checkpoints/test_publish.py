"""Nothing is lost: the destination is whole or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fxoffload import checkpoints
from fxoffload.checkpoints import DestinationError, DiskFullError
from fxoffload.checkpoints import move_bytes as move_bytes_module
from fxoffload.checkpoints import publish as publish_module
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

ROOT = Path(__file__).parents[2]
QWEN = FAMILY["qwen3_moe"]
PARTIAL, OLD = ".target.fxoffload-partial", ".target.fxoffload-old"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_whole(target: Path) -> None:
    expected = as_layout(QWEN, expert_state(QWEN, TINY), "stacked") | other_state(TINY)
    assert_same(load(target), expected)
    assert not list(target.rglob(".fxoffload*"))


def test_an_existing_destination_is_refused(source: Path, target: Path) -> None:
    target.mkdir()
    with pytest.raises(DestinationError, match=r"exists; .*--overwrite"):
        checkpoints.merge(source, target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("where", ["source", "source/inside", ".", "source/../source"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_source_and_what_is_in_or_around_it_is_refused(source: Path, where: str, overwrite: bool) -> None:
    before = listing(source)
    with pytest.raises(DestinationError, match=r"is (the source|inside the source, or around it)"):
        checkpoints.merge(source, source.parent / where, overwrite=overwrite)
    assert listing(source) == before


def test_the_source_by_another_name_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(DestinationError, match="symbolic link"):
        checkpoints.merge(source, tmp_path / "link", overwrite=True)
    with pytest.raises(DestinationError, match="is the source"):
        checkpoints.merge(tmp_path / "link", source, overwrite=True)


def test_a_missing_parent_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="make it first"):
        checkpoints.merge(source, tmp_path / "no" / "target")


def test_overwrite_replaces_a_checkpoint(source: Path, target: Path) -> None:
    make(target, "fused")
    (target / "stale.txt").write_text("of the old one")
    checkpoints.merge(source, target, overwrite=True)
    is_whole(target)
    assert not (target / "stale.txt").exists()
    assert names(target.parent) == ["source", "target"]


def test_overwrite_spares_a_folder_that_is_no_checkpoint(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "thesis.tex").write_text("")
    with pytest.raises(DestinationError, match="it is no checkpoint, and is not replaced"):
        checkpoints.merge(source, target, overwrite=True)
    (target / "thesis.tex").unlink()
    checkpoints.merge(source, target, overwrite=True)  # an empty folder holds nothing to lose
    is_whole(target)


def test_overwrite_spares_what_the_source_links_to(source: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in source.iterdir():
        (links / path.name).symlink_to(path)
    with pytest.raises(DestinationError, match="holds the files that the source links to"):
        checkpoints.merge(links, source, overwrite=True)


def test_the_old_checkpoint_comes_back_when_the_rename_fails(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(make(target, "fused"))
    rename = os.rename

    def failing(old: Path, new: Path) -> None:
        if old.name == PARTIAL:
            raise OSError(errno.EIO, "no rename today")
        rename(old, new)

    monkeypatch.setattr(publish_module.os, "rename", failing)
    with pytest.raises(OSError, match="no rename today"):
        checkpoints.merge(source, target, overwrite=True)
    assert listing(target) == before
    assert names(target.parent) == ["source", "target"]


def test_a_replacement_that_was_killed_between_its_renames_is_undone(source: Path, target: Path) -> None:
    before = listing(make(target, "fused"))
    target.rename(target.with_name(OLD))
    with pytest.raises(DestinationError, match="exists"):
        checkpoints.merge(source, target)
    assert listing(target) == before
    assert names(target.parent) == ["source", "target"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_leaves_nothing(source: Path, target: Path, kind: type[BaseException]) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        assert (target.parent / PARTIAL).is_dir()
        raise kind

    with pytest.raises(kind):
        checkpoints.merge(source, target, progress=interrupt)
    assert names(target.parent) == ["source"]


def test_a_failure_of_a_worker_is_raised(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object) -> None:
        raise ZeroDivisionError("in a worker")

    monkeypatch.setattr(move_bytes_module.ByteMover, "copy", broken)
    with pytest.raises(ZeroDivisionError, match="in a worker"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


@pytest.mark.parametrize("place", ["write", "reserve", "side file"])
def test_a_disk_that_fills_up(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module, name = {
        "write": (os, "copy_file_range"),
        "reserve": (os, "posix_fallocate"),
        "side file": (shutil, "copyfile"),
    }[place]
    monkeypatch.setattr(module, name, full)
    with pytest.raises(DiskFullError, match="was full before all were written; nothing was left behind"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


def test_room_is_looked_for_before_anything_is_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(publish_module, "building", None)
    with pytest.raises(DiskFullError, match=r"expected room for 16\.0 MiB, found 1 B free"):
        checkpoints.merge(source, target)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs of 1 MiB")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("reserve", [True, False])
def test_a_disk_that_is_really_full(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserve: bool
) -> None:
    shape = replace(TINY, hidden=128, intermediate=256)
    source = make(tmp_path / "source", shape=shape)
    with pytest.raises(DiskFullError, match="expected room for"):
        checkpoints.merge(source, small_disk / "target")
    monkeypatch.setattr(publish_module, "SLACK_BYTES", -(1 << 30))
    if not reserve:
        monkeypatch.setattr(os, "posix_fallocate", lambda file, at, size: None)
    with pytest.raises(DiskFullError, match="was full before all were written"):
        checkpoints.merge(source, small_disk / "target")
    assert names(small_disk) == []


SLOW = """
import sys, time
from fxoffload import checkpoints
from fxoffload.checkpoints import stream
from fxoffload.checkpoints.move_bytes import ByteMover
copy = ByteMover.copy
def slow(self, *args):
    copy(self, *args)
    print("copied", flush=True)
    time.sleep(0.05)
ByteMover.copy = slow
checkpoints.merge(sys.argv[1], sys.argv[2], workers=1)
"""


def stopped_by(number: signal.Signals, source: Path, target: Path, command: list[str]) -> int:
    """Start a conversion that takes a second, and send a signal after its first copy."""
    process = subprocess.Popen(
        [*command, str(source), str(target)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "copied\n"
    process.send_signal(number)
    return process.wait(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(source: Path, target: Path, number: signal.Signals) -> None:
    code = SLOW.replace(
        "checkpoints.merge", "from fxoffload.cli import app\nsys.argv[1:1] = ['moe', 'merge']\napp.main() #"
    )
    assert stopped_by(number, source, target, [sys.executable, "-c", code]) != 0
    assert names(target.parent) == ["source"]


def test_a_killed_run_leaves_a_folder_that_the_next_run_takes_over(source: Path, target: Path) -> None:
    assert stopped_by(signal.SIGKILL, source, target, [sys.executable, "-c", SLOW]) == -signal.SIGKILL
    assert names(target.parent) == [PARTIAL, "source"]
    assert len(names(target.parent / PARTIAL)) > 1
    checkpoints.merge(source, target)
    is_whole(target)
    assert names(target.parent) == ["source", "target"]


def test_a_folder_that_is_being_written_is_left_alone(source: Path, target: Path) -> None:
    raised = []

    def second(stage: str, done: int, total: int) -> None:
        before = names(target.parent / PARTIAL)
        with pytest.raises(DestinationError, match="is being written by another process"):
            checkpoints.merge(source, target)
        assert names(target.parent / PARTIAL) == before
        raised.append(True)

    checkpoints.merge(source, target, progress=second)
    assert raised
    is_whole(target)


def test_a_destination_that_appears_meanwhile_is_not_replaced(source: Path, target: Path) -> None:
    def appear(stage: str, done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "mine").touch()

    with pytest.raises(DestinationError, match="appeared while"):
        checkpoints.merge(source, target, progress=appear)
    assert names(target.parent) == ["source", "target"]
    assert names(target) == ["mine"]


def test_the_output_is_synced_before_it_appears(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    checkpoints.merge(source, target, shard_size=300)
    partial = target.parent / PARTIAL
    files = {str(partial / name) for name in listing(target)} | {str(partial), str(partial / "assets")}
    assert files == set(synced[:-1])
    assert synced[-1] == str(target.parent)
    synced.clear()
    checkpoints.merge(source, target.with_name("other"), fsync=False)
    assert synced == [str(target.parent)]
