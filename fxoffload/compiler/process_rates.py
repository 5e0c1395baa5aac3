"""The rates that plans of this process are made with."""

from __future__ import annotations

import os

import torch

from fxoffload.errors import ProfileError
from fxoffload.machine.lookup import profile_for
from fxoffload.machine.profile import MachineProfile
from fxoffload.machine.shelf import load_profile
from fxoffload.planner.rates import ProfileRates
from fxoffload.processes import processes_on_this_machine
from fxoffload.torch_private.fsdp2 import fsdp2_is_used

# The machine that a rehearsal on the CPU rehearses for, unless told otherwise.
REHEARSED = "h200"
# Rate of a link during collectives, whose streams wait for the device, as a part of its rate alone. Measured: 0.89 to
# 0.94, with one H200 and with two ([Note: Streams that wait] in ``fxoffload.runtime.copies.host_lead``). Measured steps
# then replace it.
WITH_COLLECTIVES = 0.9


def rates_for(profile: str | None, device: torch.device) -> ProfileRates:
    """Rates to plan with: of ``profile`` (a shipped name or a file), else of ``device``.

    Nothing is measured in the middle of a step: a CUDA device of which there is no profile yet is measured only where
    that is possible now.

    Raises:
        OptionsError, ProfileError: there is no such profile, or none at all.
    """
    found = ProfileRates(_profile_for(profile, device))
    return found.reaching(WITH_COLLECTIVES, WITH_COLLECTIVES) if with_collectives() else found


def with_collectives() -> bool:
    """Whether steps of this process may have streams for communication next to the compute stream."""
    return processes_on_this_machine() > 1 or fsdp2_is_used()


def _profile_for(profile: str | None, device: torch.device) -> MachineProfile:
    if profile is not None:
        return load_profile(profile)
    if device.type == "cpu" and not os.environ.get("FXOFFLOAD_PROFILE", "").strip():
        return load_profile(REHEARSED)
    try:
        return profile_for(device, allow_measure=False)
    except ProfileError:
        return profile_for(device, allow_measure=True)
