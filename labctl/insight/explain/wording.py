"""Formats of numbers in findings, the commands that they suggest, and answers that rules share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from labctl.insight.explain.evidence import RunData, Unknown
from labctl.insight.explain.samples import LEAST
from labctl.insight.scalars import Series
from labctl.text import count_text

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
CHECKPOINTING = (
    "--checkpoint-activations",
    "--activation-checkpointing",
    "--checkpointing",
    "--gradient-checkpointing",
    "--gradient_checkpointing",
)
AMP = ("--amp", "--precision", "--mixed-precision", "--mixed_precision")
EPOCHS = ("--epochs", "--num-epochs", "--num_epochs", "--num_train_epochs")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE]-?[0-9]+)?")


def make_few_samples_answer(rule: str, what: str, material: RunData) -> Unknown:
    """Explain that a rule has too few samples of telemetry to find out `what`."""
    count = len(material.samples)
    taken = "there is 1 sample" if count == 1 else f"there are {count} samples"
    return Unknown(
        rule=rule,
        what=what,
        why=f"{taken} of telemetry, one every 10 s; this rule needs {LEAST} after the start",
        next="train for at least a minute (more epochs), then:\nlabctl explain",
    )


def make_few_points_answer(rule: str, what: str, series: Series, least: int, next_: str) -> Unknown:
    """Explain that a rule has too few points of a curve to find out `what`."""
    return Unknown(
        rule=rule,
        what=what,
        why=f"{series.tag} has {count_text(len(series.values), 'point')}; this rule needs {least}",
        next=next_,
    )


def percent(share: float) -> str:
    return f"{share:.0%}"


def number(value: float) -> str:
    return f"{value:.4g}"


def find_option(material: RunData, names: Iterable[str]) -> tuple[str, str] | None:
    """Find an option with one of these names in the run's command; return (name, value)."""
    words = material.run.command
    for index, word in enumerate(words):
        for name in names:
            if word == name and index + 1 < len(words):
                return name, words[index + 1]
            if name.startswith("--") and word.startswith(name + "="):
                return name, word.partition("=")[2]
    return None


def find_numeric_option(material: RunData, names: Iterable[str]) -> float | None:
    """Return the numeric value of an option of the run's command; None if it has none."""
    option = find_option(material, names)
    return float(option[1]) if option and _NUMBER.fullmatch(option[1]) else None


def find_accepted_option(material: RunData, names: Iterable[str]) -> str:
    """Find an option of these names in the command or the lab's scripts; "" if none exists."""
    names = tuple(names)
    option = find_option(material, names)
    if option:
        return option[0]
    return next((name for name in names if name in material.options), "")


def repeat_command(material: RunData) -> str:
    """Return the command line that starts the run's command again."""
    command = material.run.command
    return f"labctl run -- {shlex.join(command)}" if command else "labctl run"


def add_switch(material: RunData, names: Iterable[str], otherwise: str) -> str:
    """Build the run's command with one of these options without a value, or return `otherwise`."""
    name = next((name for name in names if name in material.options), "")
    words = list(material.run.command)
    if not name or not any(word.endswith(".py") or word == "-m" for word in words):
        return otherwise
    return f"labctl run -- {shlex.join([*words, name])}" if name not in words else otherwise


def build_command(material: RunData, changes: Mapping[tuple[str, ...], str], otherwise: str) -> str:
    """Build the run's command with these options changed, or `otherwise` if it has none of them."""
    words = list(material.run.command)
    if not any(word.endswith(".py") or word == "-m" for word in words):
        return otherwise  # such as a shell command, which would ignore additional options
    changed = False
    for names, value in changes.items():
        name = find_accepted_option(material, names)
        if name:
            words = _replace_option(words, name, value)
            changed = True
    return f"labctl run -- {shlex.join(words)}" if changed else otherwise


def join_suggestions(first: str, more: str) -> str:
    """Join two suggestions. A command gets a line, with a comment behind it, to be copied."""
    if not more:
        return first
    if more.startswith("labctl "):
        return f"{first}, then:\n{more}"
    return f"{first}   # {more}" if first.startswith("labctl ") else f"{first}; {more}"


def _replace_option(words: list[str], name: str, value: str) -> list[str]:
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return [*words[: index + 1], value, *words[index + 2 :]]
        if name.startswith("--") and word.startswith(name + "="):
            return [*words[:index], f"{name}={value}", *words[index + 1 :]]
    return [*words, name, value]
