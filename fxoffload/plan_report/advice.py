"""What to change, in words, each with its number. Every number is a plan's, the simulator's, or was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxoffload.plan_report.exposed import Exposed, in_ms, places_of
from fxoffload.plan_report.facts import GraphFacts, StepFacts
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.table import counted, describe_mask
from fxoffload.sizes import format_bytes

# Waits below this part of a step, and differences below this part of a prediction, are not worth a word.
_WAITS = 0.01
_FASTER = 0.003
_OFF = 0.05


def advice_on(facts: StepFacts) -> list[str]:
    """All of it: of the plans that steps follow, then of what ran without one."""
    # Where graphs were planned together, steps follow that plan, and not the graphs' own.
    followed = [p for p in facts.plans if p.label] or facts.plans
    each = [(f"plan of graph {p.graph}: " if len(followed) > 1 else "", p) for p in followed]
    found = [f"{title}{text}" for title, plan in each for text in advice_on_plan(plan)]
    found += on_returned_logits(facts.graphs)
    found += on_counters(facts)
    return found


def advice_on_plan(plan: Plan) -> Iterator[str]:
    """What a plan's own numbers say."""
    yield from on_full_link(plan)
    yield from on_exceeded_budget(plan)
    yield from on_wrong_prediction(plan)
    yield from on_less_memory(plan)
    yield from on_masks(plan)
    yield from on_estimates(plan)


def on_full_link(plan: Plan) -> Iterator[str]:
    """Compute waits for copies: where, and which plans would wait less."""
    exposed = Exposed.of(plan)
    if exposed.ms <= _WAITS * exposed.step_ms:
        return
    for (_, way), waits in exposed.by_direction().items():
        ms = sum(w.ms for w in waits)
        if ms <= _WAITS * exposed.step_ms:
            continue
        what = f"the link is full ({way})" if way else "compute stands still for copies, or for the host,"
        share = 100 * ms / exposed.step_ms
        remedies = "; or ".join(_with_a_faster_plan(plan)) or _without_a_faster_plan(plan)
        where = places_of(waits)
        yield f"{what} in {where}: {in_ms(ms)} of the step ({share:.1f} %, {exposed.source}): {remedies}"


def _with_a_faster_plan(plan: Plan) -> Iterator[str]:
    now = plan.activation_budget or plan.predicted.peak_bytes
    step_ms = plan.predicted.step_ms
    faster = [p for p in plan.frontier if p.budget_bytes > now and p.step_ms < step_ms * (1 - _FASTER)]
    faster = [p for p in faster if _is_seen(p.step_ms, step_ms)]
    if faster:
        p, verb = faster[0], "raise the budget to" if plan.activation_budget else "take a budget of"
        yield (
            f"{verb} {format_bytes(p.budget_bytes)} (activation_budget={p.budget_bytes}): {p.step_ms:.1f} ms a step "
            f"instead of {step_ms:.1f}, by the plan's frontier"
        )
    base = plan.baseline.step_ms
    if plan.max_slowdown is not None and base and step_ms > base * (1 + plan.max_slowdown):
        slowdown = step_ms / base - 1
        yield f"allow {100 * slowdown:.1f} % (max_slowdown={slowdown:.3f}), which this budget takes"


def _without_a_faster_plan(plan: Plan) -> str:
    if not plan.frontier:
        return "the plan has no frontier that would name a faster budget"
    return (
        f"none of the {len(plan.frontier)} budgets of the plan's frontier is faster; fxoffload.plan() plans for seven"
    )


def on_exceeded_budget(plan: Plan) -> Iterator[str]:
    """Steps took more than the budget."""
    budget, peak = plan.activation_budget, plan.measured_peak_bytes
    if budget is not None and peak is not None and peak > budget:
        yield (
            f"steps exceed the activation_budget of {format_bytes(budget)} by {format_bytes(peak - budget)}: "
            f"activation_budget={peak} is what they take; the smallest budget that was found is "
            f"{format_bytes(plan.smallest_budget_bytes)}"
        )


def on_wrong_prediction(plan: Plan) -> Iterator[str]:
    """Steps took longer than was predicted."""
    newest, ms = plan.calibrated or plan.predicted, plan.measured_step_ms
    if ms is not None and newest.step_ms and ms > newest.step_ms * (1 + _OFF) and _is_seen(ms, newest.step_ms):
        yield (
            f"steps take {ms:.1f} ms, {100 * (ms / newest.step_ms - 1):.0f} % more than the plan's "
            f"{newest.step_ms:.1f}: the host launches too late, or something else uses the GPU; plan.save_trace shows "
            "where"
        )


def on_less_memory(plan: Plan) -> Iterator[str]:
    """The next smaller budget, where none was asked for."""
    is_part = plan.loss == "outside"  # What runs outside of the graph is known once its steps were measured.
    if plan.activation_budget is not None or not plan.baseline.step_ms or (is_part and plan.calibrated is None):
        return
    now = (plan.calibrated if is_part and plan.calibrated is not None else plan.predicted).peak_bytes
    frontier = () if is_part else plan.frontier  # of the graph alone
    less = [p for p in frontier if p.budget_bytes < now and format_bytes(p.budget_bytes) != format_bytes(now)]
    if less:
        p = less[-1]
        slower = 100 * (p.step_ms / plan.baseline.step_ms - 1)
        yield (
            f"less memory: activation_budget={p.budget_bytes} ({format_bytes(p.budget_bytes)} instead of "
            f"{format_bytes(now)}) takes {p.step_ms:.1f} ms, {slower:+.1f} % over plain Inductor"
        )
    elif (
        plan.frontier
        and plan.smallest_budget_bytes < now
        and format_bytes(plan.smallest_budget_bytes) != format_bytes(now)
    ):
        yield (
            f"less memory: budgets down to {format_bytes(plan.smallest_budget_bytes)} are met "
            f"(activation_budget={plan.smallest_budget_bytes}); fxoffload.plan() says what each costs"
        )


def on_masks(plan: Plan) -> Iterator[str]:
    """A mask for every pair of tokens."""
    for mask in plan.decisions:
        if mask.action == "mask":
            yield f"attention is given a mask for every pair of tokens: {describe_mask(plan, mask)}"


def on_estimates(plan: Plan) -> Iterator[str]:
    """Nothing of the plan was measured yet."""
    if plan.basis == "estimated" and plan.calibrated is None and plan.measured_step_ms is None:
        yield (
            f"the plan is an estimate from the profile of {plan.device}: its {plan.predicted.step_ms:.1f} ms and "
            f"{format_bytes(plan.predicted.peak_bytes)} were not measured. On a GPU the first steps are; without one, "
            "trust them to rank budgets"
        )


_FEW_OUTPUTS = 2  # logits and hidden states
_LOSS_ALONE = "Return the loss alone, or take it by model(...).loss and keep nothing else"
_CACHE = "So many tensors are a cache of keys and values: call the model with use_cache=False in training"


def on_returned_logits(graphs: Iterable[GraphFacts]) -> Iterator[str]:
    """The forward returns more than its loss."""
    for graph in graphs:
        if nbytes := graph.logits_bytes:
            others = [r for r in graph.returns if not r.is_loss]
            largest = max(others, key=lambda r: r.nbytes)
            until = "until the backward has ended" if graph.holds_outputs else "until it is let go of"
            yield (
                f"the forward returns {format_bytes(nbytes)} beside its loss, the largest {largest.label}: it is on "
                f"the device {until}. {_CACHE if len(others) > _FEW_OUTPUTS else _LOSS_ALONE}"
            )


def on_counters(facts: StepFacts) -> Iterator[str]:
    """Calls and bytes that were left out since the last ``reset_stats``, by reason."""
    stats = facts.stats
    for reason, count in stats.calls_uncompiled.items():
        yield f"{counted(count, 'call')} ran uncompiled and offloaded nothing: {reason}. TORCH_LOGS=recompiles says why"
    for reason, count in stats.calls_kept.items():
        yield f"{counted(count, 'call')} kept everything: {reason}"
    for reason, count in facts.plain.items():
        graphs = "1 graph is" if count == 1 else f"{count} graphs are"
        yield f"{graphs} plain Inductor's and keep{'s' * (count == 1)} everything: {reason}"
    if nbytes := stats.bytes_kept_host_full:
        yield (
            f"{format_bytes(nbytes)} stayed on the device because host memory was full: "
            f"{format_bytes(stats.host_bytes_reserved)} are pinned. Raise host_budget, or the container's limit"
        )
    if misses := stats.num_prefetch_misses:
        yield f"{misses} reloads began only when they were needed; 0 once steps are alike"


def _is_seen(ms: float, other_ms: float) -> bool:
    """Whether two times differ as they are printed."""
    return f"{ms:.1f}" != f"{other_ms:.1f}"
