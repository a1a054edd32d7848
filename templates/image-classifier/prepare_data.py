"""Make a dataset: folders train, val and test, each with a folder per class.

    python prepare_data.py      # the handwritten digits of scikit-learn
    python prepare_data.py --from IMAGES --out DIR      # your own images

IMAGES has a folder per class: IMAGES/<class>/*.png (or .jpg, ...).

The split depends on nothing but the seed and the file names, so everybody gets
the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SPLITS = ("train", "val", "test")
HELD_OUT_SHARE = 0.15  # of every class, for val and for test each
IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class DatasetError(Exception):
    """The dataset cannot be created or read; the message says what to change."""


@dataclass(frozen=True)
class Image:
    """One image of a new dataset: its class, its file name, and how to write it."""

    label: str
    name: str
    write: Callable[[Path], object]


def digits() -> list[Image]:
    """Return the 1797 digits of scikit-learn: gray, 8 by 8 pixels, values 0 to 16."""
    from PIL import Image as Picture
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    source = load_digits()
    images = []
    for index, (pixels, label) in enumerate(zip(source.images, source.target, strict=True)):
        picture = Picture.fromarray((pixels * 255 / 16).round().astype("uint8"))
        images.append(Image(str(label), f"digit-{index:04d}.png", picture.save))
    return images


def folder(source: Path) -> list[Image]:
    """List the images below `source`, whose folders are the classes; files are copied unchanged."""
    classes = sorted(path for path in source.iterdir() if path.is_dir() and path.name[0] != ".")
    if {path.name for path in classes} & set(SPLITS):
        raise DatasetError(f"{source} is split already; point `data:` in lab.yaml at it")
    images = []
    for class_folder in classes:
        for path in sorted(class_folder.rglob("*")):
            if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
                name = "__".join(path.relative_to(class_folder).parts)
                images.append(Image(class_folder.name, name, partial(shutil.copyfile, path)))
    return images


def split(images: Iterable[Image], seed: int) -> dict[str, list[Image]]:
    """Distribute every class to train, val and test, at least one image to each.

    The order comes from a hash of the name and not from a random generator, whose sequence may
    change between library versions; adding an image then moves few of the others.
    """
    by_class: dict[str, list[Image]] = defaultdict(list)
    for image in images:
        by_class[image.label].append(image)
    if len(by_class) < 2:
        raise DatasetError("at least two folders with images are needed, one per class")
    parts: dict[str, list[Image]] = {name: [] for name in SPLITS}
    for label, members in sorted(by_class.items()):
        if len(members) < len(SPLITS):
            raise DatasetError(f"class {label} has {len(members)} images; at least 3 are needed")
        members.sort(key=lambda image: _order(image, seed))
        held_out = max(1, round(len(members) * HELD_OUT_SHARE))
        parts["val"] += members[:held_out]
        parts["test"] += members[held_out : 2 * held_out]
        parts["train"] += members[2 * held_out :]
    return parts


def _order(image: Image, seed: int) -> str:
    return hashlib.sha256(f"{seed}/{image.label}/{image.name}".encode()).hexdigest()


def write(out: Path, parts: dict[str, list[Image]], origin: dict[str, object]) -> None:
    """Write the dataset beside `out` and rename it, so that `out` is never incomplete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        for part, images in parts.items():
            for image in images:
                path = unfinished / part / image.label / image.name
                path.parent.mkdir(parents=True, exist_ok=True)
                image.write(path)
        counts = {part: len(images) for part, images in parts.items()}
        (unfinished / "dataset.json").write_text(json.dumps(origin | {"images": counts}) + "\n")
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def prepare(out: Path, source: Path | None = None, seed: int = 0) -> bool:
    """Create the dataset at `out`; False, without changes, if the same one already exists."""
    origin: dict[str, object] = {"source": str(source) if source else "digits", "seed": seed}
    if out.is_dir() and any(out.iterdir()):
        _refuse_another(out, origin)
        return False
    write(out, split(folder(source) if source else digits(), seed), origin)
    return True


def _refuse_another(out: Path, origin: dict[str, object]) -> None:
    try:
        present = json.loads((out / "dataset.json").read_text())
    except (OSError, ValueError):
        raise DatasetError(f"{out} holds something else; choose another --out") from None
    if {key: present.get(key) for key in origin} != origin:
        raise DatasetError(f"{out} was made from {present}; delete it or choose another --out")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dataset"), help="default: ./dataset")
    parser.add_argument("--from", type=Path, dest="source", help="holds one folder per class")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another split")
    options = parser.parse_args()
    try:
        made = prepare(options.out, options.source, options.seed)
    except (DatasetError, OSError) as error:
        raise SystemExit(f"prepare_data: {error}") from None
    counts = json.loads((options.out / "dataset.json").read_text())["images"]
    print(f"{'made' if made else 'already there:'} {options.out} {counts}")


if __name__ == "__main__":
    main()
