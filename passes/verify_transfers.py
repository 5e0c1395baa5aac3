"""Pass 7: prove that an outer graph is safe, or name the rule and the node that break it.

The walk keeps, for every storage class of the inner graph, what the outer graph has done with it. The rules, one per
way in which a transfer can corrupt a value:

``unpaired``            every offload is released exactly once and its copies are returned; every reload is asked for
                        once and waited for once; nothing is waited for that was not started
``used-after-release``  no op reads a storage whose copy was released
``source-overwritten``  no segment writes to (or was given for in-place reuse) a storage that is being copied
``caller-may-write``    the copy of a graph input is waited for before the graph returns
``read-before-wait``    a reload is read only through its wait, a copy only by a reload
``donated-then-read``   what a segment may overwrite is read by no later op, not returned, and not the caller's
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch.fx as fx

from fxoffload import ops
from fxoffload.errors import VerificationError
from fxoffload.ops import is_op
from fxoffload.passes.insert_transfers import COPY_KEY, DONATABLE_KEY, STORAGE_KEY

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
    """What the walk knows so far."""

    copying: dict[str, fx.Node] = field(default_factory=dict)  # storage -> offload that reads it
    released: dict[str, fx.Node] = field(default_factory=dict)  # storage -> release
    waited: set[str] = field(default_factory=set)  # storages whose copy the compute stream waited for
    copy_storage: dict[fx.Node, str] = field(default_factory=dict)  # copy -> its source's storage
    releases_of: dict[fx.Node, int] = field(default_factory=dict)  # copy -> times released
    reload_waits: dict[fx.Node, int] = field(default_factory=dict)  # reload op -> waits
    reloaded: set[fx.Node] = field(default_factory=set)  # copies asked for
    donated: dict[str, fx.Node] = field(default_factory=dict)  # storage -> segment that may overwrite it


class VerifyTransfers:
    """Raises ``VerificationError`` (an AssertionError: a bug of ours) where an outer graph breaks a rule."""

    name = "verify_transfers"

    def __call__(self, outer: fx.GraphModule) -> fx.GraphModule:
        state = _State()
        inputs = {n.meta.get(STORAGE_KEY) for n in outer.graph.find_nodes(op="placeholder")}
        raw_copies = {n for n in outer.graph.find_nodes(op="placeholder") if n.meta.get(COPY_KEY)}
        for node in outer.graph.nodes:
            if node.op == "call_module":
                self._segment(outer, node, state, raw_copies)
            elif is_op(node, ops.offload):
                self._offload(node, state)
            elif is_op(node, ops.release):
                self._release(node, state)
            elif is_op(node, ops.wait_offload):
                for copy in _listed(node):
                    if copy not in state.copy_storage:
                        raise _error("unpaired", node, f"waits for {copy}, which no offload made")
                    state.waited.add(state.copy_storage[copy])
            elif is_op(node, ops.reload):
                self._reload(node, state, raw_copies)
            elif is_op(node, ops.wait_reload):
                source = node.args[0]
                if not isinstance(source, fx.Node) or source not in state.reload_waits:
                    raise _error("unpaired", node, f"waits for {source}, which is no reload")
                state.reload_waits[source] += 1
            elif node.target is operator.getitem:
                self._getitem(node, state)
        self._end(outer, state, inputs, raw_copies)
        return outer

    def _offload(self, node: fx.Node, state: _State) -> None:
        for source in _listed(node):
            storage = _storage(source)
            self._check_readable(node, source, state)
            if storage in state.released:
                raise _error("used-after-release", node, f"copies {source}, released by {state.released[storage]}")
            state.copying.setdefault(storage, node)

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

    def _reload(self, node: fx.Node, state: _State, raw_copies: set[fx.Node]) -> None:
        state.reload_waits[node] = 0
        for copy in _listed(node):
            if copy not in raw_copies:
                raise _error("unpaired", node, f"reloads {copy}, which no forward offloads")
            if copy in state.reloaded:
                raise _error("unpaired", node, f"reloads {copy} a second time")
            state.reloaded.add(copy)

    def _segment(self, outer: fx.GraphModule, node: fx.Node, state: _State, raw_copies: set[fx.Node]) -> None:
        module = outer.get_submodule(str(node.target))
        writes: tuple[int, ...] = getattr(module, "mutates", ())
        donates: tuple[int, ...] = getattr(module, "donates", ())
        for i, value in enumerate(node.args):
            assert isinstance(value, fx.Node)
            if value in raw_copies or value in state.copy_storage:
                raise _error("read-before-wait", node, f"reads {value}, which may be a copy on the host")
            self._check_readable(node, value, state)
            storage = _storage(value)
            if storage in state.released:
                raise _error("used-after-release", node, f"reads {value}, released by {state.released[storage]}")
            if (i in writes or i in donates) and storage in state.copying and storage not in state.waited:
                raise _error("source-overwritten", node, f"writes {value} while {state.copying[storage]} copies it")
        for i in donates:
            value = node.args[i]
            assert isinstance(value, fx.Node)
            if value.op == "placeholder" and not value.meta.get(DONATABLE_KEY):
                raise _error("donated-then-read", node, f"may overwrite {value}, which is the caller's")
            state.donated[_storage(value)] = node

    @staticmethod
    def _check_readable(node: fx.Node, value: fx.Node, state: _State) -> None:
        by = state.donated.get(_storage(value))
        if by is not None:
            raise _error("donated-then-read", node, f"reads {value}, which {by} may have overwritten")

    def _end(self, outer: fx.GraphModule, state: _State, inputs: set[object], raw_copies: set[fx.Node]) -> None:
        end = outer.graph.output_node()
        returned = [v for v in end.all_input_nodes]
        for copy, times in state.releases_of.items():
            if times != 1:
                raise _error("unpaired", copy, f"is released {times} times, expected once")
            if copy not in returned:
                raise _error("unpaired", copy, "is not returned, so nothing can reload it")
            storage = state.copy_storage[copy]
            if storage in inputs and storage not in state.waited:
                raise _error("caller-may-write", end, f"returns while the graph input behind {copy} is being copied")
        for reload, times in state.reload_waits.items():
            if times != 1:
                raise _error("unpaired", reload, f"is waited for {times} times, expected once")
        for node in outer.graph.nodes:
            if is_op(node, ops.offload) and len(_listed(node)) != len(node.users):
                raise _error("unpaired", node, "makes copies that nothing takes")
        for value in returned:
            if value in state.copy_storage:
                continue
            if value in raw_copies:
                raise _error("read-before-wait", end, f"returns {value}, which may be a copy on the host")
            self._check_readable(end, value, state)
            storage = _storage(value)
            if storage in state.released:
                raise _error("used-after-release", end, f"returns {value}, released by {state.released[storage]}")


def _listed(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.args[0] if isinstance(n, fx.Node)]  # type: ignore[union-attr]


def _storage(node: fx.Node) -> str:
    # A value without tensor memory (a size) is its own class.
    return str(node.meta.get(STORAGE_KEY, f"<{node.name}>"))


def _error(rule: str, node: fx.Node, what: str) -> VerificationError:
    return VerificationError(f"{rule}: {node} ({node.target}) {what}", VerifyTransfers.name)
