"""Uses of a plain model and its optimizer while everything is on the host; run as a script: some would end the process.

Takes names of optimizers. Writes one line per use, as JSON: the optimizer, the use, the exception, and the message.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fxoffload.phases.manager import PhaseManager

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Asking(Dataset[Any]):
    """Uses the model in a worker process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[str]:
        found = []
        for use in (lambda: self.model(x()), lambda: next(self.model.parameters()) + 1, self.model.state_dict):
            try:
                use()
            except Exception as error:
                found.append(type(error).__name__)
            else:
                found.append("nothing")
        return found


class Plain(Dataset[int]):
    """Does not know the model."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def x() -> Tensor:
    return torch.ones(2, 4)


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    optimizer.zero_grad()
    model(x() * torch.arange(2.0)[:, None]).square().sum().backward()
    optimizer.step()
    return [p.detach().double().sum().item() for p in model.parameters()]


def uses(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    p = model[0].weight  # type: ignore[index]
    return {
        "forward": lambda: model(x()),
        "no_grad forward": lambda: torch.no_grad()(model)(x()),
        "compiled forward": lambda: kept["compiled"](x()),
        "functional_call": lambda: torch.func.functional_call(model, dict(model.named_parameters()), (x(),)),
        "plus": lambda: p + 1,
        "in place": lambda: p.data.mul_(2),
        "clone": lambda: p.clone(),
        "numpy": lambda: p.detach().numpy(),
        "list": lambda: p.tolist(),
        "storage": lambda: p.untyped_storage().tolist(),
        "linear": lambda: nn.functional.linear(x(), p),
        "step": optimizer.step,
        "step of the class": lambda: type(optimizer).step(optimizer),
        "zeroing": lambda: optimizer.zero_grad(set_to_none=False),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "save model": lambda: torch.save(model, io.BytesIO()),
        "save parameter": lambda: torch.save(p, io.BytesIO()),
        "save optimizer": lambda: torch.save(optimizer, io.BytesIO()),
        "pickle": lambda: pickle.dumps(p),
        "deepcopy model": lambda: copy.deepcopy(model),
        "deepcopy parameter": lambda: copy.deepcopy(p),
        "deepcopy optimizer": lambda: copy.deepcopy(optimizer),
        "to": lambda: model.to(torch.float64),
        "half of a layer": lambda: model[2].half(),  # type: ignore[index]
        "share_memory": model.share_memory,
        "load_state_dict, assigning": lambda: model.load_state_dict(kept["model"], assign=True),
        "load_state_dict of an optimizer": lambda: optimizer.load_state_dict(kept["optimizer"]),
        "state_dict with variables": lambda: model.state_dict(keep_vars=True),
        "vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
    }


class Scale(nn.Module):
    """Its backward reads the weight in a kernel that does not look whether there is anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def backwards() -> list[Any]:
    """Of a forward before the offload: what one meanwhile raises, and the gradient of one afterwards."""
    model, x = Scale(), torch.ones(64, requires_grad=True)
    loss, version = model(x).sum(), model.weight._version
    manager = PhaseManager(model, device_types=("cpu",))
    manager.offload()
    raised = "nothing"
    try:
        loss.backward(retain_graph=True)
    except RuntimeError as error:
        raised = type(error).__name__
    added = x.grad is not None
    manager.onload()
    loss.backward()
    manager.close()
    return [raised, added, x.grad.sum().item(), model.weight._version - version]  # type: ignore[union-attr]


def main(name: str) -> None:
    reference = build()
    expected = [train(reference, o) for o in [OPTIMIZERS[name](reference.parameters())] for _ in range(4)]
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    got = [train(model, optimizer)]
    kept = {
        "compiled": compiled,
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
    before = {n: t.clone() for n, t in model.state_dict().items()}
    compiled.eval()(x())
    model.train()
    attributes = [set(vars(m)) for m in model.modules()]
    manager = PhaseManager(model, optimizer, device_types=("cpu",))
    manager.offload()
    for use, call in uses(model, optimizer, kept).items():
        try:
            call()
        except Exception as error:
            print(json.dumps([name, use, type(error).__name__, str(error)]), flush=True)
        else:
            print(json.dumps([name, use, "nothing", ""]), flush=True)
    in_workers = list(DataLoader(Asking(model), num_workers=1, collate_fn=lambda batch: batch[0]))
    numbers = [int(n) for n in DataLoader(Plain(), num_workers=1)]
    print(json.dumps([name, "in workers", in_workers, numbers]), flush=True)
    optimizer.zero_grad()  # harmless: it drops the gradients
    manager.onload()
    same = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    copied = copy.deepcopy(model)
    clean = attributes == [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in copied.modules()]
    got += [train(model, optimizer) for _ in range(3)]
    print(json.dumps([name, "afterwards", same and clean, got == expected]), flush=True)
    manager.close()
    print(json.dumps([name, "backward", *backwards()]), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for asked in sys.argv[1:]:
        torch.compiler.reset()
        main(asked)
