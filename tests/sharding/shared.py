"""The worlds whose findings tests of several files read: each is started once, which takes seconds."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .launch import Ended, Found, launch

# Cases that need four ranks; the others run on two.
ON_FOUR = (
    "tensor.mesh_layers",
    "tensor.mesh_planned",
    "fsdp2.hybrid_before",
    "fsdp2.hybrid_whole",
    "fsdp2.hybrid_planned",
)
# Of plans: there are none yet.
FIRST = "ranks.checked"
# One of them leaves a process group that counts no collectives.
LAST = "host_shards."

FoundBy = Callable[[str], list[Found]]


@pytest.fixture(scope="session")
def found_by(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> FoundBy:
    """What the ranks found in a case. A world is started once, whichever worker needs it first, and runs the cases of
    all tests that are to run."""
    items = [item for item in request.session.items if "found_by" in getattr(item, "fixturenames", ())]
    wanted = sorted({_case_of(item) for item in items}, key=lambda case: (case != FIRST, case.startswith(LAST), case))
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    ended: dict[int, list[Ended]] = {}

    def found(case: str) -> list[Found]:
        world = _ranks_of(case)
        if world not in ended:
            ended[world] = _run_once(shared / f"world{world}", world, [c for c in wanted if _ranks_of(c) == world])
        return [rank.found(case) for rank in ended[world]]

    return found


def _case_of(item: Any) -> str:
    return item.callspec.params["case"]


def _ranks_of(case: str) -> int:
    return 4 if case in ON_FOUR else 2


def _run_once(folder: Path, world: int, cases: Sequence[str]) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / "ended"
        if not kept.exists():
            kept.write_bytes(pickle.dumps(launch(folder, world, cases)))
        return pickle.loads(kept.read_bytes())
