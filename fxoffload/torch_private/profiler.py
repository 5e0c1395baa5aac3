"""Private torch APIs that show fxoffload's work in profiles and in TORCH_TRACE."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._logging._internal import trace_structured as trace_structured


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of that name in profiles.

    Stands for ``torch.profiler.record_function``, which takes the host 8 us without a profiler. This one, which
    Inductor's own code uses, takes 0.3.

    Needed by torch 2.11 to 2.14: ``torch._C._profiler._RecordFunctionFast``.
    """
    return _RECORD_FUNCTION(name)


_PROFILER: Any = getattr(torch._C, "_profiler", None)
_RECORD_FUNCTION: Any = getattr(_PROFILER, "_RecordFunctionFast", torch.profiler.record_function)
