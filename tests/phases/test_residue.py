"""Tensors left on a device: found, told apart, and not kept alive."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.residue import Residue, Residues, residue

SIZE = 777  # floats; a size that nothing else has


class Holder:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Hostile:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def fresh() -> Tensor:
    return torch.zeros(SIZE)


def found(**kwargs: Any) -> list[Residue]:
    everything = residue(min_bytes=SIZE * 4, device_types=("cpu",), **kwargs)
    return [one for one in everything if one.nbytes == SIZE * 4]


def held(**kwargs: Any) -> str:
    (one,) = found(**kwargs)
    return "; ".join(one.held_by)


def test_what_is_frozen_is_counted() -> None:
    """The collector does not list it. Not frozen here: this process could not undo that for its own objects."""
    before = gc.get_freeze_count()
    counted = residue(device_types=("cpu",)).num_frozen
    # Frozen objects may still go when nothing refers to them any more.
    assert 0 < gc.get_freeze_count() <= counted <= before
    shown = Residues()
    assert "gc.freeze" not in str(shown)
    shown.num_frozen = 1234
    assert "1,234 objects that gc.freeze() hides" in str(shown)


def test_local_variable() -> None:
    tensor = fresh()
    text = held()
    assert "local variable 'tensor' in function test_local_variable" in text and "test_residue.py:" in text
    assert tensor.numel() == SIZE


@pytest.mark.parametrize("kind", [Holder, Slotted])
def test_attribute(kind: type) -> None:
    holder = kind(fresh())
    assert held() == f"attribute 'thing' of {kind.__name__}"
    assert holder.thing is not None


def test_parameter_and_buffer() -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    assert held() == "parameter 'weight' of Linear"
    model.register_buffer("mean", fresh())
    assert sorted("; ".join(one.held_by) for one in found()) == [
        "buffer 'mean' of Linear",
        "parameter 'weight' of Linear",
    ]


def test_containers_and_who_holds_them() -> None:
    holder = Holder({"a": [fresh()]})
    assert held() == "item 0 of a list in key 'a' of a dict in attribute 'thing' of Holder"
    holder.thing = None
    assert found() == []


def test_optimizer_state_and_gradient() -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    texts = "\n".join("; ".join(one.held_by) for one in found())
    assert "key 'momentum_buffer' of a dict in key <Parameter> of a defaultdict in attribute 'state' of SGD" in texts
    assert "grad of a Parameter (1x777)" in texts


def test_global_and_closure_and_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    # The collector does not list this module's own globals: conftest.py froze all objects before the first test.
    module: Any = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("a_module", None))
    monkeypatch.setitem(sys.modules, "a_module", module)
    module.LEFT = fresh()
    assert held() == "global 'LEFT' of a_module"
    del module.LEFT

    def make() -> Any:
        inside = fresh()
        return lambda: inside

    function = make()
    assert "closure variable" in held() and "make.<locals>.<lambda>" in held()
    del function

    def generate() -> Iterator[int]:
        inside = fresh()
        yield inside.numel()

    running = generate()
    next(running)
    assert "generate" in held()
    running.close()


def test_views_are_counted_once_and_fakes_not_at_all() -> None:
    base = fresh()
    view = base[10:]
    (one,) = found()
    assert one.tensors == 2 and one.nbytes == SIZE * 4 and view.numel() == SIZE - 10
    del base, view, one
    with FakeTensorMode():
        fake = fresh()
    assert found() == [] and fake.numel() == SIZE


def test_objects_that_raise_do_no_harm() -> None:
    hostile = Hostile()
    object.__setattr__(hostile, "thing", fresh())
    assert "Hostile" in held()


def test_keeps_nothing_alive() -> None:
    tensor = fresh()
    alive = weakref.ref(tensor)
    result = found()
    assert len(result) == 1
    gc.disable()  # neither by a cycle
    try:
        del tensor
        assert alive() is None
    finally:
        gc.enable()


def test_ignore_and_least_size() -> None:
    model, tensor = nn.Linear(SIZE, 1, bias=False), fresh()
    assert len(found()) == 2
    assert len(found(ignore=[model])) == 1 and found(ignore=[model, {"x": [tensor]}]) == []
    sizes = [one.nbytes for one in residue(min_bytes=SIZE * 4 + 1, device_types=("cpu",))]
    assert SIZE * 4 not in sizes and sizes == sorted(sizes, reverse=True)


def test_device() -> None:
    tensor = fresh()
    assert len(found(device="cpu")) == 1 and found(device="cuda:0") == []
    assert tensor.numel() == SIZE


def test_nothing_is_left_of_an_offloaded_model() -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    manager = PhaseManager(model, device_types=("cpu",))
    assert len(found()) == 1
    manager.offload("params")
    assert found() == []
    manager.onload("params")
    assert held() == "parameter 'weight' of Linear"
    manager.close()


def test_table() -> None:
    one = Residue(3 << 20, "Tensor", (3, 4), torch.float32, torch.device("cpu"), 1, ("attribute 'x' of Y", "a list"))
    table = Residues([one, one])
    table.unseen_bytes = 1 << 30
    text = str(table)
    assert text.startswith("6.0 MiB in 2 storages\n1.0 GiB allocated beside them")
    assert "attribute 'x' of Y" in text and "3x4" in text and "float32" in text
    assert str(Residues()) == "0 B in 0 storages"
