"""The compiled graphs of this process: what ``fxoffload.graphs()`` lists, and the policy switch at run time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch.fx as fx

from fxoffload.counters import counters
from fxoffload.passes.annotate_layers import LayerReport
from fxoffload.passes.attention_masks import AttentionMask
from fxoffload.passes.choose_actions import POLICIES
from fxoffload.passes.find_candidates import SavedValues
from fxoffload.plan_report.registry import PlanBox
from fxoffload.reset import on_reset
from fxoffload.runtime.tracker.outputs import Outputs
from fxoffload.step.choice import Choice


@dataclass(frozen=True, eq=False)
class CompiledVariant:
    """A graph that was compiled once more, with another recompute choice (``fxoffload.runtime.variant``).

    ``number``: that calls name it by.
    """

    number: int
    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: SavedValues


@dataclass(frozen=True)
class Returned:
    """What a graph's forward hands to its caller.

    Attributes:
        label: module path, shape and dtype.
        nbytes: of its memory; 0 where a size has no hint.
        is_loss: whether it is one number that training may go on with alone.
    """

    label: str
    nbytes: int
    is_loss: bool


@dataclass(eq=False)
class CompiledGraph:
    """One training graph that fxoffload compiled.

    Attributes:
        forward: the outer forward graph; its nodes are segment calls and ``torch.ops.fxoffload`` ops.
        backward: the outer backward graph; None until the backward is compiled.
        layers: layer labels in order of execution, and where they come from ("modules", "repeats" or "none").
        saved: values that the forward saves, candidates and skipped.
        policy: "auto", "offload_all" or "keep_all"; may be set at any time, from the next forward on.
        actions: policy -> one bool per candidate, True to offload.
        masks: of S x S that its attention is called with.
        decisions: candidate name -> True to offload; outweighs the policy; may be changed at any time.
        planned: the choice of policy "auto" where there is a plan: one bool per candidate, and the plan's windows.
            Replaced as a whole, from the next forward on.
        plan_box: holds its plan for ``fxoffload.plans()``; None without a plan.
        outputs: lifetimes and gradients of the forward's results.
        returns: what its forward returns to the caller, tensors only.
        num_backwards: how many backward calls have ended.
        keeps_everything: the backward fell back to plain Inductor, so the forward may save no tokens.
        variants: with other recompute choices, for calls of a plan for a step over several graphs.
        index: place in the order of compilation.
    """

    forward: fx.GraphModule
    layers: LayerReport
    saved: SavedValues
    policy: str
    actions: Mapping[str, tuple[bool, ...]]
    masks: tuple[AttentionMask, ...] = ()
    backward: fx.GraphModule | None = None
    decisions: dict[str, bool] = field(default_factory=dict)
    planned: Choice | None = None
    plan_box: PlanBox | None = None
    outputs: Outputs = field(default_factory=Outputs)
    returns: tuple[Returned, ...] = ()
    num_backwards: int = 0
    keeps_everything: bool = False
    variants: list[CompiledVariant] = field(default_factory=list)
    index: int = field(default_factory=lambda: next(_INDEX))

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Layer labels in order of execution."""
        return self.layers.layers

    def may_follow(self) -> bool:
        """Whether the forward call that begins now follows a plan, and nothing else."""
        return not self.keeps_everything and not self.decisions and (_override.policy or self.policy) == "auto"

    def may_keep(self) -> bool:
        """Whether it uses the recompute choices of a plan over several graphs, and offloads nothing.

        It would follow the plan, but for ``override_policy("keep_all")``.
        """
        return (
            not self.keeps_everything
            and not self.decisions
            and self.policy == "auto"
            and _override.policy == "keep_all"
        )

    def choose(self, instead: Choice | None = None) -> Choice:
        """The choice for the forward call that begins now. ``decisions`` (by name) override the policy.

        ``instead`` takes the place of ``planned``: for a call of another size, or for this call's place in a plan for
        the step.
        """
        if self.keeps_everything:
            return Choice((False,) * len(self.saved.candidates))
        policy = _override.policy or self.policy
        _check_policy(policy)
        planned = (instead or self.planned) if policy == "auto" else None
        chosen = planned or Choice(self.actions[policy])
        if not self.decisions:
            return chosen
        pairs = zip(self.saved.candidates, chosen.offload, strict=True)
        return replace(chosen, offload=tuple(self.decisions.get(c.name, offload) for c, offload in pairs))

    def decide(self) -> tuple[bool, ...]:
        """One bool per candidate: what ``choose`` says of the next forward call, where no plan over several graphs says
        more (see ``fxoffload.plans``)."""
        return tuple(self.choose().offload)


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; the policies are {', '.join(POLICIES)}")


class _Override(threading.local):
    policy: str | None = None


_override = _Override()
_GRAPHS: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
on_reset(_GRAPHS.clear)
_INDEX = itertools.count()
_PLAIN: Counter[str] = Counter()
on_reset(_PLAIN.clear)


def register(graph: CompiledGraph) -> None:
    """Remember a compiled graph for as long as its code is alive."""
    _GRAPHS.add(graph)


def note_plain(reason: str) -> None:
    """A training graph is left to plain Inductor, and no plan says so."""
    _PLAIN[reason] += 1
    counters.add("num_plain_graphs")


def plain_graphs() -> dict[str, int]:
    """How many training graphs were left to plain Inductor without a plan that says so, by reason."""
    return dict(_PLAIN)


def graphs() -> list[CompiledGraph]:
    """The compiled training graphs that are alive, in order of compilation."""
    return sorted(_GRAPHS, key=lambda g: g.index)


@contextlib.contextmanager
def override_policy(policy: str) -> Iterator[None]:
    """Run the forwards of this thread under another policy: "auto", "offload_all" or "keep_all". Nothing recompiles.

    Under "keep_all" the backward recomputes what the plan says, once a step has followed that plan without the
    override. So a step has the very bits that it has with offloading. In three cases calls of a plan over several
    graphs run the graphs as they were compiled: before that, under "offload_all", and with a ``policy`` that is set on
    a graph.

    Raises:
        ValueError: unknown policy.
    """
    _check_policy(policy)
    before, _override.policy = _override.policy, policy
    try:
        yield
    finally:
        _override.policy = before
