"""The compiler backend: ``torch.compile(model, backend="fxoffload")``."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.compiled_graph import note_plain
from fxoffload.environment import disabled_pieces, everything_disabled
from fxoffload.errors import BudgetError, FxOffloadError, without_frames
from fxoffload.gc_pause import gc_paused
from fxoffload.machine.devices import memory_bytes
from fxoffload.machine.shelf import load_profile
from fxoffload.options import Options
from fxoffload.progress import working
from fxoffload.reset import reset
from fxoffload.runtime.uncompiled_calls import UNCOMPILED
from fxoffload.tell import budget_above_memory, is_new
from fxoffload.torch_private.dynamo_cache import keep_reset
from fxoffload.torch_private.dynamo_calls import watch_calls
from fxoffload.torch_private.dynamo_logging import log_after_graph

log = logging.getLogger(__name__)


def fxoffload(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured, with its saved activations offloaded.

    Args:
        gm: the captured graph.
        example_inputs: its inputs, as fake tensors.
        mode: as for ``torch.compile``; modes that use CUDA graphs are refused.
        options: see ``fxoffload.Options``.

    Raises:
        OptionsError: (a ValueError) an unknown option or a bad value, before anything is traced by AOTAutograd.
        UnsupportedError: (a NotImplementedError) CUDA graphs.
        PassError, SegmentCompileError: with ``on_error="raise"``.
    """
    keep_reset(fxoffload)
    try:
        return _compile(gm, example_inputs, mode, options)
    except FxOffloadError as error:
        error.first_useful_frame = sys._getframe()  # Dynamo leaves its own frames before it out of the traceback
        raise without_frames(error) from error.__cause__


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any] | Options | None
) -> Callable[..., Any]:
    chosen = Options.from_torch_compile(mode, options)
    disabled = frozenset(chosen.disable) | disabled_pieces()
    # Imported here: Inductor takes seconds to import, and plain `import fxoffload` should not.
    from fxoffload.compiler.graph_inputs import GraphInputs
    from fxoffload.compiler.plain import compile_plain
    from fxoffload.compiler.planning import NotWorthItError
    from fxoffload.compiler.session import CompileSession
    from fxoffload.torch_private.aot_autograd import aot_config_patch
    from fxoffload.torch_private.inductor import inductor_config
    from fxoffload.torch_private.inductor_compiler import compile_fx

    patches = chosen.inductor_config()
    if chosen.inner == "aot_eager":
        # The eager form of Inductor's own random op ignores the seed: recomputed values would differ.
        patches["fallback_random"] = True
    if everything_disabled():
        log.info("FXOFFLOAD_DISABLE is set: plain Inductor, nothing is offloaded")
        device = None
    else:
        device = _device_to_offload(example_inputs, chosen)
    inner: Any = None  # whole graphs, by Inductor
    plain: Any = functools.partial(compile_plain, inner=chosen.inner)
    plain_patches = dict(patches)
    session, asked = None, chosen.activation_budget
    if device is not None and torch.is_grad_enabled():
        if isinstance(asked, str):
            from fxoffload.auto_budget import in_bytes

            chosen = in_bytes(chosen, device)
        _tell_of_memory(chosen, device)
        session = CompileSession(chosen, disabled, device, GraphInputs.of(gm))
        base = patches.get("custom_partitioner_fn") or inductor_config.custom_partitioner_fn
        patches["custom_partitioner_fn"] = session.partitioner(base)
        inner = session.inner_compile
    elif chosen.inner != "inductor":
        inner = plain
    if inner is None:
        return UNCOMPILED.counted(compile_fx(gm, example_inputs, config_patches=patches))  # type: ignore[arg-type]
    with aot_config_patch(), gc_paused():  # compiling makes millions of objects that live until its end
        try:
            with working("compiling a graph"):
                found = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
        except NotWorthItError as error:
            session, box = None, error.box  # a plan that says why
            with working("compiling a graph as plain Inductor has it"):
                found = compile_fx(gm, example_inputs, inner_compile=plain, config_patches=plain_patches)
            found._fxoffload_plan = box  # type: ignore[union-attr]  # it is listed as long as the code is there
        except BudgetError as error:
            if device is None or not isinstance(asked, str):
                raise
            from fxoffload.auto_budget import told_of_gradients

            raise told_of_gradients(error, asked, device) from None
    if session is not None and session.leaves_gradients_undefined:
        found = _leaving_gradients_undefined(found)  # type: ignore[arg-type]
    return UNCOMPILED.counted(found)  # type: ignore[arg-type]


def _leaving_gradients_undefined(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, whose backward takes None ([Note: Gradients that nothing comes from] in ``compiler.tangents``)."""
    from fxoffload.torch_private.autograd import compiled_autograd_active, leave_gradients_undefined, num_autograd_nodes

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        before = num_autograd_nodes()
        outputs = run(*args)
        if not compiled_autograd_active():  # which traces AOTAutograd's own backward
            leave_gradients_undefined(outputs, before)
        return outputs

    return call


def _device_to_offload(example_inputs: Sequence[Any], chosen: Options) -> torch.device | None:
    """The device of the first tensor input that may be offloaded; None where there is none."""
    device_types, asked = chosen.device_types, chosen.activation_budget
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    for device in devices:
        if device.type in device_types:
            return device
    found = sorted({d.type for d in devices})
    if torch.is_grad_enabled():
        note_plain(f"its tensors are on {', '.join(found) or 'no device'}, not on {' or '.join(device_types)}")
    if found == ["cpu"] and is_new("cpu"):
        log.warning(
            "the model is on the CPU, where there is no device memory to save: plain Inductor, nothing is offloaded. "
            'options={"device_types": ("cpu",)} turns on a rehearsal that really copies'
        )
        if isinstance(asked, str):
            log.warning(
                "activation_budget=%r is of what parameters, gradients and optimizer state leave of a GPU's memory: "
                "it bounds nothing on the CPU. For a GPU that is not here: fxoffload.plan(model, inputs, "
                "device='h200', activation_budget=%r)",
                asked,
                asked,
            )
    elif found and found != ["cpu"] and is_new(("devices", *found)):
        log.warning(
            "expected tensors on %s, as device_types says, found them on %s: plain Inductor, nothing is offloaded",
            " or ".join(device_types),
            ", ".join(found),
        )
    return None


def _tell_of_memory(chosen: Options, device: torch.device) -> None:
    budget, name = chosen.activation_budget, "this device"
    if not isinstance(budget, int):
        return
    total = memory_bytes(device)
    if chosen.profile is not None:
        profile = load_profile(chosen.profile)
        total, name = profile.device_memory_bytes, profile.device_name
    budget_above_memory(budget, total, name)


fxoffload.reset = reset  # type: ignore[attr-defined]
watch_calls(fxoffload, UNCOMPILED)
log_after_graph(fxoffload)
