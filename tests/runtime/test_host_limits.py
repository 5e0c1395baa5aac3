from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fxoffload import processes
from fxoffload.runtime.host_memory import cgroups
from fxoffload.runtime.host_memory import limits as host_limits
from fxoffload.runtime.host_memory.limits import cgroup_limit_bytes, default_host_budget_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 100 GiB whose control groups are in the returned folder: v2, and v1 below ``memory``."""
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/\n0::/\n")
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN", own)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(
        host_limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * GIB, available=70 * GIB)
    )
    return tmp_path


def test_without_control_groups_the_machine_counts(machine: Path) -> None:
    assert cgroup_limit_bytes() is None
    assert default_host_budget_bytes() == 80 * GIB


def test_version_2(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{20 * GIB}\n")
    assert cgroup_limit_bytes() == 20 * GIB
    assert default_host_budget_bytes() == 16 * GIB


def test_what_there_is_in_words(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_limits.describe_host_memory() == "100.0 GiB"
    (machine / "memory.max").write_text(f"{20 * GIB}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_limits.describe_host_memory() == "100.0 GiB, control group 20.0 GiB, shared by 2 processes"
    for soft, said in ((64 << 10, "64.0 KiB"), (host_limits.resource.RLIM_INFINITY, "unlimited")):
        monkeypatch.setattr(host_limits.resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert host_limits.describe_locked_memory() == said


def test_version_2_without_a_limit(machine: Path) -> None:
    (machine / "memory.max").write_text("max\n")
    assert cgroup_limit_bytes() is None
    assert default_host_budget_bytes() == 80 * GIB


def test_version_1(machine: Path) -> None:
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    assert default_host_budget_bytes() == 8 * GIB


def test_version_1_without_a_limit_says_a_huge_number(machine: Path) -> None:
    (machine / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit_bytes() is None


def test_version_2_goes_first(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{20 * GIB}\n")
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    assert cgroup_limit_bytes() == 20 * GIB


def test_the_limit_is_read_again(machine: Path) -> None:
    assert default_host_budget_bytes() == 80 * GIB
    (machine / "memory.max").write_text(f"{10 * GIB}\n")
    assert default_host_budget_bytes() == 8 * GIB


def test_a_limit_above_the_machine_is_no_memory(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{400 * GIB}\n")
    assert default_host_budget_bytes() == 80 * GIB


def test_ranks_on_one_machine_share_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_host_budget_bytes() == 20 * GIB


@pytest.mark.parametrize(("world", "gpus", "expected"), [(2, 8, 2), (16, 8, 8), (4, 1, 1), (4, 0, 1)])
def test_without_a_launcher_the_process_group_and_the_gpus_tell(
    machine: Path, monkeypatch: pytest.MonkeyPatch, world: int, gpus: int, expected: int
) -> None:
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: world)
    monkeypatch.setattr(processes, "dist", group)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: gpus)
    assert processes.processes_on_this_machine() == expected
    assert default_host_budget_bytes() == 80 * GIB // expected
