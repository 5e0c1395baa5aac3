"""Private torch APIs of modules: their class before sharding, their buffers."""

from __future__ import annotations

import sys

from torch import nn


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module, as it was before ``fully_shard`` or ``replicate`` changed it.

    Needed by torch 2.11 to 2.14: how ``fully_shard`` makes a class.
    """
    homes = (("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed._composable.replicate", "DDP"))
    mixed_in = tuple(getattr(sys.modules[home], name, ()) for home, name in homes if home in sys.modules)
    classes = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in classes if not issubclass(kind, mixed_in))


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that its state dict leaves out. ``Module._non_persistent_buffers_set``.

    Needed by torch 2.11 to 2.14.
    """
    return module._non_persistent_buffers_set
