from __future__ import annotations

from pathlib import Path

import pytest

from fxoffload.runtime.host_memory import cgroups
from fxoffload.runtime.host_memory.cgroups import ControlGroup, cgroup_limit_bytes, limited_groups

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    return tmp_path


def group(root: Path, path: str, **files: str) -> None:
    folder = root / "cgroup" / path.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_least_limit_of_the_own_group_and_its_parents(root: Path) -> None:
    (root / "own").write_text("0::/jobs/mine\n")
    group(
        root,
        "/jobs",
        memory__max=f"{20 * GIB}\n",
        memory__current=f"{9 * GIB}\n",
        memory__stat="inactive_file 4\nactive_file 3\n",
    )
    group(root, "/jobs/mine", memory__max="max\n")
    group(root, "/jobs/other", memory__max=f"{GIB}\n")
    assert limited_groups() == ("/jobs/mine", [ControlGroup("/jobs", 20 * GIB, 9 * GIB - 7)])
    group(root, "/jobs/mine", memory__max=f"{12 * GIB}\n", memory__current="5")
    assert limited_groups()[1][0] == ControlGroup("/jobs/mine", 12 * GIB, 5)
    assert cgroup_limit_bytes() == 12 * GIB
    group(root, "/", memory__max=f"{3 * GIB}\n")
    assert cgroup_limit_bytes() == 3 * GIB


def test_version_1_counts_the_group_and_those_below_it(root: Path) -> None:
    (root / "own").write_text("9:name=systemd:/s\n4:memory:/process/a\n1:cpu:/c\n0::/\n")
    stat = "cache 900\ninactive_file 10\ntotal_inactive_file 200\ntotal_active_file 100\n"
    group(
        root,
        "/memory/process/a",
        memory__limit_in_bytes=f"{6 * GIB}",
        memory__usage_in_bytes="1000",
        memory__stat=stat,
    )
    assert limited_groups() == ("/process/a", [ControlGroup("/process/a", 6 * GIB, 700)])


@pytest.mark.parametrize("own", ["0::/../../elsewhere\n", "0::/of/the/host\n", ""])
def test_a_container_sees_its_group_at_the_root(root: Path, own: str) -> None:
    (root / "own").write_text(own)
    group(root, "/", memory__max=f"{4 * GIB}\n", memory__current="1")
    assert limited_groups()[1] == [ControlGroup("/", 4 * GIB, 1)]


def test_no_file_is_no_limit(root: Path) -> None:
    assert limited_groups() == ("", [])
    assert cgroup_limit_bytes() is None


@pytest.mark.parametrize(
    ("path", "of", "expected"),
    [
        ("/a/b", "/a", True),
        ("/a", "/a", True),
        ("/ab", "/a", False),
        ("/", "/a", False),
        ("/x", "/", True),
        ("", "", True),
    ],
)
def test_which_processes_count(path: str, of: str, expected: bool) -> None:
    assert ControlGroup(of, 1, 0).holds(path) is expected
