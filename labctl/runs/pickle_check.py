"""No pickle is loaded on this machine: loading one runs whatever code it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from labctl.errors import PolicyError
from labctl.wire.judge import judge_file


def refuse_pickles(place: Path, hint: str) -> None:
    """PolicyError, with the first one's name, where a file at or below `place` is a pickle, holds
    one, or cannot be judged."""
    for path in sorted(_files(place)):
        if reason := describe_pickle(path):
            name = path.name if path == place else path.relative_to(place.parent).as_posix()
            raise PolicyError(
                f"{name} {reason}",
                why="loading a pickle runs any code that its writer put there; safetensors does not"
                " (safetensors.torch.save_file)",
                hint=hint,
            )


def describe_pickle(path: Path) -> str:
    """Why a file must not be loaded here, as the rest of a sentence; "" where it may be."""
    try:
        with path.open("rb") as file:
            verdict = judge_file(path.name, file, os.fstat(file.fileno()).st_size)
    except OSError:
        return ""
    if verdict.pickle:
        return f"is {verdict.pickle}"
    return f"is refused: {verdict.hazard}" if verdict.hazard else ""


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder) / name for name in names)
