"""The simulation agrees with the rehearsal on the CPU: every byte, at every segment boundary.

On the CPU every copy is finished when it has started; on a GPU none may be. It makes no difference to bytes: the engine
never asks how far a copy is, it only lets streams wait. So the agreement here is the agreement there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.rehearsed_models import MODELS, vectors

pytestmark = pytest.mark.usefixtures("one_thread")

KB = 1 << 10
BUDGETS: tuple[tuple[int | None, int | None], ...] = (
    (1, None),
    (None, 1),
    (5 * KB, 3 * KB),
    (20 * KB, 40 * KB),
    (1 << 30, None),  # all is taken back, except inputs
    (1, 1 << 30),  # all is reloaded at once
)


@pytest.mark.slow_except("one layer-budgets", "shared gates-budgets", "tower-budgets")
@pytest.mark.parametrize("default_windows", [True, False], ids=["default windows", "budgets"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte(name: str, default_windows: bool) -> None:
    rehearsal = MODELS[name](default_windows)
    for budgets in [(None, None)] if default_windows else BUDGETS:
        moved = 0
        for decisions in vectors(rehearsal, 2):
            moved += rehearsal.agree(decisions, *budgets).bytes_offloaded
        assert moved > 0 or name == "one layer"


def test_views_that_different_segments_read_come_back_once_for_each() -> None:
    """What the runtime does today: such a storage crosses the link more than once, and late."""
    rehearsal = MODELS["shared gates"](False)
    takes = [t.storage for t in rehearsal.step.takes or ()]
    assert len(takes) > len(set(takes))
    _, simulation = rehearsal.simulate("offload_all", 1, 1 << 30)
    assert simulation.bytes_reloaded > simulation.bytes_offloaded
    assert simulation.num_prefetch_misses > 0


def test_an_output_that_the_caller_drops() -> None:
    """``holds_outputs`` is the only thing in a step that the graphs do not say."""
    rehearsal = MODELS["tower"](True)
    held = rehearsal.simulate("keep_all", None, None)[1]
    rehearsal.step = replace(rehearsal.step, holds_outputs=False)
    dropped = rehearsal.simulate("keep_all", None, None)[1]
    output = next(s.nbytes for s in rehearsal.step.storages if s.is_output)
    assert held.live_bytes[-1] - dropped.live_bytes[-1] == output == 4 * 8 * 8 * 4
    assert held.live_bytes[1] == dropped.live_bytes[1]
