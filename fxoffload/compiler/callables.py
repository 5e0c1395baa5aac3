"""Wrappers of compiled forwards and backwards: each adds one thing to a call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.kernels import PendingKernels
from fxoffload.runtime.executor import clone_as_laid_out
from fxoffload.runtime.tracker.outputs import Outputs
from fxoffload.runtime.tracker.own_plan import OwnPlan, saved_of_its_own
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.torch_private.autograd import backward_keeps_graph
from fxoffload.torch_private.graphs import boxed


def counted(run: Callable[[list[Any]], Any], graph: CompiledGraph) -> Callable[[list[Any]], Any]:
    """``run``, a backward, whose calls are counted."""

    def backward(args: list[Any]) -> Any:
        results = run(args)
        graph.num_backwards += 1
        return results

    return boxed(backward)


def when_ready(run: Callable[[list[Any]], Any], pending: PendingKernels) -> Callable[[list[Any]], Any]:
    """``run``, a forward, which must not start on unfinished kernels. They are finished when the backward is compiled;
    should AOTAutograd not compile it ahead of the first step, the first call waits."""

    def call(args: list[Any]) -> Any:
        if pending:
            pending.finish(save=False)
        return run(args)

    return boxed(call)


def watching(run: Callable[[list[Any]], Any], outputs: Outputs, count: int) -> Callable[[list[Any]], Any]:
    """``run``, a forward, whose ``count`` leading results are its caller's ``outputs``."""

    def forward(args: list[Any]) -> Any:
        results = run(args)
        outputs.made(results[:count])
        return results

    return boxed(forward)


def watching_backward(
    run: Callable[[list[Any]], Any], outputs: Outputs, ended: Callable[[], None] | None
) -> Callable[[list[Any]], Any]:
    """``run``, the backward of ``watching``; ``ended`` is called after each."""

    def backward(args: list[Any]) -> Any:
        outputs.backward_begins(args)
        results = run(args)
        outputs.backward_ended()
        if ended is not None:
            ended()
        return results

    return boxed(backward)


def retainable(run: Callable[[list[Any]], Any], overwritten: Collection[int]) -> Callable[[list[Any]], Any]:
    """A plain backward that may run again. Inductor lets it overwrite what only it reads, and AOTAutograd would refuse
    ``retain_graph=True`` for that, depending on what a plan did to the graph: it overwrites copies instead.

    Args:
        overwritten: positions of arguments that it may overwrite.
    """

    def backward(args: list[Any]) -> Any:
        if backward_keeps_graph():
            for i in overwritten:
                if isinstance(args[i], torch.Tensor):
                    args[i] = clone_as_laid_out(args[i])
        return run(args)

    return boxed(backward)


def tracked_plain(
    run: Callable[[list[Any]], Any], graph: OwnPlan, calls: StepTracker, num_user_outputs: int
) -> Callable[[list[Any]], Any]:
    """``run``, a forward of plain Inductor's with ``num_user_outputs`` leading results of its caller's, of which
    ``calls`` know until its backward."""
    own: list[int | None] = []  # the position of a result that is saved, as the first call found it

    def forward(args: list[Any]) -> Any:
        calls.plain_forward_begins(graph)
        given = () if own else tuple(args)  # the callee empties the list
        results = run(args)
        if not own:
            own.append(saved_of_its_own(given, results, num_user_outputs))
        if own[0] is not None:
            calls.plain_forward_ends(graph, results[own[0]])
        return results

    return boxed(forward)


def tracked_plain_backward(
    run: Callable[[list[Any]], Any], graph: OwnPlan, calls: StepTracker
) -> Callable[[list[Any]], Any]:
    """``run``, the backward of ``tracked_plain``."""

    def backward(args: list[Any]) -> Any:
        results = run(args)
        calls.plain_backward_ends(graph)
        return results

    return boxed(backward)
