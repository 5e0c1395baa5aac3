"""Private torch APIs of the compiler.

Supported: torch 2.11 and newer. fxoffload uses private names only in the files ``_torch_*``: here, in ``_torch_sizes``
(sizes and fake tensors), ``_torch_dynamo`` (which calls run compiled), ``_torch_private`` (things that need no
compiler) and smaller ones. Each function says which name it stands for, so that a new torch release is checked by
reading these files.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch._C import _autograd  # type: ignore[attr-defined]
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch._logging._internal import trace_structured as trace_structured
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

from fxoffload._torch_private import in_backward as in_backward

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


# functorch.config switches that hold while one of our graphs is compiled:
#  - Plain callables cannot go into AOTAutograd's cache. (Inductor's own cache still works per segment.)
#  - The backward is compiled together with the forward. So a failing pass raises at compile time, and the host arena is
#    pinned while the rest compiles, not inside the first step.
AOT_CONFIG: dict[str, Any] = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}


def aot_config_patch() -> contextlib.AbstractContextManager[Any]:
    """Patch ``torch._functorch.config`` for the duration of one compilation."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(AOT_CONFIG)


def default_partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's min-cut partitioner, as Inductor calls it."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


# By these settings of functorch the partitioner chooses by itself; at these values it only follows tags, or chooses as
# plans expect.
_TAGS_DECIDE: dict[str, Any] = {
    "activation_memory_budget": 1.0,
    "aggressive_recomputation": False,
    "ban_recompute_long_fusible_chains": True,
    "ban_recompute_materialized_backward": True,
    "ban_recompute_not_in_allowlist": True,
    "ban_recompute_reductions": True,
    "ban_recompute_used_far_apart": True,
    "enable_activation_offloading": False,
    "recompute_views": False,
    "_sync_decision_cross_ranks": False,  # collectives, which the ranks' partitionings would meet at other times
}
# Keys of a node's ``meta``, and of ``meta["custom"]``, that carry a memory budget (``MemoryBudgetMode`` and
# ``torch.autograd.graph.region_activation_memory_budget``).
_BUDGET_OF_NODE, _BUDGET_OF_REGION = "memory_budget", "_region_activation_memory_budget"


@contextlib.contextmanager
def tags_decide() -> Iterator[None]:
    """Within it the partitioner chooses nothing that tags have decided, whatever the user has set."""
    import torch._functorch.config as functorch_config

    # Only settings that differ are patched: up to torch 2.11 a patch holds in all threads.
    changed = {k: v for k, v in _TAGS_DECIDE.items() if k in _own_choices()}
    with functorch_config.patch(changed) if changed else contextlib.nullcontext():
        yield


def take_partitioner_choices(joint: fx.GraphModule) -> dict[str, Any]:
    """Reasons for the partitioner to choose by itself, by name: settings, and annotations, which are removed."""
    found = _own_choices()
    for module in joint.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _BUDGET_OF_NODE in node.meta:
                found["memory_budget of nodes"] = node.meta.pop(_BUDGET_OF_NODE)
            custom = node.meta.get("custom")
            if isinstance(custom, dict) and _BUDGET_OF_REGION in custom:
                found["region_activation_memory_budget"] = custom[_BUDGET_OF_REGION]
                # A new one: nodes share theirs.
                node.meta["custom"] = {k: v for k, v in custom.items() if k != _BUDGET_OF_REGION}
    return found


def _own_choices() -> dict[str, Any]:
    import torch._functorch.config as functorch_config

    now = {k: getattr(functorch_config, k) for k in _TAGS_DECIDE if hasattr(functorch_config, k)}
    return {k: v for k, v in now.items() if v != _TAGS_DECIDE[k]}


def copy_of(graph: fx.Graph) -> fx.Graph:
    """``copy.deepcopy(graph)``, but for the codegen: to copy its tree specs takes time and warns of their class."""
    copied, values = fx.Graph(tracer_cls=graph._tracer_cls), {}
    result = copied.graph_copy(graph, values)
    copied._codegen = copy.copy(graph._codegen)
    before = graph.output_node()
    copied.output(result, before.type).meta = dict(before.meta)
    return copied


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is generated at its first call.

    Graphs that are only looked at, or compiled, never need it. torch makes such modules itself, but only while it
    compiles, and plans are also made at other times.
    """
    return _LazyGraphModule(root, graph)


def put_opaque_values_last(forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> None:
    """Put the values that two graphs from the partitioner save in the order that AOTAutograd's runtime expects.

    That is tensors, then opaque objects (the DeviceMesh of a DTensor), then sizes.

    torch 2.13's ``functionalize_rng_ops`` puts the random states of recomputed ops after opaque objects. The forward
    then fails with "expected all tensors_saved_with_vc_check to be Tensors".
    """
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    saved = range(num_user_outputs, len(values))
    order = [*range(num_user_outputs), *sorted(saved, key=lambda i: _saved_kind(values[i]))]
    if order == sorted(order):
        return
    output.args = (tuple(values[i] for i in order),)
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)) and len(described) == len(order):
        output.meta["desc"] = [described[i] for i in order]
    inputs = backward.graph.find_nodes(op="placeholder")
    # The backward takes sizes first.
    moved = sorted(inputs[: len(saved)], key=lambda n: (_saved_kind(n) + 1) % 3)
    for node in moved:
        inputs[len(saved)].prepend(node)
    forward.recompile()
    backward.recompile()


def _saved_kind(value: Any) -> int:
    """0: a tensor, 1: an opaque object, 2: a size."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(found, torch.Tensor):
        return 0
    return 2 if isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool)) else 1


def frame_id() -> int | None:
    """Which code object Dynamo compiles at the moment; the same for all its recompilations. None outside Dynamo."""
    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks (user's, non-reentrant checkpoint's, ``save_on_cpu``) would see what we save now."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks_module() -> str:
    """The module that defines the saved-tensor hooks which would see what we save now; "" where that is unknown."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else str(getattr(hooks[0], "__module__", None) or "")


def compiled_autograd_active() -> bool:
    """Whether compiled autograd is on: it reads saved tensors itself, so none of them may be a token."""
    from torch._dynamo import compiled_autograd, config

    return bool(
        compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
        or config.compiled_autograd
    )


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True`` or ``create_graph=True``."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def take_donated_placeholders() -> set[int]:
    """AOTAutograd's list of backward inputs that may be reused in place, emptied for AOTAutograd itself.

    The list object is shared by all metadata of the graph; emptied, AOTAutograd no longer refuses ``retain_graph=True``
    and Inductor no longer applies whole-graph indices to a segment. Donation is then decided per segment by us.
    """
    context = TracingContext.try_get()
    idxs = getattr(context.fw_metadata, "bw_donated_idxs", None) if context and context.fw_metadata else None
    if not idxs:
        return set()
    taken = set(idxs)
    idxs.clear()
    return taken


def calls_graph(node: fx.Node) -> bool:
    """Whether ``node`` calls a graph that Inductor lowers as it does a whole one: a nested region, a branch, a loop.

    It then reads ``bw_donated_idxs`` of the graph around as positions of that graph's inputs (torch 2.11 to 2.13).
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name().startswith("flex_attention"):
        return False
    fetched = [value for value in node.all_input_nodes if value.op == "get_attr"]
    return any(not isinstance(value.meta.get("val"), torch.Tensor) for value in fetched)


@contextlib.contextmanager
def segment_tracing_context(donated: Sequence[int]) -> Iterator[None]:
    """Let ``compile_fx_inner`` run on one segment inside AOTAutograd's tracing context.

    It asserts that ``output_strides`` is unset, and reads ``fw_metadata.bw_donated_idxs`` as indices of the segment's
    own inputs. Both are restored afterwards.
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
        functorch: the same of functorch.
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

    def mutates_inputs(self) -> bool:
        """Whether the graph writes to some input, or has effects that are ordered by tokens."""
        written = any(i.mutates_data or i.mutates_metadata for i in self.metadata.input_info)
        return written or bool(self.metadata.tokens)

    @contextlib.contextmanager
    def again(self, *, compiles: bool) -> Iterator[None]:
        """Within it one may partition, and compile if so said, on any thread, whatever that thread is doing.

        Code that is compiled already is left as it is.

        Up to torch 2.11 a patched setting is another one in all threads. A partitioning may be made while a step runs.
        It therefore patches only settings that the partitioner reads and that have changed since: mostly none.

        Nothing new may be assumed of sizes that vary: see ``no_new_guards``.

        To compile may draw random numbers (kernels are tuned on them): the state of the generators is put back. That
        would disturb a thread that draws meanwhile, so compile only on a thread that is the only one to draw.
        """
        import torch._functorch.config as functorch_config
        from torch._dynamo.convert_frame import compile_lock
        from torch._dynamo.utils import preserve_rng_state
        from torch.utils._python_dispatch import _disable_current_modes

        from fxoffload._torch_sizes import no_new_guards

        context = TracingContext(self.fake_mode)
        context.fw_metadata = copy.copy(self.metadata)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compile_lock)
            stack.enter_context(_disable_current_modes())
            stack.enter_context(preserve_rng_state() if compiles else contextlib.nullcontext())
            stack.enter_context(torch._C._DisableAutocast())  # type: ignore[attr-defined]
            stack.enter_context(torch.no_grad())
            for config, then in ((inductor_config, self.inductor), (functorch_config, self.functorch)):
                changed = _changed(then, config)
                if not compiles:
                    changed = {k: v for k, v in changed.items() if k in _read_by_partitioner()}
                if changed:
                    stack.enter_context(config.patch(changed))
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
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch._dynamo.utils import preserve_rng_state
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_python_dispatcher())
        stack.enter_context(torch._C._DisableAutocast())  # type: ignore[attr-defined]
        stack.enter_context(torch._C.DisableTorchFunction())  # a default device is a function mode
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


@contextlib.contextmanager
def replaced(owner: type, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class for a while."""
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
    """Whether Inductor may run some of a graph's kernels while it compiles the graph."""
    return any(getattr(inductor_config, name, None) for name in _TIMES_KERNELS)


def boxed_eager(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run ``gm`` op by op; the callable takes one list, which it clears."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Sequence[Any]:
        return gm(args)

    return boxed(run)


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``fn`` as following AOTAutograd's boxed convention (one list argument, cleared by the callee)."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the memory of ``tensor`` was written to in place, views included; None for an inference tensor.

    Stands for ``Tensor._version``.
    """
    return None if tensor.is_inference() else tensor._version


class StorageRef:
    """A tensor's storage, not held.

    Attributes:
        key: tells it from all storages that live as long as this reference.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._weak = StorageWeakRef(storage)
        self.key: int = storage._cdata

    def is_expired(self) -> bool:
        """Whether the storage is gone: it has no reference left."""
        return bool(self._weak.expired())

    def nbytes(self) -> int:
        """Its bytes now: none where it is gone, or where it was emptied."""
        storage = self._storage()
        return 0 if storage is None else storage.nbytes()

    def address(self) -> int:
        """Of its memory, now; 0 where it has none."""
        storage = self._storage()
        return 0 if storage is None else storage.data_ptr()

    def _storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)  # type: ignore[attr-defined]

    def is_alive(self, but_for: int) -> bool:
        """Whether more than ``but_for`` tensors hold it."""
        if self.is_expired():
            return False
        # The weak reference keeps the counter, whatever happens to the storage meanwhile.
        return torch._C._storage_Use_Count(self.key) - _wrapper_holds() > but_for  # type: ignore[attr-defined]


@functools.cache
def _wrapper_holds() -> int:
    """How often a storage's Python object, once made, counts among those that hold it: 0 up to torch 2.11, then 1."""
    tensor = torch.empty(1)
    key = tensor.untyped_storage()._cdata
    return torch._C._storage_Use_Count(key) - 1  # type: ignore[attr-defined]


def is_rng_state(node: fx.Node) -> bool:
    """Whether ``node`` is the state of a random generator that the forward saves (a checkpointed dropout's)."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    return isinstance(source, fx.Node) and saves_rng_state(source)


def saves_rng_state(node: fx.Node) -> bool:
    """Whether ``node`` gives the state of a random generator, together with an op's result."""
    return node.target is torch.ops.higher_order.run_and_save_rng_state


class InputOrigin(enum.Enum):
    """The kind of a joint graph's input, where it is no input of the graph that was compiled."""

    UNKNOWN = "unknown"
    PARAMETER = "a parameter or a buffer"
    OTHER = "other"


def origin_of(node: fx.Node) -> InputOrigin | int:
    """Which input of the graph that was compiled a joint graph's input is, or is a part of.

    Stands for ``node.meta["desc"]``: AOTAutograd's descriptors (``torch._functorch._aot_autograd.descriptors``).
    """
    from torch._functorch._aot_autograd import descriptors

    found = node.meta.get("desc")
    while not isinstance(found, descriptors.PlainAOTInput):
        if isinstance(found, (descriptors.ParamAOTInput, descriptors.BufferAOTInput)):
            return InputOrigin.PARAMETER
        if isinstance(found, descriptors.SubclassGetAttrAOTInput):
            found = found.base
        elif isinstance(found, (descriptors.ViewBaseAOTInput, descriptors.SyntheticBaseAOTInput)):
            found = found.base_of
        else:
            return InputOrigin.UNKNOWN if found is None else InputOrigin.OTHER
    return found.idx


def is_static_placeholder(node: fx.Node) -> bool:
    """Whether an input of a graph from Dynamo is a parameter or a buffer, or was found where FSDP1 keeps a module's.

    Stands for ``tensor_dict["_dynamo_static_input_type"]`` and ``_dynamo_source`` of the graph's placeholders.
    """
    if (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
        return True
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()


def aliased_args(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of ``node`` may share, by its schema (``copy_``: the target only)."""
    return _args_at(node, _places_of(node.target)[0])


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments that ``node`` writes in place, by its schema.

    ``inductor::resize_storage_bytes_`` (FSDP2 in a graph) frees its argument and does not say so.
    """
    return _args_at(node, _places_of(node.target)[1])


_Places = tuple[tuple[int, str], ...]  # of arguments: position and name


@functools.cache
def _places_of(target: Any) -> tuple[_Places, _Places]:
    """The arguments whose memory a result of the op may share, and those that it writes."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return (), ()
    found = [(i, a.name, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    shares = any(r.alias_info is not None for r in schema.returns)
    aliased = tuple((i, name) for i, name, _ in found) if shares else ()
    if schema.name == "inductor::resize_storage_bytes_":
        return aliased, ((0, schema.arguments[0].name),)
    written = tuple((i, name) for i, name, alias in found if alias.is_write) if schema.is_mutable else ()
    return aliased, written


def _args_at(node: fx.Node, places: _Places) -> list[fx.Node]:
    found: list[fx.Node] = []
    for position, name in places:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        fx.map_arg(value, found.append)
    return found
