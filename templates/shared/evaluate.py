"""Evaluate a checkpoint: how many items of a split does it classify correctly?

    python evaluate.py                          # the best in ./checkpoints
    python evaluate.py runs/RUN --split val     # the best one there
    python evaluate.py --out evaluation.json    # confusions, worst mistakes

The last line printed is JSON. train.py ends with this code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import data
import model
from data import DataError

import checkpoints
from checkpoints import Checkpoint, CheckpointError
from findings import Score, findings, score
from run import find_places, write_json


@dataclass(frozen=True)
class Evaluation(Score):
    """A score, with its checkpoint and split."""

    checkpoint: str
    split: str


def examine(
    checkpoint: Checkpoint, source: Path | None, part: str
) -> tuple[Evaluation, dict[str, object]]:
    """Evaluate a checkpoint on a part of the data.

    Return its score and the body of evaluation.json. Raises CheckpointError if its predictions are
    NaN or infinite.
    """
    loaded = model.load(checkpoint)
    train, split = data.load("train", source), data.load(part, source)
    if split.classes != loaded.classes:
        raise CheckpointError(f"{checkpoint.path} knows other classes: {loaded.classes}")
    probabilities = loaded.probabilities(split.inputs)
    result = score(probabilities, split)
    if not math.isfinite(result.loss):
        raise CheckpointError(f"{checkpoint.path}: its loss on {part} is {result.loss}")
    name = checkpoint.path.resolve().name
    found = {
        "checkpoint": name,
        "checkpoint_sha256": checkpoint.files[loaded.file]["sha256"],
        "split": part,
        "device": loaded.device,
    }
    evaluation = Evaluation(**asdict(result), checkpoint=name, split=part)
    return evaluation, found | findings(probabilities, split, train)


def main() -> None:
    here = find_places()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=here.checkpoints,
        help="a checkpoint, or anything above",
    )
    parser.add_argument("--data", type=Path, help="as for train.py")
    parser.add_argument("--split", default="test", choices=data.PARTS)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON")
    # labctl sets this variable, since not every project's evaluate.py has the
    # option.
    out = os.environ.get("LABCTL_EVALUATION")
    parser.add_argument("--out", type=Path, default=out, help="write the whole evaluation there")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        result, found = examine(checkpoint, options.data or data.find(here), options.split)
    except (CheckpointError, DataError) as error:
        raise SystemExit(f"evaluate: {error}") from None
    if options.out:
        write_json(options.out, found | {"where": here.where})
    if not options.json:
        print(f"{result.checkpoint}: {result.correct} of {result.total} correct on {result.split}")
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
