"""The default predict command: the student's own predict.py on every picture.

predict.py is the module that `labctl serve` uses: `load(path)` returns an object with `classes`,
whose `predict(pictures)` returns a probability for each class. Writes item,label as CSV; an item is
the picture's path below the inputs.
"""

from __future__ import annotations

import csv
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Iterator

BATCH = 64
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def list_pictures(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in paths if path.is_file())


def predict_labels(predictor: Any, batch: list[Path]) -> Iterator[str]:
    from PIL import Image

    opened = [Image.open(path).convert("RGB") for path in batch]
    for row in predictor.predict(opened):
        values = [float(value) for value in row]
        yield str(predictor.classes[values.index(max(values))])


def main() -> int:
    sys.path.insert(0, str(Path.cwd()))
    predictor = import_module("predict").load(Path(os.environ["LABCTL_MODEL"]))
    folder = Path(os.environ["LABCTL_INPUTS"])
    paths = list_pictures(folder)
    target = Path(os.environ["LABCTL_PREDICTIONS"])
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item", "label"])
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            for path, label in zip(batch, predict_labels(predictor, batch)):
                writer.writerow([path.relative_to(folder).as_posix(), label])
    return 0


if __name__ == "__main__":
    sys.exit(main())
