from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxoffload.torch_private.aot_autograd import AOT_CONFIG, aot_config_patch
from fxoffload.torch_private.autograd import (
    backward_keeps_graph,
    compiled_autograd_active,
    in_backward,
    saved_tensor_hooks_active,
)
from fxoffload.torch_private.dynamo_cache import without_learnt_sizes
from fxoffload.torch_private.graphs import boxed, boxed_eager
from fxoffload.torch_private.inductor import cached_with_sizes
from fxoffload.torch_private.inductor_compiler import FxGraphCache
from fxoffload.torch_private.op_schemas import aliased_args, mutated_args
from fxoffload.torch_private.storages import StorageRef
from fxoffload.torch_private.symbolic_sizes import hint, hints_at, symbols_of, told_all_symbols
from tests.capture import Sketch

aten = torch.ops.aten


def symbolic(*shape: int) -> tuple[ShapeEnv, torch.Tensor]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))  # type: ignore[call-arg]
    return env, mode.from_tensor(torch.empty(*shape), symbolic_context=context)


def test_a_hint_adds_no_guard() -> None:
    """Comparisons on SymInts leak guards: five compilations for six lengths, where one is enough."""
    env, x = symbolic(7, 5)
    assert hint(x.shape[0]) == 7
    assert hint(x.shape[0] * x.shape[1]) == 35
    assert hint(x.stride()[0]) == 5
    assert not env.guards
    assert (hint(3), hint(2.5), hint(None)) == (3, None, None)


def test_an_unbacked_size_has_no_hint() -> None:
    env, _ = symbolic(7)
    assert hint(env.create_unbacked_symint()) is None


def test_symbols() -> None:
    _, x = symbolic(7, 5)
    assert len(symbols_of(x)) == 2
    assert len(symbols_of(x.shape[0])) == 1
    assert symbols_of(torch.ones(3)) == set()
    assert symbols_of(7) == set()


def test_symbols_that_inputs_tell() -> None:
    _, x = symbolic(7, 5)
    n, m = x.shape
    assert told_all_symbols([x, 3])  # a tensor's sizes are read from the tensor
    assert told_all_symbols([n * m, x])
    assert not told_all_symbols([x.reshape(-1)])
    assert told_all_symbols([n, m, n * m])
    assert told_all_symbols([n, n + 1])
    assert not told_all_symbols([n * m])
    assert not told_all_symbols([n, n * m])


def test_inductor_s_cache_guards_the_sizes_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole graph has each symbol as an input, a segment need not."""
    saved: list[tuple[object, ...]] = []
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(lambda *args: saved.append((*args, told(args[1])))))

    def told(inputs: Any) -> list[object]:
        return [n.node.expr for n in FxGraphCache._filter_backed_symints(inputs)]

    _, x = symbolic(7, 5)
    n, m = (size.node.expr for size in x.shape)
    with cached_with_sizes([x, x]):
        assert told([x, x.shape[1], x]) == [m, n]
        FxGraphCache._save_graph("a", [x])  # type: ignore[call-arg]
    FxGraphCache._save_graph("b", [x])  # type: ignore[call-arg]
    assert [(key, *found) for key, _, found in saved] == [("a", n, m), ("b",)]


def test_inductor_s_cache_takes_no_graph_whose_sizes_became_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key was made with a symbol, and the guards would be made without."""
    saved: list[tuple[object, ...]] = []
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(lambda *args: saved.append(args)))
    _, x = symbolic(7, 5)
    with cached_with_sizes([x]):
        later = FxGraphCache._save_graph
        assert int(x.shape[0]) == 7  # as a lowering does
        FxGraphCache._save_graph("a")  # type: ignore[call-arg]
        elsewhere = threading.Thread(target=later, args=("of another thread",))
        elsewhere.start()
        elsewhere.join()
    later("b")  # type: ignore[call-arg]
    with cached_with_sizes([x]):
        FxGraphCache._save_graph("c")  # type: ignore[call-arg]
    assert saved == [("of another thread",), ("c",)]


def test_sizes_other_than_those_that_are_compiled_for() -> None:
    env, x = symbolic(7, 5)
    rows, columns = x.shape
    with hints_at({rows.node.expr: 3}):
        assert (hint(rows), hint(columns), hint(rows * columns), hint(4)) == (3, 5, 15, 4)
        assert hint(env.create_unbacked_symint()) is None
        with hints_at({columns.node.expr: 2}):
            assert hint(rows * columns) == 14
    assert hint(rows * columns) == 35
    assert not env.guards


def test_what_a_result_may_share_memory_with() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4, 4), sketch.input("y", 4, 4)
    assert aliased_args(sketch.op(aten.view.default, x, [16])) == [x]
    assert aliased_args(sketch.op(aten.add.Tensor, x, y)) == []
    assert aliased_args(sketch.op(aten.copy_.default, x, y)) == [x]  # not the source of the copy
    split = sketch.op(aten.split.Tensor, x, 2)
    assert aliased_args(split) == [x]
    assert aliased_args(sketch.op(operator.getitem, split, 0)) == []  # no schema: the fake storages say it


def test_what_an_op_writes() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4, 4), sketch.input("y", 4, 4)
    assert mutated_args(sketch.op(aten.copy_.default, x, y)) == [x]
    assert mutated_args(sketch.op(aten.add.out, x, y, out=y)) == [y]
    assert mutated_args(sketch.op(aten.add.Tensor, x, y)) == []
    assert mutated_args(sketch.op(aten.view.default, x, [16])) == []
    assert mutated_args(sketch.op(aten._foreach_add_.Scalar, [x, y], 1)) == [x, y]


def test_aot_config_is_patched_and_put_back() -> None:
    import torch._functorch.config as config

    before = {name: getattr(config, name) for name in AOT_CONFIG}
    with pytest.raises(ValueError, match="inside"):
        with aot_config_patch():
            assert {name: getattr(config, name) for name in AOT_CONFIG} == AOT_CONFIG
            raise ValueError("inside")
    assert {name: getattr(config, name) for name in AOT_CONFIG} == before


def test_sizes_that_dynamo_learns_are_forgotten_and_what_it_knew_is_back() -> None:
    dynamic: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def watch(gm: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        dynamic.append(any(isinstance(x, torch.SymInt) for x in inputs))
        return gm.forward

    def compile_for(size: int) -> None:
        torch.compile(double, backend=watch)(torch.ones(size))

    with pytest.raises(ValueError, match="inside"), without_learnt_sizes():
        compile_for(4)
        raise ValueError("inside")
    compile_for(5)
    with without_learnt_sizes():
        compile_for(6)
    assert dynamic == [False, False, False]
    compile_for(7)  # after 5
    assert dynamic[3:] == [True]


def test_saved_tensor_hooks_are_seen() -> None:
    assert not saved_tensor_hooks_active()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert saved_tensor_hooks_active()
    with torch.autograd.graph.save_on_cpu():
        assert saved_tensor_hooks_active()
    assert not saved_tensor_hooks_active()


def test_compiled_autograd_is_seen() -> None:
    assert not compiled_autograd_active()
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert compiled_autograd_active()
    assert not compiled_autograd_active()


@pytest.mark.parametrize("keep", [False, True])
def test_a_running_backward_is_seen(keep: bool) -> None:
    seen: list[tuple[bool, bool]] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((in_backward(), backward_keeps_graph())))
    assert not in_backward()
    y.sum().backward(retain_graph=keep)
    assert seen == [(True, keep)]
    assert not in_backward()


def test_boxed_eager_empties_its_list_before_it_computes() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.chain(sketch.input("x", 4), 2)])
    fn = boxed_eager(gm)
    args = [torch.zeros(4)]
    (found,) = fn(args)
    assert args == []
    assert torch.equal(found, torch.ones(4))
    assert fn._boxed_call is True  # type: ignore[attr-defined]


def test_boxed_marks() -> None:
    def fn(args: list[int]) -> None: ...

    assert boxed(fn) is fn
    assert fn._boxed_call is True  # type: ignore[attr-defined]


def test_a_reference_to_a_storage() -> None:
    """It tells how many tensors hold the storage, whether or not a Python object of it was made, and holds none."""
    value = torch.empty(4)
    view = value[1:]
    ref = StorageRef(value)
    assert ref.key == StorageRef(view).key
    assert ref.is_alive(0) and ref.is_alive(1) and not ref.is_alive(2)
    del view
    assert ref.is_alive(0) and not ref.is_alive(1)
    del value
    assert ref.is_expired() and not ref.is_alive(0)
