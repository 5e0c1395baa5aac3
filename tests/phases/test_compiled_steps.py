"""Compiled functions around a model or an optimizer compute the same, and are not compiled again in every cycle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import OffloadedError, PhaseManager
from fxoffload.phases.guarding.compiled import reached
from tests.phases.delayed import DelayedCopies
from tests.phases.phase_support import WIDTH, batch, rehearse

Step = Callable[[nn.Module, Any, Tensor], None]


class Graphs:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph


def learn(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def of_step(model: nn.Module, optimizer: Any, compiling: Any) -> Callable[[Tensor], None]:
    step = compiling(optimizer.step)
    return lambda x: (learn(model, x), step(), optimizer.zero_grad())[0]


def of_a_function(model: nn.Module, optimizer: Any, compiling: Any) -> Callable[[Tensor], None]:
    step = compiling(lambda: optimizer.step())
    return lambda x: (learn(model, x), step(), optimizer.zero_grad())[0]


def of_the_class(model: nn.Module, optimizer: Any, compiling: Any) -> Callable[[Tensor], None]:
    step = compiling(type(optimizer).step)
    return lambda x: (learn(model, x), step(optimizer), optimizer.zero_grad())[0]


def of_a_loop(model: nn.Module, optimizer: Any, compiling: Any) -> Callable[[Tensor], None]:
    def loop(x: Tensor) -> None:
        for part in x.split(4):
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return compiling(loop)


class Trainer:
    """Has a compiled method."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.state = {"model": [model], "optimizer": optimizer}

    def loss(self, x: Tensor) -> Tensor:
        return self.state["model"][0](x).square().mean()


def of_a_loss(model: nn.Module, optimizer: Any, compiling: Any) -> Callable[[Tensor], None]:
    loss = compiling(Trainer(model, optimizer).loss)
    return lambda x: (loss(x).backward(), optimizer.step(), optimizer.zero_grad())[0]


def run(how: Any, cycles: int, manage: Callable[..., PhaseManager] | None, back: Callable[..., Any]) -> Any:
    """Trains through cycles of phases. Returns the numbers, and how many graphs there were after each cycle."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphs = Graphs()
    train = how(model, optimizer, functools.partial(torch.compile, backend=graphs))
    for i in range(3):
        train(batch(i))
    manager = manage(model, optimizer) if manage else None
    counts = [graphs.count]
    for i in range(cycles):
        if manager is not None:
            back(manager)
        train(batch(3 + i))
        if manager is not None:
            manager.onload()
        counts.append(graphs.count)
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    return [t.detach().clone() for t in (*model.parameters(), *state)], counts


def through_a_rollout(manager: PhaseManager) -> None:
    manager.enter("rollout")
    manager.enter("train")


def optimizer_only(manager: PhaseManager) -> None:
    manager.offload("optimizer")
    manager.onload("optimizer", wait=False)


@pytest.mark.slow_except("of_step-through_a_rollout", "of_the_class-optimizer_only", "of_a_loop-optimizer_only")
@pytest.mark.parametrize("back", [through_a_rollout, optimizer_only])
@pytest.mark.parametrize("how", [of_step, of_a_function, of_the_class, of_a_loop, of_a_loss])
def test_steps_are_the_same_and_compiled_once(how: Any, back: Callable[..., Any]) -> None:
    expected, _ = run(how, 3, None, back)
    got, counts = run(how, 3, lambda m, o: rehearse(m, o, copies=DelayedCopies()), back)
    assert counts[0] > 0
    assert counts == counts[:1] * len(counts)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("how", [of_step, of_a_function, of_a_loop])
def test_a_compiled_step_of_what_is_away_raises_and_counts_nothing(how: Any) -> None:
    torch.compiler.reset()
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphs = Graphs()
    train = how(model, optimizer, functools.partial(torch.compile, backend=graphs))
    for i in range(3):
        train(batch(i))
    manager = rehearse(model, optimizer)
    steps = [float(entry["step"]) for entry in optimizer.state.values()]
    counts = []
    for _ in range(3):
        manager.offload("optimizer")
        with pytest.raises(OffloadedError, match=r"onload\('optimizer'\)"):
            train(batch(3))
        manager.onload()
        optimizer.zero_grad()
        assert [float(entry["step"]) for entry in optimizer.state.values()] == steps
        counts.append(graphs.count)
    assert counts[0] == counts[-1], "a use that raises is compiled once at most"
    before = graphs.count
    train(batch(3))
    assert graphs.count == before


def test_who_reaches_a_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    targets = {id(model): model}
    trainer = Trainer(model, None)

    def direct() -> Any:
        return model

    def nested() -> Any:
        return [lambda: direct()]

    assert list(reached(direct, targets)) == [model]
    assert list(reached(nested, targets)) == [model]
    assert list(reached(trainer.loss, targets)) == [model]
    assert list(reached(functools.partial(print, model), targets)) == [model]
    assert list(reached(lambda x=model: x, targets)) == [model]
    assert list(reached(nn.Sequential(model).forward, targets)) == [model]
    assert list(reached(lambda: other, targets)) == []


def test_a_function_that_could_use_the_model_and_does_not() -> None:
    """It runs while everything is on the host, and no hook is left on it."""
    torch.compiler.reset()
    model = nn.Linear(WIDTH, WIDTH)
    trainer = Trainer(model, None)
    trainer.loss = torch.compile(lambda x: x + 1 if trainer.state else x, backend="eager")  # type: ignore[method-assign]
    expected = trainer.loss(torch.ones(2))
    manager = rehearse(model)
    manager.offload()
    assert torch.equal(trainer.loss(torch.ones(2)), expected)
    manager.onload()
    assert torch.equal(trainer.loss(torch.ones(2)), expected)
