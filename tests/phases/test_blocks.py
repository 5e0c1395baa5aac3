"""Phases inside phases: where one is after an inner block."""

from __future__ import annotations

import logging

import pytest

from fxoffload.phases import OffloadedError, Phase, PhaseManager, Where

from .phase_support import make, rehearse, train


def begin() -> PhaseManager:
    model, optimizer = make()
    train(model, optimizer, 0)
    return rehearse(model, optimizer)


def test_an_inner_block_that_ends_with_an_exception() -> None:
    manager = begin()
    with manager.phase("train"):
        with pytest.raises(ZeroDivisionError), manager.phase("rollout", then="sync"):
            assert manager.where("params") is Where.HOST
            _ = 1 / 0
        assert manager.phase_now is Phase.TRAIN
        assert manager.where("params") in (Where.ARRIVING, Where.DEVICE)
        train(manager.models[""], manager.optimizers[0], 1)


def test_every_block_that_an_exception_ends_is_left() -> None:
    manager = begin()
    with pytest.raises(OffloadedError), manager.phase("train"), manager.phase("logprob"), manager.phase("rollout"):
        manager.models[""](1)
    assert manager.phase_now is Phase.TRAIN
    with manager.phase("sync"):
        pass
    assert manager.phase_now is Phase.SYNC, "no block is left over"


def test_a_block_that_is_left_by_closing_a_generator() -> None:
    manager = begin()

    def answers() -> object:
        with manager.phase("rollout"):
            yield 1

    with manager.phase("logprob"):
        generator = answers()
        assert next(generator) == 1  # type: ignore[call-overload]
        assert manager.phase_now is Phase.ROLLOUT
        generator.close()  # type: ignore[attr-defined]
        assert manager.phase_now is Phase.LOGPROB


def test_what_an_inner_block_says_comes_next() -> None:
    manager = begin()
    with manager.phase("train"):
        with manager.phase("sync", then="rollout"):
            pass
        assert manager.phase_now is Phase.SYNC
        assert manager.where("params") in (Where.LEAVING, Where.HOST)


def test_an_exception_is_not_hidden_by_a_transition_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = begin()
    with manager.phase("train"), caplog.at_level(logging.WARNING):
        with pytest.raises(ZeroDivisionError), manager.phase("rollout"):
            monkeypatch.setattr(manager._transit, "onload", refuse)
            _ = 1 / 0
        assert "back to the phase train: " in caplog.text and "no room" in caplog.text
        monkeypatch.undo()
        assert manager.phase_now is Phase.ROLLOUT
        assert manager.where("params") is Where.HOST
    manager.close()


def test_what_failed_before_does_not_keep_one_from_the_outer_phase(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What went wrong in the background is raised by the next call; here that is the way back, which goes on."""
    manager = begin()
    failed = [OSError("in the background")]
    report = manager._transit.report

    def once() -> None:
        if failed:
            raise failed.pop()
        report()

    with manager.phase("logprob"), caplog.at_level(logging.WARNING):
        with pytest.raises(ZeroDivisionError), manager.phase("rollout"):
            monkeypatch.setattr(manager._transit, "report", once)
            _ = 1 / 0
        assert "in the background" in caplog.text
        assert manager.phase_now is Phase.LOGPROB
        assert manager.where("params") in (Where.ARRIVING, Where.DEVICE)
    manager.close()


def refuse(*args: object, **kwargs: object) -> None:
    raise MemoryError("no room")
