"""Refuse pickles on this machine, because loading one runs whatever code it contains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from labctl.errors import PolicyError
from labctl.wire.judge import judge_file


def refuse_pickles(place: Path, hint: str) -> None:
    """PolicyError for the first file at or below `place` that is, holds, or may be a pickle."""
    for path in sorted(_list_files(place)):
        if reason := describe_pickle(path):
            name = path.name if path == place else path.relative_to(place.parent).as_posix()
            raise PolicyError(
                f"{name} {reason}",
                why="loading a pickle runs any code that its author put there; safetensors does not"
                " (safetensors.torch.save_file)",
                hint=hint,
            )


def has_pickles(place: Path) -> bool:
    """Whether `refuse_pickles` refuses a file at or below `place`."""
    return any(describe_pickle(path) for path in _list_files(place))


def describe_pickle(path: Path) -> str:
    """Say why a file must not be loaded here, as the end of a sentence; "" if it may be."""
    try:
        with path.open("rb") as file:
            verdict = judge_file(path.name, file, os.fstat(file.fileno()).st_size)
    except OSError:
        return ""
    if verdict.pickle:
        return f"is {verdict.pickle}"
    return f"is refused: {verdict.hazard}" if verdict.hazard else ""


def _list_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder) / name for name in names)
