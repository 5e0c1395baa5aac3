"""Nothing is lost: the destination is whole or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fxoffload import checkpoints
from fxoffload.checkpoints import DestinationError, DiskFullError
from fxoffload.checkpoints import claim as claim_module
from fxoffload.checkpoints import move_bytes as move_bytes_module
from fxoffload.checkpoints import publish as publish_module
from fxoffload.checkpoints import stream as stream_module
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
LOCK, PARTIAL, OLD, TRASH = (f".target.fxoffload-{what}" for what in ("lock", "partial", "old", "trash"))


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    # A shell starts what runs in the background with SIGINT ignored, and its children inherit that.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


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
    before = make(target, "fused")
    (before / "model.safetensors").write_bytes(b"of a run with one shard")
    checkpoints.merge(source, target, overwrite=True, shard_size=300)
    is_whole(target)
    assert not (target / "model.safetensors").exists()
    assert names(target.parent) == ["source", "target"]


def test_overwrite_spares_a_folder_that_is_no_checkpoint(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "thesis.tex").write_text("")
    with pytest.raises(DestinationError, match="it is no checkpoint, and is not replaced"):
        checkpoints.merge(source, target, overwrite=True)
    (target / "thesis.tex").unlink()
    checkpoints.merge(source, target, overwrite=True)  # an empty folder holds nothing to lose
    is_whole(target)


@pytest.mark.parametrize(
    ("name", "words"),
    [("checkpoint-500/optimizer.pt", "checkpoint-500/optimizer.pt"), ("README.md", "README.md"), (".git/HEAD", ".git")],
)
def test_overwrite_spares_what_the_new_one_would_not_have(source: Path, target: Path, name: str, words: str) -> None:
    make(target, "fused")
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).touch()
    before = listing(target)
    with pytest.raises(DestinationError, match=f"files that the new checkpoint would not have: {words}"):
        checkpoints.merge(source, target, overwrite=True)
    assert listing(target) == before
    (target / name).unlink()

    def add(stage: str, done: int, total: int) -> None:
        (target / name).touch()

    with pytest.raises(DestinationError, match="would not have"):
        checkpoints.merge(source, target, overwrite=True, progress=add)
    assert listing(target) == before


def test_overwrite_spares_a_folder_with_a_config_but_no_weights(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")
    with pytest.raises(DestinationError, match="it is no checkpoint, and is not replaced"):
        checkpoints.merge(source, target, overwrite=True)
    assert names(target) == ["config.json"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors.index.json", "assets", "shard"])
@pytest.mark.parametrize("through", [True, False])
def test_overwrite_spares_every_file_that_the_source_needs(
    source: Path, target: Path, name: str, through: bool
) -> None:
    """The file lies in the destination, or a link in it leads on from there; under a name that would be replaced."""
    name = "model-00001-of-00003.safetensors" if name == "shard" else name
    make(target, "fused")
    shutil.rmtree(target / "assets")
    inside = target / (name if name == "assets" else "model-7-of-7.safetensors")
    if through:
        (source / name).rename(source.parent / "elsewhere")
        inside.symlink_to(source.parent / "elsewhere")
    else:
        (source / name).rename(inside)
    (source / name).symlink_to(os.path.relpath(inside, source))
    before = listing(source), listing(target)
    with pytest.raises(DestinationError, match=f"holds the files that the source links to .{name}"):
        checkpoints.merge(source, target, overwrite=True)
    assert (listing(source), listing(target)) == before


@pytest.mark.parametrize("name", [PARTIAL, OLD, TRASH])
def test_the_source_may_be_what_a_killed_run_left(source: Path, target: Path, name: str) -> None:
    left = source.rename(target.parent / name)
    before = listing(left)
    with pytest.raises(DestinationError, match="holds the files that the source links to"):
        checkpoints.merge(left, target)
    assert listing(left) == before


def test_a_name_that_is_empty_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make(source.parent / "here", "fused")
    monkeypatch.chdir(here)
    with pytest.raises(DestinationError, match="found an empty name"):
        checkpoints.merge(source, "", overwrite=True)
    with pytest.raises(DestinationError, match="is the current folder"):
        checkpoints.merge(source, ".", overwrite=True)


def test_links_in_the_name_are_followed_as_the_kernel_does(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "sub")
    checkpoints.merge(source, tmp_path / "link" / ".." / "target")
    is_whole(tmp_path / "real" / "target")
    assert names(tmp_path) == ["link", "real", "source"]


def test_a_name_that_is_too_long_is_a_clear_error(source: Path, target: Path) -> None:
    with pytest.raises(DestinationError, match="check the permissions of that folder and the length of the name"):
        checkpoints.merge(source, target.with_name("x" * 250))


def test_a_mount_point_is_refused_before_the_work(source: Path, small_disk: Path) -> None:
    def no_work(*args: object) -> None:
        raise AssertionError

    with pytest.raises(DestinationError, match="is a mount point, which cannot be replaced"):
        checkpoints.merge(source, small_disk, overwrite=True, progress=no_work)


def test_a_folder_bound_to_its_own_filesystem_is_a_mount_point(source: Path, tmp_path: Path) -> None:
    bound = tmp_path / "a b"
    bound.mkdir()
    (tmp_path / "place").mkdir()
    if os.geteuid() or subprocess.run(["mount", "--bind", tmp_path / "place", bound], capture_output=True).returncode:
        pytest.skip("needs to bind a folder")
    try:
        with pytest.raises(DestinationError, match="is a mount point"):
            checkpoints.merge(source, bound, overwrite=True)
    finally:
        subprocess.run(["umount", bound], check=True)


def test_the_output_is_no_more_open_than_the_source(source: Path, target: Path) -> None:
    for path, mode in ((source, 0o700), (source / "assets", 0o710), (source / "tokenizer.json", 0o640)):
        path.chmod(mode)
    for path in source.glob("*.safetensors"):
        path.chmod(0o440)

    def private(stage: str, done: int, total: int) -> None:
        assert (target.parent / PARTIAL).stat().st_mode & 0o777 == 0o700

    checkpoints.merge(source, target, shard_size=300, progress=private, verify=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.rglob("*")}
    weights = {name: mode for name, mode in modes.items() if "model" in name and "modeling" not in name}
    assert set(weights.values()) == {0o440} and "model.safetensors.index.json" in weights
    assert (target.stat().st_mode & 0o777, modes["assets"], modes["tokenizer.json"]) == (0o700, 0o710, 0o640)


def test_a_file_of_the_source_with_the_name_of_a_lock_is_kept(source: Path, target: Path) -> None:
    (source / ".fxoffload-lock").write_text("mine")
    checkpoints.merge(source, target, verify=True)
    assert (target / ".fxoffload-lock").read_text() == "mine"


def test_room_is_looked_for_once_a_killed_run_is_cleared(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_by(signal.SIGKILL, source, target, [sys.executable, "-c", SLOW])

    def usage(path: Path) -> object:
        return shutil._ntuple_diskusage(1 << 40, 0, 0 if (target.parent / PARTIAL).exists() else 1 << 40)

    monkeypatch.setattr(publish_module.shutil, "disk_usage", usage)
    checkpoints.merge(source, target)
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


KILLED = """
import os, signal, sys
from fxoffload import checkpoints
from fxoffload.checkpoints import publish
rename = os.rename
def killed(old, new):
    {before}
    rename(old, new)
    if str(new).endswith(sys.argv[3]):
        {after}
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = killed
checkpoints.merge(sys.argv[1], sys.argv[2], overwrite=True, workers=1)
"""


def killed_after(last: str, source: Path, target: Path, after: str = "pass", before: str = "pass") -> None:
    """Replace ``target``; SIGKILL after the rename to the name that ends so."""
    code = KILLED.format(after=after, before=before)
    command = [sys.executable, "-c", code, str(source), str(target), last]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == -signal.SIGKILL


def test_a_replacement_that_was_killed_between_its_renames_is_undone(source: Path, target: Path) -> None:
    before = listing(make(target, "fused"))
    killed_after("-old", source, target)
    assert names(target.parent) == [LOCK, OLD, PARTIAL, "source"]
    with pytest.raises(DestinationError, match="exists"):
        checkpoints.merge(source, target)
    assert listing(target) == before
    assert names(target.parent) == ["source", "target"]


@pytest.mark.parametrize("last", ["/target", "-trash"])
def test_a_replacement_that_was_killed_after_its_renames_is_finished(source: Path, target: Path, last: str) -> None:
    make(target, "fused")
    killed_after(last, source, target)
    assert names(target.parent) == [*sorted([LOCK, OLD if last == "/target" else TRASH]), "source", "target"]
    is_whole(target)
    with pytest.raises(DestinationError, match="is the source"):
        checkpoints.merge(source, source, overwrite=True)
    checkpoints.merge(source, target, overwrite=True)
    is_whole(target)
    assert names(target.parent) == ["source", "target"]


def test_what_is_half_removed_is_never_put_back(source: Path, target: Path) -> None:
    make(target, "fused")
    killed_after("-trash", source, target, after='os.unlink(os.path.join(new, "config.json"))')
    target.rename(target.parent / "moved")
    checkpoints.merge(source, target)
    is_whole(target)
    assert names(target.parent) == ["moved", "source", "target"]


def test_a_destination_that_was_made_anew_is_not_taken_for_the_replacement(source: Path, target: Path) -> None:
    before = listing(make(target, "fused"))
    killed_after("-old", source, target)
    make(target, "fused")
    with pytest.raises(DestinationError, match=r"expected one of .*, found both"):
        checkpoints.merge(source, target, overwrite=True)
    assert listing(target.parent / OLD) == before


@pytest.mark.parametrize("name", [PARTIAL, OLD, TRASH])
@pytest.mark.parametrize("linked", [True, False])
def test_folders_of_others_are_neither_followed_nor_removed(
    source: Path, target: Path, name: str, linked: bool
) -> None:
    victim, place = target.parent / "victim", target.parent / name
    (victim if linked else place).mkdir()
    if linked:
        place.symlink_to(victim)
    (place / "precious").touch()
    with pytest.raises(DestinationError, match=f"expected .*{name} to be of an earlier run, found no record"):
        checkpoints.merge(source, target)
    assert (place / "precious").exists()
    assert not target.exists()


def test_a_lock_of_others_is_not_written_to(source: Path, target: Path) -> None:
    lock = target.parent / LOCK
    lock.write_text("mine")
    with pytest.raises(DestinationError, match="to be a lock of an earlier run, found something else"):
        checkpoints.merge(source, target)
    assert lock.read_text() == "mine"
    lock.unlink()
    lock.symlink_to(source / "config.json")
    with pytest.raises(DestinationError, match="cannot be opened"):
        checkpoints.merge(source, target)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_second_run_while_the_first_publishes_is_refused(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """At every rename and removal of the first run, a second one starts."""
    rename, rmtree, raised = os.rename, shutil.rmtree, []

    def second() -> None:
        with pytest.raises(DestinationError, match=r"is being written by another process|exists"):
            checkpoints.convert(source, target, "fused", overwrite=overwrite)
        raised.append(True)

    def watched(call: Callable) -> Callable:
        def between(*args: object, **options: object) -> None:
            second()
            call(*args, **options)
            second()

        return between

    if overwrite:
        make(target, "fused")
    monkeypatch.setattr(publish_module.os, "rename", watched(rename))
    monkeypatch.setattr(publish_module.shutil, "rmtree", watched(rmtree))
    checkpoints.merge(source, target, overwrite=overwrite, verify=True)
    monkeypatch.undo()
    assert len(raised) == (8 if overwrite else 2)
    is_whole(target)
    assert names(target.parent) == ["source", "target"]


def test_a_second_run_while_the_first_cleans_up_is_refused(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, raised = shutil.rmtree, []

    def second(path: Path, **options: bool) -> None:
        for name in os.listdir(path):
            with pytest.raises(DestinationError, match="is being written by another process"):
                checkpoints.merge(source, target)
            raised.append(name)
            entry = path / name
            rmtree(entry) if entry.is_dir() else entry.unlink()
        rmtree(path, **options)

    def fail(stage: str, done: int, total: int) -> None:
        if done == total:
            raise RuntimeError

    monkeypatch.setattr(publish_module.shutil, "rmtree", second)
    with pytest.raises(RuntimeError):
        checkpoints.merge(source, target, progress=fail)
    assert raised
    assert names(target.parent) == ["source"]


def test_a_lock_that_was_removed_meanwhile_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, path = claim_module.fcntl.flock, tmp_path / "lock"

    def late(file: int, how: int) -> None:
        flock(file, how)
        monkeypatch.undo()
        path.unlink()  # the run before, which ended between open and flock

    monkeypatch.setattr(claim_module.fcntl, "flock", late)
    claim = claim_module.take_claim(path)
    with pytest.raises(DestinationError, match="another process"):
        claim_module.take_claim(path)
    claim.release(keep=False)
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_is_named(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(claim_module.fcntl, "flock", refuse)
    with pytest.raises(DestinationError, match="expected a filesystem with file locks, found none"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


def test_a_partial_folder_that_was_exchanged_is_not_published(source: Path, target: Path) -> None:
    def exchange(stage: str, done: int, total: int) -> None:
        if stage == "verify" and done == total:
            (target.parent / PARTIAL).rename(target.parent / "taken")
            (target.parent / PARTIAL).mkdir()
            (target.parent / PARTIAL / "precious").touch()

    with pytest.raises((DestinationError, OSError, checkpoints.CheckpointError)):
        checkpoints.merge(source, target, progress=exchange, verify=True)
    assert not target.exists()
    assert (target.parent / PARTIAL / "precious").exists()


def test_what_cannot_be_removed_is_reported(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(target, "fused")
    monkeypatch.setattr(publish_module.shutil, "rmtree", lambda *args, **options: None)
    with pytest.warns(UserWarning, match="trash could not be removed"):
        checkpoints.merge(source, target, overwrite=True)
    monkeypatch.undo()
    is_whole(target)
    assert names(target.parent) == [LOCK, TRASH, "source", "target"]
    checkpoints.merge(source, target, overwrite=True)
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


def test_a_full_disk_is_what_is_reported_by_several_workers(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that fails to create a shard is overtaken by the next before it says so."""
    failed = threading.Event()

    def full(*args: int) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class SlowLock:
        """A lock that is given to others first, once the disk is full."""

        def __init__(self) -> None:
            self.lock, self.first = threading.Lock(), None

        def __enter__(self) -> None:
            if failed.is_set() and self.first == threading.get_ident():
                time.sleep(0.2)
            self.lock.acquire()
            self.first = self.first or threading.get_ident()

        def __exit__(self, *args: object) -> None:
            self.lock.release()

    job = stream_module._StreamJob
    monkeypatch.setattr(stream_module, "_StreamJob", lambda *args: job(*args, lock=SlowLock()))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="was full before all were written"):
        checkpoints.merge(source, target, workers=4)
    assert names(target.parent) == ["source"]


@pytest.mark.parametrize("place", ["write", "reserve", "side file"])
def test_a_disk_that_fills_up(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module, name = {
        "write": (os, "copy_file_range"),
        "reserve": (os, "posix_fallocate"),
        "side file": (os, "fchmod"),
    }[place]
    monkeypatch.setattr(module, name, full)
    with pytest.raises(DiskFullError, match="was full before all were written; nothing was left behind"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


def test_files_larger_than_is_allowed(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: object) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    with pytest.raises(checkpoints.DestinationError, match=r"found a limit below it.*--shard-size"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


def test_room_is_looked_for_before_anything_is_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(publish_module, "_make", None)
    with pytest.raises(DiskFullError, match=r"expected room for 16\.0 MiB, found 1 B free"):
        checkpoints.merge(source, target)
    assert names(target.parent) == ["source"]


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
    assert process.stdout.readline().startswith("copied")
    process.send_signal(number)
    return process.wait(timeout=60)


COMMAND = SLOW.replace(
    "checkpoints.merge", "from fxoffload.cli import app\nsys.argv[1:1] = ['moe', 'merge']\napp.main() #"
)


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM, slow(signal.SIGHUP)])
def test_a_signal_leaves_nothing(source: Path, target: Path, number: signal.Signals) -> None:
    assert stopped_by(number, source, target, [sys.executable, "-c", COMMAND]) == 128 + number
    assert names(target.parent) == ["source"]


@pytest.mark.parametrize("gap_s", [slow(0), 0.003, slow(0.05)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_impatience_leaves_nothing(source: Path, target: Path, number: signal.Signals, gap_s: float) -> None:
    """Signals go on until the process has ended."""
    command = [sys.executable, "-c", COMMAND, str(source), str(target)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("copied")
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(gap_s or 0.0002)
        if not (target.parent / PARTIAL).exists():
            break
    assert process.wait(timeout=60) == 128 + number
    assert f"interrupted ({number.name}); the destination is as it was, or whole" in process.stderr.read()
    assert names(target.parent) == ["source"]


def test_workers_end_before_their_folder_goes_however_often_ctrl_c_is_pressed(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the command line: Python's own handler, which raises each time."""
    begun, ended, copy = threading.Event(), [], move_bytes_module.ByteMover.copy

    def slow(self: move_bytes_module.ByteMover, *args: int) -> None:
        copy(self, *args)
        begun.set()
        time.sleep(0.5)
        ended.append((target.parent / PARTIAL).exists())

    def press() -> None:
        begun.wait(10)
        for _ in range(10):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.03)

    monkeypatch.setattr(move_bytes_module.ByteMover, "copy", slow)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.merge(source, target, workers=2)
    finally:
        thread.join()
    assert ended and all(ended)
    assert names(target.parent) == ["source"]


def test_a_signal_whose_handler_returns_stops_nothing(source: Path, target: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        checkpoints.merge(
            source, target, progress=lambda stage, done, total: os.kill(os.getpid(), signal.SIGTERM), verify=True
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen
    is_whole(target)


def test_ctrl_c_between_the_renames_waits(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(target, "fused")
    rename = os.rename

    def interrupted(old: Path, new: Path) -> None:
        rename(old, new)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(publish_module.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.merge(source, target, overwrite=True)
    monkeypatch.undo()
    is_whole(target)
    assert names(target.parent) == ["source", "target"]


def test_a_killed_run_leaves_a_folder_that_the_next_run_takes_over(source: Path, target: Path) -> None:
    assert stopped_by(signal.SIGKILL, source, target, [sys.executable, "-c", SLOW]) == -signal.SIGKILL
    assert names(target.parent) == [LOCK, PARTIAL, "source"]
    assert names(target.parent / PARTIAL)
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


@pytest.mark.parametrize("laid", ["tokenizer.json", "assets"])
def test_a_link_laid_in_the_folder_that_is_written_is_not_followed(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, laid: str
) -> None:
    """Where the source's folder can be written by others, so can the copy."""
    outside = target.parent / "outside"
    outside.mkdir()
    make_partial = publish_module._make

    def and_lay(destination: object, claim: object) -> None:
        make_partial(destination, claim)  # type: ignore[arg-type]
        (target.parent / PARTIAL / laid).symlink_to(outside if laid == "assets" else outside / "file")

    monkeypatch.setattr(publish_module, "_make", and_lay)
    with pytest.raises(DestinationError, match=rf"{laid}: expected to make it, found that something else made it"):
        checkpoints.merge(source, target)
    assert names(outside) == []


@pytest.mark.parametrize("content", ["", "{}"])
def test_another_file_linked_to_the_name_of_the_lock_is_not_written(source: Path, target: Path, content: str) -> None:
    victim = target.parent / "victim"
    victim.write_text(content)
    (target.parent / LOCK).hardlink_to(victim)
    with pytest.raises(DestinationError, match=r"expected .*-lock to be a lock of an earlier run"):
        checkpoints.merge(source, target)
    assert victim.read_text() == content
