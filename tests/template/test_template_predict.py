"""The sample project as `labctl serve` loads it."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import CheckpointError
from dataset import ImageFolder, shape_of
from model import Classifier, to_json
from PIL import Image
from predict import Predictor, load

pytestmark = pytest.mark.train


@pytest.fixture
def trained(small: Path, tmp_path: Path) -> Path:
    """A run's checkpoints, of a network that was not trained at all."""
    shape = shape_of(small, image_size=16)
    torch.manual_seed(1)
    tensors = {"model": Classifier(shape).state_dict()}
    for step, accuracy in ((10, 0.9), (20, 0.1)):
        metrics = {"val_accuracy": accuracy, "val_loss": 0.5}
        checkpoints.write(tmp_path, step, 1, metrics, tensors, {"shape": to_json(shape)})
    return tmp_path


def served(trained: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    monkeypatch.setenv("LABCTL_DATA_DIR", str(data.parent))
    return load(trained)


def test_the_best_checkpoint_answers_as_it_does_in_the_training(
    trained: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = served(trained, small, monkeypatch)
    assert predictor.checkpoint == "step-00000010"
    assert predictor.classes == tuple("0123456789")
    images = ImageFolder(small / "test", predictor.shape)
    pictures = [Image.open(path) for path, _ in images.files[:5]]
    with torch.inference_mode():
        expected = predictor.model(torch.stack([images[number][0] for number in range(5)]))
    rows = torch.tensor(predictor.predict(pictures))
    torch.testing.assert_close(rows, expected.softmax(dim=1))
    for picture in pictures:
        picture.close()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_a_picture_of_any_size_and_mode_will_do(
    trained: Path, small: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    predictor = served(trained, small, monkeypatch)
    (row,) = predictor.predict([Image.new(mode, (31, 7))])
    assert sum(row) == pytest.approx(1)


def test_its_answers_on_the_validation_set_are_what_drift_is_measured_against(
    trained: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = served(trained, small, monkeypatch)
    assert predictor.reference is not None
    assert len(predictor.reference) == 10
    assert sum(predictor.reference) == len(ImageFolder(small / "val", predictor.shape))


def test_without_such_a_validation_set_there_is_no_reference(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "data" / "digits"
    (other / "val" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(other / "val" / "cat" / "1.png")
    assert served(trained, other, monkeypatch).reference is None


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load(tmp_path)
