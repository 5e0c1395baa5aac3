"""verl's functions, called in the order in which verl's workers call them. The CPU is the device."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.integrations import verl
from fxoffload.integrations.managers import manager_of_model, manager_of_optimizer
from fxoffload.phases import OffloadedError
from tests.integrations.phases_support import WIDTH, batch, bytes_of, log_probs, make_model, state_of, total, update

STEPS = 4


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", "cpu")


def total_of_state(optimizer: Any) -> int:
    """Bytes of what Adam adds to the parameters, its steps included; also while it is away."""
    return sum(t.numel() * t.element_size() for t in state_of(optimizer))


class MultiOptimizer:
    """As VeOmni's: it has no state and no param_groups of its own."""

    _is_multi_optimizer = True

    def __init__(self, model: nn.Module) -> None:
        first, *rest = model.parameters()
        self.optimizers_dict = {"ep": torch.optim.AdamW([first], lr=0.1), "non_ep": torch.optim.AdamW(rest, lr=0.1)}

    def step(self) -> None:
        for optimizer in self.optimizers_dict.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers_dict.values():
            optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class Worker:
    """As verl's ActorRolloutRefWorker with both offload options: between calls nothing of it is on the device."""

    def __init__(self, make_optimizer: Callable[[nn.Module], Any], functions: Any = verl) -> None:
        self.verl = functions
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.offload_all()

    def offload_all(self) -> None:
        self.verl.offload_fsdp_model_to_cpu(self.model)
        self.verl.offload_fsdp_optimizer(optimizer=self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """What rollout_mode() sends: the state dict is taken while the model is loaded, and read after it has left."""
        self.verl.load_fsdp_model_to_gpu(self.model)
        params = self.model.state_dict()
        self.verl.offload_fsdp_model_to_cpu(self.model)
        sent = {name: value.to("cpu", non_blocking=True).clone() for name, value in params.items()}
        del params
        return sent

    def compute_log_prob(self, step: int) -> Tensor:
        self.verl.load_fsdp_model_to_gpu(self.model)
        found = log_probs(self.model, step)
        self.verl.offload_fsdp_model_to_cpu(self.model)
        return found

    def update_actor(self, step: int) -> float:
        self.verl.load_fsdp_model_to_gpu(self.model)
        self.verl.load_fsdp_optimizer(optimizer=self.optimizer, device_id=0)
        loss = update(self.model, [self.optimizer], step)
        self.offload_all()
        return loss


class Resident(Worker):
    """The same without any offload."""

    def __init__(self, make_optimizer: Callable[[nn.Module], Any]) -> None:
        nothing = {name: lambda *_, **__: None for name in NAMES}
        super().__init__(make_optimizer, type("Nothing", (), {n: staticmethod(f) for n, f in nothing.items()}))


FSDP_NAMES = ("offload_fsdp_model_to_cpu", "load_fsdp_model_to_gpu", "offload_fsdp_optimizer", "load_fsdp_optimizer")
VEOMNI_NAMES = tuple(name.replace("fsdp", "veomni") for name in FSDP_NAMES)
NAMES = FSDP_NAMES + VEOMNI_NAMES


@pytest.mark.parametrize("make_optimizer", [adamw, MultiOptimizer])
def test_the_workers_steps_compute_the_same(make_optimizer: Callable[[nn.Module], Any]) -> None:
    offloading, resident = Worker(make_optimizer), Resident(make_optimizer)
    for step in range(STEPS):
        sent, expected = offloading.weights(), resident.weights()
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], expected[name]) for name in sent)
        assert torch.equal(offloading.compute_log_prob(step), resident.compute_log_prob(step))
        assert offloading.update_actor(step) == resident.update_actor(step)
    verl.load_fsdp_model_to_gpu(offloading.model)
    for ours, theirs in zip(offloading.model.state_dict().values(), resident.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_memory_is_given_back_and_objects_stay() -> None:
    model = make_model()
    optimizer = adamw(model)
    update(model, [optimizer], 0)
    model(batch(1)).square().mean().backward()
    tensors = [*model.parameters(), *model.buffers()]
    weights, state = bytes_of(tensors), bytes_of(state_of(optimizer))
    sizes = total(weights), total(state)
    assert min(sizes) > 0

    verl.offload_fsdp_model_to_cpu(model)
    assert (total(weights), total(state)) == (0, sizes[1])
    verl.offload_fsdp_model_to_cpu(model)
    verl.offload_fsdp_optimizer(optimizer)
    verl.offload_fsdp_optimizer(optimizer)
    assert (total(weights), total(state)) == (0, 0)
    with pytest.raises(OffloadedError, match="params"):
        model(batch(0))
    with pytest.raises(OffloadedError):
        optimizer.step()

    verl.load_fsdp_optimizer(optimizer, 0)
    verl.load_fsdp_optimizer(optimizer, "cuda")
    assert (total(weights), total(state)) == (0, sizes[1])
    verl.load_fsdp_model_to_gpu(model)
    verl.load_fsdp_model_to_gpu(model)
    assert (total(weights), total(state)) == sizes
    assert all(now is before for now, before in zip((*model.parameters(), *model.buffers()), tensors, strict=True))
    update(model, [optimizer], 1)


def test_gradients_go_with_the_parameters() -> None:
    model = make_model()
    model(batch(0)).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    values, storages = [grad.clone() for grad in grads], bytes_of(grads)
    verl.offload_fsdp_model_to_cpu(model)
    assert total(storages) == 0
    verl.load_fsdp_model_to_gpu(model)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True))


def test_an_optimizer_without_state_is_left_alone() -> None:
    model = make_model()
    for optimizer in (adamw(model), torch.optim.SGD(model.parameters(), lr=0.1)):
        verl.offload_fsdp_optimizer(optimizer)
        verl.load_fsdp_optimizer(optimizer, 0)
        assert not optimizer.state


def trained(step: int = 0) -> tuple[nn.Module, Any]:
    model = make_model()
    optimizer = adamw(model)
    update(model, [optimizer], step)
    return model, optimizer


def test_an_optimizer_alone_leaves_its_model_where_it_is() -> None:
    """Its manager knows no model, so every parameter looks like a master copy that no model has."""
    (model, optimizer), (expected, expected_optimizer) = trained(), trained()
    for one in (model, expected):
        one(batch(1)).square().mean().backward()
    weights, grads = bytes_of(model.parameters()), bytes_of(p.grad for p in model.parameters() if p.grad is not None)
    state = bytes_of(state_of(optimizer))
    sizes = total(weights), total(grads), total(state)
    assert min(sizes) > 0
    verl.offload_fsdp_optimizer(optimizer)
    assert (total(weights), total(grads), total(state)) == (*sizes[:2], 0)
    assert torch.equal(log_probs(model, 2), log_probs(expected, 2))
    with pytest.raises(OffloadedError, match="of the optimizer"):
        optimizer.step()
    verl.load_fsdp_optimizer(optimizer, 0)
    assert update(model, [optimizer], 3) == update(expected, [expected_optimizer], 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_the_host_holds_everything_once() -> None:
    model, optimizer = trained()
    size = total(bytes_of(model.parameters())) + total(bytes_of(model.buffers()))
    both = [manager_of_model(model), manager_of_optimizer(optimizer)]
    verl.offload_fsdp_optimizer(optimizer)
    verl.offload_fsdp_model_to_cpu(model)
    held = [sum(h.nbytes for h in manager._transit.ledger.held()) for manager in both]
    assert held == [size, total_of_state(optimizer)]
    verl.load_fsdp_optimizer(optimizer, 0)
    verl.load_fsdp_model_to_gpu(model)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_the_order_of_offloads_does_not_matter(first: str) -> None:
    (model, optimizer), (expected, expected_optimizer) = trained(), trained()
    for step in range(1, 3):
        if first == "model":
            verl.offload_fsdp_model_to_cpu(model)
        verl.offload_fsdp_optimizer(optimizer)
        if first == "optimizer":
            verl.offload_fsdp_model_to_cpu(model)
        verl.load_fsdp_model_to_gpu(model)
        assert torch.equal(log_probs(model, step), log_probs(expected, step))
        verl.load_fsdp_optimizer(optimizer, 0)
        assert update(model, [optimizer], step) == update(expected, [expected_optimizer], step)


def test_a_state_dict_from_before_our_first_call_is_readable() -> None:
    model, _ = trained()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    taken, inner = model.state_dict(), model[2].state_dict()  # type: ignore[index]
    storages = bytes_of(model.parameters())
    verl.offload_fsdp_model_to_cpu(model)
    assert total(storages) == 0
    assert all(torch.equal(taken[name].clone(), value) for name, value in expected.items())
    assert torch.equal(inner["weight"].clone(), expected["2.weight"])
    del taken, inner
    verl.load_fsdp_model_to_gpu(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_model_on_another_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", "cuda")
    model = make_model()
    before = total(bytes_of(model.parameters()))
    verl.offload_fsdp_model_to_cpu(model)
    assert total(bytes_of(model.parameters())) == before
    model(batch(0))


def test_a_state_dict_that_outlives_the_offload() -> None:
    model = make_model()
    verl.offload_fsdp_model_to_cpu(model)
    verl.load_fsdp_model_to_gpu(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    taken = model.state_dict()
    storages = bytes_of(model.parameters())
    verl.offload_fsdp_model_to_cpu(model)
    assert total(storages) == 0

    # Reading one brings that one, and what shares its memory, and nothing else.
    assert torch.equal(taken["0.weight"] + 0, expected["0.weight"])
    assert total(storages) == 0
    assert taken["0.weight"].untyped_storage().nbytes() == 4 * WIDTH * WIDTH
    assert taken["0.weight"].data_ptr() == taken["2.weight"].data_ptr()

    verl.load_fsdp_model_to_gpu(model)
    parameters = dict(model.named_parameters())
    assert taken["0.bias"].data_ptr() == parameters["0.bias"].data_ptr()
    assert taken["0.weight"].data_ptr() != parameters["0.weight"].data_ptr()
    with torch.no_grad():
        parameters["0.bias"].add_(1)
    assert torch.equal(taken["0.bias"], expected["0.bias"] + 1)
    assert torch.equal(taken["2.weight"], expected["2.weight"])

    verl.offload_fsdp_model_to_cpu(model)
    assert torch.equal(pickle.loads(pickle.dumps(taken["0.bias"])), expected["0.bias"] + 1)
    verl.load_fsdp_model_to_gpu(model)


def _zero(tensor: Tensor) -> None:
    tensor.zero_()


def _element(tensor: Tensor) -> None:
    tensor[0] = 1.0


def _data(tensor: Tensor) -> None:
    tensor.data = torch.ones(tensor.shape)


WRITES: list[Callable[[Tensor], Any]] = [
    _zero, _element, _data, lambda t: t.copy_(torch.ones(t.shape)), lambda t: torch.add(torch.ones(t.shape), 1, out=t),
    lambda t: torch._foreach_add_([t], 1.0), lambda t: t.__iadd__(1.0),
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_state_dict_from_before_the_offload_are_refused(write: Callable[[Tensor], Any]) -> None:
    model = make_model()
    expected = model[0].weight.detach().clone()
    verl.offload_fsdp_model_to_cpu(model)
    verl.load_fsdp_model_to_gpu(model)
    state = model.state_dict()
    verl.offload_fsdp_model_to_cpu(model)
    with pytest.raises(OffloadedError, match=r"writes to 0\.weight of a state dict that was taken before"):
        write(state["0.weight"])
    assert torch.equal(torch.empty_like(expected).copy_(state["0.weight"]), expected)
    verl.load_fsdp_model_to_gpu(model)
    assert torch.equal(model[0].weight, expected)


def test_writes_to_what_was_read_from_a_state_dict_from_before_the_offload_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    for write in (False, True):
        verl.load_fsdp_model_to_gpu(model)
        state = model.state_dict()
        verl.offload_fsdp_model_to_cpu(model)
        for tensor in state.values():
            tensor.clone()
            if write:
                tensor.zero_()
        assert caplog.messages == []
    verl.load_fsdp_model_to_gpu(model)
    assert len(caplog.messages) == 1 and "so the values are not in the model" in caplog.messages[0]
    assert model[0].weight.any()


def test_nothing_is_kept_alive() -> None:
    model = make_model()
    optimizer = adamw(model)
    update(model, [optimizer], 0)
    for _ in range(2):
        verl.offload_fsdp_model_to_cpu(model)
        verl.offload_fsdp_optimizer(optimizer)
        verl.load_fsdp_model_to_gpu(model)
        verl.load_fsdp_optimizer(optimizer, 0)
    alive = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    deadline = time.monotonic() + 10  # the last copies end in the background
    while any(ref() is not None for ref in alive) and time.monotonic() < deadline:
        gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_copies_of_a_model_have_managers_of_their_own() -> None:
    model = make_model()
    verl.offload_fsdp_model_to_cpu(model)
    verl.load_fsdp_model_to_gpu(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        verl.offload_fsdp_model_to_cpu(twin)
        model(batch(0))
        verl.load_fsdp_model_to_gpu(twin)
        twin(batch(0))


# -- patch and unpatch -------------------------------------------------------------------------------------------------


def theirs(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> str:
        return f"verl's {name}"

    function.__name__ = name
    return function


@pytest.fixture
def fake_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """An installed verl: where the functions are defined, and a worker that has imported them by name."""
    homes = {"verl.utils.fsdp_utils": FSDP_NAMES, "verl.workers.engine.veomni.utils": VEOMNI_NAMES}
    packages = ("verl", "verl.utils", "verl.workers", "verl.workers.engine", "verl.workers.engine.veomni")
    modules = {name: ModuleType(name) for name in (*packages, *homes, "verl.workers.fsdp_workers")}
    for package in packages:
        modules[package].__path__ = []  # type: ignore[attr-defined]
    for home, names in homes.items():
        vars(modules[home]).update({name: theirs(name) for name in names})
    worker = vars(modules["verl.workers.fsdp_workers"])
    worker.update({name: vars(modules["verl.utils.fsdp_utils"])[name] for name in FSDP_NAMES})
    worker["renamed"] = worker["load_fsdp_optimizer"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    verl.unpatch()


def test_veomnis_functions_are_fsdps() -> None:
    for fsdp, veomni in zip(FSDP_NAMES, VEOMNI_NAMES, strict=True):
        assert getattr(verl, veomni) is getattr(verl, fsdp)


def functions_in(modules: dict[str, ModuleType]) -> dict[str, Any]:
    return {f"{m}.{name}": f for m, module in modules.items() for name, f in vars(module).items() if callable(f)}


def test_patch_replaces_every_name_and_unpatch_restores_each(fake_verl: dict[str, ModuleType]) -> None:
    before = functions_in(fake_verl)
    assert len(before) == 4 + 4 + 4 + 1
    verl.patch()
    patched = functions_in(fake_verl)
    assert all(patched[name] is not before[name] for name in before)
    assert patched["verl.workers.fsdp_workers.renamed"] is patched["verl.utils.fsdp_utils.load_fsdp_optimizer"]
    verl.patch()
    assert functions_in(fake_verl) == patched

    later = ModuleType("verl.later")
    vars(later)["load_fsdp_optimizer"] = vars(fake_verl["verl.utils.fsdp_utils"])["load_fsdp_optimizer"]
    sys.modules["verl.later"] = later
    try:
        verl.unpatch()
        assert functions_in(fake_verl) == before
        assert vars(later)["load_fsdp_optimizer"] is before["verl.utils.fsdp_utils.load_fsdp_optimizer"]
        verl.unpatch()
        assert functions_in(fake_verl) == before
        # Ours stay ours.
        assert verl.load_fsdp_optimizer.__module__ == verl.__name__
    finally:
        del sys.modules["verl.later"]


def test_a_patched_verl_offloads(fake_verl: dict[str, ModuleType]) -> None:
    verl.patch()
    worker = Worker(adamw, fake_verl["verl.workers.fsdp_workers"])
    resident = Resident(adamw)
    for step in range(2):
        assert worker.update_actor(step) == resident.update_actor(step)
    with pytest.raises(RuntimeError, match=r"2 models or optimizers on the host .* load_fsdp_model_to_gpu"):
        verl.unpatch()
    veomni = fake_verl["verl.workers.engine.veomni.utils"]
    veomni.load_veomni_model_to_gpu(worker.model)
    veomni.load_veomni_optimizer(worker.optimizer, "cuda")
    worker.model(batch(0))
    verl.unpatch()
    assert veomni.load_veomni_optimizer(worker.optimizer, "cuda") == "verl's load_veomni_optimizer"


@pytest.mark.parametrize("is_installed", [True, False])
def test_patch_without_veomni(
    is_installed: bool,
    fake_verl: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / ("veomni" if is_installed else "other")).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "verl.workers.engine.veomni.utils", None)  # type: ignore[arg-type]
    verl.patch()
    assert fake_verl["verl.utils.fsdp_utils"].load_fsdp_optimizer.__wrapped__ is verl.load_fsdp_optimizer
    assert (
        fake_verl["verl.workers.engine.veomni.utils"].load_veomni_optimizer(None, 0) == "verl's load_veomni_optimizer"
    )
    assert ["leaves out VeOmni" in message for message in caplog.messages] == [True] * is_installed


def test_patch_says_what_is_missing(fake_verl: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions_in(fake_verl)
    with monkeypatch.context() as patched:
        patched.delattr(fake_verl["verl.workers.engine.veomni.utils"], "load_veomni_optimizer")
        with pytest.raises(
            RuntimeError, match=r"expected load_veomni_optimizer in verl\.workers\.engine\.veomni\.utils"
        ):
            verl.patch()
    assert functions_in(fake_verl) == before
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "verl.utils.fsdp_utils", None)
        with pytest.raises(ImportError, match=r"patch\(\) needs an installed verl"):
            verl.patch()
    assert functions_in(fake_verl) == before
