"""Any write to a state dict of an offloaded model is in the model when it returns."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fxoffload.phases import OffloadedError
from fxoffload.phases.guarding.overrides import is_ours
from fxoffload.phases.moving.host_image import HostMemoryError

from .delayed import DelayedCopies
from .phase_support import Tied, make, rehearse, train

State = dict[str, Any]


def source() -> State:
    """Of another model, in float64 and in memory of its own."""
    torch.manual_seed(1)
    return {name: tensor.detach().double() for name, tensor in Tied().state_dict().items()}


def elements(state: State, values: State) -> None:
    for name, tensor in state.items():
        tensor[...] = values[name]


def views(state: State, values: State) -> None:
    for name, tensor in state.items():
        if tensor.dim():
            for row, value in zip(tensor.unbind(), values[name].unbind(), strict=True):
                row.copy_(value)
        else:
            tensor.data.copy_(values[name])


def out(state: State, values: State) -> None:
    for name, tensor in state.items():
        torch.add(values[name].to(tensor.dtype), 0, out=tensor)


def numpy(state: State, values: State) -> None:
    for name, tensor in state.items():
        tensor.numpy()[...] = values[name].numpy()


def arithmetic(state: State, values: State) -> None:
    for name, tensor in state.items():
        tensor.zero_()
        tensor += values[name].to(tensor.dtype)


def foreach(state: State, values: State) -> None:
    torch._foreach_copy_(list(state.values()), [values[name].to(t.dtype) for name, t in state.items()])


def others(state: State, values: State) -> None:
    """What shares memory with them in other ways."""
    for name, tensor in state.items():
        torch.from_dlpack(tensor).copy_(values[name])


@pytest.mark.parametrize("write", [elements, views, out, numpy, arithmetic, foreach, others])
def test_writes_to_a_state_dict_arrive(write: Callable[[State, State], None]) -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    manager, expected = rehearse(model, optimizer), source()
    for _ in range(2):
        manager.offload()
        write(model.state_dict(), expected)
        assert all(torch.equal(t, expected[name].to(t.dtype)) for name, t in model.state_dict().items())
        state = optimizer.state_dict()["state"]
        for index, entry in state.items():
            for i, tensor in enumerate(entry.values()):
                tensor.numpy()[...] = index + i
        del state, entry, tensor
        manager.onload()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        for index, entry in optimizer.state_dict()["state"].items():
            assert all((tensor == index + i).all() for i, tensor in enumerate(entry.values()))
        train(model, optimizer, 1)
    manager.close()


def by_load_state_dict(model: nn.Module, values: State, folder: Path) -> None:
    model.load_state_dict(values)


def by_a_file(model: nn.Module, values: State, folder: Path) -> None:
    torch.save(values, folder / "model.pt")
    model.load_state_dict(torch.load(folder / "model.pt", mmap=True))


def by_the_state_dict_itself(model: nn.Module, values: State, folder: Path) -> None:
    state = model.state_dict()
    for name, tensor in state.items():
        tensor.copy_(values[name])
    model.load_state_dict(state)


def by_parts(model: nn.Module, values: State, folder: Path) -> None:
    for prefix in ("first", "norm", "last"):
        part = {name.removeprefix(f"{prefix}."): t for name, t in values.items() if name.startswith(f"{prefix}.")}
        model.get_submodule(prefix).load_state_dict(part)
    model.load_state_dict({name: values[name] for name in values if "." not in name}, strict=False)


def by_set_model_state_dict(model: nn.Module, values: State, folder: Path) -> None:
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))


def by_dcp(model: nn.Module, values: State, folder: Path) -> None:
    state = get_model_state_dict(model)
    dcp.save({"model": {name: values[name].to(t.dtype) for name, t in state.items()}}, checkpoint_id=folder)
    dcp.load({"model": state}, checkpoint_id=folder)


def by_dcp_of_the_module(model: nn.Module, values: State, folder: Path) -> None:
    dcp.save({"model": {n: values[n].to(t.dtype) for n, t in model.state_dict().items()}}, checkpoint_id=folder)
    dcp.load({"model": model}, checkpoint_id=folder)


WAYS = (
    by_load_state_dict, by_a_file, by_the_state_dict_itself, by_parts, by_set_model_state_dict, by_dcp,
    by_dcp_of_the_module,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("load", WAYS)
def test_what_is_loaded_while_everything_is_away_arrives(load: Callable[..., None], tmp_path: Path) -> None:
    model, expected = Tied(), source()
    manager = rehearse(model)
    manager.offload()
    load(model, expected, tmp_path)
    manager.onload()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert model.last.weight is model.first.weight
    manager.close()
    assert not [name for module in model.modules() for name, value in vars(module).items() if is_ours(value)]


def test_what_is_loaded_while_it_arrives_is_fenced() -> None:
    model, expected, copies = Tied(), source(), DelayedCopies()
    manager = rehearse(model, copies=copies)
    manager.offload()
    manager.onload(wait=False)
    model.load_state_dict(expected)
    copies.run_all()
    manager.onload()
    assert all(torch.equal(t, expected[name].to(t.dtype)) for name, t in model.state_dict().items())
    manager.close()


def test_what_cannot_be_loaded_from_there_raises_and_changes_nothing() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    manager = rehearse(model, optimizer)
    manager.offload()
    wrong = {**source(), "left": torch.ones(1)}
    for load, kind in {
        lambda: model.load_state_dict(source(), assign=True): OffloadedError,
        lambda: optimizer.load_state_dict(state): OffloadedError,
        lambda: set_optimizer_state_dict(model, optimizer, state): OffloadedError,
        lambda: nn.utils.vector_to_parameters(torch.ones(2000), model.parameters()): OffloadedError,
        lambda: model.first.load_state_dict({"weight": torch.ones(1)}): RuntimeError,
    }.items():
        with pytest.raises(kind):
            load()
    with pytest.raises(RuntimeError, match="size mismatch for left"):
        model.load_state_dict(wrong)
    manager.onload()
    assert torch.equal(model.left, before["left"])
    manager.close()


# -- after the model has returned --------------------------------------------------------------------------------------


def test_a_state_dict_that_is_kept_keeps_its_values_and_nothing_else_does() -> None:
    model, optimizer = make()
    manager = rehearse(model, optimizer)
    kept: list[tuple[Any, Any]] = []
    for i in range(4):
        train(model, optimizer, i)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        manager.offload()
        state = model.state_dict()
        kept.append(({name: tensor.numpy() for name, tensor in state.items()} if i % 2 else state, expected))
        if i == 2:
            manager.drain()
        manager.onload(wait=i % 2 == 0)
    manager.close()
    for state, expected in kept:
        assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in expected.items())


def test_memory_of_a_state_dict_is_used_again_when_nobody_has_it() -> None:
    model, _ = make()
    manager = rehearse(model)
    sizes = []
    for i in range(6):
        manager.offload()
        state = model.state_dict()
        if i < 3:
            del state
        manager.onload()
        sizes.append(manager.image.in_use_bytes)
        reserved = manager.image.reserved_bytes
    assert sizes == [sizes[0]] * 6, "what somebody else has is not in use"
    del state
    for _ in range(3):
        manager.offload()
        manager.onload()
    gc.collect()
    assert manager.image.reserved_bytes == reserved
    manager.close()


def test_a_limit_that_a_kept_state_dict_leaves_no_room_in_is_said() -> None:
    model = nn.Linear(256, 256, bias=False)
    manager = rehearse(model, host_limit=384 << 10)
    manager.offload()
    state = model.state_dict()
    manager.onload()
    with pytest.raises(HostMemoryError, match=r"0\.00 GiB in tensors of earlier state dicts that are still referenced"):
        manager.offload()
    del state
    manager.offload()
    manager.close()


def test_what_is_written_after_the_model_has_returned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = make()
    manager = rehearse(model)
    for i in range(3):
        manager.offload()
        assert len(caplog.messages) == min(i, 1)
        state = model.state_dict()
        state["left"].zero_()
        manager.onload()
        assert not model.left.any()
        for value in (3.0, 4.0):
            state["right"].fill_(value)
    manager.close()
    assert len(caplog.messages) == 1
    assert "1 tensors of a state dict were written to after onload(), the first of left" in caplog.messages[0]
    assert not model.right.eq(4.0).any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_a_state_dict_that_was_there() -> None:
    """As one that writes a checkpoint."""
    model, _ = make()
    manager = rehearse(model)
    manager.offload()
    state, gone = model.state_dict(), rehearse(nn.Linear(4, 4))
    gone.offload()
    arrays = {name: (tensor.numpy(), tensor.numpy().copy()) for name, tensor in state.items()}
    child = os.fork()
    if child == 0:  # without operators of torch, whose threads a child does not have
        os._exit(0 if all((array == copied).all() for array, copied in arrays.values()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    manager.close()
    gone.close()


@pytest.mark.parametrize("way", ["from the host image", "from a file", "before there was a manager"])
def test_state_that_an_optimizer_has_loaded_leaves(way: str, tmp_path: Path) -> None:
    """On a CPU the optimizer keeps the very tensors, in memory that torch cannot empty."""
    model, optimizer = make()
    train(model, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    if way == "before there was a manager":
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
    manager = rehearse(model, optimizer)
    if way == "from the host image":
        manager.offload()
        state = optimizer.state_dict()
        manager.onload()
        optimizer.load_state_dict(state)
    elif way == "from a file":
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
    tensors: list[Tensor] = [t for entry in optimizer.state.values() for t in entry.values()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    manager.offload("optimizer")
    assert [storage.nbytes() for storage in storages] == [0] * len(storages)
    manager.close()


def test_storages_are_as_large_as_at_home() -> None:
    """``safetensors.torch.save_model`` compares tensors with theirs."""
    model, optimizer = make()
    model.register_buffer("odd", torch.ones(25))
    manager = rehearse(model, optimizer)
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in model.state_dict().items()}
    manager.offload()
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in model.state_dict().items()} == sizes
    manager.close()


def test_what_is_moved_to_shared_memory_is_written_back() -> None:
    model, optimizer = make()
    manager, expected = rehearse(model, optimizer), source()
    manager.offload()
    state = model.state_dict()
    for name, tensor in state.items():
        tensor.share_memory_().copy_(expected[name])
    assert all(torch.equal(t, expected[name].to(t.dtype)) for name, t in model.state_dict().items())
    manager.onload()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    manager.close()
