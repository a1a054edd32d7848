"""The command line of train.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def parse_options(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, else the command line. All defaults are here; `--help` shows them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="the directory that holds train/, val/ and test/ (the digits)")
    add("--image-size", type=_positive, default=16, help="pixels; images are made this size")
    add("--epochs", type=_positive, default=10, help="passes over the training images")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--batch-size", type=_batch_size, default=32, help="images, or auto: what memory allows")
    add("--accumulate", type=_positive, default=1, help="batches per optimizer step")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--amp", default="auto", choices=("auto", "bf16", "fp16", "off"), help="mixed precision")
    add("--qat", choices=("int8", "int4", "fp8"), help="round weights in the last third of epochs")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    add("--workers", type=_workers, default="auto", help="processes that load images")
    add("--checkpoint-every", type=_positive, default=100, help="steps; also after every epoch")
    add("--keep", type=_positive, default=3, help="newest checkpoints to keep, beside the best")
    add("--log-every", type=_positive, default=10, help="steps between points in TensorBoard")
    return parser.parse_args(arguments)


# argparse names these in its messages ("invalid positive number value"), hence
# __name__.
def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _batch_size(text: str) -> int | None:
    return None if text == "auto" else _positive(text)


def _workers(text: str) -> int | None:
    return None if text == "auto" else int(text)


_positive.__name__ = "positive number"
_batch_size.__name__ = "batch size"
_workers.__name__ = "number of workers"
