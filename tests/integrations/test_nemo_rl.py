"""A policy worker with the mixin, called in the order of NeMo-RL's GRPO loop. The CPU is the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.integrations.nemo_rl import PhaseWorkerMixin
from fxoffload.phases import OffloadedError, Where
from tests.integrations.phases_support import batch, bytes_of, log_probs, make_model, state_of, total, update

STEPS = 4
GROUPS = ("params", "buffers", "grads", "optimizer")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", "cpu")


class PolicyWorker:
    """As NeMo-RL's DTensor worker: owns a model and an optimizer, and is told by the trainer what comes next."""

    def __init__(self, cfg: dict[str, Any] | None = None) -> None:
        self.cfg = cfg or {}
        self.cpu_offload = False
        self.model: nn.Module = make_model()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.calls: list[str] = []

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.calls.append(f"prepare_for_lp_inference({keep_train_buffers})")
        self.model.eval()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("prepare_for_training")
        self.model.train()

    def offload_before_refit(self) -> None:
        self.calls.append("offload_before_refit")

    def offload_after_refit(self) -> None:
        self.calls.append("offload_after_refit")
        self.model.eval()

    def get_logprobs(self, step: int) -> Tensor:
        assert not self.model.training
        with torch.no_grad():
            return torch.log_softmax(self.model(batch(step)), dim=-1)

    def train(self, step: int) -> float:
        assert self.model.training
        return update(self.model, [self.optimizer], step)

    def stream_weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


class Offloading(PhaseWorkerMixin, PolicyWorker):
    pass


def run(worker: PolicyWorker) -> list[Any]:
    """Steps of NeMo-RL's colocated GRPO: refit, generation, log-probs, training."""
    seen: list[Any] = []
    for step in range(STEPS):
        worker.offload_before_refit()
        seen.append(worker.stream_weights())
        worker.offload_after_refit()  # and generation
        worker.prepare_for_lp_inference()
        seen.append({"logprobs": worker.get_logprobs(step)})
        worker.prepare_for_training()
        seen.append({"loss": torch.tensor(worker.train(step))})
    return seen


@pytest.mark.parametrize("for_logprob", [False, True])
@pytest.mark.parametrize("for_refit", [False, True])
def test_the_loop_computes_the_same(for_logprob: bool, for_refit: bool) -> None:
    cfg = {"offload_optimizer_for_logprob": for_logprob, "offload_optimizer_for_refit": for_refit}
    offloading, resident = Offloading(cfg), PolicyWorker()
    for ours, theirs in zip(run(offloading), run(resident), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not offloading.calls
    assert offloading.phases.metrics()["phases/offload/bytes"] > 0


def places(worker: Offloading) -> dict[str, Where]:
    return {group: worker.phases.where(group) for group in GROUPS}


def trained(cfg: dict[str, Any] | None = None) -> Offloading:
    """After a training step, with gradients of the next one."""
    worker = Offloading(cfg)
    worker.model.train()
    worker.train(0)
    worker.model(batch(1)).square().mean().backward()
    return worker


def settled(worker: Offloading) -> dict[str, Where]:
    """Where everything is when nothing is under way any more."""
    for group in GROUPS:
        if worker.phases.where(group) is Where.LEAVING:
            worker.phases.offload(group)
        elif worker.phases.where(group) is Where.ARRIVING:
            worker.phases.onload(group)
    return places(worker)


DEVICE, HOST = Where.DEVICE, Where.HOST


def test_where_everything_is() -> None:
    worker = trained()
    state, weights = bytes_of(state_of(worker.optimizer)), bytes_of(worker.model.parameters())
    sizes = total(state), total(weights)
    worker.offload_before_refit()
    assert places(worker) == {"params": DEVICE, "buffers": DEVICE, "grads": HOST, "optimizer": HOST}
    assert (total(state), total(weights)) == (0, sizes[1])
    worker.offload_after_refit()
    assert set(places(worker).values()) == {HOST}
    assert (total(state), total(weights)) == (0, 0)
    with pytest.raises(OffloadedError):
        log_probs(worker.model, 0)
    worker.prepare_for_lp_inference()
    assert settled(worker) == {"params": DEVICE, "buffers": DEVICE, "grads": HOST, "optimizer": HOST}
    worker.prepare_for_training()
    assert set(settled(worker).values()) == {DEVICE}
    assert (total(state), total(weights)) == sizes
    worker.finish_inference()
    assert settled(worker) == {"params": HOST, "buffers": HOST, "grads": DEVICE, "optimizer": DEVICE}


def test_logprobs_leave_the_optimizer_where_it_is_unless_asked() -> None:
    for asked, expected in ((False, DEVICE), (True, HOST)):
        worker = trained({"offload_optimizer_for_logprob": asked})
        worker.prepare_for_lp_inference()
        assert settled(worker) == {"params": DEVICE, "buffers": DEVICE, "grads": HOST, "optimizer": expected}


def test_an_open_training_step_keeps_its_gradients() -> None:
    worker = trained({"offload_optimizer_for_logprob": True})
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert set(settled(worker).values()) == {DEVICE}


def test_the_optimizer_stays_for_a_refit_when_asked() -> None:
    worker = trained({"offload_optimizer_for_refit": False})
    worker.offload_before_refit()
    assert places(worker)["optimizer"] is DEVICE
    worker.offload_after_refit()
    assert places(worker) == {"params": HOST, "buffers": HOST, "grads": HOST, "optimizer": DEVICE}


def test_an_attribute_of_the_worker_comes_before_its_config() -> None:
    worker = trained({"offload_optimizer_for_refit": True})
    vars(worker)["offload_optimizer_for_refit"] = False
    worker.offload_before_refit()
    assert places(worker)["optimizer"] is DEVICE


def test_a_worker_without_an_optimizer() -> None:
    worker = Offloading()
    worker.optimizer = None
    worker.offload_after_refit()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(0)
    assert settled(worker)["params"] is DEVICE


def test_another_model_gets_another_manager() -> None:
    worker = Offloading()
    worker.offload_after_refit()
    first, weights = worker.phases, list(worker.model.parameters())
    assert worker.phases is first
    worker.model = make_model()
    assert worker.phases is not first
    assert all(weight.sum().isfinite() for weight in weights)  # the first one's are back
    worker.offload_after_refit()
    with pytest.raises(OffloadedError):
        log_probs(worker.model, 0)


def test_a_worker_of_an_older_version_is_given_no_argument_that_it_does_not_know() -> None:
    class Older(PolicyWorker):
        def prepare_for_lp_inference(self) -> None:  # type: ignore[override]
            self.calls.append("prepare_for_lp_inference")

    class OlderOffloading(PhaseWorkerMixin, Older): ...

    worker = OlderOffloading()
    worker.cpu_offload = True
    worker.prepare_for_lp_inference()
    assert worker.calls == ["prepare_for_lp_inference"]


def test_fsdps_own_cpu_offload_is_left_to_the_worker() -> None:
    worker = Offloading()
    worker.cpu_offload = True
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    worker.prepare_for_training()
    worker.offload_before_refit()
    worker.offload_after_refit()
    calls = ["prepare_for_training", "offload_before_refit", "offload_after_refit"]
    assert worker.calls == ["prepare_for_lp_inference(True)", *calls]
    worker.model(batch(0))
    with pytest.raises(RuntimeError, match="expected Offloading to have a finish_inference of its own"):
        worker.finish_inference()
