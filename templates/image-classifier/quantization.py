"""Weights in 8 or 4 bits: rounded after training (PTQ) or during it (QAT).

Each weight w becomes a small integer q with one scale s for each output
channel, and the network computes with s q. PTQ rounds the weights of a finished
training. QAT rounds them in every forward pass, while the optimizer keeps
changing the weights behind them: the loss then includes what rounding costs
(Jacob et al., 2018, arXiv:1712.05877). Rounding has no useful gradient, so the
backward pass leaves it out (straight-through estimator, Bengio et al., 2013,
arXiv:1308.3432).
"""

from __future__ import annotations

import math
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

KINDS = ("int8", "int4", "fp8")
LARGEST_FP8 = 448.0  # of float8_e4m3fn
RANGES = {"int8": (-127, 127), "int4": (-7, 7)}
BITS = {"int8": 8, "int4": 4, "fp8": 8}
Layer = nn.Conv2d | nn.Linear
# 95 of 100 such intervals hold the true accuracy (normal distribution).
Z_95 = 1.959963984540054


class Rounded(NamedTuple):
    """A weight in few bits: `values` times `scale`, one scale for each output channel."""

    values: Tensor
    scale: Tensor

    def restore(self) -> Tensor:
        """Return the weight that the network computes with."""
        return self.values.float() * self.scale


def round_weight(weight: Tensor, kind: str) -> Rounded:
    """Round a weight (channels, ...): the largest of a channel becomes the largest of `kind`.

    These are torchao's symmetric integers with one scale for each channel.
    """
    most = weight.detach().abs().amax(dim=tuple(range(1, weight.ndim)), keepdim=True)
    if kind == "fp8":
        scale = most.clamp(min=1e-12) / LARGEST_FP8
        return Rounded((weight.detach() / scale).to(torch.float8_e4m3fn), scale)
    low, high = RANGES[kind]
    scale = most.clamp(min=1e-12) / high
    values = torch.clamp(torch.round(weight.detach() / scale), low, high).to(torch.int8)
    return Rounded(values, scale)


def layers(model: nn.Module) -> list[Layer]:
    """Return the layers whose weights are rounded; norms and biases are too small to matter."""
    return [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]


@torch.no_grad()
def quantize(model: nn.Module, kind: str) -> int:
    """Round the weights of a trained model in place; return its size in bytes."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    for layer in layers(model):
        rounded = round_weight(layer.weight, kind)
        layer.weight.copy_(rounded.restore())
        size -= layer.weight.numel() * layer.weight.element_size()
        size += math.ceil(rounded.values.numel() * BITS[kind] / 8) + rounded.scale.numel() * 4
    return size


def train_rounded(model: nn.Module, kind: str) -> None:
    """Have each layer compute with its rounded weight from now on; the state dict is the same."""

    def forward(layer: Layer, inputs: Tensor) -> Tensor:
        exact = layer.weight
        # The value is the rounded weight's, the gradient goes to the exact one.
        weight = exact + (round_weight(exact, kind).restore() - exact).detach()
        if isinstance(layer, nn.Conv2d):
            return layer._conv_forward(inputs, weight, layer.bias)
        return functional.linear(inputs, weight, layer.bias)

    for layer in layers(model):
        rounded = MethodType(forward, layer)
        layer.forward = rounded  # type: ignore[method-assign]


def interval(correct: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval for an accuracy (J. Am. Stat. Assoc. 22 (1927) 209)."""
    share, square = correct / total, Z_95**2
    center = share + square / (2 * total)
    half = Z_95 * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return (center - half) / (1 + square / total), (center + half) / (1 + square / total)
