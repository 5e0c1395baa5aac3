"""Plans ahead of attention with dropout: the values that a GPU's kernel saves, and not the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fxoffload
from fxoffload.compiler import attention_ahead, planning
from fxoffload.plan_report.plan import Plan

HEADS, LENGTH, WIDTH = 2, 128, 8
SCORES = 4 * HEADS * LENGTH * LENGTH  # bytes


class Layer(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(1, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        found = self.attend(heads[0], heads[1], heads[2])
        return x + self.out(found.transpose(1, 2).reshape(1, LENGTH, HEADS * WIDTH))


class Layers(nn.Module):
    def __init__(self, checkpointed: bool = False, **kwargs: Any) -> None:
        super().__init__()
        attend = lambda q, k, v: scaled_dot_product_attention(q, k, v, **kwargs)  # noqa: E731
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean()


def planned(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Plan:
    monkeypatch.setattr(planning, "DRAWN_POINTS", 2)
    x = torch.zeros(1, LENGTH, HEADS * WIDTH)
    return fxoffload.plan(Layers(**kwargs), example_args=(x,), min_bytes=1, inner="aot_eager", max_slowdown=0.5)


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "kwargs",
    [{"is_causal": True}, {"attn_mask": CAUSAL}, {"is_causal": True, "checkpointed": True}],
    ids=["causal", "mask", "checkpointed"],
)
def test_scores_are_not_saved(monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]) -> None:
    dropped = planned(monkeypatch, dropout_p=0.1, **kwargs)
    whole = planned(monkeypatch, **kwargs)
    assert max(d.nbytes for d in dropped.decisions if d.action != "stay") < SCORES
    assert dropped.baseline == whole.baseline
    attention = [d for d in dropped.decisions if "flash_attention" in d.producer]
    if "checkpointed" not in kwargs:
        assert attention and all(d.action != "recompute" for d in attention), "dropout would be drawn anew"


def test_shapes_that_the_kernel_does_not_take_stay_as_they_are() -> None:
    q, k, v = (torch.zeros(1, HEADS, LENGTH, WIDTH) for _ in range(3))
    taken = attention_ahead._is_taken
    assert taken(q, k, v, None) and taken(q, k[:, :, :4], v[:, :, :4], CAUSAL[:, :4])
    assert not taken(q, k, v[..., :4], None) and not taken(q[0], k[0], v[0], None)
    assert not taken(q, k[:, :1], v[:, :1], None)
    assert not taken(q, k, v, torch.zeros(LENGTH, LENGTH, requires_grad=True))


@pytest.mark.parametrize("kwargs", [{}, {"dropout_p": 1.0, "enable_gqa": True}])
def test_without_dropout_or_with_shared_heads_torch_decides(kwargs: dict[str, Any]) -> None:
    q = torch.randn(1, HEADS, 4, WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_ahead, "_FLASH", None)
        found = attention_ahead._attention(q, q, q, **kwargs)
    assert torch.equal(found, scaled_dot_product_attention(q, q, q, **kwargs))


def test_graphs_without_attention_are_left_alone() -> None:
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    before = gm.code
    attention_ahead.attend_as_on_gpu(gm)
    assert gm.code == before
