"""AdamW with float32 state for bfloat16 parameters, which torch's own fused AdamW refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class MixedAdamW(Optimizer):
    """State tensors are of the parameters' kind (DTensor for DTensor) and in float32; ``step`` is a number."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        (one, two), steps = group["betas"], state["step"]
        local, gradient = plain(parameter), plain(parameter.grad).float()
        mean, square = plain(state["exp_avg"]), plain(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        divisor = (square / (1 - two**steps)).sqrt_().add_(group["eps"])
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.sub_((mean / divisor).mul_(group["lr"] / (1 - one**steps)).to(local.dtype))


def plain(tensor: Tensor | None) -> Tensor:
    """This rank's part of a tensor."""
    if tensor is None:
        raise AssertionError("expected a tensor, found None")
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
