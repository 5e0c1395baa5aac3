"""The plan of a step that ran on fake tensors: how its graphs would run on the device.

A step of one graph has that graph's plan. Several graphs do the same as in training
(``fxoffload.runtime.tracker.own_plan``). They are planned together, like layers that are compiled each on its own.
Graphs with plans of their own keep them where a budget is met so side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.fake_step import FakeGraph, FakeStep
from fxoffload.compiler.planning import too_small
from fxoffload.compiler.returned import loss_of
from fxoffload.errors import UnsupportedError
from fxoffload.plan_report.plan import Plan
from fxoffload.planner.plan import NO_GRAPH, Decision
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.tracker.chains import Seen
from fxoffload.sizes import format_bytes
from fxoffload.step.choice import Windows
from fxoffload.step.edges import EdgeMemory
from fxoffload.tell import warn
from fxoffload.torch_private.dynamo_state import why_off

log = logging.getLogger(__name__)


def plan_fake_step(step: FakeStep, breaks: tuple[str, ...]) -> Plan:
    """The plan of a step.

    Args:
        step: that ran.
        breaks: the code between its graphs.

    Raises:
        BudgetError: no plan fits into the budget.
        UnsupportedError: there is nothing to plan.
    """
    graphs = list(dict.fromkeys(step.ran))
    if not graphs:
        raise UnsupportedError(_why_nothing(step))
    apart = [g for g in graphs if g.why_not_described]
    if apart and len(graphs) > 1:
        raise UnsupportedError(
            f"expected graphs that can be planned as one step, found one that cannot: {apart[0].why_not_described}. "
            "Plan the parts of the model between its graph breaks"
        )
    plan = _plan_of_calls(step) if len(step.calls) > 1 else _plan_of_graph(graphs)
    return replace(plan, graph=NO_GRAPH, breaks=breaks, loss=loss_of(g.forward_state for g in graphs))


def _why_nothing(step: FakeStep) -> str:
    if not step.has_forward and (reason := why_off()):
        return f"expected torch.compile to trace the model, found it switched off: {reason}. Enable it"
    if not step.has_forward:
        return (
            "expected a model that computes with tensors, found nothing in its call that torch.compile could trace. "
            "Pass its inputs as tensors, and let it return them"
        )
    return (
        "expected an output that requires grad, found none: without a backward nothing is saved. Pass what the "
        "loss needs (labels), and call the model as the training step does"
    )


def _plan_of_graph(graphs: Sequence[FakeGraph]) -> Plan:
    """Of the only graph with anything to plan."""
    planned = next((g.planned for g in graphs if g.planned is not None), None)
    if planned is not None:
        return planned.plan
    graph = max(graphs, key=lambda g: len(g.layers))
    if len(graph.layers) < 2:
        raise UnsupportedError(
            f"expected two or more layers to plan, found {', '.join(graph.layers) or 'one or none'}: with one layer "
            "there is nothing to choose from. Plan the whole model, with two layers or more"
        )
    raise UnsupportedError(
        "expected saved activations, found none that may move: all are smaller than min_bytes, inputs, or parameters. "
        "Make the inputs as large as in training, or lower min_bytes"
    )


# -- several calls -----------------------------------------------------------------------------------------------------


class _Planning(ChainPlanning):
    """The planner of a step's calls, as plans ahead need it.

    Args:
        calls: of the step.
        edge_memory: memory at their edges.

    Attributes:
        said: its warnings.
    """

    def __init__(self, calls: Sequence[FakeGraph], edge_memory: tuple[EdgeMemory, ...]) -> None:
        self.said: list[str] = []
        descriptions = [g.description for g in calls if g.description is not None]
        super().__init__(descriptions, Seen(edge_memory), [frozenset()] * len(descriptions))
        # No value of a graph that plain Inductor compiles can move.
        names = [n for g, names in zip(calls, self.chain.candidates, strict=True) if g.is_plain for n in names]
        self.fixed = {name: False for name in names if name is not None}
        self.choice = self.compiled = self.chain_search.as_compiled()

    def warn(self, kind: str, text: str) -> None:
        """Keep the text: no step follows this plan yet."""
        self.said.append(text)


def _plan_of_calls(step: FakeStep) -> Plan:
    calls = step.calls
    if not (step.is_regular and step.is_complete):
        raise UnsupportedError(
            "expected a step whose backwards run in the reverse order of their forwards, each once, found "
            f"{len(calls)} calls of compiled graphs in another order, which are not planned together in training "
            "either. Plan the parts of the model between its graph breaks"
        )
    planning = _Planning(calls, step.edge_memory())
    together = _are_planned_together(calls)
    found = planning.run() if together else _as_each_plans(calls, planning)
    for text in planning.said:
        log.info("%s", text)
    _check_budget(planning, found, is_least=together)
    if not together:
        planning.summary = f"{_each_by_itself(calls)}: {planning.gain(found)}"
    plan = planning.describe(found)
    return plan if together else replace(plan, decisions=tuple(_own_decisions(calls, plan)))


def _are_planned_together(calls: Sequence[FakeGraph]) -> bool:
    """As ``fxoffload.runtime.tracker.own_plan`` says of the graphs of a step."""
    movers = [g for g in calls if not g.is_plain]
    own = [g.planned for g in movers if g.planned is not None]
    budgets = [planned.plan.activation_budget for planned in own if planned.plan.activation_budget is not None]
    if len(movers) < 2 or len(own) < len(movers) or not budgets:
        return len(movers) > 1
    # With a budget of the user's, graphs that were left to Inductor count too.
    judged = own if own[0].objective.is_checkpointing else [g.planned for g in calls if g.planned is not None]
    return sum(planned.plan.predicted.peak_bytes for planned in judged) > min(budgets)


def _each_by_itself(calls: Sequence[FakeGraph]) -> str:
    others = sum(g.planned is None for g in calls)
    text = "each graph keeps its own plan"
    return f"{text}, {others} of {len(calls)} calls have none and offload what they save" if others else text


def _check_budget(planning: ChainPlanning, found: Schedule, *, is_least: bool) -> None:
    """``is_least``: whether nothing less than ``found`` was found, where that exceeds the budget."""
    budget, limit = planning.objective.budget_bytes, planning.limit_bytes
    if planning.objective.is_checkpointing or budget is None or limit is None or found.simulation.peak_bytes <= limit:
        return
    if is_least:
        basis = f"The step has {len(planning.descriptions)} calls of compiled graphs"
        raise too_small(budget, found.simulation, budget - limit, planning.baseline.peak_bytes, basis)
    least = found.simulation.peak_bytes + budget - limit
    warn(
        f"expected a step within the activation_budget of {format_bytes(budget)}, found one that takes "
        f"{format_bytes(least)}: each of its graphs fits into the budget alone, and they cannot be planned together "
        "(one that fits without a plan is compiled as plain Inductor does). Make the model free of the graph breaks "
        "that the plan names, or give a smaller budget",
    )


# -- graphs that keep their own plans ----------------------------------------------------------------------------------


def _as_each_plans(calls: Sequence[FakeGraph], planning: ChainPlanning) -> Schedule:
    """The schedule of the calls without a plan for the step."""
    chain = planning.chain
    moves: dict[str, bool] = {}
    in_flight, ahead = [0] * (len(chain.step.forward) + 1), [0] * (len(chain.step.backward) + 1)
    for k, graph in enumerate(calls):
        own, windows = _own_choice(graph)
        pairs = zip(planning.choice.candidates_of(k), chain.candidates[k], strict=True)
        moves.update({name: own[c] for c, name in pairs if name is not None})
        down, up = chain.forward[k] + 1, chain.backward[k]
        in_flight[down : down + len(windows.in_flight)] = windows.in_flight
        ahead[up : up + len(windows.ahead)] = windows.ahead
    offload, windows = chain.step.decide(moves), Windows(tuple(in_flight), tuple(ahead))
    return Schedule(offload, windows, simulate(chain.step, offload, copies=planning.rates, windows=windows))


def _own_choice(graph: FakeGraph) -> tuple[dict[str, bool], Windows]:
    """Candidate -> whether it is offloaded, and the windows."""
    planned, description = graph.planned, graph.description
    assert description is not None
    step = description.step
    if planned is not None and planned.schedule is not None:
        names = [c.name for c in planned.partitioning.step.candidates]  # type: ignore[union-attr]
        return dict(zip(names, planned.schedule.offload, strict=True)), planned.schedule.windows
    if planned is not None:
        return {c.name: False for c in step.candidates}, no_windows(step)
    flags = zip(description.graph.saved.candidates, description.graph.actions["auto"], strict=True)
    # Its windows follow its segments: about its largest value is under way.
    most = max((c.moved_bytes or 0 for c in step.candidates), default=0)
    windows = Windows((most,) * (len(step.forward) + 1), (most,) * (len(step.backward) + 1))
    return {c.name: go for c, go in flags}, windows


def _own_decisions(calls: Sequence[FakeGraph], plan: Plan) -> Iterator[Decision]:
    """Of plans of their own, as they say; of other graphs by their calls."""
    seen: list[FakeGraph] = []
    for k, graph in enumerate(calls):
        if graph.planned is None:
            yield from (d for d in plan.decisions if f"call {k}" in d.layers)
        elif graph not in seen:
            seen.append(graph)
            yield from graph.planned.plan.decisions
