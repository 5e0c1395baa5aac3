"""Batches of changing length on a GPU: few compilations, and no memory that grows after the longest was seen."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from benchmarks.process_memory import ProcessMemory, table
from tests.gpu import lengths_run
from tests.gpu.gpu_support import MIB, deterministic, differing, gradients
from tests.gpu.lengths_run import Settings, Stack, measure_alone, wait_for_plans

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, STEPS = 1024, 6, 200
LONGEST, SHORTEST = 16_384, 1_024
# Lengths that are seen before memory must not grow any more.
WARM_UP = 24
OPTIONS: dict[str, Any] = {"min_bytes": 1 << 16, "profile": "h200", "activation_budget": 700 * MIB}
# Deterministic attention's backward alone takes more than that at the longest length (17 sums of 64 MiB): the least
# that such a step takes is 1683 MiB.
DETERMINISTIC = OPTIONS | {"activation_budget": 1792 * MIB}
# Growth of a process in 200 steps that is allowed beyond plain Inductor's.
MOST_GROWN = 32 * MIB
# Fewer than one object in each forward call of a layer.
MOST_OBJECTS = STEPS * DEPTH


def batch(length: int) -> Tensor:
    return lengths_run.batch(length, WIDTH, "cuda", torch.bfloat16)


def compiled(model: Stack, how: str, options: dict[str, Any] = OPTIONS) -> nn.Module:
    """Layer by layer, or as a whole."""
    if how == "whole":
        return torch.compile(model, backend="fxoffload", dynamic=True, options=options)  # type: ignore[return-value]
    for layer in model.layers:
        layer.compile(backend="fxoffload", dynamic=True, options=options)
    return model


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_two_hundred_lengths(how: str) -> None:
    generator = random.Random(0)
    lengths = [LONGEST, *(generator.randint(SHORTEST, LONGEST) for _ in range(STEPS))]
    lengths[1:4] = [LONGEST] * 3  # a plan over several graphs is made of steps of one length
    graphs = torch._dynamo.utils.counters["stats"]
    compiled_before = graphs["unique_graphs"]
    # Free memory of other tests is cut in pieces that suit them.
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = Stack(WIDTH, 8, DEPTH).to("cuda", torch.bfloat16)
    call = compiled(model, how)
    grown = (0, 0)
    for i, length in enumerate(lengths):
        wait_for_plans()
        model.zero_grad(set_to_none=True)
        call(batch(length)).backward()
        torch.cuda.synchronize()
        now = (torch.cuda.memory_reserved(), fxoffload.stats().host_bytes_reserved)
        if i == WARM_UP:
            grown = now
    assert graphs["unique_graphs"] - compiled_before <= 4
    seen = f"{[n / MIB for n in grown]} MiB after {WARM_UP} steps, {[n / MIB for n in now]} at the end"
    assert now[0] <= grown[0] * 1.05, f"device memory reserved: {seen}"
    assert now[1] <= grown[1], f"host memory of the arena: {seen}"


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_only_what_does_not_fit_moves(how: str) -> None:
    """A short batch that fits moves nothing; a long one does, with the gradients of keeping."""
    torch.manual_seed(0)
    model = Stack(WIDTH, 8, DEPTH).to("cuda", torch.bfloat16)
    call = compiled(model, how, DETERMINISTIC)
    with deterministic():
        # torch may compile the short ones anew. Then two steps are recorded; as the third begins, a plan is begun.
        for length in [LONGEST] * 4 + [SHORTEST] * 4:
            gradients(model, lambda length=length: call(batch(length)))
            wait_for_plans()
        for length, moves in ((SHORTEST, False), (LONGEST, True)):
            x = batch(length)
            fxoffload.reset_stats()
            found = gradients(model, lambda x=x: call(x))
            assert (fxoffload.stats().bytes_offloaded > 0) is moves, length
            with fxoffload.override_policy("keep_all"):
                assert differing(found, gradients(model, lambda x=x: call(x))) == 0


@pytest.mark.timeout(300)
def test_layers_recompute_more_at_every_length() -> None:
    """Within a budget that copies alone do not meet at next to no cost: the variants serve all lengths of their graph,
    with the bits of keeping, within the budget. Inductor itself compiles a graph for each range of lengths."""
    budget = DETERMINISTIC["activation_budget"]
    torch.manual_seed(0)
    model = compiled(Stack(WIDTH, 8, DEPTH).to("cuda", torch.bfloat16), "layers", DETERMINISTIC)
    assert isinstance(model, Stack)
    earlier = set(fxoffload.graphs())
    with deterministic():
        for length in [LONGEST] * 6:
            gradients(model, lambda length=length: model(batch(length)))
            wait_for_plans()
        mine = set(fxoffload.graphs()) - earlier
        there = sum(len(graph.variants) for graph in mine)
        assert there > 0, [plan.summary for plan in fxoffload.plans()]
        for length in (12_345, 9_001, LONGEST, 12_345, 9_001, 5_000, LONGEST - 1, 9_001):
            x = batch(length)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad(set_to_none=True)
            before = torch.cuda.memory_allocated()
            found = gradients(model, lambda x=x: model(x))
            peak = torch.cuda.max_memory_allocated() - before
            wait_for_plans()
            with fxoffload.override_policy("keep_all"):
                assert differing(found, gradients(model, lambda x=x: model(x))) == 0
            print(f"{length} tokens: {peak / MIB:.0f} of {budget / MIB:.0f} MiB")
            assert peak <= budget, length
    assert sum(len(graph.variants) for graph in mine) == there
    assert len(set(fxoffload.graphs()) - earlier) <= 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cudnn_attention", [True, False], ids=["default attention", "without cuDNN's"])
def test_the_process_grows_no_more_than_with_plain_inductor(cudnn_attention: bool, tmp_path: Path) -> None:
    """On torch 2.11 every new length makes a process with plain Inductor grow by about 3.4 MiB on an H200. So each
    backend runs the same steps in a process of its own, and what torch grows by is taken off. Lengths that were seen
    before, and attention that keeps no plans, leave nothing to take off but noise."""
    sizes: dict[str, Any] = {"width": WIDTH, "depth": DEPTH, "steps": STEPS, "warm_up": WARM_UP}
    sizes |= {"shortest": SHORTEST, "longest": LONGEST, "cudnn_attention": cudnn_attention}
    plain = measure_alone(Settings("inductor", **sizes), tmp_path)
    ours = measure_alone(Settings("fxoffload", options=OPTIONS, **sizes), tmp_path)
    shown = table(
        {
            "new lengths: Inductor": plain.new,
            "fxoffload": ours.new,
            "again: Inductor": plain.again,
            "fxoffload ": ours.again,
        }
    )
    print(shown)
    assert ours.num_graphs <= 4
    assert ours.bytes_offloaded > 0 == plain.bytes_offloaded
    assert ours.new.arena == ours.again.arena == 0, shown
    for mine, torchs in ((ours.new, plain.new), (ours.again, plain.again)):
        check_growth(mine, torchs, shown)
    assert ours.again.objects <= MOST_OBJECTS and ours.again.python_blocks <= MOST_OBJECTS, shown


def check_growth(mine: ProcessMemory, torchs: ProcessMemory, shown: str) -> None:
    """Each kind, so that one that shrinks hides none that grows. What Inductor's process gave back is not asked for."""
    for kind in ("resident", "anonymous", "file", "shared", "malloc_used"):
        allowed = max(getattr(torchs, kind), 0) + MOST_GROWN
        assert getattr(mine, kind) <= allowed, f"{kind} grew\n{shown}"
