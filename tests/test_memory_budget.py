"""``fxoffload.activation_budget``: it foresees the bytes that an optimizer's first step then allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

from fxoffload import memory_budget
from fxoffload.errors import OptionsError, ProfileError, UnsupportedError
from fxoffload.machine import load_profile
from fxoffload.memory_budget import DeviceMemory, activation_budget, device_memory

GIB = 1 << 30
Make = Callable[[Any], optim.Optimizer]


@pytest.fixture
def empty_cpu() -> Iterator[None]:
    """A CPU of 1 GiB, of which nothing is known to be in use."""
    with mock.patch.object(memory_budget, "device_memory", lambda device: DeviceMemory(GIB)):
        yield


def net(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16))


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def state_of(optimizer: optim.Optimizer) -> int:
    return nbytes(t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def needed(model: nn.Module, optimizer: optim.Optimizer | None = None, **options: Any) -> int:
    """Bytes that are foreseen on the CPU of ``empty_cpu``."""
    return GIB - activation_budget(model, optimizer, device_fraction=1.0, **options)


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p),
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: optim.Adafactor(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "ASGD": lambda p: optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("empty_cpu")
def test_state_is_foreseen(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    parameters = [p.detach().clone() for p in model.parameters()]
    foreseen = needed(model, optimizer)
    assert len(optimizer.state) == 0 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    step(model, optimizer)
    assert foreseen == nbytes(model.parameters()) + state_of(optimizer)
    # All of it exists now.
    assert needed(model, optimizer) == 0


@pytest.mark.usefixtures("empty_cpu")
def test_groups_frozen_parameters_and_existing_state() -> None:
    model = net()
    first, second, bias = model.parameters()
    bias.requires_grad_(False)
    groups = [{"params": [first]}, {"params": [second, bias], "amsgrad": True}]
    optimizer = optim.AdamW(groups, lr=0.1)
    assert needed(model, optimizer) == 3 * first.nbytes + 4 * second.nbytes + 2 * 4
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert needed(model, optimizer) == 4 * second.nbytes + 4
    step(model, optimizer)
    assert needed(model, optimizer) == 0


@pytest.mark.usefixtures("empty_cpu")
def test_schedules_hooks_and_attributes_are_left_alone() -> None:
    calls: list[str] = []

    class Counting(optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.9)
            self.steps: list[int] = []
            self.watched = list(self.param_groups[0]["params"])

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.steps.append(1)
            assert all(p.grad is not None for p in self.watched)
            return super().step(closure)

    model = net()
    optimizer = Counting(model.parameters())
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("behind"))
    optim.lr_scheduler.StepLR(optimizer, 1)
    before = calls.copy(), optimizer.steps.copy()
    assert needed(model, optimizer) == 2 * nbytes(model.parameters())
    assert (calls, optimizer.steps) == before


@pytest.mark.usefixtures("empty_cpu")
def test_an_optimizer_that_cannot_be_tried() -> None:
    model = net()
    optimizer = optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedError, match=r"LBFGS.*closure.*after the first step.*state_bytes"):
        activation_budget(model, optimizer)
    gradients = nbytes(model.parameters())
    assert needed(model, optimizer, state_bytes=1000) == gradients + 1000
    assert needed(model, optimizer, state_bytes="1KiB") == gradients + 1024
    assert needed(model, optimizer, state_bytes=0) == needed(model) == gradients


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_cpu")
def test_gradients_that_persist_and_that_do_not() -> None:
    model = net()
    first = next(model.parameters())
    assert needed(model) == nbytes(model.parameters())
    assert needed(model, gradients_persist=False) == 0
    first.grad = torch.zeros_like(first)
    assert needed(model) == nbytes(model.parameters()) - first.nbytes
    # It is in use now, and freed before the step.
    with mock.patch.object(memory_budget, "device_memory", lambda device: DeviceMemory(GIB, here=1 << 20)):
        assert needed(model, gradients_persist=False) == (1 << 20) - first.nbytes


@pytest.mark.usefixtures("empty_cpu")
def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    assert needed(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) == 2 * 4 * 32 * 32


# -- devices -----------------------------------------------------------------------------------------------------------


def blocks(*tensors: Tensor) -> int:
    """As CUDA's caching allocator hands out."""
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in tensors)


@pytest.mark.parametrize("form", ["meta", "cpu", "fake"])
def test_a_model_elsewhere_is_to_be_moved(form: str) -> None:
    if form == "fake":
        with FakeTensorMode():
            model = net()
    else:
        model = net(form)
    parameters = list(model.parameters())
    total = load_profile("h200").device_memory_bytes
    for device in ("h200", load_profile("h200")):
        left = activation_budget(model, optim.AdamW(parameters), device_fraction=1.0, device=device)
        assert left == total - 4 * blocks(*parameters)
    # Its step counts are on the device.
    left = activation_budget(model, optim.AdamW(parameters, capturable=True), device_fraction=1.0, device="h200")
    assert left == total - 4 * blocks(*parameters) - 512 * len(parameters)


def test_a_gpu_with_others_and_a_cache() -> None:
    found = {"mem_get_info": (30 * GIB, 80 * GIB), "memory_reserved": 40 * GIB, "memory_allocated": 25 * GIB}
    device = torch.device("cuda", 0)
    with mock.patch.multiple(torch.cuda, **{k: mock.Mock(return_value=v) for k, v in found.items()}):
        assert device_memory(device) == DeviceMemory(80 * GIB, here=25 * GIB, others=10 * GIB)
        with mock.patch.object(memory_budget, "resolve", lambda asked: device):
            model = net("meta")
            left = activation_budget(model, device_fraction=0.5, device="cuda")
    # Reserved memory that is not allocated is free.
    assert left == 5 * GIB - 2 * blocks(*model.parameters())


def test_state_on_the_host_stays_there_and_state_of_moved_parameters_moves() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters())
    step(model, optimizer)
    total = load_profile("h200").device_memory_bytes
    left = activation_budget(model, optimizer, device_fraction=1.0, device="h200", gradients_persist=False)
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert 0 <= total - left - blocks(*model.parameters(), *moments) <= 512 * len(optimizer.state)


def test_the_cpu_s_memory() -> None:
    found = device_memory(torch.device("cpu"))
    assert 0 < found.here < found.total and 0 <= found.others < found.total
    model = net()
    left = activation_budget(model, device_fraction=1.0)
    assert 0 < left < found.total
    with mock.patch.object(memory_budget, "memory_bytes", lambda device: GIB):
        bound = device_memory(torch.device("cpu"))
    assert (bound.total, bound.others) == (GIB, 0)


def test_local_shards_count() -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Linear(64, 32, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with mock.patch.object(memory_budget, "device_memory", lambda device: DeviceMemory(GIB)):
            assert needed(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) == 2 * 4 * 64 * 32 // 4
    finally:
        distributed.destroy_process_group()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_nothing_left_says_what_takes_how_much() -> None:
    memory = DeviceMemory(GIB, here=GIB // 2, others=GIB // 4)
    with torch.device("meta"):
        model = nn.Linear(8192, 8192, bias=False)
    with mock.patch.object(memory_budget, "device_memory", lambda device: memory):
        with pytest.raises(OptionsError) as caught:
            activation_budget(model, optim.AdamW(model.parameters()), device="cpu")
    text = str(caught.value)
    assert "921.6 MiB (90 % of 1.0 GiB), found 870.4 MiB too little" in text
    for part in (
        "in use by this process on cpu 512.0 MiB",
        "in use by others 256.0 MiB",
        "parameters and buffers to be moved there 256.0 MiB",
        "gradients 256.0 MiB",
        "optimizer state 512.0 MiB",
    ):
        assert part in text


def test_bad_arguments() -> None:
    for fraction in (0, 1.5, -1, float("nan")):
        with pytest.raises(OptionsError, match="device_fraction"):
            activation_budget(net(), device_fraction=fraction)
    with pytest.raises(OptionsError, match=r"'h20'.*did you mean 'h200'"):
        activation_budget(net(), device="h20")
    with pytest.raises(OptionsError, match="state_bytes"):
        activation_budget(net(), state_bytes="many")
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="expected cuda"):
            activation_budget(net(), device="cuda")
