"""The transformer behind the ``gpt`` workload (Vaswani et al., 2017; pre-norm as in GPT-2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads  # of this rank
        self.of_head = width // heads
        self.dropout = dropout
        self.gather: Callable[[Tensor], Tensor] | None = None  # see Transformer
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, self.heads, 3, self.of_head)
        q, *_ = qkv = qkv.permute(3, 0, 2, 1, 4)
        k, v = qkv[1:] if self.gather is None else self.gather(qkv[1:])
        mixed = _attention(q, k, v)
        mixed = self.project(mixed.transpose(1, 2).flatten(2))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        hidden = self.down(functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))
        return x + functional.dropout(hidden, self.dropout, self.training)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal; ``q``: of the last positions of those of ``k`` and ``v``."""
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    if not before:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    seen = torch.ones(length, before + length, dtype=torch.bool, device=q.device).tril(before)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Transformer(nn.Module):
    """Decoder-only language model; maps tokens (batch, length) to logits (batch, length,
    vocabulary). ``first``, ``last``: whether it begins with tokens and ends with logits, as a whole
    one does; else with what passes between blocks, (batch, length, width). ``part``: which of equal
    parts of a sequence it gets, from 0; the ``gather`` of a block makes keys and values, (2, batch,
    heads, length, width of a head), of all positions from the first to the last of that part.
    """

    def __init__(
        self, *, vocabulary: int, layers: int, heads: int, width: int, block: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.first = self.last = True
        self.part = 0
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the output projection shares the token embedding's weights."""
        if self.first:
            length = x.shape[1]
            positions = self.part * length + torch.arange(length, device=x.device)
            x = self.tokens(x) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight) if self.last else x


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
