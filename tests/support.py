"""What the CPU rehearsals share: compile with everything offloaded, run a scenario, flip the decision, compare bits.

The reference for offloading is *the same compiled code* under ``override_policy("keep_all")``: everything else
(segmentation, fusion, the random generator) is then equal, so the comparison is ``torch.equal``. That both are right,
and not equally wrong, is checked against eager with a tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler import pipeline
from fxoffload.passes.cut_segments import CutSegments
from fxoffload.runtime.step_first import STEP_FIRST

Observed = dict[str, Tensor]


class Block(nn.Module):
    """A small pre-norm residual block; the smallest thing that has the shape of a transformer layer."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Halves(nn.Module):
    """Two halves of ``half`` blocks each, as ``block`` makes them, maybe with a graph break between them."""

    def __init__(self, breaks: bool = True, half: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.first, self.second = (nn.ModuleList(block() for _ in range(half)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The code after the second half."""
        for layer in self.first:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.second:
            x = layer(x)
        return x


class Stack(nn.Module):
    """Blocks in a ``ModuleList`` named ``layers``, and a head.

    ``between`` is called after each block, with the block's index and output.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 16,
        *,
        dropout: float = 0.0,
        between: Callable[[int, Tensor], Tensor] | None = None,
        block: Callable[..., nn.Module] = Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """The head's output, not a loss."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.between is not None:
                x = self.between(i, x)
        return self.head(x)


def batch(index: int = 0, *, length: int = 6, width: int = 16) -> Tensor:
    """A random input of a ``Stack``; another one for each index."""
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(100 + index))


@contextlib.contextmanager
def heavy_layers() -> Iterator[None]:
    """All layers save more than one segment should move: those compiled on their own are cut in the forward."""
    with mock.patch.object(pipeline, "CutSegments", functools.partial(CutSegments, max_moved=1 << 10)):
        yield


def rehearsal(**changes: Any) -> dict[str, Any]:
    """Options of a rehearsal in which every copy is really made, late, and with next to no room on the device.

    ``in_flight_budget=1``: every source is dropped at its release, so nothing is reclaimed in place of a reload.
    """
    return {
        "device_types": ("cpu",),
        "inner": "aot_eager",
        "policy": "offload_all",
        "min_bytes": 1,
        "in_flight_budget": 1,
        "prefetch_budget": "16KiB",
        **changes,
    }


def compiled(fn: Any, *, dynamic: bool | None = None, fullgraph: bool = False, **changes: Any) -> Any:
    """``torch.compile`` with the options of a rehearsal."""
    return torch.compile(fn, backend="fxoffload", dynamic=dynamic, fullgraph=fullgraph, options=rehearsal(**changes))


def train_step(
    model: nn.Module, call: Callable[[], Tensor], *, seed: int = 7, backward: Callable[[Tensor], None] | None = None
) -> Callable[[], Observed]:
    """A scenario: the model as it is now, one forward through ``call``, one backward; every effect is returned.

    The scenario may be run any number of times: buffers are restored to their present values before each.
    """
    before = {name: value.detach().clone() for name, value in model.named_buffers()}

    def run() -> Observed:
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(before[name])
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        loss = call()
        if backward is None:
            loss.backward()
        else:
            backward(loss)
        return {"loss": loss.detach().clone(), **effects(model)}

    return run


def effects(model: nn.Module) -> Observed:
    """Copies of every gradient and every buffer of ``model``."""
    grads = {f"grad {n}": p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**grads, **{f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}}


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not _same_bits(actual[name], expected[name])]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:8]}"


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """The same names, and nearly the same values under each."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30))


def compile_counts() -> dict[str, int]:
    """Counters that grow whenever Dynamo, AOTAutograd or we compile something."""
    counters = torch._dynamo.utils.counters
    return {
        "frames": counters["frames"]["total"],
        "unique_graphs": counters["stats"]["unique_graphs"],
        "aot_autograd": counters["aot_autograd"]["total"],
        "segments": fxoffload.stats().num_segments_compiled,
    }


def num_dynamo_graphs() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def segment_calls(outer: torch.fx.GraphModule) -> list[nn.Module]:
    """The modules that an outer graph calls, in order."""
    return [outer.get_submodule(str(n.target)) for n in outer.graph.find_nodes(op="call_module")]


def assert_nothing_held() -> None:
    """No host memory in use, no group in the save order."""
    held = fxoffload.stats()
    if held.host_bytes_in_use or held.num_groups_on_tape:
        gc.collect()  # to tell "never" from "not until the collector runs"
        after = fxoffload.stats()
        raise AssertionError(
            f"{held.host_bytes_in_use} B in use and {held.num_groups_on_tape} groups on the tape; after gc.collect(): "
            f"{after.host_bytes_in_use} B and {after.num_groups_on_tape}"
        )


@dataclass(frozen=True)
class Flip:
    """What ``check_flip`` saw."""

    observed: Observed
    stats: fxoffload.Stats  # of one offloading run after the one that compiled
    compiled: fxoffload.Stats  # of the run that compiled
    graphs: list[CompiledGraph]  # compiled by the scenario, in order


def check_flip(run: Callable[[], Observed], *, min_segments: int = 2, reloads: float | None = 1) -> Flip:
    """Run a scenario offloading, keeping, and offloading again, all on the same compiled code.

    Args:
        run: the scenario; has to be repeatable.
        min_segments: segments that one of the forwards and one of the backwards must have. A test that passes 1 says
            why.
        reloads: how often each offloaded byte comes back; None where that is a matter of luck (wrong predictions).
    """
    alive = set(fxoffload.graphs())
    fxoffload.reset_stats()
    first = run()
    at_compile = fxoffload.stats()
    assert_nothing_held()
    graphs = [g for g in fxoffload.graphs() if g not in alive]
    counts = compile_counts()

    before = fxoffload.stats()
    with fxoffload.override_policy("keep_all"):
        kept = run()
    after = fxoffload.stats()
    assert (after.bytes_offloaded, after.num_copies) == (before.bytes_offloaded, before.num_copies)
    assert not after.calls_kept
    assert_nothing_held()
    assert_equal(first, kept)

    assert compile_counts() == counts
    fxoffload.reset_stats()
    again = run()
    stats = fxoffload.stats()
    assert_nothing_held()
    assert_equal(again, kept)
    assert compile_counts() == {**counts, "segments": 0}

    assert_offloaded(stats)
    if reloads is not None:
        assert stats.bytes_reloaded == reloads * stats.bytes_offloaded
    assert graphs
    assert max(len(segment_calls(g.forward)) for g in graphs) >= min_segments
    assert max(len(segment_calls(g.backward)) for g in graphs if g.backward is not None) >= min_segments
    return Flip(first, stats, at_compile, graphs)


def assert_offloaded(stats: fxoffload.Stats) -> None:
    """Bytes went to the host and came back, all of them, by copies."""
    assert stats.bytes_offloaded > 0
    assert stats.bytes_reloaded > 0
    assert stats.bytes_reclaimed == 0
    assert stats.bytes_kept_host_full == 0
    assert not stats.calls_kept


def set_when_a_step_waits(event: threading.Event) -> None:
    """Once a step waits for its plan; not after a minute."""

    def look() -> None:
        end = time.monotonic() + 60.0
        while STEP_FIRST._is_over is None and time.monotonic() < end:
            time.sleep(1e-3)
        event.set()

    threading.Thread(target=look, daemon=True).start()
