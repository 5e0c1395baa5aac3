"""verl's own functions for phases, as its FSDP workers call them: of a checkout, or as installed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType

from benchmarks.activations.load import load_module
from benchmarks.activations.verl_packages import bare_packages
from benchmarks.rl.strategy import PARAMS, Strategy

# What fsdp_utils imports from verl.utils.model, which needs more packages; neither is called here.
_OF_MODEL = {"check_exclude_modules": None, "check_target_modules": None}


class VerlCheckout(Strategy):
    """``offload_fsdp_model_to_cpu``, ``load_fsdp_model_to_gpu``, and the same of the optimizer.

    Args:
        path: a checkout of verl; "": the installed package.

    Raises:
        NotAvailable: neither is there.
    """

    def __init__(self, path: str) -> None:
        self._verl = _load(path)
        self._away: set[str] = set()

    def begin_offload(self, *groups: str) -> None:
        wanted = set(groups) - self._away
        self._away |= wanted
        if wanted & set(PARAMS):
            self.job.reshard()
            self._verl.offload_fsdp_model_to_cpu(self.job.model, empty_cache=False)  # the harness does, for everybody
        if "optimizer" in wanted:
            self._verl.offload_fsdp_optimizer(self.job.optimizer)

    def begin_onload(self, *groups: str) -> None:
        wanted = set(groups) & self._away
        self._away -= wanted
        if wanted & set(PARAMS):
            self._verl.load_fsdp_model_to_gpu(self.job.model)
        if "optimizer" in wanted:
            self._verl.load_fsdp_optimizer(self.job.optimizer, self.job.device)


def _load(path: str) -> ModuleType:
    packages = bare_packages(Path(path), {"model": _OF_MODEL}) if path else contextlib.nullcontext()
    with packages:
        return load_module("verl", "utils.fsdp_utils", path)
