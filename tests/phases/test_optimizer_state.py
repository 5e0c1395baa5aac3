"""State that optimizers keep in other ways than torch's: objects, nested 8-bit state, wrappers; and LoRA."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import OffloadedError, Where
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.optimizers import leaves, named_state, state_tensors
from tests.phases.phase_support import WIDTH, batch, make, rehearse, train


@dataclass
class Factors:
    """As distributed Shampoo keeps them."""

    left: Tensor
    right: list[Tensor]


class Slotted:
    __slots__ = ("inner", "never_set")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Kronecker:
    """An object with a cycle, and with members that are no state."""

    def __init__(self, parameter: Tensor, module: nn.Module) -> None:
        self.factors = Factors(torch.full((WIDTH,), 2.0), [torch.full((WIDTH,), 3.0)])
        self.slotted = Slotted({"deep": torch.full((WIDTH,), 4.0)})
        self.myself = self
        self.parameter, self.module, self.make = parameter, module, torch.zeros


class Preconditioned(torch.optim.SGD):
    """Steps with the state in its objects."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p not in self.state or "kron" not in self.state[p]:
                        self.state[p]["kron"] = Kronecker(p, STRANGER)
                    kron = self.state[p]["kron"]
                    for t in tensors_of(kron):
                        t.mul_(1.01)
                        p.add_(t.sum(), alpha=1e-4)


STRANGER = nn.Linear(2, 2)


def tensors_of(kron: Kronecker) -> list[Tensor]:
    return [kron.factors.left, *kron.factors.right, kron.slotted.inner["deep"]]


class Blockwise(torch.optim.Optimizer):
    """As 8-bit optimizers have it: quantized bytes, scales in a nested list, a table that all parameters share."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.name2qmap = {"dynamic": torch.linspace(-1, 1, 256)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["state1"] = torch.full(p.shape, 128, dtype=torch.uint8)
                    state["qmap1"] = self.name2qmap["dynamic"]
                    state["nested"] = {"absmax": [torch.ones(1), (torch.ones(2), 3)]}
                table, scale = state["qmap1"], state["nested"]["absmax"][0]
                value = table[state["state1"].long()] * scale * 0.9 + p.grad
                scale.copy_(value.abs().max().clamp(min=1e-9).reshape(1))
                state["state1"].copy_(torch.bucketize(value / scale, table).clamp(max=255))
                p.sub_(value, alpha=group["lr"])


class Chained:
    """As Megatron's ChainedOptimizer: a list, ``param_groups`` of all, and master copies inside."""

    def __init__(self, model: nn.Module) -> None:
        first, *rest = (p for p in model.parameters() if p.requires_grad)
        self.chained_optimizers = [Masters([first]), Masters(rest)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.chained_optimizers for group in one.optimizer.param_groups]

    def step(self) -> None:
        for one in self.chained_optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.chained_optimizers:
            one.zero_grad()


class Masters:
    """As Megatron's mixed precision optimizer: the torch optimizer has copies of the parameters."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().double()) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.double()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()


def simple() -> nn.Module:
    torch.manual_seed(0)
    return Loss(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def trained(model: nn.Module, optimizer: Any, i: int) -> float:
    loss = model(batch(i))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


OPTIMIZERS = {
    "objects": lambda m: Preconditioned(m.parameters(), lr=1e-2, momentum=0.9),
    "8 bit": lambda m: Blockwise(m.parameters(), lr=1e-2),
    "chained": Chained,
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_the_same(kind: str) -> None:
    model, expected = simple(), simple()
    optimizer, expected_optimizer = OPTIMIZERS[kind](model), OPTIMIZERS[kind](expected)
    trained(model, optimizer, 0)
    trained(expected, expected_optimizer, 0)
    state = [t for one in leaves(optimizer) for t in state_tensors(one) if t.numel() >= WIDTH]
    storages = [t.untyped_storage() for t in state]
    sizes = [s.nbytes() for s in storages]
    assert len(sizes) >= 4 and min(sizes) > 0
    manager = rehearse(model, optimizer)
    for i in range(1, 4):
        manager.enter("rollout")
        assert [s.nbytes() for s in storages] == [0] * len(sizes)
        before = {id(t) for t in state}
        with pytest.raises(OffloadedError):
            optimizer.step()
        manager.enter("train")
        assert trained(model, optimizer, i) == trained(expected, expected_optimizer, i)
        manager.onload()
        assert [s.nbytes() for s in storages] == sizes
        assert all(id(t) in before for one in leaves(optimizer) for t in state_tensors(one) if t.numel() >= WIDTH)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_objects_are_walked_through_and_not_for_ever() -> None:
    model = simple()
    optimizer = Preconditioned(model.parameters(), lr=1e-2)
    trained(model, optimizer, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    found = [name for name, _ in named_state(optimizer, names) if name.startswith("inner.0.bias")]
    prefix = "inner.0.bias['kron']"
    assert found == [
        f"{prefix}.factors.left",
        f"{prefix}.factors.right[0]",
        f"{prefix}.slotted.inner['deep']",
        f"{prefix}.parameter",
    ]
    ids = {id(t) for _, t in named_state(optimizer, names)}
    assert not ids & {id(p) for p in STRANGER.parameters()}


def test_without_a_model_parameters_are_not_state() -> None:
    model = simple()
    optimizer = Preconditioned(model.parameters(), lr=1e-2)
    trained(model, optimizer, 0)
    model(batch(1)).backward()
    alone, together = Inventory((), optimizer, None), Inventory(nn.Linear(2, 2), optimizer, None)
    parameters = {id(p) for p in model.parameters()}
    assert not parameters & {id(t) for _, t in alone.collect("optimizer")}
    assert alone.collect("optimizer") and alone.collect("grads") == []
    assert parameters <= {id(t) for _, t in together.collect("optimizer")}, "master copies beside a model"


def test_what_cannot_be_emptied_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = make()
    model.frozen.data = torch.ones(WIDTH).share_memory_()  # type: ignore[union-attr]
    model.scale = torch.from_numpy(torch.ones(WIDTH).numpy())
    inventory = Inventory(model, None, {"same": model.frozen})
    assert inventory.immovable({"cpu"}) == [("frozen", 4 * WIDTH), ("scale", 4 * WIDTH)]
    assert inventory.immovable({"cuda"}) == []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            inventory.warn_of_immovable({"cpu"})
            inventory.warn_of_immovable({"cuda"})
    assert len(caplog.messages) == 1
    assert "192 B in 2 storages stay on the device" in caplog.messages[0]
    assert "frozen, scale" in caplog.messages[0]


def test_what_cannot_be_emptied_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Shared memory says that it is resizable, and ends the process when it is resized."""
    model = simple()
    shared = model.inner[0].weight  # type: ignore[index]
    shared.data = shared.detach().clone().share_memory_()
    storages = [p.untyped_storage() for p in model.parameters()]
    expected = [p.detach().clone() for p in model.parameters()]
    manager = rehearse(model)
    for _ in range(2):
        manager.offload()
        assert [s.nbytes() > 0 for s in storages] == [True, False, False, False]
        assert torch.equal(shared + 0, expected[0])
        manager.onload()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    assert storages[0].is_shared()
    assert len([message for message in caplog.messages if "inner.0.weight" in message]) == 1


def test_lora() -> None:
    """Frozen base weights, adapters that alone have gradients and state, and a merge in between."""
    peft: Any = pytest.importorskip("peft", reason="LoRA's adapters are peft's")

    def build() -> tuple[Any, Any]:
        model = peft.get_peft_model(simple(), peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    (model, optimizer), (expected, expected_optimizer) = build(), build()
    expected.load_state_dict(model.state_dict())
    base = model.base_model.model.inner[0].base_layer.weight.untyped_storage()
    assert train(model, optimizer, 0) == train(expected, expected_optimizer, 0)
    manager = rehearse(model, optimizer)
    for i in range(1, 4):
        manager.enter("rollout")
        assert base.nbytes() == 0
        for use in (lambda: model(batch(0)), model.merge_adapter, optimizer.step):
            with pytest.raises(OffloadedError):
                use()
        manager.enter("logprob")
        with torch.no_grad(), model.disable_adapter(), expected.disable_adapter():
            assert torch.equal(model(batch(i)), expected(batch(i)))
        manager.enter("train")
        assert train(model, optimizer, i) == train(expected, expected_optimizer, i)
    manager.enter("sync")
    manager.onload("params")
    for one in (model, expected):
        one.merge_adapter()
        one.unmerge_adapter()
    manager.onload()
    assert manager.where("params") is Where.DEVICE
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_was_away_and_died_leaves_its_place_to_others() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    in_use = []
    for i in range(6):
        manager.offload("optimizer")
        in_use.append(manager.image.in_use_bytes)
        manager.onload("optimizer")
        if i % 2:  # else the same storages leave again, to the same place
            optimizer.state.clear()
            train(model, optimizer, i)
    assert in_use == [in_use[0]] * 6
    manager.close()


def test_what_was_away_and_has_grown_gets_another_place() -> None:
    model, optimizer = make()
    extra = torch.ones(100)
    manager = rehearse(model, optimizer, extra={"table": extra})
    manager.offload("extra")
    manager.onload("extra")
    extra.resize_(1000).fill_(2.0)
    manager.offload("extra")
    assert manager.image.in_use_bytes == 4096
    manager.onload("extra")
    assert extra.eq(2.0).all()
    manager.close()
