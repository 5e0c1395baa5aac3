"""Inputs that are made up: layouts, memory, valid integers; and what must not run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxoffload.analysis.op_key import op_key
from fxoffload.compiler.made_up import MadeUp, NotMadeUpError, Shared, nbytes_shared, why_not

aten = torch.ops.aten
CPU = torch.device("cpu")


def traced(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def made_up(gm: fx.GraphModule) -> list[Any]:
    return maker(gm).make()


def maker(gm: fx.GraphModule) -> MadeUp:
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return MadeUp(gm.graph.find_nodes(op="placeholder"), nodes, CPU)


def runs(gm: fx.GraphModule) -> None:
    """On made-up inputs, with indices checked."""
    gm(*made_up(gm))


@contextmanager
def library(definition: str, **kernels: Callable[..., Any]) -> Iterator[None]:
    lib = torch.library.Library("made_up_tests", "FRAGMENT")
    lib.define(definition)
    name = definition.split("(")[0]
    torch.library.register_fake(f"made_up_tests::{name}", lambda x, *rest: torch.empty_like(x), lib=lib)
    for key, kernel in kernels.items():
        lib.impl(name, kernel, key)
    try:
        yield
    finally:
        lib._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_layouts_are_kept(dtype: torch.dtype) -> None:
    x = torch.empty(4, 6).to(dtype)
    wide = torch.empty(1, 6).to(dtype).expand(4, 6)
    gm = traced(lambda a, b, c: (a.clone(), b.clone(), c.clone()), x.t(), wide, x[1:, 2:])
    found = made_up(gm)
    for tensor, like in zip(found, (x.t(), wide, x[1:, 2:]), strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), dtype)
    plain = found[0].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert len(set(plain.flatten().tolist())) > 6


def test_memory_is_shared_as_the_inputs_share_theirs() -> None:
    x = torch.zeros(8, 4)
    gm = traced(lambda a, b, c: (a + 1, b + 1, c + 1), x[:4], x[2:], torch.zeros(4))
    inputs = gm.graph.find_nodes(op="placeholder")
    with inputs[0].meta["val"].fake_mode:  # two fakes over one storage, as partitioned graphs have them
        whole = torch.empty(8, 4)
        inputs[0].meta["val"], inputs[1].meta["val"] = whole[:4], whole[2:]
    first, second, third = made_up(gm)
    first[2:] = 7.0
    assert bool((second[:2] == 7.0).all())
    assert not bool((third == 7.0).any())
    assert maker(gm).nbytes == 8 * 4 * 4 + 16


def test_memory_that_segments_have_in_common() -> None:
    def two(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
        return (a + b)[i]

    indices = (torch.zeros(n, dtype=torch.long) for n in (4, 6))
    first, second = (maker(traced(two, torch.randn(8), torch.randn(8), i)) for i in indices)
    shared = Shared()
    (a, b, i), (c, d, j) = first.make(shared), second.make(shared)
    assert (a.data_ptr(), b.data_ptr()) == (c.data_ptr(), d.data_ptr())
    assert len({a.data_ptr(), b.data_ptr(), i.data_ptr(), j.data_ptr()}) == 4
    assert nbytes_shared([first, second, second]) == 2 * 32 + 32 + 48 + 48


def test_memory_that_dies_in_a_call_is_its_own() -> None:
    """Where there is room: the call may leave other values in it."""
    gm = traced(lambda a, b: a + b, torch.randn(8), torch.randn(8))
    made = MadeUp(gm.graph.find_nodes(op="placeholder"), list(gm.graph.nodes), CPU, dying={1})
    shared = Shared()
    (a, b), (c, d) = made.make(shared), made.make(shared)
    assert a.data_ptr() == c.data_ptr() and b.data_ptr() != d.data_ptr()
    assert torch.equal(b, d) and bool((b.std() > 10 * a.std()).all())
    assert nbytes_shared([made, made]) == 32 + 2 * 32
    tight = Shared(has_dying=True)
    (a, b), (c, d) = made.make(tight), made.make(tight)
    assert (a.data_ptr(), b.data_ptr()) == (c.data_ptr(), d.data_ptr())
    assert nbytes_shared([made, made], has_dying=True) == 2 * 32


def test_what_is_left_out_is_none_and_takes_no_memory() -> None:
    gm = traced(lambda a, b: a + b.sum(), torch.empty(4), torch.empty(1000))
    made = MadeUp(gm.graph.find_nodes(op="placeholder"), [], CPU, left_out=(1,))
    assert made.nbytes == 16
    first, second = made.make()
    assert first.shape == (4,) and second is None


def test_the_users_random_numbers_are_not_drawn() -> None:
    gm = traced(lambda a: a * 2, torch.zeros(100))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made_up(gm)
    assert torch.equal(before, torch.get_rng_state())


def test_an_index_is_spread_over_what_it_indexes() -> None:
    table, tokens = torch.zeros(10, 3), torch.zeros(4, 8, dtype=torch.int64)
    gm = traced(lambda w, i: aten.embedding(w, i), table, tokens)
    runs(gm)
    assert made_up(gm)[1].flatten().tolist() == [i % 10 for i in range(32)]


def test_the_smallest_of_several_readers_bounds_an_index() -> None:
    def fn(a: Tensor, b: Tensor, index: Tensor) -> Any:
        known = torch.where(index != -100, index, 0).unsqueeze(1)  # as cross-entropy does
        return a.gather(1, known), torch.zeros(6, 3).index_put([index], b, accumulate=True)

    gm = traced(fn, torch.zeros(5, 4), torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))
    runs(gm)
    assert made_up(gm)[2].tolist() == [0, 1, 2, 3, 0]


def test_an_index_that_is_computed_with_is_zero() -> None:
    gm = traced(lambda a, i: a[i % 5], torch.zeros(5, 4), torch.zeros(7, dtype=torch.int64))
    runs(gm)
    assert made_up(gm)[1].tolist() == [0] * 7


def test_the_index_of_a_copy_is_spread_over_all_copies() -> None:
    """As mixtures of experts have it: three copies of each token, of which two readers want the token or the copy."""
    gm = traced(
        lambda a, b, i: (a[i // 3], b[torch.div(i, 3, rounding_mode="floor")], torch.zeros(15).index_put([i], b[:, 0])),
        torch.zeros(5, 4),
        torch.zeros(20, 4),
        torch.zeros(20, dtype=torch.int64),
    )
    runs(gm)
    assert made_up(gm)[2].tolist() == [i % 15 for i in range(20)]


def test_groups_are_even() -> None:
    def fn(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return aten._grouped_mm(a, b, ends)

    rows, weights = torch.zeros(128, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
    gm = traced(fn, rows, weights, torch.zeros(4, dtype=torch.int32))
    assert made_up(gm)[2].tolist() == [32, 64, 96, 128]


def test_new_integers_for_each_run() -> None:
    gm = traced(lambda a, i, m: (a[i], m & True), torch.zeros(5), torch.zeros(3, dtype=torch.int64), torch.zeros(2) > 0)
    making = maker(gm)
    first = making.make()
    first[1].fill_(99)
    second = making.make_integers(first)
    assert second[0] is first[0]
    assert second[1].tolist() == [0, 1, 2]
    assert second[2] is not first[2]


def test_random_states_are_the_present_ones() -> None:
    """Recomputation that replays the random numbers of the forward."""
    run = torch.ops.higher_order.run_with_rng_state
    gm = traced(lambda x, state: run(state, aten.bernoulli.p, x, 0.5), torch.zeros(3), torch.get_rng_state())
    assert why_not(nodes_of(gm)) == ""
    _, state = made_up(gm)
    assert torch.equal(state, torch.get_rng_state())
    runs(gm)
    gm.graph.find_nodes(op="placeholder")[1].meta["val"] = torch.Generator()
    _, generator = made_up(gm)
    assert isinstance(generator, torch.Generator) and generator is not torch.default_generator


def test_what_has_no_made_up_inputs() -> None:
    gm = traced(lambda a: a.to_dense(), torch.zeros(3, 3).to_sparse())
    with pytest.raises(NotMadeUpError, match="no strided tensor"):
        maker(gm)


def nodes_of(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.nodes)


def test_what_must_not_run() -> None:
    assert why_not(nodes_of(traced(lambda a: a.sin() @ a, torch.zeros(3, 3)))) == ""
    gathers = traced(lambda a: torch.ops._c10d_functional.wait_tensor(a), torch.zeros(3))
    assert why_not(nodes_of(gathers)) == "a collective"
    asserts = fx.Graph()
    asserts.call_function(aten._assert_async.msg, (asserts.placeholder("x"), "expected more"))
    assert why_not(list(asserts.nodes)) == "an assertion about values"


def test_operators_of_other_libraries_run_unless_they_read_integers() -> None:
    with library("addressed(Tensor x, Tensor i) -> Tensor", CPU=lambda x, i: x + i.sum()):
        op = torch.ops.made_up_tests.addressed
        floats = traced(lambda x, i: op(x, i), torch.zeros(3), torch.zeros(3))
        integers = traced(lambda x, i: op(x, i), torch.zeros(3), torch.zeros(3, dtype=torch.int64))
        assert why_not(nodes_of(floats)) == ""
        assert why_not(nodes_of(integers)) == "an operator of another library that reads integers"


WRONG = "an index that is computed from made-up values"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, i, m: x[i], ""),
        (lambda x, i, m: x[i // 2 * 3 % 4 + 1], ""),
        (lambda x, i, m: x[i - 1], WRONG),
        (lambda x, i, m: x[i + -1], WRONG),
        (lambda x, i, m: x[torch.where(i != -100, i, 0)], ""),
        (lambda x, i, m: x[(i == 0).cumsum(0)], WRONG),
        (lambda x, i, m: x[m.cumsum(0)], ""),
        (lambda x, i, m: x[(~m).cumsum(0)], WRONG),
        (lambda x, i, m: x[x.sort(0).indices // 2], ""),
        (lambda x, i, m: x[x.sort(0).indices - i[0]], WRONG),
        (lambda x, i, m: x[(x * 3).long()], WRONG),
        (lambda x, i, m: x[torch.arange(3) - 1], ""),
        (lambda x, i, m: torch.zeros(4).index_put([i - 1], x[:3], accumulate=True), WRONG),
        (lambda x, i, m: (i - 1, x), ""),
        # Labels as Hugging Face shifts them.
        (lambda x, i, m: x[torch.where((s := aten.constant_pad_nd(i, [0, 1], -100)[1:]) != -100, s, 0)], ""),
    ],
)
def test_indices_that_are_computed(fn: Callable[..., Any], reason: str) -> None:
    gm = traced(fn, torch.zeros(4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))
    assert why_not(nodes_of(gm)) == reason
    if not reason:
        runs(gm)


def test_ends_of_groups_that_are_computed() -> None:
    def fn(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return aten._grouped_mm(a, b, (1 - ends).to(torch.int32))

    rows, weights = torch.zeros(128, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
    gm = traced(fn, rows, weights, torch.zeros(4, dtype=torch.int32))
    assert why_not(nodes_of(gm)) == WRONG


def key_of(fn: Callable[..., Any], *inputs: Any) -> str | None:
    node, *_ = [n for n in traced(fn, *inputs).graph.nodes if n.op == "call_function"]
    return op_key(node)


def test_a_key_tells_shapes_strides_dtypes_and_arguments_apart() -> None:
    x = torch.zeros(4, 4)
    keys = [
        key_of(lambda a, b: aten.mm(a, b), x, x),
        key_of(lambda a, b: aten.mm(a, b), x, torch.zeros(4, 5)),
        key_of(lambda a, b: aten.mm(a, b), x, x.t()),
        key_of(lambda a, b: aten.mm(a, b), x.double(), x.double()),
        key_of(lambda a: aten.sort.stable(a, stable=True, dim=0), x),
        key_of(lambda a: aten.sort.stable(a, stable=True, dim=1), x),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of(lambda a, b: aten.mm(a, b), x + 1, x - 1)


def test_deterministic_kernels_have_times_of_their_own() -> None:
    x = torch.zeros(4, 4)
    before = key_of(lambda a, b: aten.mm(a, b), x, x)
    torch.use_deterministic_algorithms(True)
    try:
        assert key_of(lambda a, b: aten.mm(a, b), x, x) != before
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_fake_tensors() -> None:
    gm = traced(lambda a: a @ a, torch.zeros(3, 3))
    with FakeTensorMode():
        from fxoffload.machine.meters import HostMeter

        with HostMeter().undisturbed():
            assert type(made_up(gm)[0]) is Tensor


def test_the_seed_of_efficient_attention_is_read_on_the_host() -> None:
    """Its description says otherwise; a pointer to a GPU's memory would end the process."""

    def attend(q: Tensor) -> Tensor:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1)
        return aten._scaled_dot_product_efficient_attention_backward(
            q, q, q, q, None, out, lse, seed, offset, 0.1, [True, True, True, False]
        )[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(attend)(torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, device="cuda"))
    backward = next(n for n in gm.graph.nodes if "backward" in str(n.target))
    seeds = backward.args[7:9]
    assert [n.meta["val"].device.type for n in seeds] == ["cuda"] * 2
    made = MadeUp(backward.all_input_nodes, [backward], torch.device("cuda"))
    where = {n: d.type for n, d in zip(backward.all_input_nodes, made._devices, strict=True)}
    assert {n: "cpu" if n in seeds else "cuda" for n in where} == where
