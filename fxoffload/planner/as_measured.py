"""Measured times and bytes of segments take the place of estimates, in a step and in other partitions of its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.step.readings import Phase

# Of a phase: segments that differ between two partitions and take less say little about others.
_FEW = 0.1
# A layer that takes this many times its estimate has one op that takes far longer, in all partitions.
_FAR = 1.5

Phases = Mapping[Phase, Mapping[str, float]]


def measured_step(
    step: TrainingStep, ms: Phases, temp_bytes: Mapping[Phase, Mapping[str, int | None]] | None = None
) -> TrainingStep:
    """``step`` with measurements of its segments; the rest stays as estimated."""

    def known(phase: Phase, segments: tuple[SegmentStep, ...]) -> tuple[SegmentStep, ...]:
        times, sizes = ms.get(phase, {}), (temp_bytes or {}).get(phase, {})
        found = []
        for segment in segments:
            size = sizes.get(segment.name)
            nbytes = segment.temp_bytes if size is None else max(size, 0)
            found.append(replace(segment, ms=times.get(segment.name, segment.ms), temp_bytes=nbytes))
        return tuple(found)

    return replace(step, forward=known("forward", step.forward), backward=known("backward", step.backward))


def as_measured(other: TrainingStep, estimated: TrainingStep, measured: TrainingStep) -> TrainingStep:
    """``other``, another partition of the same graph: its estimates, corrected by the measurements of one partition.

    Where a segment has the same estimate in both, it is the same code. The others of a layer take as much longer than
    their estimates as its measured ones did, and as much more memory. Mostly one op of the layer is estimated wrongly,
    and both partitions have it. In T5's encoder the first layer's backward takes ten times its estimate. When one ratio
    counted for all, each layer got a share of that (6 + 6 layers, H200, 2026-11-30). What belongs to no layer takes as
    much longer as all that differ in the measured partition. A loss is estimated worse than layers, and mostly the same
    in both: by the ratio of whole steps, plain Inductor's backward was 5 % too short (Qwen3, 8 layers, H200,
    2026-11-27).
    """

    def known(
        segments: tuple[SegmentStep, ...], before: tuple[SegmentStep, ...], after: tuple[SegmentStep, ...]
    ) -> tuple[SegmentStep, ...]:
        pairs = {b.name: (b, a) for b, a in zip(before, after, strict=True)}
        same = {s.name for s in segments if s.name in pairs and _is_alike(s, pairs[s.name][0])}
        ratio = _ratio([pair for name, pair in pairs.items() if name not in same], pairs.values())
        differing = _by_layer(b for b in before if b.name not in same)
        layers = {
            layer: _corrected(of, [pairs[b.name] for b in differing[layer]], ratio)
            for layer, of in _by_layer(s for s in segments if s.name not in same).items()
            if layer in differing and layer
        }
        found = []
        for segment in segments:
            if segment.name in same:
                _, known_now = pairs[segment.name]
                found.append(replace(segment, ms=known_now.ms, temp_bytes=known_now.temp_bytes))
            elif segment.layer in layers:
                found.append(layers[segment.layer][segment.name])
            else:
                found.append(replace(segment, ms=segment.ms * ratio))
        return tuple(found)

    return replace(
        other,
        forward=known(other.forward, estimated.forward, measured.forward),
        backward=known(other.backward, estimated.backward, measured.backward),
    )


def _by_layer(segments: Iterable[SegmentStep]) -> dict[str, list[SegmentStep]]:
    found: dict[str, list[SegmentStep]] = {}
    for segment in segments:
        found.setdefault(segment.layer, []).append(segment)
    return found


def _corrected(
    segments: Sequence[SegmentStep], pairs: Sequence[tuple[SegmentStep, SegmentStep]], otherwise: float
) -> dict[str, SegmentStep]:
    """Segments of a layer, by what those of another partition were measured to take in the place of their estimates.

    ``otherwise``: the ratio where nothing of them is estimated to take time.
    """
    (before, after), mine = _times(pairs), sum(s.ms for s in segments)
    ratio = after / before if before else otherwise
    if ratio > _FAR and mine:
        ratio = (mine + after - before) / mine
    more = max(a.temp_bytes - b.temp_bytes for b, a in pairs)
    largest = max(segments, key=lambda s: s.temp_bytes)
    found = {s.name: replace(s, ms=s.ms * ratio) for s in segments}
    found[largest.name] = replace(found[largest.name], temp_bytes=largest.temp_bytes + max(more, 0))
    return found


def _is_alike(one: SegmentStep, other: SegmentStep) -> bool:
    return (one.ms, one.temp_bytes) == (other.ms, other.temp_bytes)


def _ratio(
    differing: Iterable[tuple[SegmentStep, SegmentStep]], everything: Iterable[tuple[SegmentStep, SegmentStep]]
) -> float:
    """Measured against estimated time of segments that differ; of all of a phase where those are a small part of it."""
    of_some, of_all = _times(differing), _times(everything)
    estimated, measured = of_some if of_some[0] > _FEW * of_all[0] else of_all
    return measured / estimated if estimated else 1.0


def _times(pairs: Iterable[tuple[SegmentStep, SegmentStep]]) -> tuple[float, float]:
    found = list(pairs)
    return sum(before.ms for before, _ in found), sum(after.ms for _, after in found)


def shared(
    sizes: Mapping[Phase, Mapping[str, int | None]], alike: Mapping[Phase, Mapping[str, object]]
) -> dict[Phase, dict[str, int | None]]:
    """``sizes``, where an unmeasured segment takes the measurement of one of the same code."""
    found: dict[Phase, dict[str, int | None]] = {}
    for phase, codes in alike.items():
        known: dict[object, int] = {}
        for name, size in sizes.get(phase, {}).items():
            if size is not None and name in codes:
                known[codes[name]] = max(size, known.get(codes[name], size))
        found[phase] = {name: known.get(code) for name, code in codes.items()}
    return found
