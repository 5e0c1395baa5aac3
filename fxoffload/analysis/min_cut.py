"""Minimum cuts with two prices, and all of them that some exchange rate between the two prices makes the best.

No graph pass: plain arrays, exact integers. A cut separates the nodes on the source's side from those on the sink's.
Each edge from the one side to the other costs its two prices. An edge without prices must not be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SOURCE, SINK = 0, 1


@dataclass(frozen=True)
class Cut:
    """One cut.

    Attributes:
        first, second: the two prices, summed over the edges that are cut.
        behind: the nodes on the sink's side.
    """

    first: int
    second: int
    behind: frozenset[int]


@dataclass
class Network:
    """Nodes are numbers (``SOURCE`` and ``SINK`` exist); edges have two prices, or None: never to be cut."""

    num_nodes: int = 2
    edges: list[tuple[int, int, tuple[int, int] | None]] = field(default_factory=list)

    def node(self) -> int:
        """A new node."""
        self.num_nodes += 1
        return self.num_nodes - 1

    def edge(self, tail: int, head: int, prices: tuple[int, int] | None = None) -> None:
        """``prices``: of cutting it, whole numbers of at least 0; None where it must not be cut."""
        if prices != (0, 0):
            self.edges.append((tail, head, prices))

    def cheapest(self, weight_first: int, weight_second: int) -> Cut:
        """The cut of least ``weight_first * first + weight_second * second``."""
        worth = [None if p is None else weight_first * p[0] + weight_second * p[1] for _, _, p in self.edges]
        behind = _behind_minimum(self.num_nodes, [(t, h) for t, h, _ in self.edges], worth)
        first = second = 0
        for tail, head, prices in self.edges:
            if head in behind and tail not in behind:
                if prices is None:
                    raise ValueError("expected a cut, found a path of edges that must not be cut")
                first += prices[0]
                second += prices[1]
        return Cut(first, second, behind)

    def best_cuts(self, max_cuts: int = 24) -> list[Cut]:
        """The corners of the lower convex hull of all cuts, from least ``first`` to least ``second``.

        Between two corners lies another one exactly if the exchange rate at which the two cost the same finds a
        cheaper cut. The widest gaps are looked into first; ``max_cuts`` bounds the corners.
        """
        most = [1 + sum(p[i] for _, _, p in self.edges if p is not None) for i in (0, 1)]
        left, right = self.cheapest(most[1], 1), self.cheapest(1, most[0])
        if left.second <= right.second or right.first <= left.first:
            return [left]
        found, gaps = [left, right], [(left, right)]
        while gaps and len(found) < max_cuts:
            gap = max(gaps, key=lambda g: (g[0].second - g[1].second) * (g[1].first - g[0].first))
            gaps.remove(gap)
            a, b = gap
            rates = (a.second - b.second, b.first - a.first)
            cut = self.cheapest(*rates)
            if rates[0] * cut.first + rates[1] * cut.second < rates[0] * a.first + rates[1] * a.second:
                found.append(cut)
                gaps += [(a, cut), (cut, b)]
        return sorted(found, key=lambda c: c.first)


def _behind_minimum(num_nodes: int, edges: Sequence[tuple[int, int]], worth: Sequence[int | None]) -> frozenset[int]:
    """The sink's side of a minimum cut, by Dinic's algorithm. ``worth``: None is infinite."""
    endless = 1 + sum(w for w in worth if w is not None)
    heads: list[int] = []
    room: list[int] = []
    leaving: list[list[int]] = [[] for _ in range(num_nodes)]
    for (tail, head), w in zip(edges, worth, strict=True):
        # An edge and its reverse are neighbours: the one's number is the other's with the last bit flipped.
        leaving[tail].append(len(heads))
        leaving[head].append(len(heads) + 1)
        heads += (head, tail)
        room += (endless if w is None else w, 0)
    flow = 0
    while True:
        level = _levels(leaving, heads, room)
        if level[SINK] < 0:
            return frozenset(i for i, found in enumerate(level) if found < 0)
        flow += _saturate(leaving, heads, room, level)
        if flow >= endless:
            raise ValueError("expected a cut, found a path of edges that must not be cut")


def _levels(leaving: list[list[int]], heads: list[int], room: list[int]) -> list[int]:
    """Distance of each node from the source over edges with room; -1 where there is no way."""
    level = [-1] * len(leaving)
    level[SOURCE] = 0
    queue = [SOURCE]
    for node in queue:
        for edge in leaving[node]:
            if room[edge] and level[heads[edge]] < 0:
                level[heads[edge]] = level[node] + 1
                queue.append(heads[edge])
    return level


def _saturate(leaving: list[list[int]], heads: list[int], room: list[int], level: list[int]) -> int:
    """Send along shortest paths all that they carry; returns how much."""
    untried = [0] * len(leaving)
    path: list[int] = []
    node, flow = SOURCE, 0
    while True:
        if node == SINK:
            sent = min(room[e] for e in path)
            flow += sent
            for edge in path:
                room[edge] -= sent
                room[edge ^ 1] += sent
            full = next(i for i, e in enumerate(path) if not room[e])
            node = heads[path[full] ^ 1]
            del path[full:]
            continue
        edges = leaving[node]
        while untried[node] < len(edges):
            edge = edges[untried[node]]
            if room[edge] and level[heads[edge]] == level[node] + 1:
                break
            untried[node] += 1
        if untried[node] < len(edges):
            path.append(edges[untried[node]])
            node = heads[path[-1]]
        elif not path:
            return flow
        else:
            edge = path.pop()
            node = heads[edge ^ 1]
            untried[node] += 1
