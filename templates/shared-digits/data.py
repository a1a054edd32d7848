"""The 1797 digits of scikit-learn in three parts: gray, 8 by 8 pixels."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits

from findings import Split
from run import Places

PARTS = ("train", "val", "test")
HELD_OUT = 270  # images for val and for test each
SIZE = 8  # pixels; images are square
CLASSES = tuple("0123456789")


class DataError(Exception):
    """The images cannot be read; the message says what to change."""


def find(places: Places) -> Path | None:
    """The digits come with scikit-learn. With files of your own, return their place here."""
    return None


def load(part: str, source: Path | None = None) -> Split:
    """Return images (N, 8, 8, 1), float32 from 0 to 1, and their labels."""
    if source is not None:
        raise DataError(f"{source}: write `load` in data.py for files of your own")
    digits = load_digits()
    # RandomState and not default_rng: its sequence never changes, so everybody
    # gets the same parts.
    order = numpy.random.RandomState(0).permutation(len(digits.target))
    start = {"val": 0, "test": HELD_OUT, "train": 2 * HELD_OUT}[part]
    chosen = order[start:] if part == "train" else order[start : start + HELD_OUT]
    images = (digits.images[chosen, :, :, None] / 16).astype("float32")

    names = tuple(f"digit {number}" for number in chosen)

    def describe(item: int) -> dict[str, str]:
        return {"item": names[item], "picture": to_data_uri(images[item])}

    return Split(images, digits.target[chosen], CLASSES, names, describe)


def to_data_uri(image: numpy.ndarray) -> str:
    """Encode an image as a small PNG, which a browser shows."""
    buffer = io.BytesIO()
    Image.fromarray((image[:, :, 0] * 255).round().astype("uint8")).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def from_picture(picture: Image.Image) -> numpy.ndarray:
    """Convert a picture of any size and mode to the network's input, (8, 8, 1)."""
    small = picture.convert("L").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return (numpy.asarray(small, "float32") / 255)[:, :, None]
