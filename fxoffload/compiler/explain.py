"""A plan in words: what happens to each value that plain Inductor, or the plan's own partitioning, would save, and
why."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.compiler.partitioning import Partitioning
from fxoffload.compiler.returned import loss_of
from fxoffload.passes.attention_masks import AttentionMask
from fxoffload.passes.find_candidates import Candidate, Skipped
from fxoffload.plan_report.plan import Plan
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import NO_GRAPH, Action, Decision, FrontierPoint, Prediction
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import Boundary, Simulation
from fxoffload.planner.steps import StorageInfo, TrainingStep
from fxoffload.sizes import format_bytes
from fxoffload.step.segment_names import in_words

_WITHOUT_MASK = (
    'attn_implementation="fxoffload_causal_sdpa" (fxoffload.integrations.transformers) without an attention_mask, or '
    "is_causal=True"
)
# A floor below this part of the peak is not worth naming.
_FLOOR = 0.05


@dataclass(frozen=True)
class ExplainRow:
    """What happens to one value of one layer; see ``Decision``."""

    layer: str
    name: str
    producer: str
    nbytes: int
    action: Action
    reason: str
    label: str = ""


def describe_plan(
    partitioning: Partitioning,
    schedule: Schedule | None,
    base: Partitioning | None,
    *,
    baseline: Simulation,
    simulation: Simulation,
    objective: Objective,
    device: str,
    summary: str,
    smallest_budget_bytes: int,
    frontier: Sequence[FrontierPoint] = (),
) -> Plan:
    """The plan to show.

    Args:
        schedule: what moves when; None: nothing is done.
        base: plain Inductor's partitioning, where ``partitioning`` is another.
    """
    assert partitioning.step is not None
    return Plan(
        graph=NO_GRAPH,
        device=device,
        activation_budget=objective.budget_bytes,
        max_slowdown=objective.max_slowdown,
        source=objective.source,
        summary=summary,
        predicted=Prediction.of(simulation),
        baseline=Prediction.of(baseline),
        smallest_budget_bytes=smallest_budget_bytes,
        decisions=decisions_of(partitioning, schedule, base, simulation),
        floors=tuple(floors_of(partitioning.step, simulation)),
        frontier=tuple(frontier),
        loss=loss_of([partitioning.forward_state]),
        simulation=simulation,
    )


def decisions_of(
    partitioning: Partitioning, schedule: Schedule | None, base: Partitioning | None, simulation: Simulation
) -> tuple[Decision, ...]:
    """What happens to each value; arguments as for ``describe_plan``."""
    return tuple(grouped(_rows(partitioning, schedule, base, simulation)))


# -- decisions ---------------------------------------------------------------------------------------------------------


def _rows(
    partitioning: Partitioning, schedule: Schedule | None, base: Partitioning | None, simulation: Simulation
) -> Iterable[ExplainRow]:
    assert partitioning.step is not None
    state = partitioning.forward_state
    offload: dict[str, bool] = {}
    if schedule is not None:
        offload = {c.name: go for c, go in zip(partitioning.step.candidates, schedule.offload, strict=True)}
    by_name = {c.name: c for c in partitioning.step.candidates}
    for candidate in state.saved.candidates:
        info = by_name.get(candidate.name)
        go = offload.get(candidate.name, False)
        yield ExplainRow(
            _layer(candidate.nodes),
            candidate.name,
            producer_of(candidate),
            candidate.nbytes or 0,
            "offload" if go else "keep",
            "nothing is done" if schedule is None else reason_of(go, info, simulation, is_input=candidate.is_input),
            candidate.label,
        )
    nodes = {n.name: n for n in state.gm.graph.nodes}
    for item in state.saved.skipped:
        if item.reason.startswith("parameter"):
            continue
        node = nodes.get(item.name)
        layer = "" if node is None else str(node.meta.get(LAYER_KEY) or "")
        producer = "" if node is None or node.op != "call_function" else str(node.target)
        yield ExplainRow(layer, item.name, producer, item.nbytes or 0, "stay", why_it_stays(item), item.label)
    yield from mask_rows(state.masks)
    if base is not None and base is not partitioning:
        saved = {n.name for c in state.saved.candidates for n in c.nodes} | {s.name for s in state.saved.skipped}
        more_ms = partitioning.step.compute_ms - (base.step.compute_ms if base.step is not None else 0.0)
        yield from recomputed_rows(base.forward_state.saved.candidates, saved, _layer, recompute_reason(more_ms))


def checkpointed_decisions(plain: Partitioning, checkpointed: Partitioning) -> Iterable[Decision]:
    """Values that the user's activation checkpointing recomputes: ``plain``, without it, saves these."""
    found = checkpointed.forward_state.saved
    saved = {n.name for c in found.candidates for n in c.nodes} | {s.name for s in found.skipped}
    return grouped(
        recomputed_rows(plain.forward_state.saved.candidates, saved, _layer, "activation checkpointing is on")
    )


def recomputed_rows(
    base: Iterable[Candidate], saved: Collection[str], label_of: Callable[[Sequence[fx.Node]], str], reason: str
) -> Iterable[ExplainRow]:
    """Values that plain Inductor would save (``base``) and whose names are not in ``saved``. Inputs are there."""
    for candidate in base:
        if not candidate.is_input and not any(n.name in saved for n in candidate.nodes):
            yield ExplainRow(
                label_of(candidate.nodes),
                candidate.name,
                producer_of(candidate),
                candidate.nbytes or 0,
                "recompute",
                reason,
                candidate.label,
            )


def recompute_reason(more_ms: float) -> str:
    """Why values are recomputed. ``more_ms``: how much longer a step computes than one that saves them all."""
    costs = f"{more_ms:.2g} ms a step" if more_ms >= 0.01 else "no time, by what is known"
    return f"recomputed in the backward from what is saved (all that is: {costs})"


def why_it_stays(item: Skipped) -> str:
    """Why a saved value is no candidate, with its size."""
    return item.reason if item.nbytes is None else f"{item.reason} ({format_bytes(item.nbytes)})"


def mask_rows(masks: Iterable[AttentionMask], label: str | None = None) -> Iterable[ExplainRow]:
    """The masks of S x S that attention is called with, and what to change. ``label``: of the calls, instead of their
    layers."""
    for mask in masks:
        source = "built in the graph" if mask.producer else "an input of the graph"
        calls = f"{len(mask.layers)} attention calls take" if len(mask.layers) > 1 else "an attention call takes"
        yield ExplainRow(
            label if label is not None else mask.layers[0] if len(mask.layers) == 1 else "",
            mask.name,
            mask.producer,
            mask.nbytes,
            "mask",
            f"a mask of {mask.tokens} x {mask.tokens}, {source}, with which {calls} the {mask.kernel} kernel, for all "
            f"{mask.tokens**2:,} pairs of tokens ({mask.tokens * (mask.tokens + 1) // 2:,} are causal). Causal "
            f"attention needs none where nothing is padded or packed: {_WITHOUT_MASK}",
            mask.label,
        )


def producer_of(candidate: Candidate) -> str:
    """The op that computes a candidate."""
    last = candidate.nodes[-1]
    if last.target is operator.getitem:
        return str(last.all_input_nodes[0].target)
    return candidate.producer


def _layer(nodes: Sequence[fx.Node]) -> str:
    labels = [n.meta.get(LAYER_KEY) for n in nodes]
    return str(next((x for x in labels if x is not None), "") or "")


def reason_of(go: bool, info: StorageInfo | None, simulation: Simulation, *, is_input: bool) -> str:
    """Why a candidate is offloaded (``go``) or kept. ``is_input``: it is the caller's memory."""
    if not go:
        if info is not None and not info.moved_bytes:
            return f"smaller than min_bytes ({format_bytes(info.nbytes)})"
        if is_input:
            size = "it" if info is None else f"its {format_bytes(info.nbytes)}"
            return f"the caller's memory: to move {size} would free nothing"
        return f"to move it{_copies(info, simulation)} would gain nothing of what was asked for"
    if simulation.exposed_ms > 0.01 * simulation.step_ms:
        size = "memory" if info is None else format_bytes(info.nbytes)
        return f"the peak needs its {size} (compute waits {simulation.exposed_ms:.2g} ms for copies in all)"
    return f"its copies{_copies(info, simulation)} hide behind compute"


def _copies(info: StorageInfo | None, simulation: Simulation) -> str:
    """How long the copies of a candidate take alone, in brackets. By its size, so that layers that are alike agree."""
    if info is None or not info.moved_bytes:
        return ""
    down, up = (simulation.copy_ms(info.moved_bytes, way) for way in ("d2h", "h2d"))
    return f" ({down:.2g} ms to the host, {up:.2g} back)"


def grouped(rows: Iterable[ExplainRow]) -> Iterable[Decision]:
    """One decision for the layers that do the same with the same."""
    count: dict[tuple[str, str, int], int] = defaultdict(int)
    groups: dict[tuple[object, ...], list[ExplainRow]] = {}
    for row in rows:
        which: object = _place_in_layer(row)
        if which is None:
            # The how-manieth of its kind in its layer.
            kind = (row.layer, row.producer, row.nbytes)
            count[kind] += 1
            which = count[kind]
        where = bool(row.layer) or row.name
        groups.setdefault((where, row.producer, row.nbytes, which, row.action, row.reason), []).append(row)
    for members in groups.values():
        first = members[0]
        yield Decision(
            layers=tuple(r.layer for r in members if r.layer),
            name=first.name,
            producer=first.producer,
            nbytes=first.nbytes,
            action=first.action,
            reason=first.reason,
            names=tuple(r.name for r in members),
            value=first.label,
            values=tuple(r.label for r in members) if all(r.label for r in members) else (),
        )


# "mlp.gate_proj [4, 8] bf16", "mlp (mul 2) [4, 8] bf16"; not "aten.mm mm_4 [4, 8] bf16", nor "input primals_1".
_OF_A_MODULE = re.compile(r"\S+( \([^)]*\))?( \[|$)")


def _place_in_layer(row: ExplainRow) -> str | None:
    """Where in its layer a value is made, the same in layers that are alike; None where its name does not tell."""
    if not row.layer or not _OF_A_MODULE.match(row.label):
        return None
    place = row.label.removeprefix(row.layer)
    return place if place != row.label or row.layer.startswith("call ") else None


def with_actions(
    decisions: Iterable[Decision], offload: Mapping[str, bool], step: TrainingStep, simulation: Simulation
) -> tuple[Decision, ...]:
    """``decisions`` where other candidates move. ``offload``: by name, of the candidates of ``step``."""
    infos = {c.name: c for c in step.candidates}

    def rows() -> Iterable[ExplainRow]:
        for d in decisions:
            layers, names = d.layers or ("",), d.names or (d.name,)
            labels = d.values or (d.value,) * len(names)
            for layer, name, label in zip(layers, names, labels, strict=False):
                row = ExplainRow(layer, name, d.producer, d.nbytes, d.action, d.reason, label)
                if name in offload and d.action in ("keep", "offload"):
                    info, go = infos[name], offload[name]
                    reason = reason_of(go, info, simulation, is_input=info.is_input)
                    row = replace(row, action="offload" if go else "keep", reason=reason)
                yield row

    return tuple(grouped(rows()))


# -- floors ------------------------------------------------------------------------------------------------------------


_ONE_GRAPH = "A graph hands them over when it ends; compile each layer on its own to have them one layer at a time"


def floors_of(step: TrainingStep, simulation: Simulation, about_gradients: str = _ONE_GRAPH) -> Iterable[str]:
    """Memory on the device at the peak under every plan. ``about_gradients``: advice that would reduce gradients."""
    peak = max(simulation.boundaries, key=lambda b: b.peak_bytes, default=None)
    if peak is None:
        return
    at = in_words(simulation.boundaries, peak.phase, peak.segment)
    if peak.gradient_bytes > _FLOOR * peak.peak_bytes:
        yield (
            f"gradients that the backward returns: {format_bytes(peak.gradient_bytes)} at the peak, in {at}. "
            f"{about_gradients}"
        )
    # Outputs that the caller releases are gone when the backward begins. Their gradients may be there all the same.
    counts = step.holds_outputs or peak.phase == "forward"
    outputs = sum(s.nbytes for s in step.storages if s.is_output) if counts else 0
    in_backward = peak.phase == "backward"
    tangents = sum(s.nbytes for s in step.storages if s.is_tangent and not s.is_left_out) if in_backward else 0
    if outputs + tangents > _FLOOR * peak.peak_bytes:
        yield (
            f"what the forward returns to the caller (logits, hidden states): {format_bytes(outputs)}, and gradients "
            f"of it: {format_bytes(tangents)}. Return the loss alone, or compute it in chunks"
        )
    if peak.outside_bytes > _FLOOR * peak.peak_bytes:
        yield (
            f"memory outside compiled graphs (an eager head or loss, FSDP's buffers): "
            f"{format_bytes(peak.outside_bytes)} at the peak, in {at}. Compile the head and its loss, or "
            "compute them in chunks"
        )
    inside = peak.peak_bytes - peak.live_bytes - peak.outside_bytes
    if inside > _FLOOR * peak.peak_bytes:
        yield (
            f"the working set of {at}: {format_bytes(inside)} above what is live when it begins. {_what_helps(peak)}"
        )


def _what_helps(peak: Boundary) -> str:
    if peak.layer:
        return "A smaller batch or a shorter sequence makes it smaller"
    return "A smaller batch, or a loss computed in chunks, makes it smaller"
