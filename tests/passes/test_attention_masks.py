"""Masks of S x S are found and named with their bytes; masks that are no such square are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from fxoffload.plan_report.plan import Plan
from fxoffload.planner.plan import Decision

TOKENS, HEADS, WIDTH = 24, 2, 8


class Attention(nn.Module):
    """Two layers of attention. ``kind``: of the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        mask = None
        if self.kind == "built":
            mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
        elif self.kind == "given":
            mask = given
        keys = x
        if self.kind == "longer keys":
            keys = torch.cat([x, x], dim=2)
            mask = torch.ones(TOKENS, 2 * TOKENS, dtype=torch.bool, device=x.device).tril(TOKENS)
        for layer in self.layers:
            x = F.scaled_dot_product_attention(layer(x), keys, keys, attn_mask=mask, is_causal=mask is None)
        return x.square().mean()


def plan_of(kind: str) -> Plan:
    x = torch.randn(1, HEADS, TOKENS, WIDTH, requires_grad=True)
    given = (torch.ones(TOKENS, TOKENS).tril().log(),) if kind == "given" else ()
    options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "max_slowdown": 5.0}
    torch.compiler.reset()
    torch.compile(Attention(kind), backend="fxoffload", options=options)(x, *given).backward()
    return fxoffload.plans()[-1]


def masks(plan: Plan) -> list[Decision]:
    return [d for d in plan.decisions if d.action == "mask"]


@pytest.mark.parametrize("kind, source", [("built", "built in the graph"), ("given", "an input of the graph")])
def test_a_mask_is_named_once_with_its_bytes_and_what_to_change(kind: str, source: str) -> None:
    plan = plan_of(kind)
    (mask,) = masks(plan)
    assert mask.nbytes == TOKENS * TOKENS * 4  # as the kernel takes it, in float32
    assert f"a mask of {TOKENS} x {TOKENS}, {source}, with which 2 attention calls take the CPU " in mask.reason
    assert 'attn_implementation="fxoffload_causal_sdpa"' in mask.reason
    shown = str(plan)
    assert mask.value.endswith(f"{TOKENS}] f32") and ("given" if kind == "given" else mask.name) in mask.value
    assert f"attention masks:\n- {mask.value}, 2.25 KiB: a mask of" in shown
    pairs = f"for all {TOKENS**2} pairs of tokens ({TOKENS * (TOKENS + 1) // 2} are causal)"
    assert pairs in mask.reason
    table = shown[shown.index("layers ") : shown.index("saved by the forward")]
    assert "attn_implementation" not in table
    assert Plan.from_json(plan.to_json()).decisions == plan.decisions


@pytest.mark.parametrize("kind", ["none", "longer keys"])
def test_other_attention_has_no_mask_to_name(kind: str) -> None:
    plan = plan_of(kind)
    assert not masks(plan) and "attention masks" not in str(plan)
