"""What a module itself has, without its submodules: what torch's own methods say, in a fifth of their time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def own_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """(attribute, parameter), one that two attributes share twice."""
    if type(module).named_parameters is not nn.Module.named_parameters:  # FSDP1 has names of its own
        return module.named_parameters(recurse=False, remove_duplicate=False)
    return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


def own_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """(attribute, buffer), likewise."""
    if type(module).named_buffers is not nn.Module.named_buffers:
        return module.named_buffers(recurse=False, remove_duplicate=False)
    return ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
