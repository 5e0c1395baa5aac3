"""The simulation agrees with the rehearsal on the CPU: every byte, at every segment boundary.

On the CPU every copy is finished when it has started; on a GPU none may be. It makes no difference to bytes: the engine
never asks how far a copy is, it only lets streams wait. So the agreement here is the agreement there.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fxoffload.planner import TrainingStep
from fxoffload.planner.windows import no_windows
from fxoffload.step.choice import Windows
from tests.capture import Tower, example_input
from tests.planner.chains import everywhere
from tests.planner.rehearsal import Rehearsal
from tests.planner.rehearsed_models import MODELS, vectors

pytestmark = pytest.mark.usefixtures("one_thread")

KB = 1 << 10
WIDE = 1 << 30


def several_windows(step: TrainingStep) -> list[Windows]:
    """The same at all points, and others at each."""
    generator = random.Random(0)

    def points(count: int) -> tuple[int, ...]:
        return tuple(generator.choice([0, 1, 3 * KB, 5 * KB, 20 * KB, WIDE]) for _ in range(count + 1))

    return [
        everywhere(step, 0, 5 * KB),
        everywhere(step, 5 * KB, 0),
        everywhere(step, 20 * KB, 40 * KB),
        everywhere(step, WIDE, 0),  # all is taken back, except inputs
        everywhere(step, 0, WIDE),  # all is reloaded at once
        *(Windows(points(len(step.forward)), points(len(step.backward))) for _ in range(2)),
    ]


@pytest.mark.slow_except("one layer", "shared gates", "tower")
@pytest.mark.parametrize("name", MODELS)
def test_every_byte(name: str) -> None:
    rehearsal = MODELS[name]()
    for windows in several_windows(rehearsal.step):
        moved = 0
        for decisions in vectors(rehearsal, 2):
            moved += rehearsal.agree(decisions, windows).bytes_offloaded
        assert moved > 0 or name == "one layer"


def test_windows_outweigh_the_budgets_of_the_options() -> None:
    options = {"in_flight_budget": "10KiB", "prefetch_budget": "10KiB"}
    rehearsal = Rehearsal(Tower(3), lambda call: call(example_input()), lambda out: out.square().sum(), options)
    for in_flight, ahead in ((0, WIDE), (WIDE, 0)):
        assert rehearsal.agree("offload_all", everywhere(rehearsal.step, in_flight, ahead)).bytes_offloaded > 10 * KB


def test_views_that_different_segments_read_come_back_once_for_each() -> None:
    """What the runtime does today: such a storage crosses the link more than once, and late."""
    rehearsal = MODELS["shared gates"]()
    takes = [t.storage for t in rehearsal.step.takes or ()]
    assert len(takes) > len(set(takes))
    _, simulation = rehearsal.simulate("offload_all", everywhere(rehearsal.step, 0, WIDE))
    assert simulation.bytes_reloaded > simulation.bytes_offloaded
    assert simulation.num_prefetch_misses > 0


def test_an_output_that_the_caller_drops() -> None:
    """``holds_outputs`` is the only thing in a step that the graphs do not say."""
    rehearsal = MODELS["tower"]()
    nothing = no_windows(rehearsal.step)
    held = rehearsal.simulate("keep_all", nothing)[1]
    rehearsal.step = replace(rehearsal.step, holds_outputs=False)
    dropped = rehearsal.simulate("keep_all", nothing)[1]
    output = next(s.nbytes for s in rehearsal.step.storages if s.is_output)
    assert held.live_bytes[-1] - dropped.live_bytes[-1] == output == 4 * 8 * 8 * 4
    assert held.live_bytes[1] == dropped.live_bytes[1]
