"""What an evaluation finds, on a model that has learned nothing, and on data that is none."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
import subprocess
import warnings
import zlib
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import Checkpoint, CheckpointError
from dataset import ImageFolder, shape_of
from evaluate import examine
from model import Classifier, to_json
from places import write_json
from prepare_data import DatasetError

from labctl.insight.report.pictures import check_picture
from labctl.runs.evaluation import Evaluation, read_evaluation

pytestmark = pytest.mark.train
CPU = torch.device("cpu")


def untrained(folder: Path, data: Path, *, weight: float | None = None) -> Checkpoint:
    """A checkpoint of a fresh network, all of its weights `weight` if given."""
    shape = shape_of(data, image_size=16)
    torch.manual_seed(1)
    model = Classifier(shape)
    if weight is not None:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, weight)
    path = checkpoints.write(
        folder, 1, 1, {}, {"model": model.state_dict()}, {"shape": to_json(shape)}
    )
    return checkpoints.read(path)


@pytest.fixture(scope="module")
def found(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    folder = tmp_path_factory.mktemp("findings")
    result, body = examine(untrained(folder, small), small, "test", CPU)
    write_json(folder / "evaluation.json", body | {"where": "here"})
    read = read_evaluation(folder / "evaluation.json")
    assert (read.accuracy, read.items) == (result.accuracy, result.total)
    return read


def test_labctl_believes_it_and_every_mistake_has_its_picture(found: Evaluation) -> None:
    assert found.items == 40
    assert len(found.worst) == min(24, found.items - found.correct)
    assert all(check_picture(one.picture)[1] == "" for one in found.worst)
    sure = [one.probability for one in found.worst]
    assert sure == sorted(sure, reverse=True)
    assert all(
        one.item.startswith(f"{one.truth}/") and one.predicted != one.truth for one in found.worst
    )


def test_the_baseline_is_that_of_one_answer_for_all(found: Evaluation) -> None:
    assert found.baseline_accuracy == 0.1


def test_the_baselines_answer_is_the_training_sets_most_frequent(
    small: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(small, data)
    for image in list((data / "test" / "7").iterdir())[1:]:
        image.unlink()
    for image in list((data / "train" / "7").iterdir()):
        shutil.copy(image, image.with_name(f"again-{image.name}"))
    _, body = examine(untrained(tmp_path, data), data, "test", CPU)
    assert body["baseline_accuracy"] == 1 / 37
    shutil.rmtree(data / "train")
    checkpoint = untrained(tmp_path / "other", small)
    assert examine(checkpoint, data, "test", CPU)[1]["baseline_accuracy"] is None


def test_the_datas_hash_is_what_a_shell_says(found: Evaluation, small: Path) -> None:
    line = "find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    done = subprocess.run(
        ["sh", "-c", line], cwd=small / "test", capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == found.data_sha256


def test_every_prediction_is_kept_in_an_order_that_a_shell_can_repeat(
    found: Evaluation, small: Path
) -> None:
    """labctl compare counts on it: the reader has checked them against the confusion matrix."""
    predictions = found.predictions
    assert predictions is not None
    right = zip(predictions.truth, predictions.predicted, strict=True)
    assert sum(one == other for one, other in right) == found.correct
    line = "find . -type f | cut -c 3- | LC_ALL=C sort | sha256sum"
    done = subprocess.run(
        ["sh", "-c", line], cwd=small / "test", capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == predictions.order_sha256


def test_answers_that_are_no_numbers_are_no_evaluation(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="loss on test is nan"):
        examine(untrained(tmp_path, small, weight=float("nan")), small, "test", CPU)


def test_a_pickle_called_safetensors_is_never_loaded(small: Path, tmp_path: Path) -> None:
    checkpoint = untrained(tmp_path, small)
    mark = tmp_path / "loaded"
    evil = b"cos\nsystem\n(S'touch %s'\ntR." % str(mark).encode()
    pickle.loads(evil)
    assert mark.exists()
    mark.unlink()
    weights = checkpoint.path / "model.safetensors"
    weights.write_bytes(evil)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    digest = hashlib.sha256(evil).hexdigest()
    manifest["files"]["model.safetensors"] = {"size": len(evil), "sha256": digest}
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        examine(checkpoints.best(tmp_path), small, "test", CPU)
    assert not mark.exists()


def claimed(width: int, height: int) -> bytes:
    """A PNG that says it is so large, with next to no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"\x78\x9c")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no image at all", "cannot be read"),
        (b"", "cannot be read"),
        (claimed(16, 16), "cannot be read"),
        (claimed(8_000, 8_000), "pixels"),
        (claimed(12_000, 12_000), "pixels"),
        (claimed(60_000, 60_000), "pixels"),
    ],
    ids=["text", "empty", "cut", "large", "warned", "bomb"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_image_or_a_bomb_is_named(
    small: Path, tmp_path: Path, content: bytes, said: str, strict: bool
) -> None:
    (tmp_path / "test" / "3").mkdir(parents=True)
    (tmp_path / "test" / "3" / "odd.png").write_bytes(content)
    images = ImageFolder(tmp_path / "test", shape_of(small, image_size=16))
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strict else "ignore")
        with pytest.raises(DatasetError, match=rf"odd\.png.*{said}"):
            images[0]
