"""Plans a chain of calls that was seen twice, and has its first steps measured."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence

from fxoffload.compiler.batch_sizes import Sizes
from fxoffload.compiler.chain_graphs import GraphDescription, descriptions_at
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.first_steps import as_in_steps, first_steps_of, in_measured_time
from fxoffload.compiler.recalibrate_chain import replan_for_chain
from fxoffload.plan_report.registry import PlanBox
from fxoffload.runtime import background
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker.chains import ChainPlan, Meanwhile, Seen, why_not_ready
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph

log = logging.getLogger(__name__)


def plan_chain(
    tracked_graphs: Sequence[TrackedGraph], seen: Seen, sizes: Sequence[Sizes] = (), meanwhile: Meanwhile | None = None
) -> ChainPlan | None:
    """The plan of a chain of calls; None where there is nothing to plan.

    That is one call of a graph without a plan of its own, or graphs that were compiled with other options.

    Args:
        tracked_graphs: of the calls, in the order of their forwards.
        seen: observations of their memory.
        sizes: of the calls, the largest that the plan is to serve; empty where none vary.
        meanwhile: is given a plan for the graphs as they are, which takes a fraction of the time to make. On a GPU
            steps that follow it are measured. If enough of them have run by the end of the search, the plan is
            predicted from the times of their calls that began without a wait. The plan that is returned has its
            variants compiled then, where that disturbs no step. None: no step runs until then.
    """
    descriptions = [t.description for t in tracked_graphs if isinstance(t.description, GraphDescription)]
    if (
        len(descriptions) != len(tracked_graphs)
        or (len(descriptions) < 2 and all(t.own_plan is None for t in tracked_graphs))
        or any(d.settings != descriptions[0].settings for d in descriptions)
    ):
        return None
    began = time.perf_counter()
    written = [frozenset(t.written) for t in tracked_graphs]
    at_sizes = as_in_steps(descriptions_at(descriptions, sizes))
    planning, first_steps = ChainPlanning(at_sizes, seen, written, sizes), None
    refs = tuple(weakref.ref(t) for t in tracked_graphs)
    if meanwhile is not None:
        quick = planning.quick()
        log.info("planned %d calls as they are compiled in %.1f s", len(descriptions), time.perf_counter() - began)
        if quick is not None:
            first_steps = first_steps_of(planning)
            choices = planning.choices(quick)
            meanwhile(ChainPlan(refs, choices, sizes=planning.sizes, order=seen.order, observer=first_steps))
        else:
            log.info("they cannot meet the objective as they are compiled")
    schedule = planning.run()
    if first_steps is not None and (readings := first_steps.readings) is not None:
        schedule = in_measured_time(planning, readings, schedule)
    background.check()
    if planning.checkpointing is not None:
        # Of a step under checkpointing next to nothing moved; no step is to wait for pinning.
        engine_for(planning.device).pin(schedule.simulation.bytes_offloaded, planning.budgets)
    box = PlanBox(planning.describe(schedule))
    log.info("planned %d calls in %.1f s: %s", len(descriptions), time.perf_counter() - began, box.plan.summary)
    plan = planning.to_follow(refs, schedule, box, replan_for_chain)
    if meanwhile is None or plan.prepare is None or not planning.may_compile_during_steps():
        return plan
    if (until := planning.choices_until_compiled()) is not None:
        meanwhile(ChainPlan(refs, until, sizes=planning.sizes, order=seen.order))
    try:
        planning.compile_variants(during_steps=True)
    except Exception as error:
        background.warn(why_not_ready(plan, error))
        return None if plan.otherwise is None else plan.otherwise()
    plan.prepare = plan.otherwise = None
    return plan
