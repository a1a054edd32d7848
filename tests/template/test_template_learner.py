from __future__ import annotations

import pytest
import torch
from dataset import Batch
from gpu_memory import read_gpu_memory
from learner import Learner, learning_rate, mixed_precision
from model import Classifier, Shape

pytestmark = pytest.mark.train

SHAPE = Shape(classes=("a", "b", "c"), channels=1, image_size=8)
CPU = torch.device("cpu")


def learner(precision: object = None) -> Learner:
    torch.manual_seed(0)
    return Learner(Classifier(SHAPE, dropout=0.0), CPU, precision)  # type: ignore[arg-type]


def batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (size, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return images, torch.arange(size) % 3


def test_accumulated_batches_count_as_one_even_when_uneven() -> None:
    images, labels = batch(10)
    parts = [(images[:4], labels[:4]), (images[4:8], labels[4:8]), (images[8:], labels[8:])]
    whole, pieces = learner(), learner()
    for _ in range(3):
        one = whole.step([(images, labels)], 1e-3, clip=1.0)
        three = pieces.step(parts, 1e-3, clip=1.0)
    assert three.images == one.images == 10
    torch.testing.assert_close(three.loss, one.loss)
    torch.testing.assert_close(three.gradient_norm, one.gradient_norm)
    torch.testing.assert_close(pieces.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("precision", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_it_learns_a_batch_by_heart(precision: object) -> None:
    one = learner(precision)
    first = one.step([batch(12)], 3e-3, clip=1.0).loss
    for _ in range(60):
        last = one.step([batch(12)], 3e-3, clip=1.0)
    assert last.loss < 0.2 * first
    assert last.correct == 12
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.float32}


def test_a_restored_learner_goes_on_with_the_same_numbers() -> None:
    torch.manual_seed(3)
    one = Learner(Classifier(SHAPE, dropout=0.5), CPU, None)
    one.step([batch(6)], 1e-3, clip=1.0)
    kept = {
        file: {name: value.clone() for name, value in values.items()}
        for file, values in one.tensors().items()
    }
    expected = one.step([batch(6)], 1e-3, clip=1.0).loss
    other = Learner(Classifier(SHAPE, dropout=0.5), CPU, None)
    other.restore(kept)
    assert torch.equal(other.step([batch(6)], 1e-3, clip=1.0).loss, expected)
    assert all(
        torch.equal(value, one.model.state_dict()[name])
        for name, value in other.model.state_dict().items()
    )


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(1, 101)]
    assert rates[4] == max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


def test_precision_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert mixed_precision("auto", CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert mixed_precision("auto", gpu) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert mixed_precision("auto", gpu) == torch.float16
    assert mixed_precision("off", gpu) is None


def test_the_curves_of_the_gpus_memory_are_those_of_pytorchs_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for a GPU: only the names of the curves, and the order of the calls."""
    assert read_gpu_memory(CPU) == {}
    calls: list[str] = []
    for number, name in enumerate(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")
    ):

        def read(device: torch.device, number: int = number, name: str = name) -> int:
            calls.append(name)
            return number * 1024**2

        monkeypatch.setattr(torch.cuda, name, read)
    assert read_gpu_memory(torch.device("cuda")) == {
        "gpu_memory/allocated_mib": 0.0,
        "gpu_memory/reserved_mib": 1.0,
        "gpu_memory/peak_mib": 2.0,
    }
    assert calls[-1] == "reset_peak_memory_stats"
