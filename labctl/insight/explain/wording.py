"""How figures are said, and the commands that try something else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from labctl.insight.explain.evidence import Material

GIB = 1024**3
LEARNING_RATE = ("--lr", "--learning-rate", "--learning_rate", "--base-lr", "--max-lr")
BATCH = (
    "--batch-size",
    "--batch_size",
    "--batch",
    "--bs",
    "-b",
    "--per_device_train_batch_size",
    "--train-batch-size",
)
WORKERS = ("--workers", "--num-workers", "--num_workers", "-j", "--dataloader_num_workers")
CLIP = ("--clip", "--clip-grad", "--grad-clip", "--clip-norm", "--max-norm", "--max_grad_norm")
ACCUMULATE = ("--accumulate", "--accumulation-steps", "--gradient_accumulation_steps")
EPOCHS = ("--epochs", "--num-epochs", "--num_epochs", "--num_train_epochs")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE]-?[0-9]+)?")


def gib(size: float) -> str:
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 1024**2:.0f} MiB" if size >= 1024**2 else f"{size / 1024:.0f} KiB"


def taken_samples(count: int, least: int) -> str:
    """Why so many samples of telemetry tell nothing."""
    said = "1 sample was taken" if count == 1 else f"{count} samples were taken"
    return f"{said}, one every 10 s; it takes {least} after the start"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def number(value: float) -> str:
    return f"{value:.4g}"


def minutes(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def given(material: Material, names: Iterable[str]) -> tuple[str, str] | None:
    """The option of these names that the run's command has, and its value."""
    words = material.run.command
    for at, word in enumerate(words):
        for name in names:
            if word == name and at + 1 < len(words):
                return name, words[at + 1]
            if name.startswith("--") and word.startswith(name + "="):
                return name, word.partition("=")[2]
    return None


def given_number(material: Material, names: Iterable[str]) -> float | None:
    found = given(material, names)
    return float(found[1]) if found and _NUMBER.fullmatch(found[1]) else None


def taken(material: Material, names: Iterable[str]) -> str:
    """The option of these names that the command has, or the lab's scripts take; "" for none."""
    names = tuple(names)
    found = given(material, names)
    if found:
        return found[0]
    return next((name for name in names if name in material.options), "")


def again(material: Material, changes: Mapping[tuple[str, ...], str], otherwise: str) -> str:
    """The run's command with these options changed; `otherwise` where it takes none of them."""
    words = list(material.run.command)
    if not any(word.endswith(".py") or word == "-m" for word in words):
        return otherwise  # a shell's line, say: what would be added to it goes nowhere
    changed = False
    for names, value in changes.items():
        name = taken(material, names)
        if name:
            words = _with(words, name, value)
            changed = True
    return f"labctl run -- {shlex.join(words)}" if changed else otherwise


def also(first: str, more: str) -> str:
    """Two things to try; behind a command the second is a comment, so that it can be copied."""
    if not more:
        return first
    return f"{first}   # {more}" if first.startswith("labctl ") else f"{first}; {more}"


def _with(words: list[str], name: str, value: str) -> list[str]:
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return [*words[: at + 1], value, *words[at + 2 :]]
        if name.startswith("--") and word.startswith(name + "="):
            return [*words[:at], f"{name}={value}", *words[at + 1 :]]
    return [*words, name, value]
