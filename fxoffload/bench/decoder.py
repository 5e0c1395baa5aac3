"""A decoder in plain torch: grouped-query attention with rotary embeddings and normalised heads, gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxoffload.bench.records import BenchWork

ROTARY_BASE = 1e6


class Attention(nn.Module):
    def __init__(self, work: BenchWork) -> None:
        super().__init__()
        self.head_dim = work.head_dim
        self.q = nn.Linear(work.hidden, work.heads * work.head_dim, bias=False)
        self.k = nn.Linear(work.hidden, work.kv_heads * work.head_dim, bias=False)
        self.v = nn.Linear(work.hidden, work.kv_heads * work.head_dim, bias=False)
        self.o = nn.Linear(work.heads * work.head_dim, work.hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(work.head_dim), nn.RMSNorm(work.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: [batch, tokens, hidden]; ``cos``, ``sin``: [tokens, head_dim]."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = _rotate(self.q_norm(self.q(x).view(shape)).transpose(1, 2), cos, sin)
        k = _rotate(self.k_norm(self.k(x).view(shape)).transpose(1, 2), cos, sin)
        v = self.v(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, work: BenchWork) -> None:
        super().__init__()
        self.attention = Attention(work)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(work.hidden), nn.RMSNorm(work.hidden)
        self.gate = nn.Linear(work.hidden, work.ffn, bias=False)
        self.up = nn.Linear(work.hidden, work.ffn, bias=False)
        self.down = nn.Linear(work.ffn, work.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """From embeddings [1, tokens, hidden] to a scalar loss. ``checkpointing``: every layer is recomputed."""

    cos: Tensor
    sin: Tensor
    probe: Tensor

    def __init__(self, work: BenchWork, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.layers = nn.ModuleList(DecoderLayer(work) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.hidden)
        rates = ROTARY_BASE ** -(torch.arange(0, work.head_dim, 2).float() / work.head_dim)
        angles = torch.outer(torch.arange(work.tokens).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("probe", torch.ones(work.hidden))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return torch.mv(self.norm(x).flatten(0, 1), self.probe).float().mean()


def build(work: BenchWork, *, checkpointing: bool = False) -> tuple[Decoder, Tensor]:
    """The decoder with seeded weights on its device, and its input, which wants a gradient."""
    dtype, device = getattr(torch, work.dtype), torch.device(work.device)
    torch.manual_seed(0)
    with device:
        decoder = Decoder(work, checkpointing=checkpointing).to(dtype)
        x = torch.randn(1, work.tokens, work.hidden, dtype=dtype, requires_grad=True)
    return decoder, x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
