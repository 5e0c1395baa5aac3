"""Models, steps and snapshots for the tests of phases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.optimizers import leaves, named_state
from fxoffload.runtime.copies.streams import CopyStreams

WIDTH = 24


class Tied(nn.Module):
    """Two views of one storage, a tied weight, buffers (one of them not saved) and a parameter that is a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        whole = torch.randn(3 * WIDTH)
        self.left = nn.Parameter(whole[:WIDTH])
        self.right = nn.Parameter(whole[2 * WIDTH :])
        self.columns = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.left + self.right
        return (self.last(x @ self.columns) * self.scale + self.frozen).square().mean()


def make(
    kind: Callable[[], nn.Module] = Tied, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind()
    return model, optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def rehearse(model: Any, optimizer: Any = None, **options: Any) -> PhaseManager:
    copies: CopyStreams | None = options.pop("copies", None)
    if copies is not None:
        options["make_copies"] = lambda device: copies
    return PhaseManager(model, optimizer, device_types=("cpu",), **options)


def batch(i: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


def train(call: Callable[[Tensor], Tensor], optimizer: Any, i: int, *, zero: bool = True) -> float:
    loss = call(batch(i))
    loss.backward()
    for one in leaves(optimizer):
        one.step()
        if zero:
            one.zero_grad()
    return loss.item()


def all_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    found |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = {id(p): name for name, p in model.named_parameters()}
    for one in leaves(optimizer):
        found |= dict(named_state(one, names))
    return found


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that offload and onload must leave as it was. Aliasing is told by the first name on each storage."""
    owners: dict[int, str] = {}
    seen: dict[str, Any] = {}
    for name, tensor in all_tensors(model, optimizer).items():
        inner = list(plain_tensors(tensor))
        aliases = [owners.setdefault(t.untyped_storage()._cdata, name) for t in inner]
        pointers = [t.data_ptr() - t.untyped_storage().data_ptr() for t in inner]
        seen[name] = (
            id(tensor),
            type(tensor),
            aliases,
            pointers,
            [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in inner],
            tensor.shape,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor._version,
            getattr(tensor, "_spec", None),
            sorted(vars(tensor)),
            [t.clone() for t in inner],
        )
    seen["defaultdict entries"] = [len(one.state) for one in leaves(optimizer)]
    seen["hooks"] = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what changed."""
    found = sorted(set(before) ^ set(after))
    for name in set(before) & set(after):
        a, b = before[name], after[name]
        if isinstance(a, tuple):
            same = a[:-1] == b[:-1] and all(_same_bytes(x, y) for x, y in zip(a[-1], b[-1], strict=True))
        else:
            same = a == b
        if not same:
            found.append(name)
    return found


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@contextmanager
def nothing_starts_in_the_background(manager: PhaseManager) -> Iterator[None]:
    """Returning tensors are not asked for yet."""
    go = threading.Event()
    manager._transit._bringer.submit(go.wait)
    try:
        yield
    finally:
        go.set()
