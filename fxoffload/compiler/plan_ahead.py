"""Plans a training step on a machine that cannot run it: no GPU, no weights, nothing allocated."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxoffload.auto_budget import in_bytes_elsewhere
from fxoffload.compiler.fake_step import FakeGraph, FakeStep
from fxoffload.compiler.step_ahead import plan_fake_step
from fxoffload.environment import disabled_pieces
from fxoffload.errors import FxOffloadError, OptionsError, UnsupportedError, without_frames
from fxoffload.gc_pause import gc_paused
from fxoffload.machine.profile import MachineProfile
from fxoffload.machine.shelf import load_profile
from fxoffload.options import Options
from fxoffload.plan_report.plan import Plan
from fxoffload.progress import working
from fxoffload.tell import budget_above_memory
from fxoffload.torch_private.dynamo_breaks import GraphBreak, graph_breaks, user_line
from fxoffload.torch_private.dynamo_cache import forgotten, without_learnt_sizes
from fxoffload.torch_private.dynamo_logging import log_after_graph
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.tensor_subclasses import DisableTorchFunction

if TYPE_CHECKING:
    from fxoffload.torch_private.fake_tensors import FakeTensorMode

# Host memory of the machine that is planned for, where the user names none: more than any has, it binds nothing.
_NO_HOST_BOUND = 1 << 50
# Fixed here: traced tensors lie on the CPU, and nothing is compiled or run.
_FIXED = {"device_types": ("cpu",), "on_error": "raise"}
# Pieces without which there is no plan.
_PLANNING = frozenset({"planner", "segments", "offload"})
_MANY = 1 << 30
# Plans are made one at a time: Dynamo's caches and graph breaks are the process's.
_TURN = threading.Lock()
# Steps that are run, at most: in two, most models have compiled everything.
_MOST_STEPS = 4


def plan(
    model: nn.Module,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    example_args: Sequence[Any] = (),
    device: str | Path | MachineProfile = "h200",
    activation_budget: int | str | None = None,
    max_slowdown: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Plan:
    """The plan that ``torch.compile(model, backend="fxoffload")`` would make for a step on ``device``.

    Nothing is computed and no tensor of the model's size is allocated. The model and the inputs may be on meta, fake or
    real, and stay as they are. Of their tensors only sizes, strides, dtypes and ``requires_grad`` are read, and the
    values of integers that are real (sizes of images, say). Call it as the training step calls the model: in
    training mode, and under its ``torch.autocast``, if any (where there is no GPU, the CPU's, of the same dtype).

    The model is traced on the CPU, where a few things differ from a GPU. Attention is the CPU's flash kernel, taken to
    have dropout too. It saves the same values as the GPU's, except a few bytes of random state. With shapes that it
    does not take, or dropout where several heads share a key, the scores are saved as well, which a GPU would not do. A
    mask that the model builds is in the plan (Hugging Face's own ``"sdpa"`` builds one of sequence x sequence where it
    is traced). Choices that a model makes by ``is_cuda`` are those for a CPU. Times are those of ``device``.

    A model with graph breaks is planned as one step of several graphs: the step runs on fake tensors, its backward from
    the output's ``loss`` or else from all outputs. ``Plan.breaks`` says what lies between the graphs. That is not in
    the plan: neither its time nor its memory.

    Args:
        model: as it would be compiled, before it is sharded or wrapped for several GPUs.
        example_kwargs: keyword arguments of one call; tensors of the sizes to plan for, on any device.
        example_args: positional arguments of the same call.
        device: a shipped profile's name, a profile's file (``fxoffload profile measure``), or a profile.
        activation_budget: in bytes or as "12GiB", see ``Options``. "auto" and "80%" are of what parameters, buffers,
            gradients and optimizer state leave of an empty ``device``.
        max_slowdown: see ``Options``; 0.02 where neither is given.
        optimizer: for such a budget; None: AdamW's two values for each parameter that requires grad.
        options: further fields of ``Options``, as in training. Without ``host_budget`` the host's memory bounds
            nothing: that of this machine says nothing about the other. ``device_types`` and ``on_error`` have no
            effect.

    Raises:
        BudgetError: (a ValueError) no plan fits into the budget. Graphs that each fit into it alone, but not side by
            side, warn.
        OptionsError: (a ValueError) an unknown device or a bad option.
        TypeError: the model is no module, or the arguments do not fit its call.
        UnsupportedError: (a NotImplementedError) there is nothing to plan: no parameter or output requires grad, no
            layers, no saved value that could move. Or the model cannot be traced: it reads the value of a tensor
            between graphs, does not run on fake tensors, or cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)  # as torch.compile returned it
    _check_call(model, example_args, example_kwargs, optimizer)
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedError(
            "expected parameters that require grad, found none: without a backward nothing is saved. Call "
            "model.requires_grad_(), or plan the model before it is frozen"
        )
    with _profile_name(device) as profile:
        chosen = _options(options, profile, activation_budget=activation_budget, max_slowdown=max_slowdown)
        machine = load_profile(profile)
        chosen = in_bytes_elsewhere(chosen, model, optimizer, machine)
        budget_above_memory(chosen.budget_bytes or 0, machine.device_memory_bytes, machine.device_name)
        try:
            with working("planning ahead"):
                found = _trace(model, args, kwargs, chosen)
        except FxOffloadError as error:
            raise without_frames(error) from error.__cause__
    return replace(found, label=type(model).__name__, shape=_shape(model, args, kwargs))


def _check_call(model: object, args: object, kwargs: object, optimizer: object) -> None:
    """Before Dynamo looks at the call, whose own message would be about a graph break."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to plan, found {type(model).__name__}")
    if not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
        raise TypeError(
            "expected a torch.optim.Optimizer, or None for AdamW's state, found "
            f"{type(optimizer).__name__} {optimizer!r}"
        )
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(
            "expected the keyword arguments of one call, as in plan(model, {'input_ids': ids}), found "
            f"{type(kwargs).__name__}; positional ones go to example_args=(...)"
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"expected example_args=(...), a tuple or a list, found {type(args).__name__}")
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **dict(kwargs or {}))
    except TypeError as error:
        names = ", ".join(str(p) for p in signature.parameters.values() if p.name not in ("args", "kwargs"))
        raise TypeError(
            f"expected a call that {type(model).__name__}.forward({names}) takes, found one with {len(args)} "
            f"positional arguments and {', '.join(map(repr, kwargs or {})) or 'no keywords'}: {error}"
        ) from None


def _options(options: Mapping[str, Any], profile: str, **objective: Any) -> Options:
    if "profile" in options:
        raise OptionsError(f"profile is {options['profile']!r}; expected it as device={options['profile']!r}")
    given = {"host_budget": None, **options}
    if given["host_budget"] is None:
        given["host_budget"] = _NO_HOST_BOUND
    chosen = Options.from_torch_compile(None, {**given, **_FIXED, **objective, "profile": profile})
    if chosen.policy != "auto":
        raise OptionsError(f"policy is {chosen.policy!r}, which plans nothing; use policy 'auto', or remove it")
    off = sorted((frozenset(chosen.disable) | disabled_pieces()) & _PLANNING)
    if off:
        raise OptionsError(f"expected the pieces that a plan needs, found {', '.join(off)} disabled; enable them")
    return chosen


@contextlib.contextmanager
def _profile_name(device: str | Path | MachineProfile) -> Iterator[str]:
    """What ``Options.profile`` takes for ``device``."""
    if not isinstance(device, MachineProfile):
        yield str(device)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(device.to_json(), encoding="utf-8")
        yield str(path)


def _shape(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """For example "input_ids 1x32768, labels 1x32768"."""
    try:
        named = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        named = {f"input {i}": x for i, x in enumerate(args)}
    flat = {k: v for name, x in named.items() for k, v in (x.items() if isinstance(x, dict) else [(name, x)])}
    tensors = [(name, x) for name, x in flat.items() if isinstance(x, Tensor)]
    return ", ".join(f"{name} {'x'.join(str(int(n)) for n in x.shape) or 'scalar'}" for name, x in tensors)


# -- twins -------------------------------------------------------------------------------------------------------------


class _FakeCopies(TorchFunctionMode):
    """Under it, ``copy.deepcopy`` of a tensor gives a fake one on the CPU, of the same sizes.

    ``mode``: theirs.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self.twin(tensor))
        if func is Tensor.clone:  # Parameter.__deepcopy__
            return self.twin(args[0])
        return func(*args, **(kwargs or {}))

    def twin(self, tensor: Tensor) -> Tensor:
        """Fake, on the CPU; shares nothing with ``tensor``."""
        from fxoffload.torch_private.fake_values import with_values

        with DisableTorchFunction():
            _check_plain(tensor)
            if (known := with_values(self.mode, tensor)) is not None:
                return known
            sizes, strides = [[int(n) for n in found] for found in (tensor.shape, tensor.stride())]
            with self.mode:
                fake = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    return nn.Parameter(fake, tensor.requires_grad)
                return fake.requires_grad_(tensor.requires_grad)


def _check_plain(tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedError("expected parameters with sizes, found a lazy one; call the model once")
    if hasattr(type(tensor), "__tensor_flatten__") or tensor.layout is not torch.strided:
        kind = f"{type(tensor).__name__} ({tensor.layout})"
        raise UnsupportedError(f"expected plain strided tensors, found a {kind}; plan the model before it is wrapped")


def _twins(model: nn.Module, args: Any, kwargs: Any, mode: FakeTensorMode) -> tuple[nn.Module, Any, Any]:
    """The same with fake tensors on the CPU in place of all others. Uses of one tensor stay uses of one tensor."""
    copies = _FakeCopies(mode)
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(t): copies.twin(t) for t in tensors}
    try:
        with copies:
            return copy.deepcopy((model, args, kwargs), memo)
    except FxOffloadError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"expected a {type(model).__name__} and inputs that copy.deepcopy can copy, found {type(error).__name__}: "
            f"{error}. Plan the model before it is wrapped, or without what cannot be copied"
        ) from error


# -- tracing -----------------------------------------------------------------------------------------------------------


@dataclass
class _Request:
    """The backend's input, and where it leaves its results."""

    options: Options
    step: FakeStep = field(default_factory=FakeStep)


# Not an argument of the backend: Dynamo keeps every backend that it was given.
_request: contextvars.ContextVar[_Request] = contextvars.ContextVar("fxoffload_plan_ahead")


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Plan:
    """Runs a step on fake tensors, and plans it."""
    from fxoffload.torch_private.fake_tensors import without_log_of_fake_tensors
    from fxoffload.torch_private.fake_values import step_fake_mode

    mode = step_fake_mode()
    model, args, kwargs = _twins(model, args, kwargs, mode)
    request = _Request(options)
    step = request.step
    token = _request.set(request)
    name = type(model).__name__
    try:
        with _TURN, _dynamo_of_its_own(), forgotten(_backend), torch.enable_grad(), _errors_of(name):
            run = torch.compile(model, backend=_backend, dynamic=False)
            with without_log_of_fake_tensors():
                breaks = _run_steps(step, run, args, kwargs, mode)
    finally:
        _request.reset(token)
    return plan_fake_step(step, breaks)


def _run_steps(step: FakeStep, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> tuple[str, ...]:
    """Runs steps until one compiles nothing. Returns the graph breaks of that one.

    One step is enough where there is one graph. Where there are several, the first step may differ from all later ones
    (a model installs hooks in it), and compilation in a step takes memory meanwhile.
    """
    breaks: list[tuple[list[GraphBreak], list[FakeGraph]]] = []  # by step, with the graphs that were compiled in it
    for number in range(_MOST_STEPS):
        known = len(step.graphs)
        step.begin(watches=number > 0)
        with graph_breaks() as found, mode, _autocast():
            output = run(*args, **kwargs)
        new = step.graphs[known:]
        breaks.append((found, new))
        if not number and not found and len(step.ran) < 2:
            break
        with mode:
            _backward(output)
        del output
        run.zero_grad()
        if number and not new:
            break
    ran = set(step.ran)
    return tuple(dict.fromkeys(str(b) for found, graphs in breaks if ran.intersection(graphs) for b in found))


def _backward(output: Any) -> None:
    """As the training step does it: from the loss, where the output has one, else from all that requires grad."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else list(tree_leaves(output))
    ends = [t for t in found if isinstance(t, Tensor) and t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Errors of the model's on fake tensors come with advice. ``name``: of the model's class."""
    from fxoffload.torch_private.fake_tensors import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except FxOffloadError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"expected a {name} whose code between compiled graphs needs no tensor's value, found one that reads it: "
            f"{error.func} at {user_line(error)}. What follows depends on data, of which a plan ahead has only the "
            "sizes. Make the model free of the read (if it is for layerdrop: set that to 0), or plan the part of it "
            "that is compiled"
        ) from error
    except Exception as error:
        raise UnsupportedError(
            f"expected a {name} that runs on fake tensors on the CPU, found an error at {user_line(error)}: "
            f"{_own_text(error)}\nCheck the sizes of the inputs, and that the model makes its tensors on "
            "the device of its inputs"
        ) from error


def _own_text(error: Exception) -> str:
    """The error of the model's op, without what Dynamo says around it."""
    text = str(error)
    if found := re.search(r": got (\w+\(.*\))$", text, re.MULTILINE):
        return found[1]
    text = re.split(r"\n\s*(?:Hint:|from user code:|Set TORCHDYNAMO_VERBOSE)", text)[0].strip()
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def _dynamo_of_its_own() -> Iterator[None]:
    """Make Dynamo forget sizes that it sees meanwhile, or the next compilation of the same code would be for dynamic
    ones. Its limits, and its permission to run on from errors, are left to the process' own compilations."""
    from torch._dynamo import config

    settings = {
        "suppress_errors": False,
        "recompile_limit": _MANY,
        "accumulated_recompile_limit": _MANY,
        "automatic_dynamic_local_pgo": False,
        "automatic_dynamic_remote_pgo": False,
    }
    with without_learnt_sizes(), config.patch(settings):
        yield


def _autocast() -> contextlib.AbstractContextManager[Any]:
    """The CPU's form of the ``torch.autocast("cuda")`` that is on."""
    if not torch.is_autocast_enabled("cuda"):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def _backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """``fxoffload.backend`` up to the plan; returns a function that runs on fake tensors."""
    # Imported here, as there.
    from fxoffload.compiler.attention_ahead import attend_as_on_gpu
    from fxoffload.compiler.graph_inputs import GraphInputs
    from fxoffload.compiler.planning import DRAWN_POINTS
    from fxoffload.compiler.session import CompileSession
    from fxoffload.torch_private.aot_autograd import aot_config_patch
    from fxoffload.torch_private.inductor import inductor_config
    from fxoffload.torch_private.inductor_compiler import compile_fx

    request = _request.get()
    options = request.options
    attend_as_on_gpu(gm)
    # There are no tensors here, and no such device.
    disabled = frozenset(options.disable) | disabled_pieces() | {"measured_costs"}
    session = CompileSession(options, disabled, torch.device("cpu"), GraphInputs.of(gm), DRAWN_POINTS)
    patches = options.inductor_config()
    if options.inner == "aot_eager":
        patches["fallback_random"] = True
    base = patches.get("custom_partitioner_fn") or inductor_config.custom_partitioner_fn
    patches["custom_partitioner_fn"] = session.partitioner(base)
    with aot_config_patch(), gc_paused():
        inner = request.step.inner_compile(session)
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


log_after_graph(_backend, says=False)
