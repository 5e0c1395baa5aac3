"""Calls of a compiled graph, as AOTAutograd makes them.

The decision to keep or to offload is taken at the start of each forward call. The backward sees the decision in the
saved value that autograd hands it: a token, or the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxoffload import tell
from fxoffload.counters import counters
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.layout import HookWatch
from fxoffload.runtime.outer_program import OuterCall, OuterProgram
from fxoffload.runtime.profiler.step_clock import StepRecording
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transfer import Group, Watch, slot_of
from fxoffload.runtime.variant import Variant, Variants
from fxoffload.step.choice import Choice
from fxoffload.torch_private.autograd import (
    backward_keeps_graph,
    compiled_autograd_active,
    in_backward,
    saved_tensor_hooks_active,
    saved_tensor_hooks_module,
)
from fxoffload.torch_private.graphs import boxed

KEPT_FOR_HOOKS = "saved-tensor hooks"
KEPT_FOR_COMPILED_AUTOGRAD = "compiled autograd"
KEPT_IN_BACKWARD = "forward inside a backward (checkpoint recompute)"
KEPT_WITHOUT_VARIANT = "a variant that is not compiled"

_TOLD: dict[str, Callable[[], None]] = {
    KEPT_FOR_HOOKS: lambda: tell.hooks_around(saved_tensor_hooks_module()),
    KEPT_FOR_COMPILED_AUTOGRAD: tell.compiled_autograd,
    KEPT_IN_BACKWARD: tell.checkpointing_around,
}


def reason_to_keep() -> str | None:
    """Why this forward call must not save tokens, or None."""
    if in_backward():
        return KEPT_IN_BACKWARD
    if saved_tensor_hooks_active():
        return KEPT_FOR_HOOKS
    if compiled_autograd_active():
        return KEPT_FOR_COMPILED_AUTOGRAD
    return None


def _watches_of(args: Sequence[Any]) -> dict[int, Watch]:
    """Storage -> the watch of an argument that lies there, for those that can be watched."""
    found: dict[int, Watch] = {}
    for value in args:
        if isinstance(value, Tensor) and (watch := Watch.of(value)) is not None:
            found.setdefault(value.untyped_storage()._cdata, watch)
    return found


def _not_measured(_args: list[Any], _choice: Choice) -> StepRecording | None:
    return None


def _settled(choice: Choice, program: OuterProgram, variants: Variants) -> tuple[Choice, Variant | None]:
    """The choice of a call, and the variant that it runs (None: variant 0). A call that must not save tokens runs
    variant 0 and keeps everything."""
    variant = variants.get(choice.variant)
    if not any(choice.offload) and not choice.variant:
        return choice, None
    reason = reason_to_keep()
    if reason is None and choice.variant and variant is None:
        reason = KEPT_WITHOUT_VARIANT
    if reason is None:
        return choice, variant
    counters.add_reason("calls_kept", reason)
    if reason in _TOLD:
        _TOLD[reason]()
    return Choice((False,) * len(program.offload_candidates), None if choice.variant else choice.windows), None


def forward_callable(
    program: OuterProgram,
    decide: Callable[[list[Any]], Choice],
    hooks: HookWatch | None = None,
    step_begins: Callable[[list[Any], Choice], StepRecording | None] = _not_measured,
    tracked: TrackedGraph | None = None,
    variants: Variants | None = None,
) -> Callable[[list[Any]], list[Any]]:
    """The function that AOTAutograd calls as the compiled forward. ``decide``: asked when a call begins, with its
    arguments. ``hooks``, ``tracked``, ``variants``: shared with its backward. ``step_begins``: makes the
    recording of the step of this call alone; see ``CallChoice``."""
    hooks = hooks or HookWatch()
    others = variants or Variants()

    def forward(args: list[Any]) -> list[Any]:
        engine = engine_for(program.device)
        hooks.seen = hooks.seen or saved_tensor_hooks_active()
        if tracked is not None:
            tracked.forward_begins(args)
        choice, variant = _settled(decide(args), program, others)
        decisions = choice.offload
        group = Group(engine.streams.compute_stream(), choice.windows)
        call = OuterCall(
            engine,
            program.options,
            group,
            decisions,
            windows=choice.windows,
            watches=_watches_of(args) if choice.watches and any(decisions) else {},
        )
        group.recording = step_begins(args, choice) if variant is None else None
        if group.recording is not None:
            call.recorder = group.recording.begin("forward")
        elif tracked is not None and tracked.measure is not None:
            call.recorder = tracked.recorder()
        if choice.paced:
            engine.streams.pace()
        token = None
        if variant is None:
            results = program.run(args, call)
        else:
            results = variant.forward.run(variant.arguments_of_forward(args), call)
            results, token = variant.saved(choice.variant, results, call.group)
        if call.recorder is not None:
            call.recorder.end()
        if len(call.group):
            engine.save_order.push(call.group)
        if tracked is not None:
            tracked.forward_ends(call.group, results, token)
        return results

    return boxed(forward)


def backward_callable(
    program: OuterProgram,
    hooks: HookWatch | None = None,
    tracked: TrackedGraph | None = None,
    variants: Variants | None = None,
) -> Callable[[list[Any]], list[Any]]:
    """The function that AOTAutograd calls as the compiled backward. ``hooks``, ``tracked``, ``variants``: as of its
    forward."""
    hooks = hooks or HookWatch()
    others = variants or Variants()

    def backward(args: list[Any]) -> list[Any]:
        engine = engine_for(program.device)
        keeps_graph = backward_keeps_graph()
        runs, own = program, None
        if (bundle := others.bundle_in(args)) is not None:
            variant = others.get(bundle.variant)
            assert variant is not None
            runs, own = variant.backward, bundle.group
            args[:] = variant.arguments_of_backward(args, bundle.take(keeps_graph=keeps_graph))
        del bundle
        slots = [s for i, name in (runs.copies or {}).items() if (s := slot_of(args[i], name)) is not None]
        if hooks.seen:
            for i, layout in runs.layouts.items():
                if isinstance(args[i], Tensor) and slot_of(args[i], "") is None:
                    args[i] = layout.restore(args[i])
        if keeps_graph:
            # Autograd hands these values out again next time; a segment may overwrite only a copy of them.
            for i in runs.overwritten:
                if isinstance(args[i], Tensor) and slot_of(args[i], "") is None:
                    args[i] = clone_as_laid_out(args[i])
        group = own if own is not None else slots[0].group if slots else Group()
        if tracked is not None:
            group = tracked.backward_begins(group, args)
        call = OuterCall(engine, runs.options, group, windows=group.windows, has_tokens=own is not None or bool(slots))
        recording, group.recording = group.recording, None
        if recording is not None:
            call.recorder = recording.begin("backward")
        elif tracked is not None and tracked.measure is not None:
            call.recorder = tracked.recorder()
        del slots, group, own
        if len(call.group) or call.windows is not None:
            call.window = call.group.prefetch_window_bytes()
            engine.request(
                call.group,
                keeps_graph=keeps_graph,
                prefetch=call.options.prefetch,
                across_graphs=call.options.across_graphs,
            )
        results = runs.run(args, call)
        if call.recorder is not None:
            call.recorder.end()
        if recording is not None:
            recording.end()
        if tracked is not None:
            tracked.backward_ends(results)
        return results

    return boxed(backward)


def clone_as_laid_out(value: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
