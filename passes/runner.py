"""Runs passes: times each, lints its result, shows the graph before and after, and names the pass that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.fx as fx

from fxoffload.errors import FxOffloadError, PassError
from fxoffload.torch_private.profiler import trace_structured

log = logging.getLogger(__name__)

State = TypeVar("State")


@dataclass(frozen=True)
class PassEntry(Generic[State]):
    """One entry of a pipeline, as data.

    Attributes:
        name: the pass' name.
        make: the pass object for the state so far; called with the graph named by ``on``.
        result: the state's attribute that takes the pass' result.
        on: the state's attribute that holds the graph which the pass works on.
    """

    name: str
    make: Callable[[State], Callable[[fx.GraphModule], Any]]
    result: str
    on: str = "gm"


def without(steps: Sequence[PassEntry[State]], *names: str) -> tuple[PassEntry[State], ...]:
    """The pipeline less the named steps.

    Raises:
        ValueError: no step has that name; lists those there are.
    """
    known = [s.name for s in steps]
    for name in names:
        if name not in known:
            raise ValueError(f"no pass is called {name!r}; the passes are {', '.join(known)}")
    return tuple(s for s in steps if s.name not in names)


def run_passes(steps: Sequence[PassEntry[State]], state: State, what: str) -> dict[str, float]:
    """Run a pipeline. ``what``: "forward" or "backward", for logs and artifacts. Returns milliseconds by pass.

    Raises:
        PassError: names the pass that failed.
    """
    times: dict[str, float] = {}
    for step in steps:
        gm: fx.GraphModule = getattr(state, step.on)
        _artifact(f"before_{step.name}", what, gm)
        began = time.perf_counter()
        try:
            result = step.make(state)(gm)
            setattr(state, step.result, result)
            after = result if isinstance(result, fx.GraphModule) else gm
            after.graph.lint()
        except FxOffloadError:
            raise
        except Exception as error:
            raise PassError(f"failed on the {what} graph: {type(error).__name__}: {error}", step.name) from error
        times[step.name] = 1e3 * (time.perf_counter() - began)
        _artifact(f"after_{step.name}", what, after)
        log.debug("%s, %s graph: %.1f ms", step.name, what, times[step.name])
    return times


def _artifact(name: str, what: str, gm: fx.GraphModule) -> None:
    """Visible in tlparse when ``TORCH_TRACE`` is set; costs nothing otherwise."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fxoffload_{what}_{name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True, include_device=True),
    )
