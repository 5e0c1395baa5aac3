"""Private torch APIs of modules and functions that were compiled. Imports no Dynamo."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

from torch import nn


def is_optimized_module(module: nn.Module) -> bool:
    """Whether ``torch.compile()`` returned it.

    Needed by torch 2.11 to 2.14: ``torch._dynamo.eval_frame.OptimizedModule``.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def optimized_modules_of(module: nn.Module) -> list[nn.Module]:
    """The modules that ``torch.compile(module)`` returned and that are still alive; ``module`` itself may be one.

    Needed by torch 2.11 to 2.14: ``OptimizedModule._orig_mod``.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    kind = dynamo.OptimizedModule
    if isinstance(module, kind):
        return [module]
    children = [found for found in gc.get_referrers(module) if isinstance(found, dict) and "_orig_mod" in found]
    owners = [owner for one in children for owner in gc.get_referrers(one)]
    # The dict may be the module's own __dict__, or the _modules in it.
    owners += [o for d in owners if isinstance(d, dict) and d.get("_modules") in children for o in gc.get_referrers(d)]
    return list({id(owner): owner for owner in owners if isinstance(owner, kind)}.values())


def num_graphs_compiled() -> tuple[int, int] | None:
    """Changes whenever Dynamo compiles something; None if it was never imported.

    A reset of Dynamo sets its count of code objects back to zero, but not that of the frames that it looked at.

    Needed by torch 2.11 to 2.14: ``convert_frame.FRAME_COUNTER`` and ``torch._dynamo.utils.counters``.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return None if dynamo is None else (dynamo.FRAME_COUNTER, dynamo.counters["frames"]["total"])


def compiled_functions() -> list[tuple[Any, list[Any]]]:
    """(the function itself, the hooks that Dynamo calls before each of its calls) of everything compiled and alive.

    Needed by torch 2.11 to 2.14: ``_torchdynamo_orig_callable`` and ``OptimizeContext.enter_exit_hooks``.
    """
    # Dynamo's wrapper closes over its context as `self`. Asked first: a function makes its dict when that is read, and
    # there are hundreds of thousands.
    wrappers = [
        one
        for one in gc.get_objects()
        if type(one) is types.FunctionType
        and "self" in one.__code__.co_freevars
        and "_torchdynamo_orig_callable" in one.__dict__
    ]
    found = []
    for one in wrappers:
        cells = dict(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True))
        hooks = getattr(cells["self"].cell_contents, "enter_exit_hooks", None)
        if isinstance(hooks, list):
            found.append((one.__dict__["_torchdynamo_orig_callable"], hooks))
    return found
