"""fxoffload: train in less GPU memory.

``torch.compile(model, backend="fxoffload")`` moves saved activations to pinned host memory behind the compute.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fxoffload import _check_torch as _check_torch  # before what an older torch lacks
from fxoffload._register import register_backend as _register_backend
from fxoffload.environment import PIECES as PIECES
from fxoffload.errors import BudgetError as BudgetError
from fxoffload.errors import FxOffloadError as FxOffloadError
from fxoffload.errors import ModifiedInputError as ModifiedInputError
from fxoffload.errors import OptionsError as OptionsError
from fxoffload.errors import PassError as PassError
from fxoffload.errors import SegmentCompileError as SegmentCompileError
from fxoffload.errors import TokenLostError as TokenLostError
from fxoffload.errors import UnsupportedError as UnsupportedError
from fxoffload.errors import VerificationError as VerificationError
from fxoffload.machine.lookup import profile as profile
from fxoffload.options import Options as Options
from fxoffload.plan_step import profile_step as profile_step
from fxoffload.planner.plan import Plan as Plan
from fxoffload.planner.shown import plans as plans
from fxoffload.ranks import check_ranks as check_ranks
from fxoffload.report import graphs as graphs
from fxoffload.report import override_policy as override_policy
from fxoffload.report import release_host_memory as release_host_memory
from fxoffload.report import reserve_host_memory as reserve_host_memory
from fxoffload.report import reset_stats as reset_stats
from fxoffload.report import stats as stats
from fxoffload.stats import Stats as Stats

__version__ = "0.1.0"

# What needs Inductor, which takes seconds to import, is imported when it is asked for.
_LATE = {"plan": "fxoffload.compiler.plan_ahead", "activation_budget": "fxoffload.memory_budget"}

if TYPE_CHECKING:
    from fxoffload.compiler.plan_ahead import plan as plan
    from fxoffload.memory_budget import activation_budget as activation_budget


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register_backend()
