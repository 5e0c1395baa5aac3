"""Private torch APIs for what needs no compiler; ``fxoffload._torch_compat`` has the others and imports Inductor."""

from __future__ import annotations

import gc
import sys

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

# -- phases: who compiled a module -------------------------------------------------------------------------------------


def optimized_modules_of(module: nn.Module) -> list[nn.Module]:
    """The modules that ``torch.compile(module)`` returned and that are still alive; ``module`` itself may be one."""
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
