"""verl's own functions for phases: loaded without the package around them, and called as its workers do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.activations.available import NotAvailable
from benchmarks.rl.make_strategy import make_strategy
from benchmarks.rl.strategy import EVERYTHING, PARAMS
from benchmarks.rl.variants import parse_variants
from benchmarks.rl.verl_checkout import VerlCheckout
from tests.benchmarks.peer_checkouts import write_verl_phases


def made(path: Path) -> tuple[VerlCheckout, list[Any]]:
    strategy = VerlCheckout(str(path))
    job = SimpleNamespace(model="model", optimizer="optimizer", device=torch.device("cpu"), reshard=lambda: None)
    strategy.job = job  # type: ignore[assignment]
    return strategy, strategy._verl.CALLS


def test_each_group_is_moved_once_and_by_verls_functions(tmp_path: Path) -> None:
    strategy, calls = made(write_verl_phases(tmp_path))
    strategy.begin_offload("optimizer")
    strategy.begin_offload(*EVERYTHING)
    strategy.begin_offload(*EVERYTHING)
    assert calls == [("offload optimizer", "optimizer"), ("offload model", "model", False)]
    calls.clear()
    strategy.begin_onload(*PARAMS)
    strategy.begin_onload(*EVERYTHING)
    assert calls == [("load model", "model"), ("load optimizer", "optimizer", torch.device("cpu"))]


def test_a_checkout_that_is_none_is_a_row_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match="expected a checkout of verl that has"):
        VerlCheckout(str(tmp_path))


def test_the_path_comes_from_the_setting_or_the_variant(tmp_path: Path) -> None:
    write_verl_phases(tmp_path)
    (variant,) = parse_variants("phases", "verl_checkout", str(tmp_path))
    assert variant.options == {"path": str(tmp_path)}
    assert isinstance(make_strategy(variant), VerlCheckout)
    (variant,) = parse_variants("rl-step", "verl_checkout@path=/x", str(tmp_path))
    assert variant.options == {"path": "/x"}
    assert parse_variants("phases", "verl", str(tmp_path))[0].options == {}
