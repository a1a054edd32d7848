"""A small GPT: tokens in, a score for each possible next token out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """The size of a network, stored with its weights."""

    context: int = 96  # tokens that it sees at once
    layers: int = 3
    heads: int = 4
    width: int = 96  # numbers per token; a multiple of heads
    vocabulary: int = 256  # a token is a byte


class Cache:
    """The keys and values of all earlier tokens, so that each is computed once.

    2 x layers x width x context numbers for each sequence.
    """

    def __init__(self, shape: Shape, like: Tensor, batch_size: int = 1) -> None:
        size = (shape.layers, 2, batch_size, shape.heads, shape.context, shape.width // shape.heads)
        self.values = torch.empty(size, dtype=like.dtype, device=like.device)
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens so far."""
        end = self.length + keys.shape[2]
        self.values[layer, 0, :, :, self.length : end] = keys
        self.values[layer, 1, :, :, self.length : end] = values
        return self.values[layer, 0, :, :, :end], self.values[layer, 1, :, :, :end]


class Block(nn.Module):
    """Attention, in which tokens read earlier ones, then a network for each token alone."""

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.heads, self.dropout = layer, shape.heads, dropout
        self.attention_norm = nn.LayerNorm(shape.width)
        self.to_queries_keys_values = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, width) -> the same."""
        x = x + self._drop(self._attend(self.attention_norm(x), cache))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + self._drop(self.mlp_out(hidden))

    def _attend(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, width = x.shape
        split = self.to_queries_keys_values(x).view(batch, length, 3, self.heads, -1)
        # Each (B, heads, T, width / heads).
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        is_first = cache is None or cache.length == 0
        if cache is not None:
            keys, values = cache.extend(self.layer, keys, values)
        # Causal: no token reads a later one. A single new token reads all.
        read = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_first,
        )
        return self.attention_out(read.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Embeddings, blocks, and the embeddings once more to score each token."""

    def __init__(
        self, shape: Shape, dropout: float = 0.1, *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.checkpoint_activations = shape, checkpoint_activations
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape, layer, dropout) for layer in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the sum of those before it, hence the
                # smaller start of what it adds.
                is_added = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** (is_added / 2))

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T) -> scores (B, T, vocabulary); with a cache, `tokens` are the new ones only.

        A cache that is not empty takes one new token at a time.
        """
        before = 0 if cache is None else cache.length
        places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                # Keep only the block's input. The backward pass computes the
                # rest again: less memory, about a third more time.
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return functional.linear(self.norm(x), self.tokens.weight)


def measure_loss(scores: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats per token; `targets` are the tokens that come next."""
    return functional.cross_entropy(
        scores.float().flatten(0, 1), targets.flatten(), reduction=reduction
    )
