"""The public tests of the exercises in model.py: `labctl check` runs them."""

from __future__ import annotations

import pytest
import torch
from learner import Learner
from model import Classifier, Shape

SHAPE = Shape(classes=("0", "1", "2"), channels=1, image_size=16)


def make_images(count: int, size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 1, size, size), generator=generator)
    return pixels.to(torch.uint8)


@pytest.mark.parametrize(("size", "half"), [(16, 8), (5, 3)])
def test_a_block_halves_the_resolution(size: int, half: int) -> None:
    """Exercise 1."""
    block = Classifier(SHAPE, width=8).features[0]
    assert block(torch.zeros(2, 1, size, size)).shape == (2, 8, half, half)


def test_a_block_has_no_negative_output() -> None:
    """Exercise 1."""
    block = Classifier(SHAPE, width=8).features[0]
    assert (block(torch.randn(4, 1, 16, 16)) >= 0).all()


def test_the_network_sees_pixels_from_minus_one_to_one() -> None:
    """Exercise 2."""
    network = Classifier(SHAPE)
    inputs: list[torch.Tensor] = []
    network.features.register_forward_pre_hook(lambda module, values: inputs.append(values[0]))
    network(torch.tensor([0, 255], dtype=torch.uint8).repeat(128).reshape(1, 1, 16, 16))
    (pixels,) = inputs
    assert pixels.min().item() == pytest.approx(-1)
    assert pixels.max().item() == pytest.approx(1)


@pytest.mark.parametrize("size", [8, 16, 33])
def test_there_is_a_logit_for_each_class(size: int) -> None:
    """Exercise 2."""
    assert Classifier(SHAPE)(make_images(5, size)).shape == (5, 3)


def test_training_lowers_the_loss() -> None:
    """Both exercises: the network learns to tell stripes apart by their width."""
    torch.manual_seed(1)
    columns = torch.arange(16)
    stripes = [255 * ((columns // width) % 2).expand(1, 16, 16) for width in (1, 2, 4)]
    batch = (torch.stack(stripes).to(torch.uint8), torch.tensor([0, 1, 2]))
    learner = Learner(Classifier(SHAPE, dropout=0.0), torch.device("cpu"), None)
    losses = [learner.step([batch], 0.01, 1.0).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2
