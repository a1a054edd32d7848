"""Check that the files that lab.yaml names exist, and stay inside the lab.

This is separate from loading, so that `down` and `status` work when a data set is gone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from labctl.config.document import escape, quote
from labctl.config.reader import LAB_FILE
from labctl.config.schema import LabConfig
from labctl.errors import ConfigError, Problem
from labctl.lazy import lazy_imports
from labctl.wire.containment import is_inside

with lazy_imports(__name__):
    from labctl.config import packages


# what makes a part of a path a pattern of names for a shell
PATTERN = re.compile(r"[*?\[]")


def check_files(config: LabConfig) -> None:
    """Raise ConfigError with every path of lab.yaml that is missing or outside the lab."""
    problems = [
        *_check_image(config),
        *_check_data(config),
        *_check_wheelhouse(config),
    ]
    if problems:
        problems.sort(key=lambda problem: (problem.line == 0, problem.line))
        raise ConfigError(
            f"{escape(str(config.path))} names files that cannot be used",
            tuple(problems),
            hint=f"fix these lines of {LAB_FILE}, or create the files, and try again",
        )


def _check_image(config: LabConfig) -> list[Problem]:
    if config.image.environment_file:
        return _check_packages(config)
    if not config.image.build:
        return []
    key = "image.build"
    directory = config.root / config.image.build
    message = ""
    if not directory.is_dir():
        message = f"there is no directory {quote(config.image.build)} in the lab"
    elif not is_inside(directory / "Dockerfile", config.root):
        message = f"{quote(config.image.build)} leads out of the lab through a link"
    elif not (directory / "Dockerfile").is_file():
        message = f"there is no Dockerfile in {quote(config.image.build)}"
    return [Problem(key, config.lines.get(key, 0), message)] if message else []


def _check_packages(config: LabConfig) -> list[Problem]:
    name = config.image.environment_file
    key = "image.requirements" if config.image.requirements else "image.conda"
    if not (config.root / name).is_file():
        message = f"there is no file {quote(name)} in the lab"
    else:
        message = packages.find_problem(config.root, name, config.image.extras)
    return [Problem(key, config.lines.get(key, 0), message)] if message else []


def _check_data(config: LabConfig) -> list[Problem]:
    problems = []
    for name, source in config.data.items():
        if source.path is None:
            continue
        message = ""
        if not source.path.exists():
            message = _describe_missing_directory(source.written)
        elif not source.path.is_dir():
            message = f"{quote(source.written)} is not a directory"
        elif source.inside_lab and not is_inside(source.path, config.root):
            message = (
                f"{quote(source.written)} leads out of the lab through a link; "
                "if that is intended, write the path of its target"
            )
        elif not os.access(source.path, os.R_OK | os.X_OK):
            message = f"{quote(source.written)} may not be read"
        if message:
            key = f"data.{name}"
            problems.append(Problem(key, config.lines.get(key, 0), message))
    return problems


def _describe_missing_directory(written: str) -> str:
    """Say what is wrong with a path; for a pattern such as images/*.png, what to write instead."""
    parts = PurePosixPath(written).parts
    first = next((n for n, part in enumerate(parts) if PATTERN.search(part)), None)
    if first is None:
        return f"there is no directory {quote(written)}"
    directory = str(PurePosixPath(*parts[:first]))
    action = "move the files to a directory" if first == 0 else f"write {quote(directory)}"
    return (
        f"{quote(written)} is a pattern of names, and data: takes a directory; {action}, "
        "and let your code choose the files"
    )


def _check_wheelhouse(config: LabConfig) -> list[Problem]:
    if not config.wheelhouse or Path(config.wheelhouse).is_dir():
        return []
    origin = config.origins.get("wheelhouse", "")
    message = f"there is no directory {quote(config.wheelhouse)} (from {escape(origin)})"
    return [Problem("wheelhouse", 0, message)]
