"""Make a dataset of the digits and of moved, darker and noisy copies of them.

    python augment.py --out varied && python train.py --data varied

A network that has seen such copies recognizes pictures that were not taken like
the originals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy
import prepare_data
from PIL import Image

FARTHEST = 1  # pixels that a copy is moved; a digit has 8 by 8
DARKEST, NOISE = 0.6, 16.0  # pixel values go from 0 to 255


def change(picture: Image.Image, random: numpy.random.Generator) -> Image.Image:
    pixels = numpy.asarray(picture, dtype="float64")
    rows, columns = pixels.shape
    top, left = random.integers(0, 2 * FARTHEST + 1, size=2)
    moved = numpy.pad(pixels, FARTHEST)[top : top + rows, left : left + columns]
    values = moved * random.uniform(DARKEST, 1) + random.normal(0, NOISE, moved.shape)
    return Image.fromarray(values.clip(0, 255).round().astype("uint8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("varied"), help="a new directory")
    parser.add_argument("--copies", type=int, default=3, help="of each picture")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same copies")
    options = parser.parse_args()
    prepare_data.prepare(options.out)
    random = numpy.random.default_rng(options.seed)
    for path in sorted(options.out.glob("*/*/*.png")):
        with Image.open(path) as picture:
            for number in range(options.copies):
                change(picture, random).save(path.with_stem(f"{path.stem}-{number}"))


if __name__ == "__main__":
    main()
