"""Opening a course with its providers' settings."""

from __future__ import annotations

from pathlib import Path

from labctl.courses.records.folder import CourseFolder
from labctl.providers import get_provider_class


def open_course(path: Path | str) -> CourseFolder:
    """Open the course of a folder, and check the sections of its providers too."""
    return CourseFolder(
        Path(path), settings_type=lambda name: get_provider_class(name).settings_type
    )
