"""The oracle's cases, in batches that share the trace of a model."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import fxoffload
from fxoffload import Plan
from tests.oracle import adapter
from tests.oracle.models import LENGTH, STEPS, machine
from tests.oracle.outcome import Numbers, numbers_of
from tests.support import Stack, batch

Options: TypeAlias = Mapping[str, Any]

# Between the least budget of a model's step (0) and what it takes with everything kept (1); its bytes are in the golden
# file, so that a better planner is asked for the same.
SHARE = "budget_share"
COMMON: Options = {"inner": "aot_eager", "min_bytes": 1}


@dataclass(frozen=True)
class Batch:
    """Cases that are made together.

    Attributes:
        made: how, in words.
        objectives: case -> options. Those of a ``SHARE`` become an ``activation_budget``.
        run: options of cases -> their results, None where the planner refused.
        is_slow: whether ``make test`` leaves it out.
    """

    made: str
    objectives: Mapping[str, Options]
    run: Callable[[Mapping[str, Options]], Mapping[str, Numbers | None]]
    is_slow: bool = False


# -- fxoffload.plan ----------------------------------------------------------------------------------------------------

_LOOSE: Mapping[str, Options] = {
    "default": {},
    "slowdown of 10 %": {"max_slowdown": 0.1},
    "least budget": {SHARE: 0.0},
    "tight budget": {SHARE: 0.2},
    "loose budget": {SHARE: 0.7},
}
_MORE: Mapping[str, Options] = {
    "slowdown of 50 %": {"max_slowdown": 0.5},
    "budget and slowdown": {SHARE: 0.4, "max_slowdown": 0.01},
    "budget, saved values as AOTAutograd chooses": {SHARE: 0.6, "recompute": "default"},
    "budget, all recomputed": {SHARE: 0.3, "recompute": "cheap"},
    "budget, little host": {SHARE: 0.7, "host_budget": 12288},
    "budget, narrow windows": {SHARE: 0.4, "in_flight_budget": 2048, "prefetch_budget": 2048},
}
_CHAIN = {k: v for k, v in _MORE.items() if "recompute" not in v}
_FEW = {k: _LOOSE[k] for k in ("default", "least budget", "loose budget")}
# Equal on torch 2.11 and 2.13. The least budgets of these models, and all of BERT, are not.
_STOCK = {k: v for k, v in _FEW.items() if k != "least budget"}


def _ahead(name: str, device: Any, options: Mapping[str, Options], **common: Any) -> dict[str, Numbers | None]:
    found = adapter.plans_ahead(STEPS[name](), list(options.values()), device=device, **COMMON, **common)
    return {
        case: numbers_of(plan) if isinstance(plan, Plan) else None for case, plan in zip(options, found, strict=True)
    }


def _of_model(name: str, objectives: Mapping[str, Options], *, is_slow: bool = False, **common: Any) -> Batch:
    told = ", ".join(f"{k}={v}" for k, v in common.items())
    return Batch(
        f"fxoffload.plan({name}{', ' + told if told else ''})",
        {f"{name}: {told + ': ' if told else ''}{case}": options for case, options in objectives.items()},
        lambda options: _ahead(name, machine(), options, **common),
        is_slow,
    )


# -- torch.compile, on the CPU -----------------------------------------------------------------------------------------


@contextmanager
def _profile() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(machine().to_json(), encoding="utf-8")
        yield str(path)


def _new_plans(train: Callable[[], object]) -> list[Plan]:
    """The plans that are made meanwhile, in order. What is trained has to live until they are read."""
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alive = train()
    found = [p for p in fxoffload.plans() if p.graph not in before]
    del alive
    return found


def _train(
    make: Callable[[], nn.Module],
    lengths: tuple[int, ...],
    *,
    per_layer: bool,
    dynamic: bool | None = None,
    **options: Any,
) -> object:
    """Steps of these lengths."""
    torch.manual_seed(0)
    model = make()
    how: dict[str, Any] = {"backend": "fxoffload", "dynamic": dynamic}
    how["options"] = {**COMMON, "device_types": ("cpu",), **options}
    run = model if per_layer else torch.compile(model, **how)
    for layer in model.layers if per_layer else ():  # type: ignore[union-attr]
        layer.compile(**how)
    for length in lengths:
        model.zero_grad(set_to_none=True)
        run(batch(length, length=length)).square().mean().backward()
    return model, run


def _last(train: Callable[..., object], around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """Runs cases in which the last plan counts."""

    def run(options: Mapping[str, Options]) -> dict[str, Numbers | None]:
        found: dict[str, Numbers | None] = {}
        for case, one in options.items():
            with ExitStack() as stack:
                profile = stack.enter_context(_profile())
                stack.enter_context(around())
                plans = _new_plans(lambda profile=profile, one=one: train(profile=profile, **one))
            found[case] = numbers_of(plans[-1]) if plans else None
        return found

    return run


_trained_chain = partial(_train, lambda: Stack(5), (LENGTH,) * 4, per_layer=True)
_measured_chain = partial(_train, lambda: Stack(5), (LENGTH,) * 10, per_layer=True)
_measured_graph = partial(_train, lambda: Stack(4), (LENGTH,) * 10, per_layer=False)


@contextmanager
def _measured_before() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory() as folder,
        adapter.measured_before(folder, op_ms=0.02, segment_ms=0.05, peak_bytes=20_000),
    ):
        yield


SIZES = (LENGTH, LENGTH, LENGTH, 15, 32, 41)


def _of_sizes(options: Mapping[str, Options]) -> dict[str, Numbers | None]:
    """One plan for each size of the grid; their labels tell which."""
    (one,) = ({k: v for k, v in o.items() if k != "label"} for o in list(options.values())[:1])
    with _profile() as profile:
        train = partial(_train, lambda: Stack(5), SIZES, per_layer=True, dynamic=True, profile=profile, **one)
        plans = {p.label.partition("sizes ")[2]: numbers_of(p) for p in _new_plans(train)}
    return {case: plans.get(o["label"]) for case, o in options.items()}


def _of_sizes_of_one_graph(options: Mapping[str, Options]) -> dict[str, Numbers | None]:
    """What steps of each length offload: plans of single graphs show the first size only."""
    (one,) = ({k: v for k, v in o.items() if k != "length"} for o in list(options.values())[:1])
    found: dict[str, Numbers | None] = {}
    torch.compiler.reset()
    with _profile() as profile:
        model = Stack(4)
        chosen = {**COMMON, "device_types": ("cpu",), "profile": profile, **one}
        run = torch.compile(model, backend="fxoffload", dynamic=True, options=chosen)
        for case, o in options.items():
            fxoffload.reset_stats()
            run(batch(length=o["length"])).square().mean().backward()
            found[case] = {"host_bytes": fxoffload.stats().bytes_offloaded}
    return found


EXTRA = 40_000

BATCHES: tuple[Batch, ...] = (
    _of_model("stack", {**_LOOSE, **_MORE}),
    _of_model("wide", _LOOSE, is_slow=True),
    _of_model("skips", _LOOSE, is_slow=True),
    _of_model("heavy head", _FEW, is_slow=True),
    _of_model("shared gates", _FEW, is_slow=True),
    _of_model("checkpointed", _FEW, is_slow=True),
    _of_model("checkpointed", {"least budget": {SHARE: 0.0}}, is_slow=True, checkpoints="obey"),
    _of_model("chain", {**_LOOSE, **_CHAIN}),
    _of_model("wide chain", _FEW, is_slow=True),
    _of_model("chain of two kinds", _LOOSE, is_slow=True),
    _of_model("gpt2", _STOCK, is_slow=True),
    Batch(
        "torch.compile(layer) for each layer, and four steps",
        {"trained chain: budget": {"activation_budget": 110_000}},
        _last(_trained_chain),
    ),
    Batch(
        f"the same, with {EXTRA} bytes of the allocator's that are not the graphs', from the second call on",
        {"trained chain: extra memory: budget": {"activation_budget": 130_000}},
        _last(_trained_chain, lambda: adapter.extra_memory(EXTRA, from_the_beginning=False)),
    ),
    Batch(
        f"the same, with {EXTRA} bytes on another stream while the step runs, as FSDP2 gathers parameters",
        {"trained chain: gathered parameters: budget": {"activation_budget": 130_000}},
        _last(_trained_chain, lambda: adapter.extra_memory(EXTRA, from_the_beginning=True)),
    ),
    Batch(
        "torch.compile(layer) for each layer, ten steps, each reading of the clock 0.005 ms later: faster than planned",
        {
            "measured chain, fast: slowdown": {"max_slowdown": 0.1},
            "measured chain, fast: budget": {"activation_budget": 110_000},
        },
        _last(_measured_chain, lambda: adapter.measured(0.005)),
        is_slow=True,
    ),
    Batch(
        "the same, each reading 0.2 ms later: slower than planned",
        {"measured chain, slow: slowdown": {"max_slowdown": 0.02}},
        _last(_measured_chain, lambda: adapter.measured(0.2)),
    ),
    Batch(
        "torch.compile(model), ten steps, each reading of the clock 0.01 ms later: faster than planned",
        {
            "measured graph, fast: slowdown": {"max_slowdown": 0.1},
            "measured graph, fast: budget": {"activation_budget": 100_000},
        },
        _last(_measured_graph, lambda: adapter.measured(0.01)),
        is_slow=True,
    ),
    Batch(
        "the same, each reading 0.3 ms later: slower than planned",
        {"measured graph, slow: slowdown": {"max_slowdown": 0.02}},
        _last(_measured_graph, lambda: adapter.measured(0.3)),
    ),
    Batch(
        "torch.compile(model), one step, operators (0.02 ms each) and segments (0.05 ms, 20,000 bytes) measured before",
        {"measured before: slowdown": {"max_slowdown": 0.2}},
        _last(partial(_train, lambda: Stack(4), (LENGTH,), per_layer=False), _measured_before),
        is_slow=True,
    ),
    Batch(
        f"torch.compile(layer, dynamic=True) for each layer, steps of lengths {', '.join(map(str, SIZES))}",
        {
            f"chain of sizes: {label}": {"activation_budget": 110_000, "label": label}
            for label in ("2, 48", "2, 15", "2, 32", "2, 44")
        },
        _of_sizes,
        is_slow=True,
    ),
    Batch(
        "torch.compile(model, dynamic=True), steps of several lengths",
        {
            f"graph of sizes: length {length}": {"activation_budget": 100_000, "length": length}
            for length in (LENGTH, 15, 32, 41)
        },
        _of_sizes_of_one_graph,
        is_slow=True,
    ),
    _of_model("qwen3", _STOCK, is_slow=True),
)
