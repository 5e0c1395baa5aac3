"""Private torch APIs of the context that a graph is compiled in: kept, entered later, or left."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config

from fxoffload.torch_private.inductor import generators_left_alone, needs_kernels_while_compiling
from fxoffload.torch_private.tensor_subclasses import DisableTorchFunction


@contextlib.contextmanager
def segment_tracing_context(donated: Sequence[int]) -> Iterator[None]:
    """Let ``compile_fx_inner`` run on one segment inside AOTAutograd's tracing context.

    It asserts that ``output_strides`` is unset, and reads ``fw_metadata.bw_donated_idxs`` as indices of the segment's
    own inputs. Both are restored afterwards.

    Needed by torch 2.11 to 2.14.
    """
    context = TracingContext.try_get()
    # A custom partitioner in the configuration would keep segments out of Inductor's cache.
    with inductor_config.patch(custom_partitioner_fn=None):
        if context is None:
            yield
            return
        strides, context.output_strides = context.output_strides, None
        metadata = context.fw_metadata
        before = metadata.bw_donated_idxs if metadata is not None else None
        if metadata is not None:
            metadata.bw_donated_idxs = list(donated)
        try:
            yield
        finally:
            context.output_strides = strides
            if metadata is not None:
                metadata.bw_donated_idxs = before


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The context that a graph is compiled in, kept so that more can be compiled in it later.

    Stands for ``TracingContext`` with ``ViewAndMutationMeta``, ``CompileContext``, and the configurations of Inductor
    and functorch (a call of the backend patches both).

    Attributes:
        metadata: a copy: AOTAutograd's own is read when the compiled graph runs.
        inductor: settings that were not the defaults, without a custom partitioner. Their values are the user's own
            objects: not every custom pass can be copied.
    """

    fake_mode: Any
    metadata: Any
    compile_context: Any
    inductor: Mapping[str, Any]
    functorch: Mapping[str, Any]

    @staticmethod
    def now() -> Surroundings | None:
        """While AOTAutograd compiles a forward or a backward graph; None outside."""
        import torch._functorch.config as functorch_config

        context = TracingContext.try_get()
        if context is None or context.fw_metadata is None or context.fake_mode is None:
            return None
        inductor, functorch = _settings(inductor_config), _settings(functorch_config)
        inductor.pop("custom_partitioner_fn", None)  # one of ours holds the graphs
        metadata = copy.copy(context.fw_metadata)
        return Surroundings(context.fake_mode, metadata, CompileContext.try_get(), inductor, functorch)

    def may_compile_during_steps(self) -> bool:
        """Whether a thread may compile while others train: no kernels are timed."""
        return not needs_kernels_while_compiling(self.inductor)

    def mutates_inputs(self) -> bool:
        """Whether the graph writes to some input, or has effects that are ordered by tokens."""
        written = any(i.mutates_data or i.mutates_metadata for i in self.metadata.input_info)
        return written or bool(self.metadata.tokens)

    @contextlib.contextmanager
    def restored(self, *, compiles: bool, during_steps: bool = False) -> Iterator[None]:
        """Within it one may partition, and compile if so said, on any thread, whatever that thread is doing.

        Code that is compiled already is left as it is.

        Up to torch 2.11 a patched setting is another one in all threads. A partitioning may be made while a step runs.
        It therefore patches only settings that the partitioner reads and that have changed since: mostly none.

        Nothing new may be assumed of sizes that vary: see ``no_new_guards``.

        To compile may draw random numbers (kernels are tuned on them): the state of the generators is put back. That
        would disturb a thread that draws meanwhile. So compile on the only thread that draws, or ``during_steps``,
        where no numbers are drawn; see ``may_compile_during_steps``.
        """
        import torch._functorch.config as functorch_config
        from torch._dynamo.convert_frame import compile_lock
        from torch._dynamo.utils import preserve_rng_state
        from torch.utils._python_dispatch import _disable_current_modes

        from fxoffload.torch_private.size_guards import no_new_guards

        context = TracingContext(self.fake_mode)
        context.fw_metadata = copy.copy(self.metadata)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compile_lock)
            stack.enter_context(_disable_current_modes())
            if compiles and not during_steps:
                stack.enter_context(preserve_rng_state())
            stack.enter_context(torch._C._DisableAutocast())  # type: ignore[attr-defined]
            stack.enter_context(torch.no_grad())
            for config, then in ((inductor_config, self.inductor), (functorch_config, self.functorch)):
                changed = _changed(then, config)
                if not compiles:
                    changed = {k: v for k, v in changed.items() if k in _read_by_partitioner()}
                if changed:
                    stack.enter_context(config.patch(changed))
            if during_steps:
                stack.enter_context(generators_left_alone())
            stack.enter_context(tracing(context))
            stack.enter_context(compile_context(self.compile_context))
            stack.enter_context(no_new_guards(self.fake_mode.shape_env))
            yield


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within it tensors are real and code runs as in a step, though this thread is compiling. Random generators (of the
    CPU and the current CUDA device) are put back, as they are by a compilation.

    Stands for ``_disable_current_modes`` (no FakeTensorMode), ``no_python_dispatcher``, ``_DisableAutocast`` and
    ``tracing(None)``.

    Needed by torch 2.11 to 2.14.
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch._dynamo.utils import preserve_rng_state
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_python_dispatcher())
        stack.enter_context(torch._C._DisableAutocast())  # type: ignore[attr-defined]
        stack.enter_context(DisableTorchFunction())  # a default device is a function mode
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(None))
        stack.enter_context(preserve_rng_state())
        yield


def _settings(config: Any) -> dict[str, Any]:
    """The settings that are not the defaults, by reference.

    Stands for ``ConfigModule._config`` and ``ConfigModule._is_default``.
    """
    names = [k for k, entry in config._config.items() if entry.alias is None and not config._is_default(k)]
    return {k: getattr(config, k) for k in names}


def _changed(then: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The settings that are other ones now, as they were then."""
    now = _settings(config)
    defaults = {k: config._config[k].default for k in now.keys() - then.keys()}
    before = {**defaults, **then}
    current = {k: now[k] if k in now else config._config[k].default for k in before}
    return {k: v for k, v in before.items() if current[k] is not v and current[k] != v}


@functools.cache
def _read_by_partitioner() -> frozenset[str]:
    """Settings of Inductor and functorch by whose names ``torch._functorch.partitioners`` asks; they change with every
    release."""
    from torch._functorch import partitioners

    return frozenset(re.findall(r"config\.(\w+(?:\.\w+)*)", inspect.getsource(partitioners)))
