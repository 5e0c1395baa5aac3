"""Work of torch's that takes a fifth of the time of tests, and that no test has anything of."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import pattern_matcher
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves


def quicken() -> None:
    """For as long as the process lives. What torch compiles is the same."""
    # Dynamo times the guards of all it compiles, for its log, and flushes the machine's caches first: with two
    # processes that takes a tenth of the time.
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # pyright: ignore[reportAttributeAccessIssue]
    # AOTAutograd prints every graph, for its log too. Nobody else asks for definitions of what the graph calls.
    GraphModule.print_readable = functools.partialmethod(_print_readable, GraphModule.print_readable)  # type: ignore[assignment,method-assign]
    # Inductor looks for a hundred forms of attention at every matrix product.
    PatternMatcherPass.apply = functools.partialmethod(_apply, PatternMatcherPass.apply)  # type: ignore[assignment,method-assign]


def _print_readable(self: GraphModule, original: Any, *args: Any, expanded_def: bool = False, **how: Any) -> str:
    return "" if expanded_def else original(self, *args, **how)


def _apply(self: PatternMatcherPass, original: Any, gm: GraphModule | Graph) -> int:
    """Without the patterns that need an operation which the graph does not have."""
    there = {node.target for node in (gm.graph if isinstance(gm, GraphModule) else gm).nodes}
    patterns = self.patterns
    self.patterns = defaultdict(list)
    for key, entries in patterns.items():
        if found := [e for e in entries if all(not there.isdisjoint(any_of) for any_of in _needed(e.pattern))]:
            self.patterns[key] = found
    try:
        return original(self, gm)
    finally:
        self.patterns = patterns


@functools.cache
def _needed(pattern: Any) -> frozenset[frozenset[Any]]:
    """Sets of operations, of each of which a graph has at least one where the pattern matches."""
    return frozenset(frozenset(p.fns) for p in _parts(pattern) if isinstance(p, pattern_matcher._TargetExpr))


def _parts(pattern: Any) -> Iterator[Any]:
    if isinstance(pattern, pattern_matcher.CallModule | pattern_matcher.CallModuleVarArgs):
        return  # its operation is told otherwise
    if isinstance(pattern, pattern_matcher.PatternExpr):
        yield pattern
    inner = [getattr(pattern, name, ()) for name in ("args", "kwargs", "outputs", "pattern", "inner_pattern")]
    for part in tree_leaves(inner):
        if isinstance(part, pattern_matcher.PatternExpr):
            yield from _parts(part)
