"""Private torch APIs of Inductor: its cache and its configuration. Its compiler is in ``inductor_compiler``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch._inductor import config as inductor_config

from fxoffload.torch_private.fake_tensors import with_strides
from fxoffload.torch_private.symbolic_sizes import backed_sizes


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class or a module for a while.

    Needed by all versions of torch: it replaces private methods of Inductor.
    """
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def cached_with_sizes(inputs: Sequence[Any]) -> Iterator[None]:
    """Around one call of Inductor on ``inputs``, of which a segment may have sizes in its tensors alone: Inductor's
    cache guards them too.

    In a whole graph each symbol is an input, and the guards of an entry are those of inputs that are sizes. A lowering
    may also fix a size after the entry's key was made, as that of a convolution's backward does. Its symbol is gone
    when guards are saved: such a graph is left out.

    Needed by torch 2.11 to 2.14: ``GuardedCache._filter_backed_symints``, ``FxGraphCache._save_graph``.
    """
    sizes = backed_sizes(inputs)
    if not sizes:
        yield
        return
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.codecache import FxGraphCache, GuardedCache

    mine, save_now = threading.get_ident(), FxGraphCache._save_graph
    known, sizes_now = [n.node.expr for n in sizes], vars(GuardedCache)["_filter_backed_symints"]

    def sizes_of(of: Any, given: Sequence[Any]) -> list[Any]:
        return backed_sizes(given) if threading.get_ident() == mine else sizes_now.__func__(of, given)

    def save(*args: Any) -> None:
        if threading.get_ident() != mine:
            save_now(*args)
        elif [n.node.expr for n in sizes] == known:
            with compile_lock, replaced(GuardedCache, "_filter_backed_symints", classmethod(sizes_of)):
                save_now(*args)

    with (
        compile_lock,
        replaced(FxGraphCache, "_save_graph", staticmethod(save)),
        replaced(GuardedCache, "_filter_backed_symints", classmethod(sizes_of)),
    ):
        yield


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


def needs_kernels_while_compiling(settings: Mapping[str, Any] | None = None) -> bool:
    """Whether Inductor may run some of a graph's kernels while it compiles the graph.

    Needed by torch 2.11 to 2.14: settings of ``torch._inductor.config``.

    Args:
        settings: that take the place of today's.
    """
    found = settings or {}
    return any(found.get(name, getattr(inductor_config, name, None)) for name in _TIMES_KERNELS)


def compiled_layouts(compiled: object, values: Sequence[Any]) -> list[Any]:
    """``values``, fake results of a graph, laid out as the compiled graph returns them.

    Inductor keeps the order of a view's dimensions, not its strides. A product whose matrices it pads, for a
    vocabulary of 50,257 words, is a slice of a wider one.

    Needed by torch 2.11 to 2.14: ``CompiledFxGraph.output_strides``, ``ShapeEnv.deserialize_symexpr``.

    Args:
        compiled: by Inductor; of anything else nothing is known, and all values stay.
    """
    known = getattr(compiled, "output_strides", None)
    if not known or len(known) != len(values):
        return list(values)
    return [v if strides is None else with_strides(v, strides) for v, strides in zip(values, known, strict=True)]


@contextlib.contextmanager
def generators_left_alone() -> Iterator[None]:
    """Within it this thread compiles without reading or writing the state of random generators, which others may use.

    Inductor puts back the state that it found: other threads would draw the same numbers twice. It draws for one
    thing only where no kernels are timed, to find out whether larger matrices multiply faster: it does not do so here.

    Needed by torch 2.11 to 2.15: it replaces a function that Inductor calls.
    """
    from torch._dynamo import utils

    mine, everywhere = threading.get_ident(), utils.preserve_rng_state

    def preserve_rng_state() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if threading.get_ident() == mine else everywhere()

    with replaced(utils, "preserve_rng_state", preserve_rng_state), inductor_config.patch(shape_padding=False):
        yield
