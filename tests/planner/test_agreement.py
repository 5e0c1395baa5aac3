"""What is simulated is what the rehearsal on the CPU does: every byte, at every segment boundary.

On the CPU every copy is finished when it has started; on a GPU none may be. It makes no difference to bytes: the engine
never asks how far a copy is, it only lets streams wait. So the agreement here is the agreement there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.capture import Block, Tower, example_input
from tests.planner.rehearsal import Decisions, Rehearsal
from tests.support import Stack, batch

KB = 1 << 10
BUDGETS: tuple[tuple[int | None, int | None], ...] = (
    (1, None),
    (None, 1),
    (5 * KB, 3 * KB),
    (20 * KB, 40 * KB),
    (1 << 30, None),  # all is taken back, except inputs
    (1, 1 << 30),  # all is reloaded at once
)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.up(x * gate.sin())


class SharedGates(nn.Module):
    """Several slices of one storage are saved, and each layer's backward is the first to read one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(16, 160)
        self.layers = nn.ModuleList(Gated() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates(x).chunk(10, -1)[::2], strict=False):
            x = layer(x, gate)
        return self.head(x)


class Skips(nn.Module):
    """The first layers' outputs are read by the last ones."""

    def __init__(self, half: int = 3) -> None:
        super().__init__()
        self.depth = half
        self.layers = nn.ModuleList(Block() for _ in range(2 * half))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        waiting: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x) if i < self.depth else layer(x * waiting.pop())
            if i < self.depth:
                waiting.append(x)
        return self.head(x)


Make = Callable[[bool], Rehearsal]


class HeavyHead(nn.Module):
    """What stands behind the layers saves more than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.up = nn.Linear(16, 256)
        self.down = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(self.up(x).sigmoid()).exp()


def on_example(model: Callable[[], nn.Module]) -> Make:
    def make(default_windows: bool) -> Rehearsal:
        torch.manual_seed(0)
        return Rehearsal(
            model(),
            lambda call: call(example_input()),
            lambda out: out.square().sum(),
            default_windows=default_windows,
        )

    return make


def on_batch(default_windows: bool) -> Rehearsal:
    return Rehearsal(
        Stack(4, dropout=0.1),
        lambda call: call(batch()),
        lambda out: out.square().sum(),
        default_windows=default_windows,
    )


def qwen3(default_windows: bool) -> Rehearsal:
    pytest.importorskip("transformers")
    from tests.models.zoo import build

    built = build("qwen3")
    return Rehearsal(
        built.model, lambda call: call(**built.batch), lambda out: out.loss, default_windows=default_windows
    )


MODELS: dict[str, Make] = {
    "tower": on_example(lambda: Tower(5)),
    "bare tower": on_example(lambda: Tower(3, embed=False)),
    "one layer": on_example(Block),
    "stack": on_batch,
    "shared gates": on_example(SharedGates),
    "skips": on_example(Skips),
    "heavy head": on_example(HeavyHead),
    "qwen3": qwen3,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ops this small take a millisecond each where threads of other processes compete with theirs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vectors(rehearsal: Rehearsal, count: int) -> list[Decisions]:
    """The policies, and random decisions."""
    generator = random.Random(0)
    names = [c.name for c in rehearsal.graph.saved.candidates]
    return ["keep_all", "offload_all", "auto"] + [
        {name: generator.random() < share for name in names} for share in [0.2, 0.5, 0.8] for _ in range(count)
    ]


@pytest.mark.parametrize("default_windows", [True, False], ids=["default windows", "budgets"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte(name: str, default_windows: bool) -> None:
    rehearsal = MODELS[name](default_windows)
    for budgets in [(None, None)] if default_windows else BUDGETS:
        moved = 0
        for decisions in vectors(rehearsal, 2):
            seen, stats = rehearsal.run(decisions, *budgets)
            expected, simulation = rehearsal.simulate(decisions, *budgets)
            assert expected == seen, (budgets, decisions)
            assert (
                simulation.bytes_offloaded,
                simulation.bytes_reloaded,
                simulation.bytes_reclaimed,
                simulation.bytes_kept_for_backward,
                simulation.num_prefetch_misses,
            ) == (
                stats.bytes_offloaded,
                stats.bytes_reloaded,
                stats.bytes_reclaimed,
                stats.bytes_kept_for_backward,
                stats.num_prefetch_misses,
            ), (budgets, decisions)
            moved += stats.bytes_offloaded
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
