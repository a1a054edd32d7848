from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import batch_size
import evaluate
import pytest
import torch
from dataset import Batch, ImageFolder, shape_of
from learner import Learner
from model import Classifier, Shape
from torch import nn

pytestmark = pytest.mark.train

SHAPE = Shape(classes=("a", "b"), channels=3, image_size=32)
CPU = torch.device("cpu")


def test_it_doubles_until_one_does_not_fit_and_steps_back() -> None:
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 20

    assert batch_size.largest_that_fits(fits, cap=4096) == 16
    assert tried == [1, 2, 4, 8, 16, 32]


def test_it_does_not_pass_the_cap() -> None:
    assert batch_size.largest_that_fits(lambda _: True, cap=100) == 64
    assert batch_size.largest_that_fits(lambda _: True, cap=1) == 1


def test_a_single_image_too_large_is_said() -> None:
    with pytest.raises(MemoryError, match="not even one image"):
        batch_size.largest_that_fits(lambda _: False, cap=8)


@pytest.mark.long
def test_a_gpu_out_of_memory_ends_the_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: the error is raised by hand, the rest is the code that runs on one."""
    step = Learner.step

    def limited(self: Learner, group: Sequence[Batch], rate: float, clip: float) -> object:
        if len(group[0][1]) > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return step(self, group, rate, clip)

    monkeypatch.setattr(Learner, "step", limited)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    model = Classifier(SHAPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chosen = batch_size.largest_that_fits(
        lambda size: batch_size._fits_gpu(model, SHAPE, size, CPU, None), cap=4096
    )
    assert chosen == 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_on_a_cpu_the_dataset_and_the_memory_are_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Classifier(SHAPE)
    assert batch_size.choose(model, SHAPE, 1000, CPU, None) == 32  # 16 steps need 62 or fewer
    assert batch_size.choose(model, SHAPE, 3, CPU, None) == 1
    monkeypatch.setattr(batch_size, "available_memory_bytes", lambda: 20_000_000)
    assert 1 < batch_size.choose(model, SHAPE, 10**6, CPU, None) < 64


def test_choosing_leaves_no_trace() -> None:
    model = Classifier(SHAPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    batch_size.choose(model, SHAPE, 1000, CPU, None)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_estimate_is_of_the_right_size() -> None:
    """The first block's output alone is 32 float32 channels of 32 by 32, kept at least twice."""
    per_image = batch_size._activation_bytes(Classifier(SHAPE), SHAPE, CPU)
    assert 2 * 32 * 32 * 32 * 4 < per_image < 5_000_000


@pytest.mark.long
@pytest.mark.parametrize(("image_size", "images"), [(16, 40), (512, 4)])
def test_evaluation_takes_large_images_in_small_batches(
    small: Path, image_size: int, images: int
) -> None:
    """It must fit in memory where a training with small batches does."""
    seen: list[int] = []

    class Recorder(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            seen.append(len(batch))
            return torch.zeros(len(batch), 10)

    val = ImageFolder(small / "val", shape_of(small, image_size))
    evaluate.score(Recorder(), val, CPU)
    assert (sum(seen), max(seen)) == (40, images)


def test_available_memory_is_believable() -> None:
    assert 2**20 < batch_size.available_memory_bytes() < 2**50
