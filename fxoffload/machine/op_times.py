"""Measured times of operators on disk, next to the machine profile of the same device: ``ops-*.json``.

[Note: Ranks decide alike] These times decide which ops a graph recomputes. With collectives in the graph, that has to
be the same on every rank, and times that each rank measured for itself would differ by some percent. So the ranks of a
machine share the file: one measures missing times under a lock, and the others find them. Where there are several
processes, failures to measure are kept too, for an hour, or the next rank would try once more and might know more.
Ranks on several machines share no file, so they use estimates. So does a rank that has to wait for too long.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fxoffload.files import replace_file
from fxoffload.machine import cache
from fxoffload.machine.devices import Identity
from fxoffload.processes import in_process_group, processes_on_this_machine

log = logging.getLogger(__name__)

_SCHEMA = 1
_FAILURES_HOLD_S = 3600.0
# For the rank that measures. It may wait for its device, which may wait for a rank that waits here.
_PATIENCE_S = 60.0
_NOT_SHARED = "the ranks cannot share times"
# The oldest are dropped; an entry has some 300 characters.
_MOST_ENTRIES = 20_000

# Key -> milliseconds, or why there are none.
Outcomes = Mapping[str, float | str]


@dataclass(frozen=True)
class OpTimes:
    """The known times of some operators.

    Attributes:
        ms: key (``fxoffload.analysis.op_key``) -> milliseconds of one call.
        reasons: why others have no time -> how many.
    """

    ms: Mapping[str, float]
    reasons: Mapping[str, int]


# Answers that this process has got: a later question gets the same.
_known: dict[Identity, dict[str, float | str]] = {}


def times_of(identity: Identity, keys: Iterable[str], measure: Callable[[list[str]], Outcomes]) -> OpTimes:
    """Times of the operators of ``keys``: those that are kept, else measured by ``measure`` and kept from then on. See
    [Note: Ranks decide alike].

    Args:
        measure: measures those that it is given.
    """
    wanted = list(dict.fromkeys(keys))
    known = _known.setdefault(identity, {})
    missing = [k for k in wanted if k not in known]
    if missing:
        known.update(_shared(identity, missing, measure))
    ms = {k: found for k in wanted if isinstance(found := known.get(k), float)}
    reasons = Counter(reason for k in missing if isinstance(reason := known.get(k), str))
    return OpTimes(ms, reasons)


def forget(identity: Identity) -> None:
    """Drop all times: the next question measures them."""
    _known.pop(identity, None)
    try:
        path_of(identity).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.debug("the measured times of operators cannot be dropped: %s", error)


def path_of(identity: Identity) -> Path:
    """The file. Raises RuntimeError as ``cache.folder`` does."""
    path = cache.path_of(identity)
    return path.with_name(path.name.replace("profile-", "ops-", 1))


def _shared(identity: Identity, keys: list[str], measure: Callable[[list[str]], Outcomes]) -> Outcomes:
    """Times of ``keys``, by the file."""
    is_one_of_several = num_processes() > 1
    if num_processes() > processes_on_this_machine():
        return dict.fromkeys(keys, "ranks on several machines share no times")
    with cache.locked(identity, _PATIENCE_S) as is_locked:
        if is_one_of_several and not is_locked:
            return dict.fromkeys(keys, _NOT_SHARED)
        kept = _load(identity)
        found = {k: outcome for k in keys if (outcome := _outcome(kept.get(k))) is not None}
        missing = [k for k in keys if k not in found]
        measured = dict(measure(missing)) if missing else {}
        new = {k: v for k, v in measured.items() if is_one_of_several or isinstance(v, float)}
        if new and not _store(identity, kept, new) and is_one_of_several:
            return dict.fromkeys(keys, _NOT_SHARED)
        return {**found, **measured}


def num_processes() -> int:
    """Ranks of the program, on all machines."""
    if in_process_group():
        return dist.get_world_size()
    count = os.environ.get("WORLD_SIZE", "")
    return max(int(count) if count.isdigit() else 1, processes_on_this_machine())


def _outcome(entry: Any) -> float | str | None:
    """The value of an entry; None for one that is not there, damaged, or a failure of long ago."""
    if isinstance(entry, (int, float)) and not isinstance(entry, bool) and 0 < entry < float("inf"):
        return float(entry)
    if not isinstance(entry, dict):
        return None
    reason, at = entry.get("reason"), entry.get("at")
    if isinstance(reason, str) and isinstance(at, (int, float)) and 0 <= time.time() - at < _FAILURES_HOLD_S:
        return reason
    return None


def _load(identity: Identity) -> dict[str, Any]:
    try:
        found = json.loads(path_of(identity).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, RecursionError) as error:
        log.debug("the kept times of operators cannot be used: %s", error)
        return {}
    is_ours = isinstance(found, dict) and found.get("schema") == _SCHEMA and isinstance(found.get("ops"), dict)
    return found["ops"] if is_ours else {}


def _store(identity: Identity, kept: Mapping[str, Any], new: Outcomes) -> bool:
    """Whether it could be written."""
    now = time.time()
    entries = {**kept, **{k: v if isinstance(v, float) else {"reason": v, "at": now} for k, v in new.items()}}
    entries = dict(list(entries.items())[-_MOST_ENTRIES:])
    about = {"schema": _SCHEMA, "device_name": identity.device_name, "torch_version": identity.torch_version}
    try:
        path = path_of(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**about, "ops": entries}, indent=0).encode())
    except (OSError, RuntimeError) as error:
        log.info("measured times of operators cannot be kept on disk (%s); set %s", error, cache.CACHE_VARIABLE)
        return False
    return True
