"""A solver's decisions about a step: per layer one way to recompute, per storage that it saves, keep or offload.

Segments are numbers: positions in the forward, and positions in the backward in the order in which it runs. Bytes are
on the device, times in milliseconds, rates in bytes per millisecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ProblemStorage:
    """A storage that a forward saves for the backward.

    Attributes:
        name: no two layers share one. In two variants of a layer it means the same storage.
        held_bytes: taken while it is kept; 0 for the caller's memory.
        moved_bytes: bytes that a copy moves, and that it takes once it is back; 0: it cannot move.
        made_at: forward segment that allocates it, -1 if it exists before.
        copy_after: forward segment after which its copy to the host may begin, -1 for the entry.
        freed_after: last forward segment that reads it; its source stays until then.
        needed_at: first backward segment that reads it; len(backward): none, it is returned.
        dies_at: last backward segment that reads it; len(backward): it lives to the end.
        fixed: True: must be offloaded (see ``Problem.is_taken_back``), False: must stay, None: free.
    """

    name: str
    held_bytes: int
    moved_bytes: int
    made_at: int
    copy_after: int
    freed_after: int
    needed_at: int
    dies_at: int
    fixed: bool | None = None

    @property
    def may_move(self) -> bool:
        """Whether an offload is allowed and of any use: that of the caller's memory frees nothing."""
        return self.fixed is True or (self.fixed is None and self.held_bytes > 0 and self.moved_bytes > 0)

    @property
    def copied_bytes(self) -> int:
        """Bytes that its copy to the host is charged for: as many as it frees.

        Where only ranges of a storage are saved, only these are copied, and that takes less time than is charged.
        """
        return max(self.held_bytes, self.moved_bytes)

    @property
    def freed_before(self) -> int:
        """First forward segment that may run without it."""
        return max(self.copy_after, self.freed_after) + 1


@dataclass(frozen=True)
class LayerVariant:
    """A way to recompute a part of a layer.

    Attributes:
        extra_ms: backward segment -> time to recompute.
        extra_bytes: backward segment -> working set beyond ``Problem.backward_bytes``.
    """

    name: str
    storages: tuple[ProblemStorage, ...]
    extra_ms: Mapping[int, float]
    extra_bytes: Mapping[int, int]


@dataclass(frozen=True)
class ProblemLayer:
    """A part of the step for which one variant is chosen.

    Attributes:
        structure: layers of one structure have the same variants in the same order.
        variants: at least one.
    """

    name: str
    structure: Hashable
    variants: tuple[LayerVariant, ...]


@dataclass(frozen=True)
class Problem:
    """The decisions about a step, and their effects on it.

    Attributes:
        forward_ms, backward_ms: compute time per segment.
        forward_bytes, backward_bytes: per segment, the most that everything but the storages takes while it runs.
        host_bytes: most bytes on the host; None: no bound.
        runs: as of ``TrainingStep``.

    Raises:
        ValueError: it contradicts itself.
    """

    layers: tuple[ProblemLayer, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float
    host_bytes: int | None = None
    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.forward_ms) != len(self.forward_bytes) or len(self.backward_ms) != len(self.backward_bytes):
            raise ValueError("expected a time and bytes for each segment, found different numbers of them")
        if self.d2h_bytes_per_ms <= 0 or self.h2d_bytes_per_ms <= 0:
            raise ValueError("expected positive rates of the link")
        owner: dict[str, int] = {}
        for at, layer in enumerate(self.layers):
            if not layer.variants:
                raise ValueError(f"expected at least one variant, found none for layer {layer.name}")
            for variant in layer.variants:
                self._check(layer, variant)
                for storage in variant.storages:
                    if owner.setdefault(storage.name, at) != at:
                        raise ValueError(
                            f"expected storages of different names in different layers, found {storage.name}"
                        )

    def _check(self, layer: ProblemLayer, variant: LayerVariant) -> None:
        forward, backward = len(self.forward_ms), len(self.backward_ms)
        where = f"variant {variant.name} of layer {layer.name}"
        twice = [name for name, count in Counter(i.name for i in variant.storages).items() if count > 1]
        if twice:
            raise ValueError(f"expected storages of different names in {where}, found {twice[0]} twice")
        for storage in variant.storages:
            if not (-1 <= storage.made_at <= storage.copy_after < forward and storage.freed_after < forward):
                raise ValueError(f"expected {storage.name} in {where} to be made, then copied, in the forward")
            if not 0 <= storage.needed_at <= storage.dies_at <= backward:
                raise ValueError(f"expected {storage.name} in {where} to be needed, then to die, in the backward")
            if storage.fixed and not storage.moved_bytes:
                raise ValueError(f"expected {storage.name} in {where} to move, as it must: it has no bytes to move")
        for at in (*variant.extra_ms, *variant.extra_bytes):
            if not 0 <= at < backward:
                raise ValueError(f"expected backward segments in {where}, found {at} of {backward}")

    def is_taken_back(self, storage: ProblemStorage) -> bool:
        """Whether a storage must be offloaded, but so late that it is still on the device when the backward begins. It
        counts as kept; but for the host."""
        return storage.fixed is True and storage.held_bytes > 0 and storage.copy_after == len(self.forward_ms) - 1

    @cached_property
    def backward_after(self) -> list[int]:
        """Per forward segment, the first backward segment that runs after it."""
        found, ran = [], 0
        for forward, backward in self.runs or ((len(self.forward_ms), 0),):
            found.extend([ran] * forward)
            ran += backward
        return found

    @cached_property
    def forward_after(self) -> list[int]:
        """Per backward segment, the first forward segment that runs after it; len(forward): none does. The last entry
        is that of the step's end."""
        found, ran = [], 0
        for forward, backward in self.runs or ((len(self.forward_ms), len(self.backward_ms)),):
            ran += forward
            found.extend([ran] * backward)
        return [*found, ran]

    @cached_property
    def reloads_until(self) -> list[int]:
        """Per backward segment, the first one after it that nothing is reloaded for yet: a later run's."""
        found = []
        for _, backward in self.runs or ((0, len(self.backward_ms)),):
            found.extend([len(found) + backward] * backward)
        return found

    @property
    def compute_ms(self) -> float:
        """Time of all segments when nothing is recomputed."""
        return sum(self.forward_ms) + sum(self.backward_ms)


@dataclass(frozen=True)
class Solution:
    """A choice, and its predicted time and memory.

    Attributes:
        variants: per layer, the number of the chosen one.
        offloaded: names of the storages to offload.
        ms: the step.
        exposed_ms: the part of it in which compute waits for copies.
        peak_bytes: the least memory in which it takes that long.
        bytes_offloaded: bytes that the host has to hold.
        gap: no other choice is better by more than this part of the objective (of ``ms``, or of ``peak_bytes``).
    """

    variants: tuple[int, ...]
    offloaded: frozenset[str]
    ms: float
    exposed_ms: float
    peak_bytes: int
    bytes_offloaded: int
    gap: float
