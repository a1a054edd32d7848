"""A small convolutional network for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The input and output of a checkpoint's network, stored with its weights."""

    classes: tuple[str, ...]  # in the order of the network's outputs
    channels: int  # 1: gray, 3: color
    image_size: int  # pixels; images are square


def to_json(shape: Shape) -> dict[str, object]:
    """Convert to the form in a checkpoint's state.json."""
    return {
        "classes": list(shape.classes),
        "channels": shape.channels,
        "image_size": shape.image_size,
    }


def from_json(values: dict[str, Any]) -> Shape:
    """Restore a shape that `to_json` wrote."""
    return Shape(tuple(values["classes"]), values["channels"], values["image_size"])


class Classifier(nn.Module):
    """Three convolutions, each followed by half the resolution, then one linear layer.

    About 100,000 parameters. GroupNorm and not BatchNorm: it looks at one image at a time, so the
    result does not depend on the batch size and gradient accumulation is exact.
    """

    def __init__(self, shape: Shape, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _block(shape.channels, width),
            _block(width, 2 * width),
            _block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),  # any image size will do
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * width, len(shape.classes)))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, S, S) -> logits (B, number of classes)."""
        # Exercise 2: scale the pixels from 0..255 to -1..1, then apply
        # `features` and `head`.
        raise NotImplementedError("exercise 2: Classifier.forward in model.py")


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    """(B, channels_in, S, S) -> (B, channels_out, S/2, S/2)."""
    # Exercise 1: a convolution of 3 by 3 pixels, GroupNorm with 8 groups, ReLU,
    # and max pooling that halves the resolution. An odd size is rounded up: 5
    # pixels become 3.
    raise NotImplementedError("exercise 1: _block in model.py")
