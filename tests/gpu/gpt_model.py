"""A language model of GPT-2's shape, with fused attention, as `labctl estimate` counts layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, LAYERS, HEADS, SEQ, VOCABULARY = 768, 12, 12, 1024, 50257
DROPOUT = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.queries_keys_values = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, seq, HEADS, -1).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, seq, HIDDEN)))
        return x + self.dropout(self.narrow(functional.gelu(self.wide(self.norms[1](x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))
        return scores


def gpt() -> tuple[nn.Module, Tensor]:
    return Gpt(), torch.zeros(1, SEQ, dtype=torch.int64)
