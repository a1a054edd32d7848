"""What lab.yaml names on this disk: does it exist, and does it stay inside the lab.

Apart from loading, so that `down` and `status` work when a data set is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from labctl.config.document import plain, shown
from labctl.config.reader import LAB_FILE
from labctl.config.schema import LabConfig
from labctl.errors import ConfigError, Problem


def check_files(config: LabConfig) -> None:
    """Raises ConfigError with every path of lab.yaml that is not there or leaves the lab."""
    problems = [
        *_image_problems(config),
        *_data_problems(config),
        *_wheelhouse_problems(config),
    ]
    if problems:
        problems.sort(key=lambda found: (found.line == 0, found.line))
        raise ConfigError(
            f"{plain(str(config.path))} names files that cannot be used",
            tuple(problems),
            hint=f"mend these lines of {LAB_FILE}, or put the files there, and try again",
        )


def _image_problems(config: LabConfig) -> list[Problem]:
    if not config.image.build:
        return []
    key = "image.build"
    directory = config.root / config.image.build
    said = ""
    if not directory.is_dir():
        said = f"there is no directory {shown(config.image.build)} in the lab"
    elif not _stays_inside(config.root, directory / "Dockerfile"):
        said = f"{shown(config.image.build)} leads out of the lab through a link"
    elif not (directory / "Dockerfile").is_file():
        said = f"there is no Dockerfile in {shown(config.image.build)}"
    return [Problem(key, config.lines.get(key, 0), said)] if said else []


def _data_problems(config: LabConfig) -> list[Problem]:
    problems = []
    for name, source in config.data.items():
        if source.path is None:
            continue
        said = ""
        if not source.path.exists():
            said = f"there is no directory {shown(source.written)}"
        elif not source.path.is_dir():
            said = f"{shown(source.written)} is not a directory"
        elif source.inside_lab and not _stays_inside(config.root, source.path):
            said = (
                f"{shown(source.written)} leads out of the lab through a link; "
                "if that is meant, write where it leads"
            )
        elif not os.access(source.path, os.R_OK | os.X_OK):
            said = f"{shown(source.written)} may not be read"
        if said:
            key = f"data.{name}"
            problems.append(Problem(key, config.lines.get(key, 0), said))
    return problems


def _wheelhouse_problems(config: LabConfig) -> list[Problem]:
    if not config.wheelhouse or Path(config.wheelhouse).is_dir():
        return []
    origin = config.origins.get("wheelhouse", "")
    said = f"there is no directory {shown(config.wheelhouse)} (from {plain(origin)})"
    return [Problem("wheelhouse", 0, said)]


def _stays_inside(root: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())
