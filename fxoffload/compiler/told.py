"""What the user is told while a graph is compiled: of values that stay, of a budget that is not checked."""

from __future__ import annotations

import logging
from collections import Counter

from fxoffload import tell
from fxoffload.compiled_graph import note_plain
from fxoffload.compiler.pipeline import ForwardState
from fxoffload.counters import counters
from fxoffload.options import Options
from fxoffload.passes.find_candidates import SMALL
from fxoffload.sizes import format_bytes

log = logging.getLogger(__name__)


def the_plan_wins(ignored: str) -> None:
    """torch's own settings of saved values, named in ``ignored``, have no effect."""
    tell.warn_once(
        ("torch's settings", ignored),
        f"expected one place that chooses what is saved and recomputed, found torch's own settings beside fxoffload: "
        f"{ignored}. fxoffload's choice holds, and they have no effect. For less memory set "
        "options={'activation_budget': ...}; to leave the choice to torch use policy='keep_all' or 'offload_all'",
    )


def checkpointing_stays() -> None:
    """No plan for the step takes the place of activation checkpointing."""
    log.info("steps change too often: activation checkpointing of graphs of one layer goes on being obeyed")


def irregular_steps(budget_bytes: int) -> None:
    """No plan for the step is made, though there is a budget."""
    tell.warn(
        "expected steps that run the same compiled graphs forward and backward in the same order, to plan for an "
        f"activation_budget of {format_bytes(budget_bytes)}; found steps that change too often. They run "
        "without a plan for all of their graphs, and the budget is not checked"
    )


def no_common_plan(budget_bytes: int | None, reason: str) -> None:
    """A graph cannot be planned together with the others of its step."""
    if budget_bytes is not None:
        tell.warn(
            "expected graphs that can be planned together, for an activation_budget of "
            f"{format_bytes(budget_bytes)}; found one that cannot: {reason}. In steps with it all "
            "that may move is offloaded, and the budget is not checked"
        )


def sizes_depend_on_data(budget_bytes: int) -> None:
    """A budget cannot be planned for."""
    tell.warn(
        f"expected sizes that are known before a step runs, to plan for an activation_budget of "
        f"{format_bytes(budget_bytes)}; found activations whose sizes depend on data (experts "
        "without a capacity, say). All that may move is offloaded, and the budget is not checked"
    )


def nothing_moves(state: ForwardState, options: Options) -> None:
    """Loudly where all was to be offloaded, and only the sizes are in the way."""
    skipped = Counter(s.reason for s in state.saved.skipped if not s.reason.startswith("parameter"))
    found = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "none but parameters"
    log.info("nothing to offload in a graph, plain Inductor. It saves %s", found)
    note_plain(f"nothing in it may be offloaded: it saves {found}")
    if options.policy == "offload_all" and set(skipped) == {SMALL}:
        tell.warn_once(
            "small",
            f"expected values to offload, as policy='offload_all' asks, found a graph that saves {found} "
            f"({format_bytes(options.min_bytes)}): it is compiled as plain Inductor. Lower min_bytes to move "
            "them too",
        )


def count_skipped(state: ForwardState) -> None:
    """Counts the values that stay, by their reasons."""
    for item in state.saved.skipped:
        counters.add_reason("bytes_skipped", item.reason, item.nbytes or 0)
        log.debug("keeps %s (%s bytes): %s", item.name, item.nbytes, item.reason)
