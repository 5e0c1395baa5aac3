"""Others who look inside what autograd saved: saved-tensor hooks and compiled autograd."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxoffload
from fxoffload.runtime.executor import KEPT_FOR_COMPILED_AUTOGRAD, KEPT_FOR_HOOKS
from fxoffload.runtime.layout import Layout
from tests.support import (
    Stack,
    assert_close,
    assert_equal,
    assert_nothing_held,
    assert_offloaded,
    batch,
    compiled,
    effects,
    num_dynamo_graphs,
    rehearsal,
    train_step,
)


def squared(call: Callable[..., Tensor]) -> Callable[[], Tensor]:
    return lambda: (call(batch()) ** 2).sum()


HOOKS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "detach": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "clone": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()),
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "numpy": lambda: saved_tensors_hooks(lambda t: t.detach().numpy(), lambda a: torch.from_numpy(a)),
}


@pytest.mark.slow_except("step-save_on_cpu")
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("where", ["forward", "step"])
def test_a_call_under_saved_tensor_hooks_keeps_everything_and_says_so(hooks: str, where: str) -> None:
    model = Stack()
    module = compiled(model)

    def under_hooks() -> Tensor:
        with HOOKS[hooks]():
            return squared(module)()

    plain = train_step(model, squared(module))
    hooked = train_step(model, under_hooks)
    reference = plain()
    graphs = num_dynamo_graphs()
    fxoffload.reset_stats()
    if where == "forward":
        observed = hooked()
    else:
        with HOOKS[hooks]():
            observed = plain()
    stats = fxoffload.stats()
    assert_equal(observed, reference)
    assert dict(stats.calls_kept) == {KEPT_FOR_HOOKS: 1}
    assert (stats.bytes_offloaded, stats.num_copies) == (0, 0)
    assert_nothing_held()

    # That call only.
    fxoffload.reset_stats()
    assert_equal(plain(), reference)
    assert_offloaded(fxoffload.stats())
    assert num_dynamo_graphs() == graphs


class Attention(nn.Module):
    """Saves tensors that are not contiguous: chunks of one projection, transposed; and an expanded scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scale = x.mean(dim=-1, keepdim=True).unsqueeze(1).expand(-1, 2, -1, 8)
        return nn.functional.scaled_dot_product_attention(q, k, v * scale, is_causal=True).transpose(1, 2).flatten(2)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """What ``save_on_cpu(pin_memory=True)`` makes of a tensor."""
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["offload_all", "keep_all"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_hooks_that_give_everything_back_contiguous(inner: str, dynamic: bool, policy: str) -> None:
    model = nn.Sequential(Attention(), Attention())
    module = compiled(model, dynamic=dynamic, inner=inner, policy=policy)
    plain = train_step(model, squared(module))

    def under_hooks() -> Tensor:
        with saved_tensors_hooks(contiguous_copy, lambda t: t):
            return squared(module)()

    reference = plain()
    assert_equal(train_step(model, under_hooks)(), reference)
    assert_equal(plain(), reference)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: torch.randn(n, 3, 4),
        lambda n: torch.randn(4, 3, n).permute(2, 1, 0),
        lambda n: torch.randn(n, 4, 3).transpose(1, 2),
        lambda n: torch.randn(n, 3, 12)[..., 4:8],
        lambda n: torch.randn(n, 6, 4)[:, ::2],
        lambda n: torch.randn(1, 3, 4).expand(n, -1, -1),
        lambda n: torch.randn(n, 1, 4).expand(-1, 3, -1),
        lambda n: torch.randn(n, 1, 4),
        lambda n: torch.randn(n, 3, 4, 1).select(3, 0),
        lambda n: torch.randn(n, 3, 8)[..., :5],
        lambda n: torch.randn(n * 3, 8)[:, :5].view(n, 3, 5),
    ],
)
def test_layouts(made: Callable[[int], Tensor]) -> None:
    traced = made(5)
    layout = Layout.of(traced.shape, traced.stride())
    assert layout is not None
    for n in (5, 2, 9):
        value = made(n)
        assert layout.restore(value) is value
        restored = layout.restore(contiguous_copy(value))
        assert torch.equal(restored, value)
        assert [s for s, size in zip(restored.stride(), value.shape, strict=True) if size > 1] == [
            s for s, size in zip(value.stride(), value.shape, strict=True) if size > 1
        ]


class Slices(nn.Module):
    """Saves slices whose strides depend on the length, dense at one length by coincidence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return (torch.sin(y[:, :8]) * y[:, -8:]).sum(dim=1) @ self.linear.weight


@pytest.mark.slow_except("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_values_of_other_lengths_are_left_alone_where_the_layout_depends_on_the_length(inner: str) -> None:
    model = Slices()
    module = compiled(model, dynamic=True, inner=inner)
    for length in (8, 24, 40, 100):
        x = batch(length=length)
        reference = train_step(model, lambda x=x: (model(x) ** 2).sum())()
        for hooks in (HOOKS["identity"], contextlib.nullcontext):

            def call(x: Tensor = x, hooks: Callable[..., contextlib.AbstractContextManager[object]] = hooks) -> Tensor:
                with hooks():
                    return (module(x) ** 2).sum()

            found = train_step(model, call)()
            for name, value in reference.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def test_a_length_that_another_dimension_has_is_no_coincidence() -> None:
    """The gap must be a whole number for all sizes, not at the size that was traced."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    real = torch.empty(2, 8, 16)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(real, symbolic_context=context)
    guards = len(shape_env.guards)
    assert Layout.of(fake.shape, fake.stride()) == Layout((2, 1, 0), (1, 1, 1), 3)
    assert Layout.of((2, 8, 16), fake.stride()) is None
    assert len(shape_env.guards) == guards


@pytest.mark.parametrize("shape", [(2, 0, 16), (0,), (2, 4, 0, 16)])
def test_empty_values_have_no_layout(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    assert Layout.of(empty.shape, empty.stride()) is None


def test_a_model_with_an_empty_input() -> None:
    """An empty prefix: its placeholder is nothing to move and nothing to stumble over."""
    model = Stack()
    empty = torch.empty(2, 0, 16)
    module = compiled(lambda x, prefix: model(torch.cat([prefix, x], dim=1)))
    found = train_step(model, lambda: (module(batch(), empty) ** 2).sum())()
    assert_close(found, train_step(model, squared(model))())


def test_what_overlaps_has_no_layout() -> None:
    windows = torch.randn(10).unfold(0, 4, 3)
    assert Layout.of(windows.shape, windows.stride()) is None
    assert Layout((0,), (1,), 1).restore(windows) is windows


def test_hooks_from_the_first_call_on() -> None:
    """Compiled under hooks, used without them afterwards."""
    model = Stack()
    module = compiled(model)
    with HOOKS["clone"]():
        hooked = train_step(model, squared(module))()
    assert dict(fxoffload.stats().calls_kept) == {KEPT_FOR_HOOKS: 1}
    fxoffload.reset_stats()
    assert_equal(train_step(model, squared(module))(), hooked)
    assert_offloaded(fxoffload.stats())


@contextlib.contextmanager
def _config_switch() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        yield


@pytest.mark.slow_except("config")
@pytest.mark.parametrize("switch", [_config_switch, _enabled], ids=["config", "enable"])
def test_a_step_under_compiled_autograd_keeps_everything_and_says_so(
    switch: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    model = Stack(layers=3)
    eager = train_step(model, squared(model))()
    with switch():
        module = compiled(model)
        run = train_step(model, squared(module))
        first = run()
        fxoffload.reset_stats()
        second = run()
        stats = fxoffload.stats()
        with fxoffload.override_policy("keep_all"):
            kept = run()
    assert_close(first, eager)
    assert_equal(second, kept)
    assert dict(stats.calls_kept) == {KEPT_FOR_COMPILED_AUTOGRAD: 1}
    assert (stats.bytes_offloaded, stats.num_copies) == (0, 0)
    assert_nothing_held()


def test_compiled_autograd_around_the_backward_alone_never_gives_wrong_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward could not know, and our backward is not asked: compiled autograd inlines the graph and finds tokens
    where values should be. It cannot trace that (no shape fits a token's), so it raises before anything runs."""
    model = Stack(layers=3)
    module = compiled(model)
    expected = train_step(model, squared(module))()
    model.zero_grad(set_to_none=True)
    loss = squared(module)()
    assert fxoffload.stats().host_bytes_in_use > 0
    # pytest keeps log records, a record its exception, and that the tokens.
    monkeypatch.setattr(torch._subclasses.fake_tensor.log, "disabled", True)
    with _enabled():
        with contextlib.suppress(RuntimeError):
            loss.backward()
            assert_close({"loss": loss.detach(), **effects(model)}, expected)
            return
    assert all(p.grad is None for p in model.parameters())
    del loss
    # Both remember the arguments of the trace that failed.
    compiled_autograd.reset()
    torch.compiler.reset()
    gc.collect()
    assert_nothing_held()
    assert_equal(train_step(model, squared(module))(), expected)


# -- hooks that come after the forward ---------------------------------------------------------------------------------


def _register_late(loss: Tensor, pack: Callable[[Tensor], object], unpack: Callable[..., Tensor]) -> int:
    """Register hooks on what the compiled graphs below ``loss`` have saved; returns on how many tensors."""
    seen, todo, found = set(), [loss.grad_fn], 0
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions]
        if "CompiledFunction" in type(node).__name__:
            for saved in node._raw_saved_tensors:  # type: ignore[attr-defined]
                saved.register_hooks(pack, unpack)
                found += 1
    return found


@pytest.mark.slow_except("same object")
@pytest.mark.parametrize("kind", ["same object", "detached", "copied"])
def test_hooks_set_after_the_forward_never_give_wrong_gradients(kind: str) -> None:
    model = Stack()
    module = compiled(model)
    expected = train_step(model, squared(module))()
    model.zero_grad(set_to_none=True)
    loss = squared(module)()
    value = loss.detach().clone()
    pack = {"same object": lambda t: t, "detached": lambda t: t.detach(), "copied": lambda t: t.clone()}[kind]
    assert _register_late(loss, pack, lambda t: t) > 0
    lost = None
    try:
        loss.backward()
    except fxoffload.TokenLostError as error:
        lost = str(error)
    if lost is None:
        assert_equal({"loss": value, **effects(model)}, expected)
    else:
        assert "saved-tensor hook set after the forward" in lost
        assert all(p.grad is None for p in model.parameters())
    del loss
    gc.collect()  # the traceback and its frames are a cycle
    assert_nothing_held()
    assert_equal(train_step(model, squared(module))(), expected)


def test_layers_under_hooks_and_layers_without() -> None:
    """Per layer: the calls under hooks keep, the others offload, one save order serves both."""
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal())

    def call() -> Tensor:
        x = batch()
        for i, layer in enumerate(model.layers):
            with HOOKS["save_on_cpu"]() if i % 2 else contextlib.nullcontext():
                x = layer(x)
        return (model.head(x) ** 2).sum()

    run = train_step(model, call)
    first = run()
    fxoffload.reset_stats()
    assert_equal(run(), first)
    stats = fxoffload.stats()
    assert dict(stats.calls_kept) == {KEPT_FOR_HOOKS: 2}
    assert stats.bytes_offloaded == stats.bytes_reloaded > 0
    assert_nothing_held()
    with fxoffload.override_policy("keep_all"):
        assert_equal(run(), first)
