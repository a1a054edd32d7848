"""A course's flows: one file each."""

from __future__ import annotations

from pathlib import Path

from labctl.courses.records.folder import CourseFolder
from labctl.providers import provider_class


def open_course(path: Path | str) -> CourseFolder:
    """The course of a folder, its providers' sections read and checked too."""
    return CourseFolder(Path(path), settings_type=lambda name: provider_class(name).settings_type)
