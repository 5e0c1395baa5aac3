"""A step prepared for simulation, computed once: a solver simulates the same step under many decisions.

Numbers stand for names here. Bytes that no decision changes (values between segments, gradients, the caller's outputs)
are summed up in advance. Of the candidates only their sizes, first and last readers are kept.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from fxoffload.planner.steps import SegmentStep, StorageInfo, Take, TrainingStep
from fxoffload.step.segment_names import lies_between


@dataclass(frozen=True)
class Candidates:
    """One entry per candidate.

    Attributes:
        labels: what a person calls them; the names where there is nothing better.
        moved_bytes: bytes that a copy moves.
        held_bytes: bytes of the step that the storage takes; 0 for the caller's memory.
        made_at: the forward segment that allocates it, -1 if it exists before.
        is_callers: whether the caller holds it too, so that it is never taken back.
        rank: place in the order of reloads.
        last_read_forward: the last forward segment that reads it or through which the caller holds it, -1 for none.
        last_read_backward: the backward segment in which it dies where it was kept; len(backward): it does not.
        need_order: candidates in the order in which reloads are queued.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    moved_bytes: list[int]
    held_bytes: list[int]
    made_at: list[int]
    is_callers: list[bool]
    rank: list[int]
    last_read_forward: list[int]
    last_read_backward: list[int]
    need_order: list[int]


@dataclass(frozen=True)
class Program:
    """A step, ready to simulate. Lists have one entry per segment unless they say otherwise.

    Attributes:
        fixed_before, fixed_after: bytes that no decision changes, right before and right after each segment, in the
            order in which they run.
        gradients_before, gradients_after: the part of these that the backward returns.
        made: bytes of candidates that each forward segment allocates.
        offloads: per forward segment, and at [0] for the entry, its offload ops as candidates.
        releases: whether a release stands there, with the same positions.
        takes: per backward segment, and at [-1] for its end: (candidate, last segment that reads the result).
        awaited: with the same positions as ``offloads``: the caller's candidates whose copies are waited for there.
        is_gap: per backward segment, whether it stands for the code between two calls of a chain.
        drops: per backward segment, whether the sources of all copies are dropped after it.
        runs: forward and backward segments, in turn as they run.
        forward_at, backward_at: per segment, its position among all in the order in which they run.
        first_take: per candidate, the backward segment that first takes it; len(backward): none does.
    """

    candidates: Candidates
    fixed_before: list[int]
    fixed_after: list[int]
    gradients_before: list[int]
    gradients_after: list[int]
    made: list[int]
    offloads: list[list[list[int]]]
    releases: list[bool]
    takes: list[list[tuple[int, int]]]
    awaited: list[list[int]]
    is_gap: list[bool]
    drops: list[bool]
    runs: list[tuple[range, range]]
    forward_at: list[int]
    backward_at: list[int]
    first_take: list[int]


_PROGRAMS: weakref.WeakKeyDictionary[TrainingStep, Program] = weakref.WeakKeyDictionary()


def program_of(step: TrainingStep) -> Program:
    """The program of a step; made on first use.

    Raises:
        ValueError: the step contradicts itself.
    """
    program = _PROGRAMS.get(step)
    if program is None:
        program = _PROGRAMS[step] = _ProgramBuilder(step).build()
    return program


class _Uses:
    """Which segments of one graph write and read each storage, as positions."""

    def __init__(self, segments: Iterable[SegmentStep]) -> None:
        self.first_write: dict[str, int] = {}
        self.last_write: dict[str, int] = {}
        self.first_read: dict[str, int] = {}
        self.last_read: dict[str, int] = {}
        for i, segment in enumerate(segments):
            for name in segment.reads:
                self.first_read.setdefault(name, i)
                self.last_read[name] = i
            for name in segment.writes:
                self.first_write.setdefault(name, i)
                self.last_write[name] = i


class _ProgramBuilder:
    """Works a ``Program`` out."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.num_forward, self.num_backward = len(step.forward), len(step.backward)
        self.runs = step.ranges
        self.forward_at, self.backward_at = self._positions()
        self.down, self.up = _Uses(step.forward), _Uses(step.backward)
        self._check()
        self.takes = step.takes if step.takes is not None else self._usual_takes()
        taken = {t.storage for t in self.takes}
        self.all = step.candidates
        # The executor drops values at once that the partitioner saved without need.
        self.unread = {c.name for c in self.all if c.name not in taken and not c.is_input}

    def _positions(self) -> tuple[list[int], list[int]]:
        """Of each segment, forward and backward, among all in the order in which they run."""
        if [sum(len(run[i]) for run in self.runs) for i in (0, 1)] != [self.num_forward, self.num_backward]:
            raise ValueError("expected runs of all segments, found more or fewer")
        for forward, backward in self.runs if self.step.runs else ():
            if not forward or not backward or not lies_between(self.step.backward[backward.start].name):
                raise ValueError("expected runs that begin between two calls, found an empty one or one that does not")
        down, up = [], []
        for forward, backward in self.runs:
            down.extend(range(len(down) + len(up), len(down) + len(up) + len(forward)))
            up.extend(range(len(down) + len(up), len(down) + len(up) + len(backward)))
        return down, up

    def _check(self) -> None:
        known = {s.name: s for s in self.step.storages}
        if len(known) != len(self.step.storages):
            raise ValueError("expected storages of different names, found two of one name")
        made: set[str] = {s.name for s in known.values() if s.is_input}
        parts = [
            (part, segments[run[i].start : run[i].stop])
            for run in self.runs
            for i, (part, segments) in enumerate((("forward", self.step.forward), ("backward", self.step.backward)))
        ]
        for part, segments in parts:
            if part == "backward":
                made |= {s.name for s in known.values() if s.is_tangent}
            for segment in segments:
                unknown = [n for n in (*segment.reads, *segment.writes) if n not in known]
                early = [n for n in segment.reads if n not in made]
                if unknown or early:
                    what = "a storage that the step lists" if unknown else "a storage that was written before"
                    raise ValueError(f"expected {what}, found {(unknown or early)[0]} in {part} segment {segment.name}")
                made.update(segment.writes)

    def _usual_takes(self) -> list[Take]:
        first, last = self.up.first_read, self.up.last_read
        return [Take(c.name, first[c.name], last[c.name]) for c in self.step.candidates if c.name in first]

    def build(self) -> Program:
        due = {c.name: self._due(c) for c in self.all}
        takes: list[list[tuple[int, int]]] = [[] for _ in range(self.num_backward + 1)]
        first_take = [self.num_backward] * len(self.all)
        number = {c.name: i for i, c in enumerate(self.all)}
        for take in self.takes:
            i = number[take.storage]
            takes[take.before].append((i, take.last_reader))
            first_take[i] = min(first_take[i], take.before)

        def op_of(i: int) -> tuple[int, bool]:
            """One op copies all that is due after a segment; the caller's storages have one of their own, the first."""
            return due[self.all[i].name], not self.all[i].is_input

        order = sorted(range(len(self.all)), key=op_of)
        candidates = self._candidates(order, first_take)
        offloads: list[list[list[int]]] = [[] for _ in range(self.num_forward + 1)]
        releases = [False] * (self.num_forward + 1)
        awaited: list[list[int]] = [[] for _ in range(self.num_forward + 1)]
        for (at, _), group in itertools.groupby(order, key=op_of):
            op = list(group)
            if kept := [i for i in op if self.all[i].name not in self.unread]:
                offloads[at + 1].append(kept)
            last = max(self.down.last_read.get(self.all[i].name, at) for i in op)
            releases[max(at, last) + 1] = True
            for i in op:
                if candidates.is_callers[i]:
                    until = self.all[i].caller_until
                    awaited[self.num_forward if until is None else until + 1].append(i)
        if self.step.releases is not None:
            releases = [i - 1 in self.step.releases for i in range(self.num_forward + 1)]
        made = [0] * self.num_forward
        for c, nbytes in zip(self.all, candidates.held_bytes, strict=True):
            if nbytes:
                made[self.down.first_write[c.name]] += nbytes
        before, after = self._sums(self._fixed_lives(due))
        gradients_before, gradients_after = self._sums(self._gradient_lives())
        is_gap = [lies_between(s.name) for s in self.step.backward]
        return Program(
            candidates,
            before,
            after,
            gradients_before,
            gradients_after,
            made,
            offloads,
            releases,
            takes,
            awaited,
            is_gap,
            self._drops(takes, is_gap),
            self.runs,
            self.forward_at,
            self.backward_at,
            first_take,
        )

    def _drops(self, takes: list[list[tuple[int, int]]], is_gap: list[bool]) -> list[bool]:
        """Each call that takes anything drops all sources after its first segment. In a step of one run, only the
        first call finds any."""
        found = [False] * self.num_backward
        if not self.step.runs:
            found[:1] = [any(takes)] * min(1, self.num_backward)
            return found
        begins = [at + 1 for at, gap in enumerate(is_gap) if gap]
        for begin, end in zip(begins, [*(at - 1 for at in begins[1:]), self.num_backward + 1], strict=True):
            found[begin] = any(takes[begin:end])
        return found

    def _due(self, storage: StorageInfo) -> int:
        if storage.copied_after is not None:
            return storage.copied_after
        return self.down.last_write.get(storage.name, -1)

    def _candidates(self, order: list[int], first_take: list[int]) -> Candidates:
        """``order``: that of their copies to the host."""
        dies: dict[str, int] = dict(self.up.last_read)
        for take in self.takes:
            dies[take.storage] = max(dies.get(take.storage, -1), take.last_reader)
        rank = [first if c.rank is None else c.rank for c, first in zip(self.all, first_take, strict=True)]
        return Candidates(
            names=tuple(c.name for c in self.all),
            labels=tuple(c.label or c.name for c in self.all),
            moved_bytes=[0 if c.name in self.unread else c.moved_bytes or 0 for c in self.all],
            held_bytes=[0 if c.is_input or c.name in self.unread else c.nbytes for c in self.all],
            made_at=[-1 if c.is_input else self.down.first_write.get(c.name, -1) for c in self.all],
            is_callers=[(c.is_input or c.caller_until is not None) and not c.watched for c in self.all],
            rank=rank,
            last_read_forward=[
                max(self.down.last_read.get(c.name, -1), -1 if c.caller_until is None else c.caller_until)
                for c in self.all
            ],
            last_read_backward=[dies.get(c.name, self.num_backward) for c in self.all],
            need_order=sorted(order, key=lambda i: rank[i]),
        )

    # -- bytes that no decision changes --------------------------------------------------------------------------------

    # A life is (start, stop, bytes) on a line with two points for each segment, in the order in which they run: 2 g
    # right before segment g, 2 g + 1 right after it.

    def _fixed_lives(self, due: dict[str, int]) -> list[tuple[int, int, int]]:
        begin, end = 2 * (self.backward_at[0] if self.backward_at else self.num_forward), 2 * self._num_segments
        candidates = {c.name for c in self.all} - self.unread
        lives = []
        for storage in self.step.storages:
            name = storage.name
            if storage.is_input or storage.is_left_out or name in candidates:
                continue
            if storage.is_tangent:
                lives.append((begin, end, storage.nbytes))
            elif name in self.down.first_write:
                last = max(self.down.last_read.get(name, -1), self.down.last_write[name], due.get(name, -1))
                stop = max(
                    self._after(last, self.forward_at), self._after(self.up.last_read.get(name), self.backward_at)
                )
                if storage.is_output:
                    stop = end if self.step.holds_outputs else max(stop, begin)
                lives.append((2 * self.forward_at[self.down.first_write[name]] + 1, stop, storage.nbytes))
            elif name in self.up.first_write:
                last = max(self.up.last_read.get(name, -1), self.up.last_write[name])
                stop = end if storage.is_gradient else self._after(last, self.backward_at)
                lives.append((2 * self.backward_at[self.up.first_write[name]] + 1, stop, storage.nbytes))
        return lives

    @property
    def _num_segments(self) -> int:
        return self.num_forward + self.num_backward

    @staticmethod
    def _after(segment: int | None, positions: list[int]) -> int:
        """Right after a segment; -1: there is none."""
        return -1 if segment is None else 2 * positions[segment] + 1

    def _gradient_lives(self) -> list[tuple[int, int, int]]:
        made = self.up.first_write
        gradients = [s for s in self.step.storages if s.is_gradient and s.name in made]
        return [(2 * self.backward_at[made[s.name]] + 1, 2 * self._num_segments, s.nbytes) for s in gradients]

    def _sums(self, lives: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        """Bytes right before and right after each segment. A segment's own results exist right after it in any case."""
        changes = [0] * (2 * self._num_segments + 2)
        for start, stop, nbytes in lives:
            changes[start] += nbytes
            changes[max(stop, start + 1)] -= nbytes
        bytes_at = list(itertools.accumulate(changes))[:-2]
        return bytes_at[::2], bytes_at[1::2]
