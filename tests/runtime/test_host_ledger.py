"""Bookings of one process, of two, and of those that died."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import fxoffload
from fxoffload.runtime.host_memory import ledger as host_ledger
from fxoffload.runtime.host_memory import ledger_files
from fxoffload.runtime.host_memory import limits as host_limits
from fxoffload.runtime.host_memory.cgroups import ControlGroup
from fxoffload.runtime.host_memory.ledger import Booking, Ledger

GIB = 1 << 30
# The ledger needs neither the package's front door nor torch, which take seconds to import.
LIGHT = f"""
import sys, types
package = types.ModuleType("fxoffload")
package.__path__ = [{str(Path(fxoffload.__file__).parent)!r}]
torch = types.ModuleType("torch")
torch.distributed = types.ModuleType("torch.distributed")
torch.distributed.is_available = lambda: False
sys.modules |= {{"fxoffload": package, "torch": torch, "torch.distributed": torch.distributed}}
"""
# A process that books given numbers, line by line, against a machine of 100 GiB. It stays until its input ends.
OTHER = f"""
{LIGHT}
from pathlib import Path
from fxoffload.runtime.host_memory import ledger as host_ledger, limits as host_limits
from fxoffload.runtime.host_memory.cgroups import ControlGroup
group, folder = sys.argv[1:]
host_limits.memory_limits = lambda: (group, [ControlGroup("", 100 << 30, 0)])
booking = host_ledger.Booking(host_ledger.Ledger(Path(folder)))
for line in sys.stdin:
    booking.shrink_to(0)
    print(booking.grow_to(int(line) << 30), flush=True)
"""


class Other:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def book(self, gib: int) -> bool:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{gib}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"


@contextlib.contextmanager
def other_process(folder: Path, group: str = "/") -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER, group, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[ControlGroup]:
    """What bounds this process, in the group /jobs/mine: a machine of 100 GiB unless the test says otherwise."""
    found = [ControlGroup("", 100 * GIB, 0)]
    monkeypatch.setattr(host_limits, "memory_limits", lambda: ("/jobs/mine", found))
    return found


@pytest.fixture
def ledger(tmp_path: Path, limits: list[ControlGroup]) -> Ledger:
    return Ledger(tmp_path / "ledger")


def files(ledger: Ledger) -> list[Path]:
    assert ledger._folder is not None
    return [path for path in ledger._folder.iterdir() if path.name != "lock"]


def test_two_arenas_share_what_there_is(ledger: Ledger) -> None:
    first, second = Booking(ledger), Booking(ledger)
    assert first.grow_to(50 * GIB)
    assert not second.grow_to(31 * GIB)
    assert (second.nbytes, ledger.booked_bytes()) == (0, 50 * GIB)
    assert "31.00 GiB more were asked for and 30.00 GiB are left: of 100.00 GiB of the machine, 50.00" in second.refusal
    assert second.grow_to(30 * GIB)
    assert first.grow_to(40 * GIB)  # has more already
    assert not first.grow_to(50 * GIB + 1)
    first.shrink_to(20 * GIB)
    assert second.grow_within(90 * GIB) == 60 * GIB
    second.release()
    assert ledger.booked_bytes() == 20 * GIB
    first.release()
    assert files(ledger) == []


def test_pageable_memory_may_have_more_of_the_machine(ledger: Ledger) -> None:
    pinned, pageable = Booking(ledger), Booking(ledger, share=0.95)
    assert pinned.grow_within(100 * GIB) == 80 * GIB
    assert pageable.grow_within(100 * GIB) == 15 * GIB
    assert not pinned.grow_to(80 * GIB + 1)


def test_what_is_in_use_counts_and_what_is_backed_is_in_use(ledger: Ledger, limits: list[ControlGroup]) -> None:
    """95 of 100 GiB may be used. 60 are; then 20 are booked, and with 15 of them touched 75 are used."""
    limits[0] = ControlGroup("", 100 * GIB, 60 * GIB)
    booking = Booking(ledger)
    assert not booking.grow_to(36 * GIB)
    assert "60.00 GiB are in use" in booking.refusal
    assert booking.grow_to(20 * GIB)
    assert not booking.grow_to(36 * GIB)
    limits[0] = ControlGroup("", 100 * GIB, 75 * GIB)
    assert not booking.grow_to(35 * GIB)  # as far as anybody knows, others use these 75
    booking.backed(15 * GIB)
    assert not booking.grow_to(35 * GIB + 1)
    assert booking.grow_to(35 * GIB)


def test_two_processes_do_not_book_the_same_bytes(ledger: Ledger) -> None:
    booking = Booking(ledger)
    with other_process(ledger._given or Path()) as other:
        assert other.book(50)
        assert not booking.grow_to(31 * GIB)
        assert "by 2 processes" in booking.refusal
        assert booking.grow_to(30 * GIB)
        assert not other.book(51)
        assert other.book(10)
        assert booking.grow_to(70 * GIB)


def test_a_killed_process_gives_its_booking_back(ledger: Ledger) -> None:
    booking = Booking(ledger)
    with other_process(ledger._given or Path()) as other:
        assert other.book(80)
        assert not booking.grow_to(GIB)
        assert len(files(ledger)) == 1
        other.process.kill()
        while psutil.Process(other.process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert booking.grow_to(80 * GIB)  # though its exit status was not read
    assert [path.name.split("-")[0] for path in files(ledger)] == [str(os.getpid())]


def test_a_number_that_was_given_to_another_process_books_nothing(ledger: Ledger) -> None:
    booking = Booking(ledger)
    assert booking.grow_to(GIB)
    (mine,) = files(ledger)
    with other_process(ledger._given or Path()) as other:
        assert other.book(70)
        (theirs,) = (path for path in files(ledger) if path != mine)
        number, _, start = theirs.name.partition("-")
        theirs.rename(theirs.with_name(f"{number}-{int(start) - 3_600_000}"))
        assert booking.grow_to(80 * GIB)
        assert files(ledger) == [mine]


def test_each_group_counts_its_own_processes(ledger: Ledger, limits: list[ControlGroup]) -> None:
    limits.insert(0, ControlGroup("/jobs", 50 * GIB, 0))
    booking = Booking(ledger)
    with other_process(ledger._given or Path(), "/jobs/theirs") as inside:
        with other_process(ledger._given or Path(), "/else") as outside:
            assert inside.book(10)
            assert outside.book(20)
            assert booking.grow_within(100 * GIB) == 30 * GIB
            assert "control group /jobs" in booking.refusal
            assert outside.book(35)
            booking.shrink_to(0)
            assert booking.grow_within(100 * GIB) == 30 * GIB
            booking.shrink_to(0)
            assert outside.book(60)
            assert booking.grow_within(100 * GIB) == 10 * GIB


def test_a_process_that_ends_takes_its_file_along(ledger: Ledger) -> None:
    code = f"""
{LIGHT}
from pathlib import Path
from fxoffload.runtime.host_memory import ledger as host_ledger, ledger_files
ledger_files.users_folder = lambda: Path(sys.argv[1])
assert host_ledger.Booking().grow_to(4096)
print(len(list(Path(sys.argv[1]).iterdir())))
"""
    folder = ledger._given or Path()
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_forked_child_has_booked_nothing(ledger: Ledger) -> None:
    booking = Booking(ledger)
    assert booking.grow_to(50 * GIB)
    read, write = os.pipe()
    with ledger._lock:  # a thread of the parent may be in the middle of something
        pid = os.fork()
        if pid == 0:
            mine = booking.nbytes
            fits = booking.grow_to(30 * GIB)
            too_much = booking.grow_to(31 * GIB)
            booking.release()
            os.write(write, repr((mine, fits, too_much)).encode())
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"(0, True, False)"
    assert ledger.booked_bytes() == 50 * GIB


@pytest.mark.parametrize("blocked", ["a file", "of somebody else", "no room"])
def test_without_a_folder_there_is_no_ledger(
    tmp_path: Path, limits: list[ControlGroup], monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """The limits hold for each process by itself."""
    folder = tmp_path / "ledger"
    if blocked == "a file":
        folder.write_text("")
    elif blocked == "of somebody else":
        folder.mkdir()
        monkeypatch.setattr(ledger_files.os, "getuid", lambda: 12345)
    else:
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "ledger"
    ledger = Ledger(folder)
    booking, other = Booking(ledger), Booking(Ledger(folder))
    assert booking.grow_to(80 * GIB)
    assert other.grow_to(80 * GIB)
    assert not booking.grow_to(80 * GIB + 1)
    booking.backed(GIB)
    booking.release()
    assert booking.grow_within(90 * GIB) == 80 * GIB
    ledger.close()


def test_a_lock_that_is_never_given_back_does_not_stop_us(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(host_ledger, "_LOCK_S", 0.01)
    booking = Booking(ledger)
    assert booking.grow_to(GIB)
    assert ledger._folder is not None
    with open(ledger._folder / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert booking.grow_to(2 * GIB)
    assert ledger.booked_bytes() == 2 * GIB


def test_nonsense_in_the_folder_is_passed_over(ledger: Ledger) -> None:
    booking = Booking(ledger)
    assert booking.grow_to(GIB)
    (mine,) = files(ledger)
    (mine.parent / "readme").write_text("hello")
    (mine.parent / f"{os.getpid()}-{int(mine.name.split('-')[1]) + 1}").write_text("not numbers")
    assert booking.grow_to(80 * GIB)


def test_a_booking_may_be_given_back_in_the_middle_of_another(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a finalizer that runs while this very thread books."""
    first, second = Booking(ledger), Booking(ledger)
    assert first.grow_to(50 * GIB)
    real = host_limits.memory_limits()

    def interrupted() -> object:
        first.release()
        return real

    monkeypatch.setattr(host_limits, "memory_limits", interrupted)
    assert not second.grow_to(40 * GIB)  # it has begun to count
    assert (first.nbytes, ledger.booked_bytes()) == (0, 0)
    assert second.grow_to(40 * GIB)


def test_the_users_folder_is_private_and_is_that_of_the_process_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_files, "_MEMORY_FOLDER", tmp_path)
    folder = ledger_files.make_folder(ledger_files.users_folder())
    assert folder.parent == tmp_path
    assert folder.name == f"fxoffload-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(ledger_files, "_MEMORY_FOLDER", tmp_path / "missing")
    monkeypatch.setattr(ledger_files.tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    assert ledger_files.users_folder().parent == tmp_path / "temp"
