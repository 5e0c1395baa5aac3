"""What sharded modules hold beside their parameters."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def settle(model: nn.Module) -> None:
    """Brings every FSDP module of a model to its sharded state."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fsdp_groups(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """(FSDP module, the parameters that its forward gathers)."""
    return [(m, list(m.parameters())) for m in model.modules() if isinstance(m, FSDPModule)]


def prefetched_by(module: nn.Module) -> list[nn.Module]:
    """The FSDP modules whose parameters a forward of ``module`` gathers as well."""
    return []
