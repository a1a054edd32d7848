"""Calls of the exercises in model.py, whose results the hidden tests judge.

It runs beside the student's code, which can read it: it has no expected value.
Each function returns numbers, texts, lists and dictionaries; arrays and tensors
become lists.
"""

from __future__ import annotations

import torch
from learner import Learner
from model import Classifier, Shape

SHAPE = Shape(classes=("0", "1", "2", "3"), channels=1, image_size=12)
COLOR = Shape(classes=("0", "1"), channels=3, image_size=9)


def make_images(count: int, size: int, channels: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (count, channels, size, size), generator=generator)
    return pixels.to(torch.uint8)


def block_shapes() -> list[list[int]]:
    shapes = []
    for shape, sizes in ((SHAPE, (12, 7)), (COLOR, (9, 2))):
        block = Classifier(shape, width=16).features[0]
        for size in sizes:
            shapes.append(list(block(torch.zeros(3, shape.channels, size, size)).shape))
    return shapes


def block_minimum() -> float:
    torch.manual_seed(3)
    block = Classifier(COLOR, width=8).features[0]
    return float(block(torch.randn(8, 3, 11, 11) * 5).min())


def centered_pixels() -> torch.Tensor:
    network = Classifier(SHAPE)
    inputs: list[torch.Tensor] = []
    network.features.register_forward_pre_hook(lambda module, values: inputs.append(values[0]))
    network(torch.tensor([0, 51, 204, 255], dtype=torch.uint8).repeat(36).reshape(1, 1, 12, 12))
    return inputs[0].flatten()[:4]


def logit_shapes() -> list[list[int]]:
    gray, color = Classifier(SHAPE), Classifier(COLOR)
    return [
        list(gray(make_images(6, 12)).shape),
        list(gray(make_images(1, 31)).shape),
        list(color(make_images(2, 10, channels=3)).shape),
    ]


def alone_and_in_a_batch() -> list[torch.Tensor]:
    torch.manual_seed(5)
    network = Classifier(SHAPE, dropout=0.0).train()
    images = make_images(4, 12)
    return [network(images[:1])[0], network(images)[0]]


def losses() -> list[float]:
    torch.manual_seed(2)
    rows = torch.arange(12)
    stripes = [255 * ((rows // width) % 2).expand(1, 12, 12) for width in (1, 2, 3, 6)]
    batch = (torch.stack(stripes).to(torch.uint8), torch.tensor([0, 1, 2, 3]))
    learner = Learner(Classifier(SHAPE, dropout=0.0), torch.device("cpu"), None)
    return [learner.step([batch], 0.01, 1.0).loss.item() for _ in range(25)]
