"""A byte-level GPT small enough to break and heal within a minute, and real enough to do so by itself.

The lab's patient. Each layer's kernel is the attribute `attend` of its `Attention`, the one place where
Foreshock looks in and steps in. Weights are float32; q, k, v reach the kernel in bf16, as under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.lab.flash import FlashAttention


class Attention(nn.Module):
    """Multi-head causal attention; `attend` is (q, k, v) -> out, all (B, heads, T, head_dim)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, d_model // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = FlashAttention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).bfloat16().unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.o_proj(self.attend(q, k, v).float().transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(d_model, eps=1e-6), Attention(d_model, heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(d_model, eps=1e-6), MLP(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Pre-norm decoder over bytes. Raises ValueError if `heads` does not divide `d_model`.

    Initialised from torch's global generator: normal, 0.02, the two projections that write into the residual
    stream divided by sqrt(2·layers).
    """

    def __init__(
        self, vocab: int = 256, d_model: int = 128, heads: int = 4, layers: int = 2, context: int = 64
    ) -> None:
        if d_model % heads:
            raise ValueError(f"{heads} heads do not divide d_model {d_model}")
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, d_model), nn.Embedding(context, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d_model, eps=1e-6), nn.Linear(d_model, vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocab) of int64 `tokens` (B, T); with `targets` (B, T) the mean loss in nats."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
