"""Profiles that come with the package, measured or from data sheets, and those in files that a user names."""

from __future__ import annotations

import functools
from importlib.resources import files
from pathlib import Path

from fxoffload.environment import suggestion
from fxoffload.errors import OptionsError
from fxoffload.machine.data_sheets import SHEETS, profile_from
from fxoffload.machine.profile import MEASURED, MachineProfile

# All others that come from data sheets are derived from it.
_REFERENCE = "h200"


def shipped_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package, for ``load_profile``; some are from data sheets."""
    return tuple(sorted(_shipped()))


def load_profile(path_or_name: str | Path) -> MachineProfile:
    """The profile in a file, or a shipped one by its name, for example ``"h200"``.

    A string that is a shipped name stands for that profile; ``"./h200"`` or a Path would be a file.
    Raises OptionsError (a ValueError) where there is neither, or the file is no profile.
    """
    if isinstance(path_or_name, str) and path_or_name.lower() in _shipped():
        return _shipped()[path_or_name.lower()]
    path = Path(path_or_name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionsError(
            f"expected a machine profile's file or a shipped name, found {str(path_or_name)!r}"
            f"{suggestion(str(path_or_name), shipped_names())} ({error}); shipped are {', '.join(shipped_names())}, "
            "and fxoffload profile measure --out FILE writes a file"
        ) from None
    return MachineProfile.from_json(text, str(path))


def shipped_for(device_name: str) -> MachineProfile | None:
    """The shipped profile of the device of that name; None where there is none. Measured ones only: a device that is
    here is measured rather than looked up in a data sheet."""
    return next((p for p in _shipped().values() if p.device_name == device_name and p.source == MEASURED), None)


@functools.cache
def _shipped() -> dict[str, MachineProfile]:
    folder = files("fxoffload.machine") / "shipped"
    found = [item for item in folder.iterdir() if item.name.endswith(".json")]
    measured = {
        item.name.removesuffix(".json"): MachineProfile.from_json(item.read_text(encoding="utf-8"), item.name)
        for item in found
    }
    derived = {name: profile_from(sheet, measured[_REFERENCE]) for name, sheet in SHEETS.items()}
    return dict(sorted({**derived, **measured}.items()))
