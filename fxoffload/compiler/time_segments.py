"""Times of segments on made-up inputs.

[Note: In the order of the step] A GPU lowers its clocks when it draws too much power, so the same code takes longer at
one place of a step than at another, and longer with values that draw more power. So the calls of a step are timed one
after another, as in a step, on values as random as a step's, where time and memory allow. On an H200, the backward of
eight layers of Qwen3 took 190 ms in a step, 187 on new random values of standard deviation 1, 183 with 0.02, 177 in
memory that earlier calls had left other values in, and 167 on zeros (2026-11-27). Alone, it was predicted 7 % too fast.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from fxoffload.compiler.distinct_segments import CallName, DistinctSegment
from fxoffload.compiler.made_up import Shared, nbytes_shared
from fxoffload.compiler.measuring import Allowance, reason_of
from fxoffload.machine.meters import Meter

log = logging.getLogger(__name__)

# Rounds over the calls of a step, at least: the later half of them counts, the others bring the device where a step
# leaves it.
_ROUNDS = 2
# Runs of a segment that is timed alone.
_ALONE = 3
# Room for more than the estimate, as a factor.
MARGIN = 1.25


def time_segments(ran: Sequence[DistinctSegment], meter: Meter, allowance: Allowance) -> dict[CallName, float]:
    """Milliseconds of calls. Those of a segment that failed are missing.

    Args:
        ran: segments whose kernels are tuned.
        allowance: is spent, where ``Allowance.spending`` is on.
    """
    if found := _in_rounds(ran, meter, allowance):
        return found
    times = {d: _alone_ms(d, meter, allowance) for d in ran}
    return {name: ms for d, ms in times.items() if ms is not None for name in d.places}


# -- in the order of the step ------------------------------------------------------------------------------------------


def _in_rounds(ran: Sequence[DistinctSegment], meter: Meter, allowance: Allowance) -> dict[CallName, float]:
    """See [Note: In the order of the step]. Empty where that is not possible."""
    calls = _calls_of_round(ran, 1e3 * allowance.left_s)
    room = meter.room_bytes() / MARGIN
    fitting = [all_in for all_in in (False, True) if _round_bytes([d for d, _ in calls], has_dying=all_in) <= room]
    if not calls or not fitting:
        return {}
    shared, rounds, total_ms = Shared(has_dying=fitting[0]), list[list[float]](), 0.0
    try:
        # A graph of one layer has short rounds.
        while len(rounds) < _ROUNDS or (total_ms < meter.sustained_ms and allowance.left_s > 0):
            rounds.append(meter.each_ms([_work(d, shared) for d, _ in calls]))
            total_ms += sum(rounds[-1])
    except Exception as error:
        log.info("segments are timed alone: %s", reason_of(error))
        return {}
    # A host that is late lengthens some of them.
    times = [statistics.median(of_call) for of_call in zip(*rounds[len(rounds) // 2 :], strict=True)]
    of_calls = dict(zip((name for _, name in calls), times, strict=True))
    return {name: ms for d in ran for name, ms in _of_all(d, of_calls).items()}


def _calls_of_round(ran: Sequence[DistinctSegment], limit_ms: float) -> list[tuple[DistinctSegment, CallName]]:
    """In the order of the step: all calls, or as many of each segment as can run in ``limit_ms``; empty where one of
    each takes longer."""

    def rounds_ms(count: int) -> float:
        return _ROUNDS * sum(min(count, len(d.places)) * d.estimate.ms for d in ran)

    most = max((len(d.places) for d in ran), default=0)
    count = next((n for n in range(most, 0, -1) if rounds_ms(n) <= limit_ms), 0)
    calls = [(d, name) for d in ran for name in _spread(list(d.places), count)]
    return sorted(calls, key=lambda call: call[0].places[call[1]])


def _spread(names: Sequence[CallName], count: int) -> list[CallName]:
    """``count`` of ``names``, evenly."""
    return list(names) if count >= len(names) else [names[len(names) * i // count] for i in range(count)]


def _round_bytes(called: Sequence[DistinctSegment], *, has_dying: bool) -> int:
    """Of a round: the inputs of all calls are there when it begins. ``has_dying``: as of ``Shared``."""
    made = [d.made for d in called if d.made is not None]
    return nbytes_shared(made, has_dying=has_dying) + max((d.temp_bytes for d in called), default=0)


def _work(distinct: DistinctSegment, shared: Shared) -> Callable[[], None]:
    assert distinct.made is not None
    return partial(distinct.run, distinct.made.make(shared))


def _of_all(distinct: DistinctSegment, timed: dict[CallName, float]) -> dict[CallName, float]:
    """Each call gets the time of the nearest call in the step that was timed."""
    places = distinct.places
    known = [name for name in places if name in timed]
    return {name: timed[min(known, key=lambda k: abs(places[k] - place))] for name, place in places.items()}


# -- alone -------------------------------------------------------------------------------------------------------------


def _alone_ms(distinct: DistinctSegment, meter: Meter, allowance: Allowance) -> float | None:
    """The median of a few runs, of one where no time is left; None where it fails."""
    assert distinct.made is not None
    times: list[float] = []
    try:
        inputs = distinct.made.make()
        while len(times) < _ALONE and (not times or allowance.left_s > 0):
            times.append(meter.once_ms(partial(distinct.run, distinct.made.make_integers(inputs))))
    except Exception as error:
        log.info("a segment is not timed: %s", reason_of(error))
    return statistics.median(times) if times else None
