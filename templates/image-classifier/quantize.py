"""Round a checkpoint's weights to 8 or 4 bits; measure the effect.

    python quantize.py --to int8                # the best in ./checkpoints
    python quantize.py runs/RUN --to int4 --split val

The last line printed is JSON: size, latency and accuracy before and after. The
convolutions here still compute in float32 with the rounded weights, so that the
latency is the same; stored, the weights are smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import checkpoints
import evaluate
import places
import quantization
from checkpoints import CheckpointError
from dataset import ImageFolder, locate
from findings import predictions
from model import Classifier, from_json
from prepare_data import SPLITS, DatasetError

TRIALS, WARM_UP = 30, 5
# In the run's logs: the weights before QAT, and the comparison.
BEFORE, REPORT = "before-qat.safetensors", "quantization.json"
train_rounded = quantization.train_rounded


@dataclass(frozen=True)
class Row:
    """One way to store the weights. `low` and `high` are the accuracy's 95% interval.

    `predictions` of each image let labctl test the difference of two rows in pairs.
    """

    name: str
    size_bytes: int
    latency_ms: float  # one image, the median of many
    correct: int
    total: int
    accuracy: float
    low: float
    high: float
    predictions: dict[str, object]


def size_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


@torch.inference_mode()
def measure_latency(model: nn.Module, images: ImageFolder, device: torch.device) -> float:
    """Return the median of the milliseconds that one image takes."""
    shape = images.shape
    one = torch.zeros(
        1, shape.channels, shape.image_size, shape.image_size, dtype=torch.uint8, device=device
    )
    model.eval()
    times = []
    for _ in range(WARM_UP + TRIALS):
        begun = time.perf_counter()
        model(one)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begun) * 1000)
    return sorted(times[WARM_UP:])[TRIALS // 2]


def measure(
    name: str, model: nn.Module, size: int, images: ImageFolder, device: torch.device
) -> Row:
    answers = evaluate.answer(model, images, device)
    correct, total = answers.correct, len(images)
    low, high = quantization.interval(correct, total)
    latency_ms = round(measure_latency(model, images, device), 4)
    predicted = predictions(answers, images)
    return Row(name, size, latency_ms, correct, total, correct / total, low, high, predicted)


def compare(
    model: nn.Module, kind: str, images: ImageFolder, device: torch.device
) -> tuple[Row, Row]:
    """Measure a model before and after rounding; its weights are the rounded ones afterwards."""
    before = measure("float32", model, size_of(model), images, device)
    size = quantization.quantize(model, kind)
    return before, measure(f"{kind} (PTQ)", model, size, images, device)


def save_weights(model: nn.Module, path: Path) -> None:
    """Save the weights that PTQ will round, to compare it with QAT at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".new")
    save_file({name: value.cpu() for name, value in model.state_dict().items()}, staging)
    staging.replace(path)


def compare_training(
    model: nn.Module, logs: Path, kind: str, images: ImageFolder, device: torch.device
) -> tuple[Row, ...]:
    """Compare PTQ of the weights before QAT with QAT; write `logs`/quantization.json.

    QAT trained for a third of the epochs more than the other weights, which the
    file says, too.
    """
    former = Classifier(images.shape).to(device)
    former.load_state_dict(load_file(logs / BEFORE))
    before, after = compare(former, kind, images, device)
    trained = Classifier(images.shape).to(device)
    trained.load_state_dict(model.state_dict())
    _, qat = compare(trained, kind, images, device)
    rows = (before, after, replace(qat, name=f"{kind} (QAT)"))
    note = (
        "float32 and PTQ are the weights before the last third of the epochs. QAT trained through "
        "that third, so a part of its difference is the longer training. All of them compute in "
        "float32 here: a difference in latency is chance."
    )
    body = {"model": kind, "note": note, "rows": [asdict(row) for row in rows]}
    places.write_json(logs / REPORT, body)
    return rows


def main() -> None:
    here = places.from_environment(os.environ)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, nargs="?", default=here.checkpoints)
    parser.add_argument("--to", required=True, choices=quantization.KINDS, help="kind of weights")
    parser.add_argument("--data", type=Path, help="the directory that holds the splits")
    parser.add_argument("--split", default="test", choices=SPLITS)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        shape = from_json(checkpoints.load_state(checkpoint)["shape"])
        images = ImageFolder((options.data or locate(here)) / options.split, shape)
        device = evaluate.pick_device(options.device)
        model = Classifier(shape)
        model.load_state_dict(checkpoints.load_tensors(checkpoint, "model"))
        rows = compare(model.to(device), options.to, images, device)
    except (CheckpointError, DatasetError) as error:
        raise SystemExit(f"quantize: {error}") from None
    name = checkpoint.path.resolve().name
    print(json.dumps({"model": name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
