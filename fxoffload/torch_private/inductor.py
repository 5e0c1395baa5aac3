"""Private torch APIs of Inductor: its compiler, its cache and its configuration."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch._inductor import config as inductor_config

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile as AsyncCompile
    from torch._inductor.codecache import CodeCacheFuture as CodeCacheFuture
    from torch._inductor.codecache import FxGraphCache as FxGraphCache
    from torch._inductor.compile_fx import compile_fx as compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
    from torch._inductor.triton_bundler import TritonBundler as TritonBundler

# Imported when they are asked for: `import fxoffload` reads this file, and Inductor takes 0.7 s of CPU time to import.
_OF_INDUCTOR = {
    "AsyncCompile": "async_compile",
    "CodeCacheFuture": "codecache",
    "FxGraphCache": "codecache",
    "compile_fx": "compile_fx",
    "compile_fx_inner": "compile_fx",
    "CustomPartitionerFn": "custom_graph_pass",
    "TritonBundler": "triton_bundler",
}


def __getattr__(name: str) -> Any:
    if name in _OF_INDUCTOR:
        return getattr(importlib.import_module(f"torch._inductor.{_OF_INDUCTOR[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextlib.contextmanager
def replaced(owner: type, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class for a while.

    Needed by all versions of torch: it replaces private methods of Inductor.
    """
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# Inductor settings under which it runs kernels before the code that holds them is finished: they are timed.
_TIMES_KERNELS = (
    "max_autotune",
    "max_autotune_pointwise",
    "max_autotune_gemm",
    "benchmark_kernel",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "triton.multi_kernel",
    "triton.autotune_at_compile_time",
    "cpp_wrapper",
)


def needs_kernels_while_compiling() -> bool:
    """Whether Inductor may run some of a graph's kernels while it compiles the graph.

    Needed by torch 2.11 to 2.14: settings of ``torch._inductor.config``.
    """
    return any(getattr(inductor_config, name, None) for name in _TIMES_KERNELS)
