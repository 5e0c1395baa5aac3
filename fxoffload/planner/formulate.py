"""From a step to the solver's problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxoffload.planner.problem import LayerVariant, Problem, ProblemLayer, ProblemStorage
from fxoffload.planner.program import program_of
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.steps import TrainingStep


def storages_of(step: TrainingStep, fixed: Mapping[str, bool] | None = None) -> list[ProblemStorage]:
    """The storages of the candidates. ``fixed``: name -> True where it must be offloaded, False where it must stay."""
    program = program_of(step)
    c = program.candidates
    copied = {i: at - 1 for at, ops in enumerate(program.offloads) for op in ops for i in op}
    storages = []
    for i, name in enumerate(c.names):
        if not c.held_bytes[i] and not c.moved_bytes[i]:
            continue
        made_at = c.made_at[i]
        storages.append(
            ProblemStorage(
                name,
                held_bytes=c.held_bytes[i],
                moved_bytes=c.moved_bytes[i],
                made_at=made_at,
                copy_after=copied.get(i, made_at),
                freed_after=max(c.last_read_forward[i], made_at),
                needed_at=program.first_take[i],
                dies_at=c.last_read_backward[i],
                fixed=(fixed or {}).get(name),
            )
        )
    return storages


def other_bytes(step: TrainingStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per forward and per backward segment, the most bytes of storages that are no candidates while it runs."""
    program = program_of(step)
    before, after = program.fixed_before, program.fixed_after
    forward = [
        max(before[at] + s.temp_bytes - made, after[at])
        for at, made, s in zip(program.forward_at, program.made, step.forward, strict=True)
    ]
    dying = [0] * (len(step.backward) + 1)
    c = program.candidates
    for i, at in enumerate(c.last_read_backward):
        dying[at] += c.held_bytes[i]
    backward = [
        max(before[at] + s.temp_bytes, after[at] - died)
        for at, died, s in zip(program.backward_at, dying, step.backward, strict=False)
    ]
    return tuple(max(0, b) for b in forward), tuple(max(0, b) for b in backward)


def problem_of(
    step: TrainingStep,
    rates: ProfileRates,
    *,
    layers: Sequence[ProblemLayer] | None = None,
    fixed: Mapping[str, bool] | None = None,
    host_bytes: int | None = None,
) -> Problem:
    """The problem of a step. ``layers``: variants to choose from; default: the step as it is, keep or offload."""
    if layers is None:
        layers = [
            ProblemLayer("step", "step", (LayerVariant("as partitioned", tuple(storages_of(step, fixed)), {}, {}),))
        ]
    forward, backward = other_bytes(step)
    return Problem(
        tuple(layers),
        forward_ms=tuple(s.ms for s in step.forward),
        backward_ms=tuple(s.ms for s in step.backward),
        forward_bytes=forward,
        backward_bytes=backward,
        d2h_bytes_per_ms=rates.bytes_per_ms("d2h"),
        h2d_bytes_per_ms=rates.bytes_per_ms("h2d"),
        host_bytes=host_bytes,
        runs=step.runs,
    )
