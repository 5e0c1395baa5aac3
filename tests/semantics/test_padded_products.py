"""Inductor pads matrices that are not aligned, as a vocabulary of 50,257 words: their product is a slice of a wider
one, and lies in memory as such. On a CPU it has to be told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm

import fxoffload
from fxoffload.compiler import build
from fxoffload.compiler.fit import Signature
from tests.capture import rehearsal_options

WORDS, WIDE = 2003, 1027  # Rows of 2,003 bfloat16 numbers become 2,008 long.


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with inductor_config.patch(force_shape_pad=True):
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, WIDE, bias=False), nn.Linear(WIDE, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Decoder(nn.Module):
    """Returns loss and logits, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), logits


def build_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().to(torch.bfloat16)


def batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, tokens, 32, generator=generator).to(torch.bfloat16)
    return x, torch.randint(0, WORDS, (rows, tokens), generator=generator)


def step(model: nn.Module, run: Any, inputs: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor]:
    model.zero_grad()
    loss, logits = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], logits


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_saved_lies_as_the_forward_left_it(dynamic: bool) -> None:
    model = build_model()
    run = torch.compile(model, backend="fxoffload", dynamic=dynamic, options=rehearsal_options(inner="inductor"))
    for inputs in (batch(3, 17), batch(2, 33)) if dynamic else (batch(3, 17),):
        expected, _ = step(model, model, inputs)
        found, logits = step(model, run, inputs)
        with fxoffload.override_policy("keep_all"):
            kept, _ = step(model, run, inputs)
        assert logits.stride(1) == 2008, "the case does not show what it is for"
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-2)
    assert dynamic or fxoffload.stats().num_segments_reused > 0


def test_a_backward_that_falls_back_reads_it_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = build.rank_offload_candidates

    def fail(*args: Any) -> None:
        rank(*args)
        raise RuntimeError("a fault of this test")

    monkeypatch.setattr(build, "rank_offload_candidates", fail)
    model, inputs = build_model(), batch(3, 17)
    expected, _ = step(model, model, inputs)
    run = torch.compile(model, backend="fxoffload", options=rehearsal_options(inner="inductor", on_error="fallback"))
    with pytest.warns(UserWarning, match="a fault of this test"):
        found, logits = step(model, run, inputs)
    assert logits.stride(1) == 2008
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-2)


def test_hooks_that_hand_saved_values_back_otherwise() -> None:
    model, inputs = build_model(), batch(3, 17)
    run = torch.compile(model, backend="fxoffload", options=rehearsal_options(inner="inductor"))
    with fxoffload.override_policy("keep_all"):
        expected, _ = step(model, run, inputs)
        with torch.autograd.graph.save_on_cpu():
            found, _ = step(model, run, inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.contiguous()):
            again, _ = step(model, run, inputs)
    for other in (found, again):
        assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


def test_variants_stand_in_for_a_graph_that_returns_padded_logits() -> None:
    """They come from the graph as it was traced."""
    made: list[Signature] = []
    forward = build.Builder.forward

    def record(self: build.Builder, state: Any, kwargs: Any) -> Any:
        made.append(Signature.of(state.gm, state.gm, 2))
        built = forward(self, state, kwargs)
        made.append(Signature.of(state.gm, state.gm, 2))
        return built

    model, inputs = build_model(), batch(3, 17)
    with mock.patch.object(build.Builder, "forward", record):
        run = torch.compile(model, backend="fxoffload", options=rehearsal_options(inner="inductor"))
        _, logits = step(model, run, inputs)
    assert logits.stride(1) == 2008
    before, after = made
    assert before == after
