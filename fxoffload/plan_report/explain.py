"""``fxoffload.explain()``: plans and measurements, where copies are exposed, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxoffload.errors import NoPlanError
from fxoffload.plan_report.advice import advice_on
from fxoffload.plan_report.blocks import Block, Lines, Points, as_html, as_text
from fxoffload.plan_report.exposed import Exposed
from fxoffload.plan_report.facts import GraphFacts, StepFacts
from fxoffload.plan_report.modules import near, values_of
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.table import basis, costs, counted, decisions, describe, describe_mask, totals
from fxoffload.planner.plan import Decision, why_not_measured
from fxoffload.sizes import format_bytes


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``print`` shows it as text, a notebook as HTML.

    Attributes:
        advice: what to change, in words, each with its number; what may gain most first.
        blocks: all of it, in order.
    """

    advice: tuple[str, ...]
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return as_text(self.blocks)

    def __repr__(self) -> str:
        return f"<explanation with {len(self.advice)} pieces of advice; print shows it>"

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return as_html(self.blocks)


def explain(module: str | None = None) -> Explanation:
    """Shows plans and measurements of the steps that ran, and says what to change. Waits for running copies.

    For each plan: predicted, calibrated and measured time and peak; where compute waits for copies, by layer; what
    keeps everything, and why; attention masks; whether logits are returned. For the step: calls that ran uncompiled,
    and advice, each with the number that it rests on.

    Args:
        module: only the values of one module: the end of its path ("mlp.gate_proj"), or a pattern ("layers.1?.mlp").

    Returns:
        An object to print, or to look at in a notebook.

    Raises:
        NoPlanError: (a LookupError) nothing was planned, or no backward of a planned graph has run.
        ValueError: no saved value is of ``module``; the message names some that are.
        TypeError: ``module`` is no text.
    """
    return explained(StepFacts.now(), module)


def explained(facts: StepFacts, module: str | None = None) -> Explanation:
    """The same of given facts."""
    if not isinstance(module, (str, type(None))):
        raise TypeError(f'expected the name of a module, as "mlp.gate_proj", found {type(module).__name__} {module!r}')
    _check(facts)
    if module is not None:
        return _of_module(facts, module)
    advice = tuple(advice_on(facts))
    blocks: list[Block] = [_summary(facts)]
    for plan in facts.plans:
        blocks += _of_plan(plan, [g for g in facts.graphs if g.plan == plan.graph])
    if others := [g for g in facts.graphs if g.plan is None]:
        blocks.append(Points("compiled graphs without plans of their own:", tuple(map(_of_graph, others))))
    blocks.append(Points("advice:", advice) if advice else Lines(("advice: none, nothing stands out",)))
    return Explanation(advice, tuple(blocks))


def _check(facts: StepFacts) -> None:
    if facts.plans or facts.graphs:
        if facts.graphs and not any(g.has_backward for g in facts.graphs):
            raise NoPlanError(
                "expected a step that has run, found none: the model was compiled, and no backward of it has ended. "
                "Call loss.backward() first; print(fxoffload.last_plan()) shows the plan before that"
            )
        return
    plain = "; ".join(f"{count} compiled as plain Inductor does: {reason}" for reason, count in facts.plain.items())
    uncompiled = facts.stats.calls_uncompiled.items()
    calls = "; ".join(f"{counted(count, 'call')} ran uncompiled: {reason}" for reason, count in uncompiled)
    found = "; ".join(text for text in (plain, calls) if text) or "nothing that was compiled and called with gradients"
    raise NoPlanError(
        f"expected a step of a model compiled with fxoffload, found none to explain: {found}. Run one step first, with "
        "gradients and with tensors on a device that activations are offloaded from (device_types; the CPU is none by "
        "default). fxoffload.plan(model, inputs, device='h200') plans without running"
    )


# -- the whole step ----------------------------------------------------------------------------------------------------


def _summary(facts: StepFacts) -> Lines:
    stats = facts.stats
    num_graphs = sum(g.count for g in facts.graphs)
    uncompiled = sum(stats.calls_uncompiled.values())
    return Lines(
        (
            f"{counted(len(facts.plans), 'plan')}, {counted(num_graphs, 'graph')} compiled to offload, "
            f"{counted(sum(facts.plain.values()), 'graph')} plain Inductor's without a plan",
            f"since the last reset_stats(): {format_bytes(stats.bytes_offloaded)} offloaded, compute waited "
            f"{stats.exposed_copy_ms:.1f} ms for copies, {counted(uncompiled, 'call')} ran uncompiled",
        )
    )


def _of_plan(plan: Plan, graphs: list[GraphFacts]) -> list[Block]:
    lines = [describe(plan), plan.summary, basis(plan)]
    if not _changes_any(plan.decisions):
        lines.append("it keeps everything, as plain Inductor does")
    lines += [f"it {text}" for graph in graphs for text in _of_returns(graph)]
    lines += [f"it keeps everything: {graph.keeps}" for graph in graphs if graph.keeps]
    blocks: list[Block] = [Lines(tuple(lines)), costs(plan), _of_waits(plan)]
    if any(d.action != "mask" for d in plan.decisions):
        blocks.append(Lines((totals(plan, plan.decisions),)))
    if masks := [d for d in plan.decisions if d.action == "mask"]:
        blocks.append(Points("attention masks:", tuple(describe_mask(plan, d) for d in masks)))
    return blocks


def _of_waits(plan: Plan) -> Block:
    exposed, reason = Exposed.of(plan), why_not_measured(plan)
    after = (reason,) if reason else ()
    if not exposed.source:
        return Lines(("where copies are exposed is not known: the plan was read from JSON", *after))
    if exposed.ms <= 0:
        return Lines((f"no copy is exposed ({exposed.source}): all of them run behind compute", *after))
    title = f"exposed copies by layer ({exposed.source}, {exposed.ms:.2g} of {exposed.step_ms:.1f} ms):"
    return Points(title, (*exposed.in_words(), *after))


def _of_graph(graph: GraphFacts) -> str:
    name = graph.layers or "a graph of one layer or none"
    texts = [f"keeps everything: {graph.keeps}"] if graph.keeps else []
    texts += _of_returns(graph)
    texts += [] if graph.has_backward else ["no backward of it has run"]
    times = f" ({graph.count} alike)" if graph.count > 1 else ""
    return f"{name}{times}: {'; '.join(texts) or 'planned with others of its step, or offloads by its policy'}"


def _of_returns(graph: GraphFacts) -> Iterator[str]:
    """Whether logits are returned; nothing of a graph without a loss."""
    if not any(r.is_loss for r in graph.returns):
        return
    if not graph.logits_bytes:
        yield "returns its loss alone, no logits"
        return
    largest = max((r for r in graph.returns if not r.is_loss), key=lambda r: r.nbytes)
    yield f"returns {format_bytes(graph.logits_bytes)} beside its loss, the largest {largest.label}"


# -- one module --------------------------------------------------------------------------------------------------------


def _of_module(facts: StepFacts, module: str) -> Explanation:
    found = [(plan, some) for plan in facts.plans if (some := values_of(plan, module))]
    if not found:
        hint = near(facts.plans, module) or "no plan knows module paths"
        raise ValueError(f"expected a module whose activations are saved, found {module!r}; {hint}")
    blocks: list[Block] = []
    for plan, some in found:
        layers = {layer for d in some for layer in d.layers}
        lines = [totals(plan, some), *_waits_of(plan, layers)]
        if not _changes_any(some):
            lines.append("nothing of it moves or is recomputed")
        blocks += [Lines((f"{module} in {describe(plan)}",)), decisions(plan, some), Lines(tuple(lines))]
    return Explanation((), tuple(blocks))


def _waits_of(plan: Plan, layers: Iterable[str]) -> Iterator[str]:
    """What compute waits in the layers of a module, for copies of theirs and of others."""
    exposed = Exposed.of(plan)
    # In a step over several graphs a layer is a call, and the name of a place begins with it.
    mine = [w for w in exposed.waits if any(w.place == x or w.place.startswith(f"{x} ") for x in layers)]
    if exposed.source:
        ms = sum(w.ms for w in mine)
        yield f"in its layers compute waits {ms:.2g} of {exposed.step_ms:.1f} ms for copies ({exposed.source})"


def _changes_any(some: Iterable[Decision]) -> bool:
    return any(d.action in ("offload", "recompute") for d in some)
