"""Evaluate a checkpoint: how many images of a split does it classify correctly?

    python evaluate.py                          # the best in ./checkpoints
    python evaluate.py runs/RUN --split test    # the best one there
    python evaluate.py --out evaluation.json    # confusions, worst mistakes

The last line printed is JSON. The figure is the same wherever it is computed:
train.py ends with this code, in full precision, on whatever device there is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import checkpoints
import places
from checkpoints import Checkpoint, CheckpointError
from dataset import ImageFolder, loader, locate
from findings import Answers, findings
from model import Classifier, from_json
from prepare_data import SPLITS, DatasetError

# A batch depends on the image size alone, so that the sums are the same
# everywhere. Large images come in small batches: validation must fit in memory
# wherever training does.
BATCH_SIZE = 256
BATCH_PIXELS = BATCH_SIZE * 64 * 64


@dataclass(frozen=True)
class Score:
    """The result of a model on a split."""

    accuracy: float  # correct / total
    correct: int
    total: int
    loss: float  # mean cross-entropy


@dataclass(frozen=True)
class Evaluation(Score):
    """A score, with its checkpoint and split."""

    checkpoint: str
    split: str


def pick_device(wish: str) -> torch.device:
    """`wish` is auto (a GPU if there is one) or a PyTorch device such as cpu or cuda:1."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wish)


def choose_batch_size(image_size: int) -> int:
    """Return the number of images to classify at once."""
    return max(1, min(BATCH_SIZE, BATCH_PIXELS // image_size**2))


@torch.inference_mode()
def answer(
    model: nn.Module,
    images: ImageFolder,
    device: torch.device,
    workers: int = 0,
    between: Callable[[], None] = lambda: None,
) -> Answers:
    """Classify every image once. Leaves the model in evaluation mode.

    `between` is called before each batch; to break off, it raises an exception.
    """
    model.eval()
    loss = 0.0
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    # Without TF32, which rounds to 10 bits, GPU and CPU give the same
    # predictions.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        size = choose_batch_size(images.shape.image_size)
        for batch, labels in loader(images, size, device, workers):
            between()
            logits = model(batch.to(device)).double().cpu()
            probability, said = logits.softmax(dim=1).max(dim=1)
            parts.append((labels, said, probability))
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    truth, said, probability = (torch.cat(part) for part in zip(*parts, strict=True))
    return Answers(truth, said, probability, loss / len(images))


def score(
    model: nn.Module,
    images: ImageFolder,
    device: torch.device,
    workers: int = 0,
    between: Callable[[], None] = lambda: None,
) -> Score:
    """Count the images that `answer` classifies correctly."""
    return _score(answer(model, images, device, workers, between))


def _score(answers: Answers) -> Score:
    total = len(answers.truth)
    return Score(answers.correct / total, answers.correct, total, answers.loss)


def examine(
    checkpoint: Checkpoint, data: Path, split: str, device: torch.device, workers: int = 0
) -> tuple[Evaluation, dict[str, object]]:
    """Evaluate a checkpoint on `data`/`split`; return its score and the body of evaluation.json.

    Raises CheckpointError if its predictions are NaN or infinite.
    """
    shape = from_json(checkpoints.load_state(checkpoint)["shape"])
    model = Classifier(shape)
    model.load_state_dict(checkpoints.load_tensors(checkpoint, "model"))
    images = ImageFolder(data / split, shape)
    answers = answer(model.to(device), images, device, workers)
    if not math.isfinite(answers.loss):
        raise CheckpointError(f"{checkpoint.path}: its loss on {split} is {answers.loss}")
    result = Evaluation(
        **asdict(_score(answers)), checkpoint=checkpoint.path.resolve().name, split=split
    )
    return result, findings(answers, images, checkpoint, str(device))


def main() -> None:
    here = places.from_environment(os.environ)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=here.checkpoints,
        help="a checkpoint, or anything above",
    )
    parser.add_argument("--data", type=Path, help="the directory that holds the splits")
    parser.add_argument("--split", default="test", choices=SPLITS)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON")
    # labctl sets this variable, since not every project's evaluate.py has the
    # option.
    out = os.environ.get("LABCTL_EVALUATION")
    parser.add_argument("--out", type=Path, default=out, help="write the whole evaluation there")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        data = options.data or locate(here)
        device = pick_device(options.device)
        result, found = examine(checkpoint, data, options.split, device)
    except (CheckpointError, DatasetError) as error:
        raise SystemExit(f"evaluate: {error}") from None
    if options.out:
        places.write_json(options.out, found | {"where": here.where})
    if not options.json:
        print(f"{result.checkpoint}: {result.correct} of {result.total} correct on {result.split}")
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
