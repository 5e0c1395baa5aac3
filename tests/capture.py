"""What the tests of the passes share: tiny models, the real graphs that the backend makes of them, hand-made graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxoffload
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler import build, session
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.passes.annotate_layers import LayerReport

WIDTH = 16


class Block(nn.Module):
    """A transformer's MLP block: pre-norm, residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """``num_layers`` blocks in an ``nn.ModuleList`` called ``stack``, between two projections (``embed``: or one)."""

    def __init__(
        self, num_layers: int = 2, stack: str = "layers", make: Callable[[], nn.Module] = Block, *, embed: bool = True
    ) -> None:
        super().__init__()
        self.stack = stack
        self.embed = nn.Linear(WIDTH, WIDTH) if embed else nn.Identity()
        self.add_module(stack, nn.ModuleList(make() for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in getattr(self, self.stack):
            x = layer(x)
        return self.head(x)


def rehearsal_options(**changes: Any) -> dict[str, Any]:
    """Everything is offloaded, on the CPU, and the segments run uncompiled."""
    return {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "policy": "offload_all", **changes}


def example_input(batch: int = 4) -> Tensor:
    return torch.randn(batch, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@dataclass
class Call:
    """One run of an outer graph under "keep_all": what went in and what came out."""

    args: list[Any]
    results: list[Any]


@dataclass
class Captured:
    """One compiled training graph, from the joint graph to the outer graphs."""

    model: nn.Module
    output: Any
    joint: fx.GraphModule
    layers: LayerReport
    forward: ForwardState
    backward: BackwardState
    graph: CompiledGraph
    calls: list[Call] = field(default_factory=list)  # forward, backward

    @property
    def outer_forward(self) -> fx.GraphModule:
        assert self.forward.outer is not None
        return self.forward.outer

    @property
    def outer_backward(self) -> fx.GraphModule:
        assert self.backward.outer is not None
        return self.backward.outer


def capture(model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] | None = None, **options: Any) -> Captured:
    """Compile ``model`` through the backend, run one step under "keep_all", and return everything that was made."""
    torch.compiler.reset()  # Dynamo would run an equal model with the code that it has
    states: dict[str, Any] = {}
    calls: list[Call] = []
    alive = set(fxoffload.graphs())
    run_passes = session.run_passes

    def record(steps: Any, state: Any, what: str) -> Any:
        states[what] = state
        return run_passes(steps, state, what)

    class Recording(build.OuterProgram):
        def run(self, args: list[Any], call: Any) -> list[Any]:
            before = list(args)
            results = super().run(args, call)
            calls.append(Call(before, list(results)))
            return results

    with (
        mock.patch.object(session, "run_passes", record),
        mock.patch.object(build, "run_passes", record),
        mock.patch.object(build, "OuterProgram", Recording),
    ):
        compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options(**options))
        with fxoffload.override_policy("keep_all"):
            output = compiled(*inputs)
            (loss or (lambda out: out.square().sum()))(output).backward()
    (graph,) = set(fxoffload.graphs()) - alive
    return Captured(
        model, output, states["joint"].gm, states["joint"].layers, states["forward"], states["backward"], graph, calls
    )


@functools.cache
def tiny_tower(num_layers: int = 2) -> Captured:
    """A captured ``Tower``. Shared by all tests of a process: copy its graphs before changing them."""
    torch.manual_seed(0)
    return capture(Tower(num_layers), example_input())


@functools.cache
def bare_tower(num_layers: int = 2) -> Captured:
    """Without the first projection: the first layer's saved residual stream is a graph input, each later layer reads
    what the one before it saved. Shared, as ``tiny_tower``."""
    torch.manual_seed(0)
    return capture(Tower(num_layers, embed=False), example_input())


class Sketch:
    """A hand-made graph whose nodes carry fake values and Dynamo's module paths."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(*shape, dtype=dtype, device=device)
        return node

    def op(self, target: Any, *args: Any, path: str = "", backward: bool = False, **kwargs: Any) -> fx.Node:
        """``path``: the module path that Dynamo would have recorded, for example ``layers.0.mlp``."""
        name = getattr(getattr(target, "overloadpacket", target), "__name__", None)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        values, keywords = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **keywords)
        if backward:
            node.meta["partitioner_tag"] = "is_backward"
        if path:
            node.meta["fwd_nn_module_stack" if backward else "nn_module_stack"] = module_stack(path)
        return node

    def chain(self, x: fx.Node, length: int, *, path: str = "", backward: bool = False) -> fx.Node:
        """``length`` ops, one after the other."""
        for i in range(length):
            x = self.op((torch.ops.aten.sin, torch.ops.aten.cos)[i % 2].default, x, path=path, backward=backward)
        return x

    def module(self, outputs: Sequence[Any]) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule({}, self.graph)
        gm.graph.lint()
        return gm


def module_stack(path: str) -> dict[str, tuple[str, str]]:
    """What Dynamo writes for a node inside ``path``: every module on the way down, with its class."""
    parts = path.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    return {p: (f"L['self'].{p}", "Item" if p.split(".")[-1].isdigit() else p.split(".")[-1]) for p in prefixes}
