"""The text to learn: your own files, or sentences made by a small grammar.

    python text.py | head       # read it

A token is a byte, so any text in any language can be learned, and no vocabulary
has to be stored. The last tenth is for testing, the tenth before it for
validation; the rest is for training.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch
from torch import Tensor

# Directories with *.txt files. `data: {text: ./text}` in lab.yaml sends yours.
OWN_TEXT = Path(os.environ.get("LABCTL_DATA_DIR", ".")) / "text"
SPLITS = ("train", "val", "test")
SENTENCES = 6000
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WHO = ("the student", "the teacher", "a friend", "the second group", "everybody")
DOES = {
    "starts": ("a run", "the server", "another epoch"),
    "reads": ("the loss", "the log", "a paper about attention"),
    "saves": ("a checkpoint", "the curves", "a dollar"),
    "waits for": ("the night", "a free card", "the last step"),
}
WHEN = ("before lunch", "after the lecture", "while it rains", "at midnight", "once more")


class TextError(Exception):
    """The text is missing or too short; the message says what to change."""


def write_sentences(seed: int = 0) -> str:
    """Make a text whose rules a small network can learn: grammar, and sums up to ten."""
    dice = random.Random(seed)
    lines = []
    for _ in range(SENTENCES):
        if dice.random() < 0.3:
            total = dice.randrange(len(NUMBERS))
            first = dice.randint(0, total)
            sentence = f"{NUMBERS[first]} and {NUMBERS[total - first]} make {NUMBERS[total]}"
        else:
            does = dice.choice(list(DOES))
            sentence = f"{dice.choice(WHO)} {does} {dice.choice(DOES[does])} {dice.choice(WHEN)}"
        lines.append(f"{sentence.capitalize()}.\n")
    return "".join(lines)


def load(directory: Path | None = None) -> tuple[bytes, str]:
    """Return the text, and where it is from. Raises TextError for a directory without any."""
    if directory is None and not OWN_TEXT.is_dir():
        return write_sentences().encode(), "the grammar in text.py"
    directory = directory or OWN_TEXT
    files = sorted(path for path in directory.rglob("*.txt") if path.is_file())
    if not files:
        raise TextError(f"{directory} has no file named *.txt")
    return b"\n".join(path.read_bytes() for path in files), f"{len(files)} files of {directory}"


def split(text: bytes, context: int) -> dict[str, Tensor]:
    """Cut the text into train, val and test: uint8 tensors. Raises TextError if one is short."""
    first, second = len(text) * 8 // 10, len(text) * 9 // 10
    parts = (text[:first], text[first:second], text[second:])
    if len(text) < 10 * (context + 2):
        raise TextError(
            f"the text has {len(text)} bytes, and --context {context} needs {10 * (context + 2)}; "
            "use a longer text, or a smaller --context"
        )
    tensors = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return dict(zip(SPLITS, tensors, strict=True))


def draw(text: Tensor, batch_size: int, context: int, dice: torch.Generator) -> Tensor:
    """Draw random pieces of context + 1 bytes: (B, context + 1)."""
    starts = torch.randint(len(text) - context, (batch_size,), generator=dice)
    return text[starts[:, None] + torch.arange(context + 1)].long()


def cut(text: Tensor, context: int) -> Tensor:
    """Cut the whole text into pieces of context + 1 bytes, each from the end of the last one."""
    count = (len(text) - 1) // context
    starts = torch.arange(count) * context
    return text[starts[:, None] + torch.arange(context + 1)].long()


if __name__ == "__main__":
    sys.stdout.buffer.write(load()[0])
