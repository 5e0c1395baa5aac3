"""Wrapper subclasses (quantized weights, 8-bit optimizer state): in state dicts, and made while one is away."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxoffload.phases import OffloadedError
from fxoffload.phases.guarding.sentinel import is_away

from .phase_support import rehearse

aten: Any = torch.ops.aten


class Pair(Tensor):
    """The sum of two tensors, as torchao and others write such classes."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Pair:
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)  # type: ignore[attr-defined]

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Pair:
        return cls(parts["a"], parts["b"])

    @classmethod
    def of(cls, value: float) -> Pair:
        return cls(torch.full((4,), value), torch.zeros(4))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            first, rest = args[0], args[1:]
            return cls(func(first.a, *rest, **kwargs), func(first.b, *rest, **kwargs))
        if func is aten.copy_.default:
            target, value = args[0], args[1]
            parts = (value.a, value.b) if isinstance(value, Pair) else (value, torch.zeros_like(value))
            target.a.copy_(parts[0])
            target.b.copy_(parts[1])
            return target
        args, kwargs = tree_map(lambda t: t.a + t.b if isinstance(t, Pair) else t, (args, kwargs))
        return func(*args, **kwargs)

    def again(self) -> Pair:
        return type(self)(torch.ones(4), torch.zeros(4))

    def empty_like_me(self) -> Pair:
        found = Tensor._make_wrapper_subclass(type(self), (4,), dtype=self.dtype, device=self.device)  # type: ignore[attr-defined]
        found.a, found.b = torch.ones(4), torch.zeros(4)
        return found

    def with_my_attributes(self) -> Pair:
        found = Pair(torch.full((4,), 3.0), torch.zeros(4))
        found.__dict__.update({name: value for name, value in vars(self).items() if name not in ("a", "b")})
        return found


class Nested(Pair):
    """Of such a class and a plain tensor."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Pair(torch.ones(4), torch.full((4,), 2.0)), requires_grad=False)
        self.deep = nn.Parameter(Nested(Pair.of(3.0), torch.ones(4)), requires_grad=False)
        self.plain = nn.Parameter(torch.ones(4))


def total(tensor: Any) -> Tensor:
    return tensor + 0 if isinstance(tensor, Pair) else tensor


torch.serialization.add_safe_globals([Pair, Nested])


def test_a_subclass_stays_itself_in_state_dicts_then_and_afterwards() -> None:
    model = Model()
    expected = {name: total(tensor).clone() for name, tensor in model.state_dict().items()}
    kinds = {name: type(tensor) for name, tensor in model.state_dict().items()}
    manager = rehearse(model)
    for _ in range(2):
        manager.offload()
        state = model.state_dict()
        for step in ("away", "back"):
            assert {name: type(tensor) for name, tensor in state.items()} == kinds, step
            assert type(state["deep"].a) is Pair
            assert all(torch.equal(total(tensor), expected[name]) for name, tensor in state.items())
            for copied in (copy.deepcopy(state["weight"]), copy.copy(state["weight"]), state["weight"].clone()):
                assert type(copied) is Pair and torch.equal(total(copied), expected["weight"])
            stream = io.BytesIO()
            torch.save(state, stream)
            assert b"fxoffload" not in stream.getvalue()
            stream.seek(0)
            loaded = torch.load(stream, weights_only=True)
            assert {name: type(tensor) for name, tensor in loaded.items()} == kinds
            assert type(pickle.loads(pickle.dumps(state["weight"]))) is Pair
            if step == "away":
                state["weight"].a.add_(1.0)
                state["deep"].copy_(Nested(Pair.of(7.0), torch.ones(4)))
                expected["weight"] += 1.0
                expected["deep"] = torch.full((4,), 8.0)
                manager.onload()
        assert all(torch.equal(total(t), expected[name]) for name, t in model.state_dict().items())
    manager.close()


def test_optimizer_state_of_a_subclass_is_loaded_and_saved() -> None:
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("sum", Pair.of(1.0)).a.add_(1.0)

    plain = nn.Linear(2, 2)
    optimizer = Keeping(plain.parameters(), lr=0.1)
    optimizer.step()
    manager = rehearse(plain, optimizer)
    manager.offload()
    state = optimizer.state_dict()
    assert [type(entry["sum"]) for entry in state["state"].values()] == [Pair, Pair]
    manager.onload()
    optimizer.step()
    optimizer.load_state_dict(state)
    optimizer.step()
    assert [total(entry["sum"]).tolist() for entry in optimizer.state.values()] == [[3.0] * 4] * 2
    manager.close()


MADE: dict[str, Callable[[Pair], Any]] = {
    "type(self)(...)": lambda w: w.again(),
    "type(w)(...)": lambda w: type(w)(torch.ones(4), torch.zeros(4)),
    "a class method": lambda w: type(w).of(1.0),
    "unflatten": lambda w: type(w).__tensor_unflatten__({"a": torch.ones(4), "b": torch.zeros(4)}, None, None, None),
    "_make_wrapper_subclass": lambda w: w.empty_like_me(),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_made_while_one_is_away_is_of_its_own_class(make: Callable[[Pair], Any]) -> None:
    model = Model()
    manager = rehearse(model)
    manager.offload()
    made = make(model.weight)  # type: ignore[arg-type]
    assert type(made) is Pair or make is MADE["_make_wrapper_subclass"], "that one is when it is used"
    assert torch.equal(made + 0, torch.ones(4))
    assert type(made) is Pair and not is_away(made)
    manager.onload()
    assert torch.equal(made + 0, torch.ones(4)) and type(copy.deepcopy(made)) is Pair
    manager.close()


def test_what_has_the_attributes_of_one_that_was_away_is_at_home() -> None:
    model = Model()
    manager = rehearse(model)
    manager.offload()
    copied = model.weight.with_my_attributes()  # type: ignore[attr-defined]
    manager.onload()
    assert not is_away(copied) and torch.equal(total(copied), torch.full((4,), 3.0))
    holder = nn.Module()
    holder.register_buffer("copied", copied)
    manager.close()
    manager = rehearse(holder)
    for _ in range(2):
        manager.offload()
        assert is_away(copied) and type(copied) is not Pair
        manager.onload()
        assert type(copied) is Pair and not is_away(copied)
    manager.close()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "nn.Parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "nn.Buffer": nn.Buffer,
    "swap_tensors": lambda w: torch.utils.swap_tensors(w, OTHER),
    "swap_tensors, the other way": lambda w: torch.utils.swap_tensors(OTHER, w),
    "tree_map": lambda w: tree_map(lambda t: t.to(torch.float64), [w]),
    "type()": lambda w: w.type(torch.float64),
    "as_subclass": lambda w: w.as_subclass(Tensor),
}
OTHER = Pair.of(1.0)


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_rebuilding_one_that_is_away_is_refused_and_leaves_everything_as_it_was(use: Callable[[Any], Any]) -> None:
    model = Model()
    manager = rehearse(model)
    manager.offload()
    for tensor in (model.weight, model.deep):
        with pytest.raises(OffloadedError):
            use(tensor)
    manager.onload()
    assert (type(model.weight), type(model.deep), type(model.weight.a)) == (Pair, Nested, Tensor)
    assert torch.equal(total(model.weight), torch.full((4,), 3.0))
    assert torch.equal(total(OTHER), torch.ones(4)) and type(OTHER) is Pair
    manager.close()


class Tagged(Tensor):
    """Has memory of its own, and an attribute."""


def test_a_subclass_with_memory_of_its_own_is_detached_as_it_is_at_home() -> None:
    module = nn.Module()
    tagged = torch.ones(4).as_subclass(Tagged)
    tagged.tag = "kept"  # type: ignore[attr-defined]
    module.register_buffer("tagged", tagged)
    at_home = module.state_dict()["tagged"]
    manager = rehearse(module)
    manager.offload()
    found = module.state_dict()["tagged"]
    assert type(found) is type(at_home) and vars(found) == vars(at_home)
    manager.onload()
    assert type(module.tagged) is Tagged and tagged.tag == "kept"  # type: ignore[attr-defined]
    manager.close()


class Opaque(Tensor):
    """Does not name its inner tensors: there is no memory that could be taken."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, Opaque) else t, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return cls(found) if func is aten.detach.default else found


def test_what_cannot_be_taken_apart_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(4, 4)
    module.opaque = nn.Parameter(Opaque(torch.ones(8)))  # type: ignore[assignment]
    module.register_buffer("sparse", torch.eye(4).to_sparse())
    with caplog.at_level(logging.WARNING):
        manager = rehearse(module)
        for _ in range(2):
            manager.offload()
            assert torch.equal(module.opaque + 1, torch.full((8,), 2.0))  # type: ignore[operator]
            assert type(module.state_dict()["opaque"]) is Opaque
            manager.onload()
        manager.close()
    assert len(caplog.messages) == 1
    assert "112 B in 2 storages stay on the device" in caplog.messages[0]
    assert "__tensor_flatten__: opaque, sparse." in caplog.messages[0]
