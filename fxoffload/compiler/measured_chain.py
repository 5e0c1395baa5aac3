"""A chain of calls with measurements in the place of estimates."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence

from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import Chain
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.readings import PHASES, Phase
from fxoffload.step.segment_names import TURN, lies_between, segment_of

Times = Mapping[Phase, Mapping[str, float]]

# Calls differ by as much from step to step.
_LITTLE = 0.02


def as_compiled(
    compiled: Chain,
    ran: Chain,
    varied: Sequence[bool],
    graphs: Sequence[object],
    ms: Times,
    *,
    is_measured: bool = False,
) -> dict[Phase, dict[str, float]]:
    """Times of a chain whose calls run their graphs as compiled, from measurements of one in which some ran variants.

    Such a call takes the median time of the calls that ran the same graph as compiled. Where there are none, its
    estimate is as wrong as that of the variant that ran. Between the calls nothing changes, unless times of
    ``compiled`` stand, be it of one call. A wait is in a call or in the gap after it, so the gaps of its phase stand
    too, if they take less in all. With FSDP2, 11 of 390 ms counted twice (two H200s, 2026-11-29). What runs between
    forwards and backwards computes, and does not wait. FSDP2's eager head took 55 ms in first steps, in which the
    device often idles, and 59 or 61 ms in steps of plans.

    Args:
        compiled: the chain that is asked for.
        ran: the chain that was measured.
        varied: per call, whether it ran a variant.
        graphs: per call, which graph it is of.
        ms: of ``ran``.
        is_measured: whether the times of ``compiled`` are measurements of the first steps. They stand where no call ran
            it, unless variants take longer than by them in both phases. Then the first steps were measured too fast,
            and all of them are lengthened by the smaller factor. Of four plans of FSDP2, one had them 8 % too fast, and
            plain Inductor's step 5 % too short (two H200s, 2026-11-29).
    """
    longer = _longer(ran, varied, ms) if is_measured else 1.0
    found: dict[Phase, dict[str, float]] = {}
    for phase in PHASES:
        mine, others = (c.segments_of_calls(phase) for c in (compiled, ran))
        measured = ms.get(phase, {})
        times = found[phase] = dict(measured)
        stands = False
        for call, (own, other) in enumerate(zip(mine, others, strict=True)):
            if not varied[call]:
                continue
            alike = [mine[k] for k, g in enumerate(graphs) if g == graphs[call] and not varied[k]]
            estimated = sum(s.ms for s in other)
            ratio = sum(measured.get(s.name, s.ms) for s in other) / estimated if estimated > 0 else 1.0
            ratio = longer if is_measured else ratio
            for at, segment in enumerate(own):
                taken = [measured[a[at].name] for a in alike if a[at].name in measured]
                times[segment.name] = statistics.median(taken) if taken else segment.ms * ratio
                stands |= is_measured and not taken
        steps = compiled.step.forward if phase == "forward" else compiled.step.backward
        between = {s.name: s.ms for s in steps if lies_between(s.name) and s.name != TURN}
        if stands and sum(between.values()) < sum(measured.get(name, ms) for name, ms in between.items()):
            times.update(between)
    return found


def _longer(ran: Chain, varied: Sequence[bool], ms: Times) -> float:
    """By which factor the calls of variants took longer than estimated, at least, in forward and backward; 1 where that
    is little."""
    ratios: list[float] = []
    for phase in PHASES:
        measured = ms.get(phase, {})
        calls = zip(ran.segments_of_calls(phase), varied, strict=True)
        there = [s for call, varies in calls if varies for s in call if s.name in measured]
        estimated = sum(s.ms for s in there)
        ratios.append(sum(measured[s.name] for s in there) / estimated if estimated > 0 else 1.0)
    found = min(ratios)
    return found if found > 1 + _LITTLE else 1.0


def measured_calls(
    steps: Sequence[TrainingStep], graphs: Sequence[Hashable], ms: Times
) -> dict[Hashable, tuple[TrainingStep, bool]]:
    """The step of one call of each graph, from measurements of a chain; and whether all of it was measured.

    Calls of one graph run the same code: a segment takes its time from the median call. One that was measured in no
    call is as much longer than its estimate as the others of its phase are.

    Args:
        steps: of the calls, as estimated.
        graphs: per call, which graph it ran.
        ms: of the chain's segments.
    """
    calls: dict[Hashable, list[int]] = {}
    for call, graph in enumerate(graphs):
        calls.setdefault(graph, []).append(call)
    times: dict[Hashable, dict[Phase, dict[str, float]]] = {graph: {} for graph in calls}
    incomplete: set[Hashable] = set()
    for phase in PHASES:
        measured = ms.get(phase, {})
        estimates: dict[tuple[Hashable, str], float] = {}
        found: dict[tuple[Hashable, str], float] = {}
        for graph, of in calls.items():
            step = steps[of[0]]
            for segment in step.forward if phase == "forward" else step.backward:
                estimates[graph, segment.name] = segment.ms
                taken = [measured[n] for call in of if (n := segment_of(call, segment.name)) in measured]
                if taken:
                    found[graph, segment.name] = statistics.median(taken)
        estimated = sum(estimates[at] for at in found)
        ratio = sum(found.values()) / estimated if estimated > 0 else 1.0
        for (graph, name), estimate in estimates.items():
            times[graph].setdefault(phase, {})[name] = found.get((graph, name), estimate * ratio)
        incomplete |= {graph for graph, name in estimates.keys() - found.keys()}
    return {graph: (measured_step(steps[of[0]], times[graph]), graph not in incomplete) for graph, of in calls.items()}
