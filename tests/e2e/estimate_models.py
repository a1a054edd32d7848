"""build_model functions for the estimate's tests: a residual network and a small transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and the way around them (He et al., 2015, arXiv:1512.03385, figure 5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.around = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(x) + self.around(x))


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, stride if number == 0 else 1))
            channels = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Transformer(nn.Module):
    """Four layers of GPT's kind, 256 wide, over 64 tokens of a vocabulary of 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layers(self.words(tokens)))


def transformer() -> tuple[nn.Module, Tensor]:
    return Transformer(), torch.zeros(1, 64, dtype=torch.int64)


def two_layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 10)), torch.zeros(
        1, 1000
    )


def frozen() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    model[0].requires_grad_(False)
    return model, torch.zeros(1, 100)


def group_norm() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(100, 100), nn.GroupNorm(10, 100)), torch.zeros(1, 100)


MODELS = {"resnet50": resnet50, "transformer": transformer, "two_layers": two_layers}
