"""Finds the profile of a device: a file that the user named, the cache on disk, a shipped one, or a measurement.

``FXOFFLOAD_PROFILE``
    A profile's file or a shipped name: used for every device, and nothing is measured.
``FXOFFLOAD_CACHE_DIR``
    Where measured profiles are kept. Unset or empty: ``fxoffload`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.

Both are read at the time of the call.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

from fxoffload.errors import OptionsError, ProfileError
from fxoffload.machine import cache, op_times
from fxoffload.machine.devices import Identity, identify, resolve
from fxoffload.machine.measure import measure
from fxoffload.machine.profile import MachineProfile
from fxoffload.machine.shelf import load_profile, shipped_for
from fxoffload.runtime.engine import engines
from fxoffload.tell import warn
from fxoffload.torch_private.autograd import in_backward

log = logging.getLogger(__name__)

PROFILE_VARIABLE = "FXOFFLOAD_PROFILE"


def profile(device: torch.device | str | None = None, *, refresh: bool = False) -> MachineProfile:
    """The rates of this machine and ``device``; measured by the first call (seconds), then kept on disk.

    Kept per device name, driver and torch version, in FXOFFLOAD_CACHE_DIR or the user's cache folder. The environment
    variable FXOFFLOAD_PROFILE names a file (or a shipped profile, such as ``h200``) to use instead.

    Args:
        device: default: the current CUDA device, else the CPU.
        refresh: measure in any case; measured times of operators are dropped too.

    Raises:
        ProfileError: a RuntimeError; there is no such device, or this is the middle of a step.
        OptionsError: a ValueError; FXOFFLOAD_PROFILE names no profile.
        UnsupportedError: a NotImplementedError; the device is neither CUDA nor CPU.
    """
    if not refresh:
        return profile_for(device, allow_measure=True)
    named = _named_profile(device)
    if named is not None:
        warn(f"refresh has no effect: {PROFILE_VARIABLE} is set; unset it to measure")
        return named
    target = resolve(device)
    identity = identify(target)
    op_times.forget(identity)
    return _measure_once(target, identity, refresh=True)


def profile_for(device: torch.device | str | None, allow_measure: bool) -> MachineProfile:
    """The profile to plan with: named by FXOFFLOAD_PROFILE, else kept on disk, else measured or shipped.

    ``allow_measure``: measure where none is kept. Without it, nothing is measured, and a shipped profile of a device of
    that name is used.

    Raises:
        ProfileError: a RuntimeError; there is no profile and none may be measured, or there is no such device.
        OptionsError, UnsupportedError: as ``profile``.
    """
    named = _named_profile(device)
    if named is not None:
        return named
    target = resolve(device)
    identity = identify(target)
    found = cache.load(identity)
    if found is not None:
        return found
    if allow_measure:
        return _measure_once(target, identity, refresh=False)
    found = shipped_for(identity.device_name)
    if found is not None:
        log.debug("the shipped profile of %s is used; fxoffload.profile() would measure", identity.device_name)
        return found
    raise ProfileError(
        f"expected a profile of {identity.device_name} (driver {identity.driver}, torch {identity.torch_version}), "
        f"found none; call fxoffload.profile({str(target)!r}) before the first step, which measures the machine once, "
        f"or set {PROFILE_VARIABLE} to a profile's file"
    )


def _named_profile(device: torch.device | str | None) -> MachineProfile | None:
    value = os.environ.get(PROFILE_VARIABLE, "").strip()
    if not value:
        return None
    try:
        named = load_profile(value)
    except OptionsError as error:
        raise OptionsError(f"{PROFILE_VARIABLE}: {error}") from None
    _warn_other_device(named, device)
    return named


def _warn_other_device(named: MachineProfile, device: torch.device | str | None) -> None:
    """Planning for another machine on purpose is fine; by mistake it makes every prediction wrong."""
    try:
        here = identify(resolve(device)).device_name
    except (ProfileError, NotImplementedError):
        return  # a device that is not here: the profile is all there is
    if here != named.device_name:
        _warn_once(f"{PROFILE_VARIABLE} names a profile of {named.device_name}; this device is {here}")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _measure_once(device: torch.device, identity: Identity, *, refresh: bool) -> MachineProfile:
    _refuse_in_a_step(device)
    # Ranks that start together would share the link and spoil each other's numbers: one measures, the others wait.
    with cache.locked(identity):
        found = None if refresh else cache.load(identity)
        if found is None:
            found = measure(device)
            cache.store(identity, found)
        return found


def _refuse_in_a_step(device: torch.device) -> None:
    reason = None
    if in_backward():
        reason = "a backward that is running"
    elif any(len(engine.save_order) for engine in engines()):
        reason = "a forward whose backward has not run"
    elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        reason = "a CUDA graph capture"
    if reason is not None:
        raise ProfileError(
            f"expected to measure between steps, found {reason}; call fxoffload.profile() before the first step"
        )
