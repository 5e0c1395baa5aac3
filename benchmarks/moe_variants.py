"""One conversion in a process of its own: its time, and its RAM."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Sample:
    """``seconds`` without the start of Python and imports, which are ``startup_s``.

    ``peak_rss_bytes`` counts pages of mapped files too, ``rss_before_bytes`` is after the imports; ``anonymous_bytes``
    (where it was read) is the process's own memory when everything was stacked.
    """

    seconds: float
    startup_s: float
    peak_rss_bytes: int
    rss_before_bytes: int
    anonymous_bytes: int | None = None


def run_sample(kind: str, source: Path, target: Path, answer: Path, started: float) -> None:
    """Run ``kind`` and write its Sample; ``started`` is when the parent started this process (time.time)."""
    work = WORK[kind]()
    before = _status("VmRSS")
    begun = time.time()
    anonymous = work(source, target)
    ended = time.time()
    sample = Sample(ended - begun, begun - started, _status("VmHWM"), before, anonymous)
    answer.write_text(json.dumps(dataclasses.asdict(sample)))


def _cp(*, sync: bool) -> Callable[[Path, Path], None]:
    def work(source: Path, target: Path) -> None:
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        if sync:
            subprocess.run(["sync", *map(str, [*target.iterdir(), target])], check=True)

    return work


def _convert(layout: str, *, fsync: bool, verify: bool = False) -> Callable[[Path, Path], None]:
    from fxoffload import checkpoints

    def work(source: Path, target: Path) -> None:
        checkpoints.convert(source, target, layout, fsync=fsync, verify=verify)

    return work


def _all_in_ram() -> Callable[[Path, Path], int]:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    def work(source: Path, target: Path) -> int:
        """The strategy of existing scripts: every shard into one dict, stack layer by layer, save. No cast here."""
        target.mkdir()
        state = {}
        for shard in sorted(source.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                state.update({name: file.get_tensor(name) for name in list(file.keys())})
        experts = json.loads((source / "config.json").read_text())["num_experts"]
        for stem in sorted({name.split(".experts.")[0] for name in state if ".experts." in name}):
            for name in ("gate_proj", "up_proj", "down_proj"):
                parts = [state.pop(f"{stem}.experts.{j}.{name}.weight") for j in range(experts)]
                state[f"{stem}.experts.{name}"] = torch.stack(parts)
        held = _status("RssAnon")
        shards = [[]]
        for name in state:
            if sum(state[n].nbytes for n in shards[-1]) + state[name].nbytes > 5_000_000_000:
                shards.append([])
            shards[-1].append(name)
        for number, names in enumerate(shards):
            save_file({name: state[name] for name in names}, target / f"model-{number}.safetensors")
        return held

    return work


Work = Callable[[Path, Path], int | None]

# Each makes its work, and does its imports meanwhile.
WORK: dict[str, Callable[[], Work]] = {
    "cp": lambda: _cp(sync=False),
    "cp, synced": lambda: _cp(sync=True),
    "cp of stacked": lambda: _cp(sync=False),
    "merge, no fsync": lambda: _convert("stacked", fsync=False),
    "merge": lambda: _convert("stacked", fsync=True),
    "merge, verified": lambda: _convert("stacked", fsync=True, verify=True),
    "fuse, no fsync": lambda: _convert("fused", fsync=False),
    "split, no fsync": lambda: _convert("experts", fsync=False),
    "everything in RAM": _all_in_ram,
}


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open(f"/proc/{os.getpid()}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))
