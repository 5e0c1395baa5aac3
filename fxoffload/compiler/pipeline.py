"""The order of the passes, as data, and the state that they hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from fxoffload.analysis.segmentation import Donations, Segmentation
from fxoffload.analysis.values import Storages, output_values
from fxoffload.compiler.segments import SegmentCall
from fxoffload.compiler.tangents import left_out, losses_of
from fxoffload.passes.attention_masks import AttentionMask, FindAttentionMasks
from fxoffload.passes.choose_actions import POLICIES, ChooseActions
from fxoffload.passes.choose_donations import ChooseDonations
from fxoffload.passes.cut_segments import CutSegments
from fxoffload.passes.find_candidates import FindCandidates, SavedValues
from fxoffload.passes.insert_transfers import InsertOffloads, InsertReloads
from fxoffload.passes.rematerialize import Rematerialize
from fxoffload.passes.runner import PassEntry, State
from fxoffload.passes.settle_nodes import SettleNodes
from fxoffload.passes.verify_pairing import VerifyPairing
from fxoffload.passes.verify_transfers import VerifyTransfers
from fxoffload.passes.verify_wiring import VerifyWiring


@dataclass
class ForwardState:
    """From a partitioned forward graph to its outer graph."""

    gm: fx.GraphModule
    num_user_outputs: int
    static_inputs: frozenset[int]
    device: torch.device
    min_bytes: int
    logs: bool = False  # so plain Inductor breaks the graph
    whole: bool = False
    num_moved: int = 0
    masks: tuple[AttentionMask, ...] = ()
    saved: SavedValues = field(default_factory=lambda: SavedValues((), ()))
    segmentation: Segmentation = field(default_factory=lambda: Segmentation(()))
    actions: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    modules: Mapping[str, SegmentCall] = field(default_factory=dict)
    outer: fx.GraphModule | None = None

    @property
    def returned(self) -> Sequence[object]:
        """What the user's code is given."""
        return output_values(self.gm.graph)[: self.num_user_outputs]


@dataclass
class BackwardState:
    """From a partitioned backward graph to its outer graph."""

    gm: fx.GraphModule
    forward: ForwardState
    copies: frozenset[str]
    donatable: frozenset[fx.Node]
    device: torch.device
    whole: bool = False
    num_moved: int = 0
    segmentation: Segmentation = field(default_factory=lambda: Segmentation(()))
    donations: Donations = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()  # names of tangents
    modules: Mapping[str, SegmentCall] = field(default_factory=dict)
    outer: fx.GraphModule | None = None

    @property
    def owned(self) -> frozenset[str]:
        """Names of the placeholders that end with their last reader: copies, and outputs, which the caller has let go
        of (logits, of which the loss is made)."""
        storages = Storages(self.forward.gm.graph.nodes)
        roots = {storages.root(v) for v in self.forward.returned if isinstance(v, fx.Node)}
        made = {root for root in roots if all(v.op == "call_function" for v in storages.members(root))}
        return self.copies.union(v.name for root in made for v in storages.members(root))


def _find_left_out(
    segmentation: Segmentation, returned: Sequence[object]
) -> Callable[[fx.GraphModule], frozenset[str]]:
    """Tangents are likely zeros where one of the outputs is a loss."""
    return lambda gm: left_out(gm, segmentation) if losses_of(returned) else frozenset()


def _choose_actions(
    segmentation: Segmentation, saved: SavedValues
) -> Callable[[fx.GraphModule], Mapping[str, tuple[bool, ...]]]:
    choose = ChooseActions(segmentation, saved.candidates)
    return lambda gm: {policy: choose(policy) for policy in POLICIES}


def _make_calls(
    segmentation: Segmentation, donations: Donations, left_out: frozenset[str] = frozenset()
) -> Callable[[fx.GraphModule], Mapping[str, SegmentCall]]:
    return lambda gm: {s.name: SegmentCall(s, donations.get(s.name, ()), left_out) for s in segmentation.segments}


def _verify_pairing(state: BackwardState) -> VerifyPairing:
    forward = state.forward
    assert forward.outer is not None
    return VerifyPairing(forward.gm, forward.outer, forward.num_user_outputs)


FIND: tuple[PassEntry[ForwardState], ...] = (
    PassEntry("find_attention_masks", lambda s: FindAttentionMasks(), "masks"),
    PassEntry("settle_nodes", lambda s: SettleNodes(s.num_user_outputs), "num_moved", ("num_user_outputs",)),
    PassEntry(
        "find_candidates",
        lambda s: FindCandidates(
            num_user_outputs=s.num_user_outputs, static_inputs=s.static_inputs, min_bytes=s.min_bytes, device=s.device
        ),
        "saved",
        ("num_user_outputs", "static_inputs", "min_bytes", "device"),
    ),
)

FORWARD: tuple[PassEntry[ForwardState], ...] = (
    PassEntry(
        "cut_segments",
        lambda s: CutSegments(moved=s.saved.moved_bytes, whole=s.whole, single=True),
        "segmentation",
        ("saved", "whole"),
    ),
    PassEntry(
        "rematerialize",
        lambda s: Rematerialize(s.segmentation, moved=s.saved.moved_bytes),
        "segmentation",
        ("segmentation", "saved"),
    ),
    PassEntry(
        "choose_actions", lambda s: _choose_actions(s.segmentation, s.saved), "actions", ("segmentation", "saved")
    ),
    PassEntry("make_calls", lambda s: _make_calls(s.segmentation, {}), "modules", ("segmentation",)),
    PassEntry(
        "insert_offloads",
        lambda s: InsertOffloads(s.segmentation, s.saved.candidates, s.modules),
        "outer",
        ("segmentation", "saved", "modules"),
    ),
    PassEntry(
        "verify_wiring", lambda s: VerifyWiring(s.gm, s.segmentation), "outer", ("gm", "segmentation"), on="outer"
    ),
    PassEntry("verify_transfers", lambda s: VerifyTransfers(), "outer", on="outer"),
)

BACKWARD: tuple[PassEntry[BackwardState], ...] = (
    PassEntry("settle_nodes", lambda s: SettleNodes(None), "num_moved"),
    PassEntry(
        "cut_segments",
        lambda s: CutSegments(moved=s.forward.saved.moved_bytes, whole=s.whole),
        "segmentation",
        ("forward", "whole"),
    ),
    PassEntry(
        "rematerialize",
        lambda s: Rematerialize(s.segmentation, moved=s.forward.saved.moved_bytes),
        "segmentation",
        ("segmentation", "forward"),
    ),
    PassEntry(
        "choose_donations",
        lambda s: ChooseDonations(s.segmentation, s.donatable),
        "donations",
        ("segmentation", "donatable"),
    ),
    PassEntry(
        "find_left_out",
        lambda s: _find_left_out(s.segmentation, s.forward.returned),
        "left_out",
        ("segmentation", "forward"),
    ),
    PassEntry(
        "make_calls",
        lambda s: _make_calls(s.segmentation, s.donations, s.left_out),
        "modules",
        ("segmentation", "donations", "left_out"),
    ),
    PassEntry(
        "insert_reloads",
        lambda s: InsertReloads(
            s.segmentation,
            s.copies,
            frozenset(n.name for n in s.donatable),
            s.device,
            s.modules,
        ),
        "outer",
        ("segmentation", "copies", "donatable", "device", "modules", "forward"),
    ),
    PassEntry(
        "verify_wiring", lambda s: VerifyWiring(s.gm, s.segmentation), "outer", ("gm", "segmentation"), on="outer"
    ),
    PassEntry("verify_transfers", lambda s: VerifyTransfers(), "outer", on="outer"),
    PassEntry("verify_pairing", _verify_pairing, "outer", ("forward",), on="outer"),
)

# The passes that the piece "verify" switches off.
PROOFS = ("verify_wiring", "verify_transfers", "verify_pairing")


def without_proofs(entries: tuple[PassEntry[State], ...]) -> tuple[PassEntry[State], ...]:
    """A pipeline less its proofs."""
    return tuple(e for e in entries if e.name not in PROOFS)
