"""Pass 8: prove that an outer graph is safe, or name the rule and the node that break it.

The walk keeps, for every storage class of the inner graph, the ops of the outer graph on it. That each op is
given the right values is ``verify_wiring``'s proof, that a backward fits its forward ``verify_pairing``'s. The rules
here, one per way in which a transfer can corrupt a value:

``unpaired``            Every offload is released exactly once and its copies are returned. Every reload is asked for
                        once and waited for once. Nothing is waited for that was not started.
``used-after-release``  No op reads a storage whose copy was released.
``source-overwritten``  No segment writes to (or was given for in-place reuse) the source storage of a copy. Not while
                        it is copied, and not later, since the decision to keep returns the source itself.
``caller-may-write``    The copy of a graph input is known to be one (it is never reclaimed). It is waited for before
                        the graph returns, in the order of the copies: the engine waits for the last one.
``read-before-wait``    A reload is read only through its wait, a copy only by a reload.
``donated-then-read``   A value that a segment may overwrite is its alone: read by no later op and through no other
                        input, not returned, and no memory of the caller or of a constant.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch.fx as fx

from fxoffload import ops
from fxoffload.analysis.labels import CANDIDATES_KEY, STORAGE_KEY
from fxoffload.errors import VerificationError
from fxoffload.ops import is_op
from fxoffload.passes.insert_transfers import COPY_KEY, DONATABLE_KEY

RULES = (
    "unpaired",
    "used-after-release",
    "source-overwritten",
    "caller-may-write",
    "read-before-wait",
    "donated-then-read",
)


@dataclass
class _State:
    """The state of the walk."""

    raw_copies: set[fx.Node]  # Placeholders that may hold a copy.
    callers: dict[str, fx.Node]  # Storage -> the placeholder or constant that brings it in.
    sources: dict[str, fx.Node] = field(default_factory=dict)  # Storage -> offload that reads it.
    released: dict[str, fx.Node] = field(default_factory=dict)  # Storage -> release.
    copy_storage: dict[fx.Node, str] = field(default_factory=dict)  # Copy -> its source's storage, in order of copies.
    releases_of: dict[fx.Node, int] = field(default_factory=dict)  # Copy -> times released.
    waited: set[fx.Node] = field(default_factory=set)  # Copies that the compute stream waited for.
    reload_waits: dict[fx.Node, int] = field(default_factory=dict)  # Reload op -> waits.
    reloaded: set[fx.Node] = field(default_factory=set)  # Copies asked for.
    donated: dict[str, fx.Node] = field(default_factory=dict)  # Storage -> segment that may overwrite it.


class VerifyTransfers:
    """Raises ``VerificationError`` (an AssertionError: a bug of ours) where an outer graph breaks a rule."""

    name = "verify_transfers"

    def __call__(self, outer: fx.GraphModule) -> fx.GraphModule:
        heads = [n for n in outer.graph.nodes if n.op in ("placeholder", "get_attr")]
        state = _State({n for n in heads if n.meta.get(COPY_KEY)}, {_storage(n): n for n in heads})
        for node in outer.graph.nodes:
            if node.op == "call_module":
                self._segment(outer, node, state)
            elif is_op(node, ops.offload):
                self._offload(node, state)
            elif is_op(node, ops.release):
                self._release(node, state)
            elif is_op(node, ops.wait_offload):
                self._wait_offload(node, state)
            elif is_op(node, ops.reload):
                self._reload(node, state)
            elif is_op(node, ops.wait_reload):
                source = node.args[0]
                if not isinstance(source, fx.Node) or source not in state.reload_waits:
                    raise _error("unpaired", node, f"waits for {source}, which is no reload")
                state.reload_waits[source] += 1
            elif node.target is operator.getitem:
                self._getitem(node, state)
        self._end(outer, state)
        return outer

    def _offload(self, node: fx.Node, state: _State) -> None:
        for source in _listed(node):
            self._check_readable(node, source, state)
            state.sources.setdefault(_storage(source), node)
        candidates = node.meta.get(CANDIDATES_KEY, ())
        inputs = [c.is_input for c in candidates for _ in c.nodes]
        for source, is_input in zip(_listed(node), inputs, strict=bool(candidates)):
            if (caller := state.callers.get(_storage(source))) is not None and not is_input:
                raise _error("caller-may-write", node, f"copies {source}, memory of {caller}, as if it were ours")

    def _getitem(self, node: fx.Node, state: _State) -> None:
        packed, index = node.args
        assert isinstance(packed, fx.Node)
        if is_op(packed, ops.offload):
            source = _listed(packed)[index]  # type: ignore[index]
            state.copy_storage[node] = _storage(source)
            state.releases_of[node] = 0
        elif is_op(packed, ops.reload):
            raise _error("read-before-wait", node, f"unpacks {packed} itself; unpack its wait_reload")

    def _release(self, node: fx.Node, state: _State) -> None:
        for copy in _listed(node):
            if copy not in state.releases_of:
                raise _error("unpaired", node, f"releases {copy}, which no offload made")
            state.releases_of[copy] += 1
            state.released.setdefault(state.copy_storage[copy], node)

    def _wait_offload(self, node: fx.Node, state: _State) -> None:
        for copy in _listed(node):
            if copy not in state.copy_storage:
                raise _error("unpaired", node, f"waits for {copy}, which no offload made")
        if _listed(node) != [c for c in state.copy_storage if c in _listed(node)]:
            raise _error("caller-may-write", node, "lists copies in another order than they are made in")
        state.waited.update(_listed(node))

    def _reload(self, node: fx.Node, state: _State) -> None:
        state.reload_waits[node] = 0
        for copy in _listed(node):
            if copy not in state.raw_copies:
                raise _error("unpaired", node, f"reloads {copy}, which no forward offloads")
            if copy in state.reloaded:
                raise _error("unpaired", node, f"reloads {copy} a second time")
            state.reloaded.add(copy)

    def _segment(self, outer: fx.GraphModule, node: fx.Node, state: _State) -> None:
        module = outer.get_submodule(str(node.target))
        donates: tuple[int, ...] = getattr(module, "donates", ())
        for i, value in enumerate(node.args):
            assert isinstance(value, fx.Node)
            self._check_readable(node, value, state)
            offload = state.sources.get(_storage(value))
            if offload is not None and (i in getattr(module, "mutates", ()) or i in donates):
                raise _error("source-overwritten", node, f"writes {value}, which {offload} copies")
        storages = [_storage(value) for value in node.args]  # type: ignore[arg-type]
        for i in donates:
            caller = state.callers.get(storages[i])
            if caller is not None and not caller.meta.get(DONATABLE_KEY):
                raise _error("donated-then-read", node, f"may overwrite {node.args[i]}, memory of {caller}")
            if storages.count(storages[i]) > 1:
                raise _error("donated-then-read", node, f"may overwrite {node.args[i]}, which is two of its inputs")
            state.donated[storages[i]] = node

    @staticmethod
    def _check_readable(node: fx.Node, value: fx.Node, state: _State) -> None:
        if value in state.raw_copies or value in state.copy_storage:
            raise _error("read-before-wait", node, f"reads {value}, which may be a copy on the host")
        if any(is_op(value, op) for op in ops.ALL):
            raise _error("read-before-wait", node, f"reads {value} itself, not what a wait unpacks")
        if (by := state.donated.get(_storage(value))) is not None:
            raise _error("donated-then-read", node, f"reads {value}, which {by} may have overwritten")
        if (by := state.released.get(_storage(value))) is not None:
            raise _error("used-after-release", node, f"reads {value}, released by {by}")

    def _end(self, outer: fx.GraphModule, state: _State) -> None:
        end = outer.graph.output_node()
        for value in end.all_input_nodes:
            if value not in state.copy_storage:
                self._check_readable(end, value, state)
        for copy, times in state.releases_of.items():
            if times != 1:
                raise _error("unpaired", copy, f"is released {times} times, expected once")
            if copy not in end.all_input_nodes:
                raise _error("unpaired", copy, "is not returned, so nothing can reload it")
            if (caller := state.callers.get(state.copy_storage[copy])) is not None and copy not in state.waited:
                raise _error("caller-may-write", end, f"returns while {caller} is being copied to {copy}")
        for reload, times in state.reload_waits.items():
            if times != 1:
                raise _error("unpaired", reload, f"is waited for {times} times, expected once")
        for node in outer.graph.nodes:
            if is_op(node, ops.offload) and sorted(u.args[1] for u in node.users) != [*range(len(_listed(node)))]:  # type: ignore[type-var]
                raise _error("unpaired", node, "makes copies that nothing takes, or that two take")


def _listed(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.args[0], (list, tuple)):
        raise _error("unpaired", node, f"is given {node.args[0]}, expected a list")
    return [n for n in node.args[0] if isinstance(n, fx.Node)]


def _storage(node: fx.Node) -> str:
    # A value without tensor memory (a size) is its own class.
    return str(node.meta.get(STORAGE_KEY, f"<{node.name}>"))


def _error(rule: str, node: fx.Node, what: str) -> VerificationError:
    return VerificationError(f"{rule}: {node} ({node.target}) {what}", VerifyTransfers.name)
