"""What a machine can do: copy, matmul and memory rates, measured once and kept on disk, or shipped.

``fxoffload.profile()`` is the user's entry. It is not repeated here: ``fxoffload.machine.profile`` is the module.
"""

from __future__ import annotations

from fxoffload.machine.curve import CopyCurve as CopyCurve
from fxoffload.machine.lookup import profile_for as profile_for
from fxoffload.machine.profile import Direction as Direction
from fxoffload.machine.profile import MachineProfile as MachineProfile
from fxoffload.machine.rates import MachineRates as MachineRates
from fxoffload.machine.shelf import load_profile as load_profile
from fxoffload.machine.shelf import shipped_names as shipped_names
