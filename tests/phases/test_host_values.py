"""Values that are read from the host image are those of the tensors, in memory that is the reader's own."""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.torch_private.storages import StorageWeakRef, is_gone

from .phase_support import rehearse


class Bits(nn.Module):
    """Tensors whose bytes are not yet their values, and some that do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, tensor in {
            "weight": torch.randn(4, 4),
            "conjugated": torch.randn(4, dtype=torch.cfloat).conj(),
            "negated": torch.randn(4, dtype=torch.cfloat).conj().imag,
            "both": torch.randn(4, 2, dtype=torch.cfloat).t().conj(),
            "strided": torch.arange(8.0)[::2],
            "expanded": torch.ones(1).expand(8),
            "column": torch.arange(16.0).view(4, 4)[:, 1],
            "turned": torch.randn(4, 6).t(),
            "empty": torch.empty(0, 3),
            "nothing of something": torch.randn(4)[:0],
        }.items():
            self.register_buffer(name, tensor)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


def values(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().resolve_conj().resolve_neg() for name, tensor in tensors}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_state_dicts_have_the_values_of_conjugated_and_negated_tensors() -> None:
    module = Bits()
    expected = values(module.named_buffers())
    bits = {name: (t.is_conj(), t.is_neg()) for name, t in module.named_buffers()}
    manager = rehearse(module)
    manager.offload()
    found = module.state_dict()
    assert_equal(values(found.items()), expected)
    assert {name: (t.is_conj(), t.is_neg()) for name, t in found.items()} == bits
    assert_equal(values((name, manager.host_copy(buffers(module)[name])) for name in expected), expected)
    manager.close()
    assert_equal(values(module.named_buffers()), expected)


@pytest.mark.parametrize("bucket_bytes", ["64B", "1MiB"])
@pytest.mark.parametrize("away", [True, False])
def test_weights_are_streamed_with_their_values(away: bool, bucket_bytes: str) -> None:
    module = Bits()
    expected = values(module.named_buffers())
    manager = rehearse(module)
    if away:
        manager.offload()
    assert_equal(values(manager.stream_weights(bucket_bytes)), expected)
    manager.close()


@pytest.mark.parametrize(
    "mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["default device", "inference mode"]
)
def test_what_is_read_is_an_ordinary_tensor_on_the_cpu(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Bits())
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = values(model.state_dict().items())
    manager = rehearse(model, optimizer)
    manager.offload()
    with mode():
        found, of_optimizer = model.state_dict(), optimizer.state_dict()
        copied = manager.host_copy(model[0].weight)
        streamed = values(manager.stream_weights("64B")) if isinstance(mode(), torch.device) else expected
    manager.onload()
    assert_equal(values(found.items()), expected)
    assert_equal(streamed, expected)
    entries = [value for entry in of_optimizer["state"].values() for value in entry.values()]
    for tensor in (copied, *found.values(), *entries):
        assert tensor.device.type == "cpu" and not tensor.is_inference()
    optimizer.load_state_dict(of_optimizer)
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    manager.close()


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_a_destination_that_is_filled_again_gets_the_values_of_then(kind: type) -> None:
    module = nn.Module()
    for i in range(6):
        module.register_parameter(f"w{i}", nn.Parameter(torch.full((16,), float(i))))
    manager = rehearse(module)
    destination = kind()
    for round in range(4):
        expected = values(module.named_parameters())
        manager.offload()
        for _ in range(2):
            module.state_dict(destination=destination)
            assert_equal(destination, expected)
        manager.onload()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(100 * (round + 1))
    manager.close()


def test_what_is_taken_out_of_a_state_dict_and_dropped_is_free() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    manager = rehearse(module)
    manager.offload()
    found = module.state_dict()
    storages = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in found.items()}
    for name in list(found):
        found.pop(name)
        gc.collect()
        assert is_gone(storages[name])
        assert not any(is_gone(storages[other]) for other in found)
    manager.close()


def test_ties_hold_also_after_a_state_dict_that_failed_and_in_a_module_around_two() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    manager = rehearse([module[0], module[1]])
    manager.offload()
    destination: dict[str, Tensor] = {}

    def fail(*_: Any) -> None:
        raise KeyError("a user's hook")

    hook = module[1].register_state_dict_pre_hook(fail)
    with contextlib.suppress(KeyError):
        module.state_dict(destination=destination)
    hook.remove()
    found = module.state_dict(destination=destination)
    assert found["0.weight"].untyped_storage()._cdata == found["1.weight"].untyped_storage()._cdata
    manager.close()
    assert not [name for one in module.modules() for name in vars(one) if name == "_save_to_state_dict"]
