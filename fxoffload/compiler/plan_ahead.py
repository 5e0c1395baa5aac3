"""Plans a training step on a machine that cannot run it: no GPU, no weights, nothing allocated."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxoffload._torch_sizes import without_learnt_sizes
from fxoffload.environment import disabled_pieces
from fxoffload.errors import FxOffloadError, OptionsError, UnsupportedError
from fxoffload.gc_pause import gc_paused
from fxoffload.machine.profile import MachineProfile
from fxoffload.options import Options
from fxoffload.planner.plan import Plan

# Host memory of the machine that is planned for, where the user names none: more than any has, it binds nothing.
_NO_HOST_BOUND = 1 << 50
# Fixed here: what is traced lies on the CPU, and nothing is compiled or run.
_FIXED = {"device_types": ("cpu",), "on_error": "raise"}
# Pieces without which there is no plan.
_PLANNING = frozenset({"planner", "segments", "offload"})
_MANY = 1 << 30


def plan(
    model: nn.Module,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    example_args: Sequence[Any] = (),
    device: str | Path | MachineProfile = "h200",
    activation_budget: int | str | None = None,
    max_slowdown: float | None = None,
    **options: Any,
) -> Plan:
    """The plan that ``torch.compile(model, backend="fxoffload")`` would make for a step on ``device``.

    Nothing runs and no tensor is allocated: the model and the inputs may be on meta, fake or real, and stay as they
    are; of their tensors only sizes, strides, dtypes and ``requires_grad`` are read. Call it as the training step calls
    the model: in training mode, and under its ``torch.autocast``, if any (where there is no GPU, the CPU's, of the same
    dtype).

    The model is traced on the CPU, where a few things differ from a GPU. Attention is the CPU's flash kernel: it saves
    what the GPU's saves, except a few bytes of random state; with dropout inside the attention, or with shapes that
    kernel does not take, the scores are saved as well, which a GPU would not do. A mask that the model builds is in
    the plan (Hugging Face's own ``"sdpa"`` builds one of sequence x sequence where it is traced). What a model
    chooses by ``is_cuda`` is chosen as on a CPU. Times are those of ``device``.

    Args:
        model: as it would be compiled, before it is sharded or wrapped for several GPUs.
        example_kwargs: keyword arguments of one call; tensors of the sizes to plan for, on any device.
        example_args: positional arguments of the same call.
        device: a shipped profile's name, a profile's file (``python -m fxoffload.machine measure``), or a profile.
        activation_budget: in bytes or as "12GiB", see ``Options``.
        max_slowdown: see ``Options``; 0.02 where neither is given.
        options: further fields of ``Options``, as in training. Without ``host_budget`` the host's memory bounds
            nothing: that of this machine says nothing about the other. ``device_types`` and ``on_error`` have no
            effect.

    Raises:
        BudgetError: (a ValueError) no plan fits into the budget.
        OptionsError: (a ValueError) an unknown device or a bad option.
        UnsupportedError: (a NotImplementedError) nothing to plan: no parameter or output requires grad, no layers,
            nothing saved that could move; or the model cannot be traced in one graph, or not be copied.
    """
    model = getattr(model, "_orig_mod", model)  # as torch.compile returned it
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedError(
            "expected parameters that require grad, found none: without a backward nothing is saved. Call "
            "model.requires_grad_(), or plan the model before it is frozen"
        )
    with _profile_name(device) as profile:
        chosen = _options(options, profile, activation_budget=activation_budget, max_slowdown=max_slowdown)
        args, kwargs = tuple(example_args), dict(example_kwargs or {})
        found = _trace(model, args, kwargs, chosen)
    return replace(found, label=type(model).__name__, shape=_shape(model, args, kwargs))


def _options(options: Mapping[str, Any], profile: str, **goal: Any) -> Options:
    if "profile" in options:
        raise OptionsError(f"profile is {options['profile']!r}; expected it as device={options['profile']!r}")
    given = {"host_budget": None, **options}
    if given["host_budget"] is None:
        given["host_budget"] = _NO_HOST_BOUND
    chosen = Options.from_torch_compile(None, {**given, **_FIXED, **goal, "profile": profile})
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

    ``mode``: a FakeTensorMode, theirs.
    """

    def __init__(self, mode: Any) -> None:
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
        with torch._C.DisableTorchFunction():
            _check_plain(tensor)
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


def _twins(model: nn.Module, args: Any, kwargs: Any, mode: Any) -> tuple[nn.Module, Any, Any]:
    """The same with fake tensors on the CPU in place of all others. What was one tensor is one tensor."""
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
    """What the backend has to know, and where it leaves what it found. ``has_backward``: None where it was not called;
    ``layers``: of the graph.
    """

    options: Options
    has_backward: bool | None = None
    layers: Sequence[str] = ()
    plan: Plan | None = None


class _Enough(FxOffloadError):
    """Ends a compilation whose plan is there; see Note [errors through Dynamo]."""


# Not an argument of the backend: Dynamo keeps every backend that it was given.
_request: contextvars.ContextVar[_Request] = contextvars.ContextVar("fxoffload_plan_ahead")


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Plan:
    from torch._dynamo.exc import TorchRuntimeError, Unsupported
    from torch._subclasses.fake_tensor import FakeTensorMode

    request = _Request(options)
    model, args, kwargs = _twins(model, args, kwargs, FakeTensorMode())
    token = _request.set(request)
    name = type(model).__name__
    try:
        with _dynamo_of_its_own(), torch.enable_grad(), _autocast():
            torch.compile(model, backend=_backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _Enough:
        pass
    except FxOffloadError:
        raise
    except Unsupported as error:
        raise UnsupportedError(
            f"expected a {name} that is traced in one graph, found a graph break: {error}\nA plan is for one graph: "
            "make the model free of the break, or plan the part of it that is compiled"
        ) from error
    except TorchRuntimeError as error:
        raise UnsupportedError(
            f"expected a {name} that is traced with fake tensors on the CPU, found an error: {error}\n"
            "Check the sizes of the inputs, and that the model makes its tensors on the device of its inputs"
        ) from error
    finally:
        _request.reset(token)
    return _plan_of(request)


def _plan_of(request: _Request) -> Plan:
    if request.plan is not None:
        return request.plan
    if request.has_backward is None:
        raise UnsupportedError("expected torch.compile to trace the model, found it switched off; enable it")
    if not request.has_backward:
        raise UnsupportedError(
            "expected an output that requires grad, found none: without a backward nothing is saved. Pass what the "
            "loss needs (labels), and call the model as the training step does"
        )
    if len(request.layers) < 2:
        raise UnsupportedError(
            f"expected two or more layers to plan, found {', '.join(request.layers) or 'none'}: there is nothing to "
            "choose from. Plan the whole model"
        )
    raise UnsupportedError(
        "expected saved activations, found none that may move: all are smaller than min_bytes, inputs, or parameters. "
        "Make the inputs as large as in training, or lower min_bytes"
    )


@contextlib.contextmanager
def _dynamo_of_its_own() -> Iterator[None]:
    """What Dynamo learns of sizes is forgotten, or the next compilation of the same code would be for dynamic ones. Its
    limits, and that it may run on from errors, are for what the process compiles."""
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
    """``fxoffload.backend`` up to the plan."""
    # Imported here, as there.
    from fxoffload._torch_compat import aot_config_patch, compile_fx, inductor_config
    from fxoffload.compiler.session import CompileSession

    request = _request.get()
    options = request.options
    # There are no tensors here, and no such device.
    disabled = frozenset(options.disable) | disabled_pieces() | {"measured_costs"}
    session = CompileSession(options, disabled, torch.device("cpu"))

    def stop(*args: Any, is_inference: bool = False, **kwargs: Any) -> Any:
        request.has_backward = not is_inference
        request.layers = session._layers.layers
        if session._planned is not None:
            request.plan = session._planned.plan
        session._plan_box = None  # fxoffload.plans() lists what is compiled
        raise _Enough("the plan is made")

    patches = options.inductor_config()
    if options.inner == "aot_eager":
        patches["fallback_random"] = True
    base = patches.get("custom_partitioner_fn") or inductor_config.custom_partitioner_fn
    patches["custom_partitioner_fn"] = session.partitioner(base)
    with aot_config_patch(), gc_paused():
        return compile_fx(gm, example_inputs, inner_compile=stop, config_patches=patches)  # type: ignore[return-value]
