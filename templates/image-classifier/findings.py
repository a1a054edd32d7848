"""Summarize predictions of a checkpoint as labctl's evaluation.json.

The confusion matrix, the share that always predicting the majority class would
get right, the worst mistakes with their pictures, and hashes of what was asked
and of what was asked about.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpoints import Checkpoint
from dataset import ImageFolder, opened

MOST_MISTAKES = 24
THUMBNAIL_SIZE = (96, 96)  # pixels


@dataclass(frozen=True)
class Answers:
    """A model's prediction for each image of a split, in the split's order."""

    truth: Tensor  # int64 (N,)
    said: Tensor  # int64 (N,)
    probability: Tensor  # float64 (N,), of what was said
    loss: float  # mean cross-entropy

    @property
    def correct(self) -> int:
        return int((self.said == self.truth).sum())


def findings(
    answers: Answers, images: ImageFolder, checkpoint: Checkpoint, device: str
) -> dict[str, object]:
    """Build the body of evaluation.json, without `where`."""
    classes = images.shape.classes
    return {
        "version": 1,
        "checkpoint": checkpoint.path.resolve().name,
        "checkpoint_sha256": checkpoint.files["model.safetensors"]["sha256"],
        "data_sha256": sha256_of(images),
        "split": images.split.name,
        "classes": classes,
        "confusion": confusion(answers, len(classes)),
        "accuracy": answers.correct / len(images),
        "items": len(images),
        "baseline_accuracy": baseline(images, images.split.parent / "train"),
        "loss": answers.loss,
        "device": device,
        "at": round(time.time(), 3),
        "worst": worst(answers, images),
        "predictions": predictions(answers, images),
    }


def confusion(answers: Answers, classes: int) -> list[list[int]]:
    """Count items: a row for each true class, a column for each predicted class."""
    cells = (answers.truth * classes + answers.said).bincount(minlength=classes * classes)
    table: list[list[int]] = cells.reshape(classes, classes).tolist()
    return table


def predictions(answers: Answers, images: ImageFolder) -> dict[str, object]:
    """List the true and the predicted class of each image, with a hash of the images' order.

    labctl needs them to decide whether two models differ by more than chance.
    """
    names = [path.relative_to(images.split).as_posix() for path, _ in images.files]
    order = "".join(f"{name}\n" for name in names).encode()
    return {
        "order_sha256": hashlib.sha256(order).hexdigest(),
        "truth": answers.truth.tolist(),
        "said": answers.said.tolist(),
    }


def baseline(images: ImageFolder, train: Path) -> float | None:
    """Compute the accuracy of always predicting the majority class of `train`; None without it."""
    if not train.is_dir():
        return None
    counts = Counter(label for _, label in ImageFolder(train, images.shape).files)
    usual = max(sorted(counts), key=lambda label: counts[label])
    return sum(label == usual for _, label in images.files) / len(images)


def worst(answers: Answers, images: ImageFolder) -> list[dict[str, object]]:
    """List the most confident mistakes, with their pictures as data URIs."""
    classes = images.shape.classes
    wrong = (answers.said != answers.truth).nonzero().flatten().tolist()
    wrong.sort(key=lambda number: -float(answers.probability[number]))
    return [
        {
            "item": images.files[number][0].relative_to(images.split).as_posix(),
            "truth": classes[int(answers.truth[number])],
            "said": classes[int(answers.said[number])],
            "probability": float(answers.probability[number]),
            "picture": thumbnail(images.files[number][0]),
        }
        for number in wrong[:MOST_MISTAKES]
    ]


def thumbnail(path: Path) -> str:
    """Encode the image as a small PNG in a data URI."""
    with opened(path) as picture:
        small = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
        small.thumbnail(THUMBNAIL_SIZE)
        buffer = io.BytesIO()
        small.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def sha256_of(images: ImageFolder) -> str:
    """One hash for all images of a split and their names, the same as this prints there:

    find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
    """
    names = {f"./{path.relative_to(images.split).as_posix()}": path for path, _ in images.files}
    digest = hashlib.sha256()
    for name in sorted(names, key=str.encode):
        with names[name].open("rb") as file:
            line = f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
        digest.update(line.encode())
    return digest.hexdigest()
