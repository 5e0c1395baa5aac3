"""torchtitan's graph_trainer on a model of ours: forward and backward traced into one graph, offloaded, then compiled.

Its own tracer and passes run, from a checkout: ``minimal_fx_tracer``, dead code and canonical form.
``tag_all_offloadable_activations`` takes all layers but the last, largest first within ``cpu_budget_gb``.
``apply_cpu_offload_pass`` comes with its prefetch. ``full_inductor_compilation_pass`` compiles (``inductor=false``
leaves that out, and eager kernels run). Its trainer, models, sharding and CUDA graphs do not. The loss, the model and
the attention are those of every other variant.

Tried with torchtitan of August 2026 and torch 2.13 on a CPU: tracing and its passes run. Inductor refuses the graph,
since ``ao::wait_tensor`` returns an alias of its input: torchtitan asks for a nightly torch. The ops want an
accelerator.

The graph holds forward and backward: a step's time falls on ``forward_ms``, and ``backward_ms`` is next to nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.activations.available import NotAvailable
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper
from benchmarks.workloads import Job, build_job, decoder_layers
from fxoffload.torch_private.dynamo_positions import assume_consecutive

OPS = "torch._functorch._activation_offloading.offload_ops"
PACKAGE = "torchtitan.experiments.graph_trainer"


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """The case, whose first step traces and compiles."""
    make_step = load_step(request.variant, device)
    job = build_job(request.case, device)
    return Stepper(job, make_step(job), device)


def load_step(variant: Variant, device: torch.device) -> Callable[[Job], TracedStep]:
    """What makes the step of a job; asked before there is a model, as torchtitan may not be here.

    Raises:
        NotAvailable: it cannot run here; the text says why.
    """
    if device.type == "cpu":
        raise NotAvailable("torchtitan's offload ops need an accelerator's streams; the case is on the CPU")
    options = dict(variant.options)
    load = _Loader(str(options.pop("path", "")))
    return lambda job: TracedStep(job, load, dict(options))


class TracedStep:
    """Called with the inputs, it runs the whole step, adds the gradients up, and returns a loss without a graph.

    Where there is no gradient yet, the graph's own tensor becomes it, as in any backward.
    """

    def __init__(self, job: Job, load: _Loader, options: dict[str, Any]) -> None:
        self._job = job
        self._load = load
        self._inductor = options.pop("inductor", True)
        self._options = options
        self._run: Any = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self._run is None:
            self._run = self._compile(inputs)
        loss, *gradients = self._run(*inputs)
        leaves = [*self._parameters(), *(tensor for tensor in inputs if tensor.requires_grad)]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if leaf.grad is None:
                leaf.grad = gradient
            else:
                leaf.grad.add_(gradient)
        return loss.detach().requires_grad_()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._job.module.parameters() if p.requires_grad]

    def _compile(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        module, load = self._job.module, self._load

        def forward_and_backward(*args: torch.Tensor) -> list[torch.Tensor]:
            loss = module(*args)
            leaves = [*self._parameters(), *(tensor for tensor in args if tensor.requires_grad)]
            return [loss, *torch.autograd.grad(loss, leaves)]

        # torchtitan tells layers by names that begin with "layers.".
        load("common_utils").annotate_module_fqns(_parent_of_layers(module))
        tracer = load("make_fx_tracer")
        with assume_consecutive():  # else the tracer, which is not Dynamo, would get masks of packed sequences
            traced = tracer.minimal_fx_tracer(forward_and_backward, module=module)(*inputs)
        graph, examples = traced.gm, tuple(traced.example_inputs)
        for name in ("eliminate_dead_code_pass", "canonicalize_graph_pass"):
            graph = getattr(load("remove_noop_passes"), name)(graph, examples)
        offload = load("cpu_offload")
        graph = offload.tag_all_offloadable_activations(graph, examples, **self._options)
        graph = offload.apply_cpu_offload_pass(graph, examples)
        if self._inductor:
            graph = load("inductor_passes").full_inductor_compilation_pass(graph, examples)
        traced.gm = graph
        return tracer.run_traced(traced, module=module)


class _Loader:
    """graph_trainer's modules by name.

    Raises:
        NotAvailable: torch lacks the ops that it is built on, there is no checkout, or one of its imports is missing
            here.
    """

    def __init__(self, path: str) -> None:
        if importlib.util.find_spec(OPS) is None:
            raise NotAvailable(
                f"torchtitan's graph_trainer needs {OPS}, which torch {torch.__version__} lacks; torch 2.13 has it"
            )
        if path:
            folder = Path(path).expanduser()
            if not (folder / Path(*PACKAGE.split("."))).is_dir():
                raise NotAvailable(f"expected a checkout of torchtitan that has {PACKAGE}, found none at {folder}")
            sys.path.insert(0, str(folder))
        self("make_fx_tracer")
        self("cpu_offload")

    def __call__(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(f"{PACKAGE}.{name}")
        except ImportError as error:
            raise NotAvailable(
                f"{PACKAGE}.{name} cannot be imported ({error}): give a checkout of torchtitan with --set titan=PATH, "
                "and install what it needs"
            ) from error


def _parent_of_layers(module: nn.Module) -> nn.Module:
    layers = decoder_layers(module)  # type: ignore[arg-type]
    return next(parent for parent in module.modules() if getattr(parent, "layers", None) is layers)
