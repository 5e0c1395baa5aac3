"""verl's offloading functions on ``fxoffload.phases``, and a patch that puts them into an installed verl.

    from fxoffload.integrations import verl as fxoffload_verl

    fxoffload_verl.patch()  # in every worker process, before the workers offload for the first time

The functions have verl's names and signatures, with these differences:

- Every object keeps its identity: parameters, state tensors and ``step``, which stays where it is.
- An offload is finished when it returns. A load returns while the copies still run, and readers wait for their own.
- Gradients and buffers go with the parameters. Calling twice does nothing.
- Parameters that live on the CPU anyway (``CPUOffloadPolicy``) are left alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxoffload.integrations.managers import manager_of_model, manager_of_optimizer, managers_away
from fxoffload.integrations.state_dict_aliases import aliases_of
from fxoffload.phases.phase import BUFFERS, GRADS, OPTIMIZER, PARAMS

log = logging.getLogger(__name__)

_MODEL = (PARAMS, BUFFERS, GRADS)


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Moves a model's parameters, buffers and gradients to the host.

    Tensors of a ``state_dict()`` that was taken before stay readable: each gets memory of its own when it is read.

    Args:
        model: FSDP1, FSDP2 or any other module.
        empty_cache: also gives freed memory back to the driver.
    """
    manager = manager_of_model(model)
    aliases = aliases_of(model)
    manager.offload(*_MODEL)
    aliases.leave(manager)
    if empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Moves a model back to where it was. Returns at once; every layer waits for its own parameters."""
    aliases = aliases_of(model)
    aliases.warn_of_writes()
    handle = manager_of_model(model).onload(*_MODEL, wait=False)
    if aliases.any_away():
        handle.wait()  # no reader would wait for them one by one
        aliases.come_back()


def offload_fsdp_optimizer(optimizer: Any) -> None:
    """Moves an optimizer's state to the host. An optimizer without state is left as it is.

    Args:
        optimizer: a torch optimizer, or verl's and VeOmni's MultiOptimizer.
    """
    manager_of_optimizer(optimizer).offload(OPTIMIZER)


def load_fsdp_optimizer(optimizer: Any, device_id: Any) -> None:
    """Moves an optimizer's state back. Returns at once; ``optimizer.step()`` waits for copies that still run.

    Args:
        optimizer: as above.
        device_id: taken as verl passes it, and not needed: the state returns to the device that it came from.
    """
    manager_of_optimizer(optimizer).onload(OPTIMIZER, wait=False)


# The same for VeOmni's engine.
offload_veomni_model_to_cpu = offload_fsdp_model_to_cpu
load_veomni_model_to_gpu = load_fsdp_model_to_gpu
offload_veomni_optimizer = offload_fsdp_optimizer
load_veomni_optimizer = load_fsdp_optimizer

# Where verl defines the functions that are replaced. VeOmni's engine imports veomni, which need not be installed.
_FSDP_HOME = "verl.utils.fsdp_utils"
_VEOMNI_HOME = "verl.workers.engine.veomni.utils"
_FSDP: tuple[str, ...] = (
    "offload_fsdp_model_to_cpu",
    "load_fsdp_model_to_gpu",
    "offload_fsdp_optimizer",
    "load_fsdp_optimizer",
)
_VEOMNI = tuple(name.replace("fsdp", "veomni") for name in _FSDP)

# Replacements that are in place now -> the function of verl that each stands for.
_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}


def patch() -> None:
    """Puts the functions of this module into verl, also into modules that have imported them by name. Twice is once.

    Modules that are imported later find ours. VeOmni's four are left out where its engine cannot be imported.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: this verl does not have the functions.
    """
    if _replaced:
        return
    homes = [(_home(_FSDP_HOME), _FSDP)]
    if (veomni := _veomni_home()) is not None:
        homes.append((veomni, _VEOMNI))
    for home, names in homes:
        missing = [name for name in names if not callable(getattr(home, name, None))]
        if missing:
            raise RuntimeError(
                f"expected {', '.join(missing)} in {home.__name__}, found no such functions: this verl moves its "
                "models in another way. Call fxoffload.integrations.verl's functions, or a PhaseManager of "
                "fxoffload.phases, from your worker instead of patch()"
            )
    for home, names in homes:
        for name in names:
            _replaced[_stand_in(globals()[name])] = getattr(home, name)
    _exchange({id(theirs): stand_in for stand_in, theirs in _replaced.items()})


def unpatch() -> None:
    """Puts verl's own functions back wherever ours are. Nothing happens without a ``patch()``.

    Raises:
        RuntimeError: something is still offloaded; verl's functions could not load it.
    """
    if not _replaced:
        return
    if away := managers_away():
        raise RuntimeError(
            f"expected everything to be loaded before unpatch(), found {len(away)} models or optimizers on the host "
            f"({'; '.join(manager.state for manager in away[:3])}): load them with load_fsdp_model_to_gpu(model) and "
            "load_fsdp_optimizer(optimizer, device_id) first"
        )
    _exchange({id(stand_in): theirs for stand_in, theirs in _replaced.items()})
    _replaced.clear()


def _home(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"patch() needs an installed verl: {name} could not be imported ({error}); install verl, or call the "
            "functions of fxoffload.integrations.verl yourself"
        ) from error


def _veomni_home() -> ModuleType | None:
    try:
        return importlib.import_module(_VEOMNI_HOME)
    except ImportError as error:
        if _is_installed("veomni"):
            log.warning("patch() leaves out VeOmni's functions: %s could not be imported (%s)", _VEOMNI_HOME, error)
        return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is in sys.modules, and does not say where it comes from
        return False


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own, so that ``unpatch`` does not take ours from modules that imported it from here."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _exchange(new_for: dict[int, Callable[..., Any]]) -> None:
    """Binds every name of every imported module anew that is bound to a function with one of these ids."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or names is globals():
            continue
        for name, value in list(names.items()):
            if id(value) in new_for:
                names[name] = new_for[id(value)]
