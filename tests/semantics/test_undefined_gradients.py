"""Outputs that no gradient comes to: autograd passes None, and segments are compiled without these gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler.segments import SegmentCall
from fxoffload.compiler.without_tangents import WithoutTangents
from tests.capture import WIDTH, Block, example_input, rehearsal_options
from tests.support import assert_equal


class Returning(nn.Module):
    """A loss, logits, a view of them, a state, and something without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x * 2)
        logits = self.head(x)
        return logits.logsumexp(-1).mean(), logits, logits.view(-1), states[0], logits.argmax(-1)


Uses = Callable[[tuple[Tensor, ...]], Any]
ALONE = "the loss alone"
USES: dict[str, Uses] = {
    ALONE: lambda o: o[0].backward(),
    "logits too": lambda o: (o[0] + o[1].sin().mean()).backward(),
    "logits without the loss": lambda o: o[1].sin().mean().backward(),
    "a view": lambda o: (o[0] + o[2].cos().mean()).backward(),
    "a state": lambda o: o[3].square().mean().backward(),
    "twice": lambda o: (o[0].backward(retain_graph=True), o[0].backward()),
    "two backwards": lambda o: (o[0].backward(retain_graph=True), o[1].sin().mean().backward()),
    "a hook": lambda o: (o[1].register_hook(lambda g: None), (o[0] + o[1].sum()).backward()),
    "a gradient of one's own": lambda o: torch.autograd.backward([o[0], o[1]], [None, torch.ones_like(o[1])]),
}


def gradients(
    model: nn.Module, call: Callable[[Tensor], Any], use: Uses, given: Tensor | None = None
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    x = (example_input() if given is None else given.clone()).requires_grad_()
    use(call(x))
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**found, "x": x.grad}


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Returning()
    return model, torch.compile(model, backend="fxoffload", options=rehearsal_options(policy="offload_all"))


@pytest.mark.slow_except("a hook")
@pytest.mark.parametrize("use", [u for u in USES if u != ALONE])
def test_gradients_are_those_of_eager(use: str) -> None:
    check_gradients(*build(), USES[use])


def test_gradients_of_the_loss_alone_are_those_of_eager(same_code: Callable[..., Any]) -> None:
    check_gradients(*same_code(build), USES[ALONE])


def test_bits_are_those_without_offloading(same_code: Callable[..., Any]) -> None:
    model, call = same_code(build)
    found = gradients(model, call, USES[ALONE])
    with fxoffload.override_policy("keep_all"):
        assert_equal(gradients(model, call, USES[ALONE]), found)


def check_gradients(model: nn.Module, call: Any, use: Uses) -> None:
    for _ in range(2):
        found = gradients(model, call, use)
        expected = gradients(model, model, use)
        assert found.keys() >= expected.keys()
        for name, gradient in found.items():  # one graph has zeros where eager code has none
            like = expected.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, like, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("uses_logits", [False, True])
def test_what_is_made_is_known(uses_logits: bool) -> None:
    model = Returning()
    call = torch.compile(model, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    gradients(model, call, USES["logits too" if uses_logits else ALONE])
    (graph,) = fxoffload.graphs()
    assert len(graph.outputs.zeros) == 3
    assert graph.outputs.have_gradients is uses_logits


def test_a_users_function_whose_result_is_returned_gets_its_zeros() -> None:
    """Its node is not the graph's."""
    seen: list[Any] = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen.extend(gradients)
            return gradients[0] * 2 + gradients[1] * 3

    model = Returning()

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (y, *model(x))

    call = torch.compile(run, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    a, _ = Two.apply(torch.randn(3, requires_grad=True))
    outputs = call(example_input(), a)
    (outputs[0].sum() + outputs[1]).backward()
    assert len(seen) == 2 and seen[1] is not None
    assert bool((seen[1] == 0).all())


def calls_of(graph: Any) -> list[SegmentCall]:
    return [m for m in graph.backward.children() if isinstance(m, SegmentCall)]


def test_segments_leave_tangents_out_until_some_come() -> None:
    """With kernels of Inductor, in layers and in the head. Gradients of logits then count, and bits are those without
    offloading."""
    torch.manual_seed(0)
    model = Returning()
    options = rehearsal_options(policy="offload_all", inner="inductor")
    call = torch.compile(model, backend="fxoffload", options=options)
    alone = gradients(model, call, USES[ALONE])
    (graph,) = fxoffload.graphs()
    without = [c.fn for c in calls_of(graph) if c.left_out]
    assert without and all(isinstance(fn, WithoutTangents) and not fn._versions for fn in without)
    for use in ("logits too", ALONE, "a state"):
        check_gradients(model, call, USES[use])
        found = gradients(model, call, USES[use])
        with fxoffload.override_policy("keep_all"):
            assert_equal(gradients(model, call, USES[use]), found)
        if use == ALONE:
            assert_equal(alone, found)
    assert all(fn._versions for fn in without)  # type: ignore[union-attr]


class Layer(nn.Module):
    """Returns one of two states. Without a gradient of it, layers of both kinds are the same."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.linear(x) * 0.5
        other = one * 3
        return x + other * 0.7, (one if self.first else other).clone()


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first=i % 2 == 0) for i in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states = []
        for layer in self.layers:
            x, state = layer(x)
            states.append(state)
        return (x.square().mean(), *states)


def test_layers_that_add_a_gradient_elsewhere_share_no_code() -> None:
    torch.manual_seed(0)
    model = Layered()
    call = torch.compile(model, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    check_gradients(model, call, USES[ALONE])
    (graph,) = fxoffload.graphs()
    assert any(c.left_out for c in calls_of(graph))
    check_gradients(model, call, lambda o: sum(s.sin().mean() for s in o).backward())


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_returned_gradient_holds_no_more_than_itself(inner: str) -> None:
    """It is a part of the gradient of something larger."""
    soft, fixed = nn.Parameter(torch.zeros(2, 64)), torch.ones(1022, 64)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([soft, fixed]).sin() * x).mean(), soft.clone()

    call = torch.compile(run, backend="fxoffload", options=rehearsal_options(policy="offload_all", inner=inner))
    call(torch.ones(1024, 64))[0].backward()
    assert soft.grad is not None and soft.grad.untyped_storage().nbytes() == soft.grad.nbytes


def test_returned_gradients_share_no_memory() -> None:
    """Both are the gradient of one sum, and accumulate on their own."""
    one, two = (nn.Parameter(torch.zeros(16).view(shape)) for shape in ((16,), (4, 4)))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        seen = one.view(4, 4)
        return ((seen + two) * x).sin().mean(), seen.clone(), two.clone()

    call = torch.compile(run, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    x = torch.ones(4, 4)
    for _ in range(2):
        call(x)[0].backward()
    assert one.grad is not None and two.grad is not None
    assert torch.equal(one.grad.view(4, 4), two.grad) and one.grad.data_ptr() != two.grad.data_ptr()
    torch.testing.assert_close(two.grad, torch.full((4, 4), 2 / 16))


def test_sizes_that_vary() -> None:
    """No zeros of their size can be made beforehand, and none are needed."""
    torch.manual_seed(0)
    model = Returning()
    options = rehearsal_options(policy="offload_all")
    call = torch.compile(lambda x: model(x)[:2], backend="fxoffload", dynamic=True, options=options)
    for rows, use in ((4, ALONE), (6, ALONE), (5, "logits too"), (3, ALONE)):
        x = torch.randn(rows, WIDTH)
        found = gradients(model, call, USES[use], x)
        expected = gradients(model, model, USES[use], x)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    (graph,) = fxoffload.graphs()
    assert any(c.left_out for c in calls_of(graph))


def test_zeros_that_are_no_summand_where_sizes_vary() -> None:
    """A cache's view, and a negation: autograd makes the zeros, then for logits too."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = linear(x)
        return y.square().mean(), y.view(-1, 2, WIDTH // 2).transpose(0, 1), -y, y * 1

    call = torch.compile(run, backend="fxoffload", dynamic=True, options=rehearsal_options(policy="offload_all"))
    for rows, use in ((4, ALONE), (6, "a view"), (5, ALONE)):
        x = torch.randn(rows, WIDTH)
        found, expected = (gradients(linear, f, USES[use], x) for f in (call, run))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    assert all(not c.left_out for graph in fxoffload.graphs() for c in calls_of(graph))


def test_the_loss_alone() -> None:
    """It is held, and has a gradient; no plan counts that."""
    model = Returning()
    call = torch.compile(
        lambda x: model(x)[0], backend="fxoffload", options=rehearsal_options(policy="auto", max_slowdown=9.0)
    )
    for _ in range(2):
        call(example_input()).backward()
    (graph,) = fxoffload.graphs()
    assert graph.outputs.are_held is None and graph.outputs.have_gradients is None


@pytest.mark.slow
def test_under_compiled_autograd_autograd_makes_the_zeros() -> None:
    from torch._dynamo import compiled_autograd

    model = Returning()
    call = torch.compile(model, backend="fxoffload", options=rehearsal_options(policy="offload_all"))
    expected = gradients(model, model, USES[ALONE])
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found = gradients(model, call, USES[ALONE])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
