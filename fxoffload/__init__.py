"""fxoffload: train in less GPU memory.

``torch.compile(model, backend="fxoffload")`` moves saved activations to pinned host memory while the GPU computes.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fxoffload import torch_private as torch_private  # before anything that an older torch lacks
from fxoffload._register import register_backend as _register_backend

if TYPE_CHECKING:
    from fxoffload.compile_model import compile as compile
    from fxoffload.compiler.plan_ahead import plan as plan
    from fxoffload.counters import Stats as Stats
    from fxoffload.environment import PIECES as PIECES
    from fxoffload.errors import BudgetError as BudgetError
    from fxoffload.errors import FxOffloadError as FxOffloadError
    from fxoffload.errors import ModifiedInputError as ModifiedInputError
    from fxoffload.errors import NoPlanError as NoPlanError
    from fxoffload.errors import OptionsError as OptionsError
    from fxoffload.errors import PassError as PassError
    from fxoffload.errors import SegmentCompileError as SegmentCompileError
    from fxoffload.errors import TokenLostError as TokenLostError
    from fxoffload.errors import UnsupportedError as UnsupportedError
    from fxoffload.errors import VerificationError as VerificationError
    from fxoffload.machine.lookup import profile as profile
    from fxoffload.memory_budget import activation_budget as activation_budget
    from fxoffload.options import Options as Options
    from fxoffload.plan_report.explain import explain as explain
    from fxoffload.plan_step import profile_step as profile_step
    from fxoffload.planner.plan import Plan as Plan
    from fxoffload.planner.plan_registry import last_plan as last_plan
    from fxoffload.planner.plan_registry import plans as plans
    from fxoffload.ranks import check_ranks as check_ranks
    from fxoffload.report import graphs as graphs
    from fxoffload.report import metrics as metrics
    from fxoffload.report import override_policy as override_policy
    from fxoffload.report import release_host_memory as release_host_memory
    from fxoffload.report import reserve_host_memory as reserve_host_memory
    from fxoffload.report import reset_stats as reset_stats
    from fxoffload.report import stats as stats

__version__ = "0.1.0"

# Imported when it is asked for: torch._dynamo and Inductor take seconds, and the command line's help needs neither.
_LATE = {
    "compile": "fxoffload.compile_model",
    "plan": "fxoffload.compiler.plan_ahead",
    "Stats": "fxoffload.counters",
    "PIECES": "fxoffload.environment",
    "BudgetError": "fxoffload.errors",
    "FxOffloadError": "fxoffload.errors",
    "ModifiedInputError": "fxoffload.errors",
    "NoPlanError": "fxoffload.errors",
    "OptionsError": "fxoffload.errors",
    "PassError": "fxoffload.errors",
    "SegmentCompileError": "fxoffload.errors",
    "TokenLostError": "fxoffload.errors",
    "UnsupportedError": "fxoffload.errors",
    "VerificationError": "fxoffload.errors",
    "profile": "fxoffload.machine.lookup",
    "activation_budget": "fxoffload.memory_budget",
    "Options": "fxoffload.options",
    "explain": "fxoffload.plan_report.explain",
    "profile_step": "fxoffload.plan_step",
    "Plan": "fxoffload.planner.plan",
    "last_plan": "fxoffload.planner.plan_registry",
    "plans": "fxoffload.planner.plan_registry",
    "check_ranks": "fxoffload.ranks",
    "graphs": "fxoffload.report",
    "metrics": "fxoffload.report",
    "override_policy": "fxoffload.report",
    "release_host_memory": "fxoffload.report",
    "reserve_host_memory": "fxoffload.report",
    "reset_stats": "fxoffload.report",
    "stats": "fxoffload.report",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        found = getattr(importlib.import_module(_LATE[name]), name)
        globals()[name] = found
        return found
    full = f"{__name__}.{name}"
    if not name.startswith("_") and importlib.util.find_spec(full) is not None:
        return importlib.import_module(full)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


_register_backend()
