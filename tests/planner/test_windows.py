"""Windows: the peak stays within the limit, more room never costs time, and the runtime agrees with the simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxoffload.planner import ConstantRates, SegmentStep, StorageInfo, Take, TrainingStep, simulate
from fxoffload.planner.windows import least_peak_bytes, no_windows, windows_for
from fxoffload.step.choice import Windows
from tests.marks import examples
from tests.planner.chains import MB, decided_steps, everywhere
from tests.planner.rehearsal import Rehearsal
from tests.planner.rehearsed_models import MODELS, vectors

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = ConstantRates(50.0, 50.0)
WIDE = 1 << 50
many = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def peak_and_ms(step: TrainingStep, decisions: tuple[bool, ...], windows: Windows) -> tuple[int, float]:
    found = simulate(step, decisions, copies=RATES, windows=windows)
    return found.peak_bytes, found.step_ms


# -- random chains -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@many
@given(decided_steps(), st.floats(-0.1, 1.2))
def test_the_peak_stays_within_the_limit(decided: tuple[TrainingStep, tuple[bool, ...]], share: float) -> None:
    step, decisions = decided
    least = least_peak_bytes(step, decisions)
    widest = simulate(step, decisions, copies=RATES, windows=unbounded(step)).peak_bytes
    limit = round(least + share * max(widest - least, MB))
    windows = windows_for(step, decisions, limit)
    if windows is None:
        assert limit < least
        return
    assert limit >= least
    assert (len(windows.in_flight), len(windows.ahead)) == (len(step.forward) + 1, len(step.backward) + 1)
    assert min((*windows.in_flight, *windows.ahead)) >= 0
    assert peak_and_ms(step, decisions, windows)[0] <= limit


@many
@given(decided_steps())
def test_least_peak_is_the_edge(decided: tuple[TrainingStep, tuple[bool, ...]]) -> None:
    step, decisions = decided
    least = least_peak_bytes(step, decisions)
    found = windows_for(step, decisions, least)
    assert found is not None
    assert peak_and_ms(step, decisions, found)[0] == least
    assert windows_for(step, decisions, least - 1) is None


@many
@given(decided_steps(), st.lists(st.floats(0, 1.1), min_size=2, max_size=4))
def test_more_room_never_costs_time(decided: tuple[TrainingStep, tuple[bool, ...]], shares: list[float]) -> None:
    """Where storages move whole. Of a range, less comes back than was there. A reclaimed value then takes the room of
    reloads, and either may be the better use of it."""
    step, decisions = whole(decided[0]), decided[1]
    least = least_peak_bytes(step, decisions)
    widest = simulate(step, decisions, copies=RATES, windows=unbounded(step)).peak_bytes
    before = peak_and_ms(step, decisions, no_windows(step))[1]
    largest_ms = max((RATES.copy_ms(c.nbytes, "d2h", False) for c in step.candidates), default=0.0)
    for share in sorted(shares):
        windows = windows_for(step, decisions, round(least + share * max(widest - least, MB)))
        assert windows is not None
        _, ms = peak_and_ms(step, decisions, windows)
        # By one copy it may: a reclaimed value is not always the best use of the room.
        assert ms <= before + largest_ms + 1e-9
        before = min(before, ms)


@pytest.mark.slow
@many
@given(decided_steps())
def test_with_all_the_room_nobody_waits_for_it(decided: tuple[TrainingStep, tuple[bool, ...]]) -> None:
    step, decisions = decided
    windows = windows_for(step, decisions, WIDE)
    assert windows is not None
    assert peak_and_ms(step, decisions, windows)[1] <= peak_and_ms(step, decisions, unbounded(step))[1] + 1e-9


def unbounded(step: TrainingStep) -> Windows:
    return everywhere(step, WIDE, WIDE)


def whole(step: TrainingStep) -> TrainingStep:
    """All of a storage moves, and comes back once."""
    takes: dict[str, Take] = {}
    for take in step.takes or ():
        one = takes.get(take.storage, take)
        takes[take.storage] = Take(take.storage, min(one.before, take.before), max(one.last_reader, take.last_reader))
    storages = tuple(replace(s, moved_bytes=s.nbytes) if s.moved_bytes else s for s in step.storages)
    return replace(step, storages=storages, takes=tuple(takes.values()))


# -- by hand -----------------------------------------------------------------------------------------------------------


def chain(count: int = 4, nbytes: int = 10) -> TrainingStep:
    """Each segment saves one storage, which its mirror image reads; 1 ms each, and as long for a copy."""
    storages = tuple(StorageInfo(f"s{k}", nbytes, moved_bytes=nbytes) for k in range(count))
    forward = tuple(SegmentStep(f"f{k}", f"l{k}", 1.0, (), (f"s{k}",)) for k in range(count))
    backward = tuple(SegmentStep(f"b{k}", f"l{k}", 1.0, (f"s{k}",)) for k in reversed(range(count)))
    return TrainingStep(storages, forward, backward)


def test_a_chain() -> None:
    step, all_move = chain(), (True,) * 4
    rates = ConstantRates(1e-5, 1e-5)  # 10 bytes in 1 ms
    assert least_peak_bytes(step, all_move) == 10
    expected = {
        # Every copy is waited for; the last storage is taken back.
        10: ((0, 0, 0, 0, 10), (10, 0, 0, 0, 0), 15.0),
        # One under way while the next is made. Two are taken back, the last one when its copy has ended.
        20: ((0, 10, 10, 10, 20), (20, 10, 10, 10, 10), 9.0),
        40: ((0, 30, 30, 30, 40), (40, 30, 30, 30, 30), 9.0),
    }
    for limit, (in_flight, ahead, ms) in expected.items():
        windows = windows_for(step, all_move, limit)
        assert windows is not None
        found = simulate(step, all_move, copies=rates, windows=windows)
        assert (windows.in_flight, windows.ahead, found.step_ms) == (in_flight, ahead, ms), limit
        assert found.peak_bytes <= limit
    assert windows_for(step, all_move, 9) is None
    assert windows_for(step, (False,) * 4, 39) is None
    assert windows_for(step, (False,) * 4, 40) == no_windows(step)


# -- against the runtime -----------------------------------------------------------------------------------------------


@pytest.mark.slow_except("shared gates")
@pytest.mark.parametrize("name", ["tower", "stack", "shared gates", "skips", "heavy head", "qwen3"])
def test_every_byte_under_windows(name: str) -> None:
    rehearsal = MODELS[name]()
    moved = taken_back = 0
    kept = gradients(rehearsal, lambda: rehearsal.run_policy("keep_all"))
    for decisions in ["offload_all", *vectors(rehearsal, 1)[3:]]:
        chosen = rehearsal.chosen(decisions)
        least = least_peak_bytes(rehearsal.step, chosen)
        widest = simulate(rehearsal.step, chosen, copies=RATES, windows=unbounded(rehearsal.step)).peak_bytes
        for limit in (least, (least + widest) // 2, widest):
            windows = windows_for(rehearsal.step, chosen, limit)
            assert windows is not None
            found = gradients(rehearsal, functools.partial(rehearsal.run, decisions, windows))
            assert found.keys() == kept.keys()
            assert all(torch.equal(found[n], kept[n]) for n in kept)
            simulation = rehearsal.agree(decisions, windows)
            assert simulation.peak_bytes <= limit
            moved += simulation.bytes_offloaded
            taken_back += simulation.bytes_reclaimed
    assert moved > taken_back > 0


def gradients(rehearsal: Rehearsal, step: Callable[[], object]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    step()
    found = {n: p.grad.clone() for n, p in rehearsal.model.named_parameters() if p.grad is not None}
    assert found
    return found
