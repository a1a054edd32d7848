"""Read a dataset with the layout {train,val,test}/<class>/<image>."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import prepare_data
from model import Shape
from places import Places
from prepare_data import IMAGE_SUFFIXES, SPLITS, DatasetError
from ranks import Ranks

# Images: uint8 (B, C, S, S), values 0 to 255; labels: int64 (B,).
Batch = tuple[Tensor, Tensor]
# The label of an image that does not count.
NO_LABEL = -100
# Of one image: a file of some kilobytes can claim to be billions.
MOST_PIXELS = 50_000_000
UNREADABLE = (
    OSError,
    SyntaxError,  # Pillow's word for a broken PNG
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image; raises DatasetError if it is not an image, damaged, or too large."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                size = f"{picture.width} x {picture.height}"
                raise DatasetError(f"{path} has {size} pixels; {MOST_PIXELS} are allowed")
            yield picture
    except UNREADABLE as error:
        raise DatasetError(f"{path} cannot be read as an image ({error})") from error


def locate(places: Places) -> Path:
    """Return the dataset's directory, after creating the digits if there is no dataset.

    Raises DatasetError if there is no dataset and no writable place for it.
    """
    for place in (places.dataset, places.spare_dataset):
        if place.is_dir() and any(place.iterdir()):
            return place
    for place in (places.dataset, places.spare_dataset):
        try:
            prepare_data.prepare(place)
        except OSError:
            continue  # read-only, as the mounted data directory on a server is
        note = f"no dataset at {places.dataset}: made the handwritten digits in {place}"
        print(note, file=sys.stderr, flush=True)
        return place
    raise DatasetError(f"no dataset at {places.dataset}, and no writable place to make one")


def shape_of(root: Path, image_size: int) -> Shape:
    """Find the shape of a network for this dataset: the classes of train/, and gray or color."""
    train = root / "train"
    if not train.is_dir():
        raise DatasetError(f"{train} is not there; {root} needs the folders {', '.join(SPLITS)}")
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir()))
    files = (path for path in sorted(train.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES)
    first = next(files, None)
    if first is None:
        raise DatasetError(f"no images below {train}")
    with opened(first) as picture:
        channels = 1 if picture.mode in ("1", "L") else 3
    return Shape(classes=classes, channels=channels, image_size=image_size)


class ImageFolder(Dataset[Batch]):
    """The images of one split, ordered by name.

    An item is the image as uint8 (C, S, S) and the class's index in `shape.classes`, int64 ().
    Bytes instead of floats reduce the traffic between workers and to the GPU to a quarter.
    """

    def __init__(self, split: Path, shape: Shape) -> None:
        self.split = split
        self.shape = shape
        index = {name: number for number, name in enumerate(shape.classes)}
        self.files: list[tuple[Path, int]] = []
        for path in sorted(split.glob("*/*")):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                if path.parent.name not in index:
                    raise DatasetError(f"{path.parent} is not one of the classes {shape.classes}")
                self.files.append((path, index[path.parent.name]))
        if not self.files:
            raise DatasetError(f"no images in {split}/<class>/")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Load an image. That of ~number is the same without its label: see `Ranks.share`."""
        path, label = self.files[number if number >= 0 else ~number]
        with opened(path) as picture:
            image = to_tensor(picture, self.shape)
        return image, torch.tensor(label if number >= 0 else NO_LABEL)

    def share(self, ranks: Ranks) -> ImageFolder:
        """Return this rank's part of the images."""
        part = copy.copy(self)
        part.files = self.files[ranks.rank :: ranks.count]
        return part


def to_tensor(picture: Image.Image, shape: Shape) -> Tensor:
    """Convert a picture of any size and mode to the network's input: uint8 (C, S, S)."""
    size = (shape.image_size, shape.image_size)
    plain = picture.convert("L" if shape.channels == 1 else "RGB")
    pixels = numpy.array(plain.resize(size, Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.reshape(*size, -1)).permute(2, 0, 1).contiguous()


class EpochOrder(Sampler[int]):
    """A new shuffle for every epoch, which can start in the middle.

    The order is a function of seed and epoch alone: a resumed run sees exactly the images that the
    interrupted one had not come to, whatever the number of workers.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        batch_size: int = 1,  # of all ranks together
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self.length = length
        self.seed = seed
        self.batch_size = batch_size
        self.ranks = ranks
        self.epoch = 0
        self.position = 0  # images of this epoch already seen

    def start(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        whole, rest = divmod(self.length - self.position, self.batch_size)
        return whole * self.ranks.part_of(self.batch_size) + self.ranks.part_of(rest)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        for start in range(self.position, self.length, self.batch_size):
            yield from self.ranks.share(order[start : start + self.batch_size])


def loader(
    images: ImageFolder,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    order: EpochOrder | None = None,
) -> DataLoader[Batch]:
    """Create a loader of batches in `order`, else by name."""
    return DataLoader(
        images,
        batch_size=batch_size,
        sampler=order,
        num_workers=workers,
        # Copies to the GPU overlap with computation only from page-locked
        # memory.
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        # A separate generator: the loader draws a number at every iteration,
        # and the model's dropout must not depend on how often a run was
        # interrupted.
        generator=torch.Generator().manual_seed(0),
    )
