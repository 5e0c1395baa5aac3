"""Random training steps for hypothesis: chains with aliases, long-lived tensors, inputs and gradients."""

from __future__ import annotations

from hypothesis import strategies as st

from fxoffload.planner import SegmentStep, StorageInfo, Take, TrainingStep
from fxoffload.step.choice import Windows

MB = 1 << 20
_bytes = st.integers(1, 64).map(lambda n: n * MB)
_ms = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def training_steps(draw: st.DrawFn, max_segments: int = 6) -> TrainingStep:
    """A step of up to ``max_segments`` segments each way. The backward's segments read saved values in some order,
    mostly the mirror image of the one that made them."""
    count = draw(st.integers(1, max_segments))
    storages: list[StorageInfo] = []
    reads: list[list[str]] = [[] for _ in range(count)]
    writes: list[list[str]] = [[] for _ in range(count)]
    back_reads: list[list[str]] = [[] for _ in range(count)]
    takes: list[Take] = []

    def reader(made: int) -> list[int]:
        usual = count - 1 - max(made, 0)
        return sorted(draw(st.sets(st.integers(0, count - 1), max_size=2)) or {usual})

    def save(name: str, made: int) -> None:
        nbytes = draw(_bytes)
        is_input = made < 0
        storages.append(
            StorageInfo(
                name,
                nbytes,
                moved_bytes=draw(st.sampled_from([nbytes, nbytes, nbytes // 2, 0])),
                is_input=is_input,
            )
        )
        if made >= 0:
            writes[made].append(name)
        for later in draw(st.sets(st.integers(made + 1, count - 1), max_size=2)) if made < count - 1 else ():
            reads[later].append(name)
        if made >= 0 and made < count - 1 and draw(st.integers(0, 4)) == 0:
            later = draw(st.integers(made + 1, count - 1))  # a view of it is saved there
            reads[later].append(name)
            writes[later].append(name)
        found = reader(made)
        for at in found:
            back_reads[at].append(name)
        if len(found) > 1 and draw(st.integers(0, 3)) == 0:
            takes.extend(Take(name, at, at) for at in found)
        else:
            takes.append(Take(name, found[0], found[-1]))

    for i in range(draw(st.integers(0, 2))):
        save(f"input_{i}", -1)
    for k in range(count):
        storages.append(StorageInfo(f"stream_{k}", draw(_bytes), is_output=k == count - 1))
        writes[k].append(f"stream_{k}")
        if k:
            reads[k].append(f"stream_{k - 1}")
        for i in range(draw(st.integers(0, 3))):
            save(f"saved_{k}_{i}", k)
    for j in range(count):
        storages.append(StorageInfo(f"gradient_{j}", draw(_bytes), is_gradient=True))
    layered = count > 2
    forward = tuple(
        SegmentStep(
            f"segment_{k}", _layer(k, count, layered), draw(_ms), tuple(dict.fromkeys(reads[k])), tuple(writes[k])
        )
        for k in range(count)
    )
    backward = tuple(
        SegmentStep(
            f"segment_{j}",
            _layer(count - 1 - j, count, layered),
            draw(_ms),
            tuple(dict.fromkeys(back_reads[j])),
            (f"gradient_{j}",),
            temp_bytes=draw(st.sampled_from([0, MB, 100 * MB])),
        )
        for j in range(count)
    )
    return TrainingStep(tuple(storages), forward, backward, takes=tuple(takes))


def _layer(k: int, count: int, layered: bool) -> str:
    return f"layers.{k}" if layered and 0 < k < count - 1 else ""


@st.composite
def decided_steps(draw: st.DrawFn, max_segments: int = 6) -> tuple[TrainingStep, tuple[bool, ...]]:
    """A step, and decisions for it."""
    step = draw(training_steps(max_segments))
    count = len(step.candidates)
    return step, draw(
        st.one_of(st.just((True,) * count), st.tuples(*[st.booleans()] * count) if count else st.just(()))
    )


def everywhere(step: TrainingStep, in_flight: int, ahead: int) -> Windows:
    """The same bytes at all points."""
    return Windows((in_flight,) * (len(step.forward) + 1), (ahead,) * (len(step.backward) + 1))


@st.composite
def steps_under_windows(draw: st.DrawFn) -> tuple[TrainingStep, tuple[bool, ...], Windows]:
    """A step, decisions for it, and windows: the same ones at all points, or others at each."""
    step, decisions = draw(decided_steps())
    nbytes = st.sampled_from([0, 1, 10 * MB, 50 * MB, 1 << 40])

    def points(segments: int) -> tuple[int, ...]:
        count = segments + 1
        return draw(st.one_of(nbytes.map(lambda n: (n,) * count), st.tuples(*[nbytes] * count)))

    return step, decisions, Windows(points(len(step.forward)), points(len(step.backward)))
