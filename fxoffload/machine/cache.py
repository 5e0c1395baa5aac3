"""Measured profiles on disk, one file for each device name, driver and torch version."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fxoffload.errors import OptionsError
from fxoffload.files import replace_file
from fxoffload.machine.devices import Identity
from fxoffload.machine.profile import MachineProfile
from fxoffload.runtime.host_memory.ledger_files import lock_within

log = logging.getLogger(__name__)

CACHE_VARIABLE = "FXOFFLOAD_CACHE_DIR"

# Profiles that could not be written, so that this process at least does not measure twice.
_unstored: dict[Identity, MachineProfile] = {}


def folder() -> Path:
    """The folder that measured profiles are kept in; it need not exist.

    Raises RuntimeError where no variable names it and the user has no home.
    """
    value = os.environ.get(CACHE_VARIABLE, "").strip()
    if value:
        return Path(value).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path there is to be ignored, says the XDG specification.
    return (base if base.is_absolute() else Path.home() / ".cache") / "fxoffload"


def path_of(identity: Identity) -> Path:
    """The file of a device's profile. Raises RuntimeError as ``folder`` does."""
    fields = (identity.device_name, identity.device_type, identity.driver, identity.torch_version)
    digest = hashlib.sha256("\n".join(fields).encode()).hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9]+", "-", identity.device_name.lower()).strip("-")[:40]
    return folder() / f"profile-{slug}-{digest}.json"


def load(identity: Identity) -> MachineProfile | None:
    """The profile kept for a device; None where there is none, or where it is damaged or another device's."""
    try:
        path = path_of(identity)
        found = MachineProfile.from_json(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return _unstored.get(identity)
    except (OSError, RuntimeError, UnicodeDecodeError, OptionsError) as error:
        log.debug("the kept profile cannot be used: %s", error)
        return _unstored.get(identity)
    of = Identity(found.device_name, found.device_type, found.driver, found.torch_version)
    if of != identity:
        log.debug("the kept profile cannot be used: %s is of %s, expected one of %s", path, of, identity)
        return _unstored.get(identity)
    return found


def store(identity: Identity, profile: MachineProfile) -> None:
    """Keep a profile: on disk in one step, so that no reader sees half of it, else in this process."""
    try:
        write(path_of(identity), profile)
        _unstored.pop(identity, None)
    except (OSError, RuntimeError) as error:
        log.warning("the machine profile cannot be kept on disk (%s); set %s to a folder", error, CACHE_VARIABLE)
        _unstored[identity] = profile


def write(path: Path, profile: MachineProfile) -> None:
    """Write a profile's file, and its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, profile.to_json().encode())


@contextlib.contextmanager
def locked(identity: Identity, patience_s: float | None = None) -> Iterator[bool]:
    """One process, and one thread of it, at a time. Gives whether it is locked: not where the folder allows no lock,
    nor where another process has it for longer than ``patience_s``."""
    with contextlib.ExitStack() as stack:
        is_locked = True
        try:
            path = path_of(identity)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, file)
            if patience_s is None:
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                lock_within(file, patience_s)
        except (OSError, RuntimeError) as error:
            log.debug("measuring without a lock: %s", error)
            is_locked = False
        yield is_locked
