"""Runs passes: times each, lints its result, shows the graph before and after, and names the pass that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.fx as fx

from fxoffload.errors import FxOffloadError, PassError
from fxoffload.torch_private.profiler import trace_structured

log = logging.getLogger(__name__)

State = TypeVar("State")


@dataclass(frozen=True)
class PassEntry(Generic[State]):
    """One entry of a pipeline, as data.

    Attributes:
        make: the pass object for the state so far; called with the graph named by ``on``.
        writes: the state's attribute that takes the pass' result.
        reads: attributes of the state that ``make`` may read; it finds no others.
        on: the state's attribute that holds the graph which the pass works on.
    """

    name: str
    make: Callable[[State], Callable[[fx.GraphModule], Any]]
    writes: str
    reads: tuple[str, ...] = ()
    on: str = "gm"


class _Readable:
    """A state, as far as a pass may read it."""

    def __init__(self, state: object, entry: PassEntry[Any]) -> None:
        self._state, self._entry = state, entry

    def __getattr__(self, name: str) -> Any:
        if name not in self._entry.reads:
            raise AttributeError(f"{self._entry.name} reads {name!r}, which its entry in the pipeline does not list")
        return getattr(self._state, name)


def without(entries: Sequence[PassEntry[State]], *names: str) -> tuple[PassEntry[State], ...]:
    """The pipeline less the named ones.

    Raises:
        ValueError: no entry has that name; lists those there are.
    """
    known = [s.name for s in entries]
    for name in names:
        if name not in known:
            raise ValueError(f"no pass is called {name!r}; the passes are {', '.join(known)}")
    return tuple(s for s in entries if s.name not in names)


def run_passes(entries: Sequence[PassEntry[State]], state: State, what: str) -> dict[str, float]:
    """Run a pipeline. ``what``: "forward" or "backward", for logs and artifacts. Returns milliseconds by pass.

    Raises:
        PassError: names the pass that failed.
    """
    times: dict[str, float] = {}
    for entry in entries:
        gm: fx.GraphModule = getattr(state, entry.on)
        _artifact(f"before_{entry.name}", what, gm)
        began = time.perf_counter()
        try:
            result = entry.make(cast(State, _Readable(state, entry)))(gm)
            setattr(state, entry.writes, result)
            after = result if isinstance(result, fx.GraphModule) else gm
            after.graph.lint()
        except FxOffloadError:
            raise
        except Exception as error:
            raise PassError(f"failed on the {what} graph: {type(error).__name__}: {error}", entry.name) from error
        times[entry.name] = 1e3 * (time.perf_counter() - began)
        _artifact(f"after_{entry.name}", what, after)
        log.debug("%s, %s graph: %.1f ms", entry.name, what, times[entry.name])
    return times


def _artifact(name: str, what: str, gm: fx.GraphModule) -> None:
    """Visible in tlparse when ``TORCH_TRACE`` is set; costs nothing otherwise."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fxoffload_{what}_{name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True, include_device=True),
    )
