"""Make the hidden pictures and their labels, in hidden/ beside this file.

    python make_hidden_data.py

They are the digits of scikit-learn, moved, darkened and with noise, by random
numbers that are not stored: students who know the original digits do not know
these. A network that learned only digits in the middle of the picture gets
fewer of them right. For an exam, use pictures of your own in the same layout.
"""

from __future__ import annotations

import csv
import secrets
import shutil
from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

COUNT = 500
FARTHEST = 1  # pixels that a digit of 8 by 8 pixels is moved
DARKEST, NOISE = 0.7, 1.0  # pixel values go from 0 to 16


def make_pictures(out: Path) -> None:
    """Write inputs/*.png and labels/labels.csv to a new directory."""
    random = numpy.random.default_rng(secrets.randbits(128))
    digits = load_digits()
    chosen = random.permutation(len(digits.images))[:COUNT]
    (out / "inputs").mkdir(parents=True)
    (out / "labels").mkdir()
    rows = []
    for number, index in enumerate(chosen):
        top, left = random.integers(0, 2 * FARTHEST + 1, size=2)
        moved = numpy.pad(digits.images[index], FARTHEST)[top : top + 8, left : left + 8]
        pixels = moved * random.uniform(DARKEST, 1) + random.normal(0, NOISE, moved.shape)
        name = f"hidden-{number:04d}.png"
        gray = (pixels.clip(0, 16) * 255 / 16).round().astype("uint8")
        Image.fromarray(gray).save(out / "inputs" / name)
        rows.append((name, int(digits.target[index])))
    with (out / "labels" / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("item", "label"), *rows])


def main() -> None:
    hidden = Path(__file__).parent / "hidden"
    if hidden.exists():
        raise SystemExit(f"{hidden} exists; delete it to make other pictures")
    draft = hidden.with_name(".hidden.draft")
    shutil.rmtree(draft, ignore_errors=True)
    make_pictures(draft)
    draft.rename(hidden)
    print(f"made {COUNT} pictures in {hidden}")


if __name__ == "__main__":
    main()
