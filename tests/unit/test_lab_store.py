"""The store of a lab or of a seat, as its configuration and its provider describe it."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import Lab
from labctl.config import find_paths
from labctl.courses.context import build_course_context
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.events import SilentReporter
from labctl.state import State
from labctl.stores import s3
from labctl.stores.lab_store import open_lab_store

AWS = "server: {provider: aws, aws: {profile: staff}}\nstore: s3://results/labs\n"


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The profiles with which buckets are opened."""
    profiles: list[str] = []
    monkeypatch.setattr(s3, "open_folder", lambda url, prefix, profile: profiles.append(profile))
    return profiles


def test_a_bucket_is_opened_with_the_profile_of_the_provider(
    tmp_path: Path, profiles: list[str]
) -> None:
    (tmp_path / "lab.yaml").write_text("lab: digits\n" + AWS)
    open_lab_store(Lab.load(tmp_path).context)
    (tmp_path / "lab.yaml").write_text("lab: digits\nstore: s3://results/labs\n")
    open_lab_store(Lab.load(tmp_path).context)
    assert profiles == ["staff", ""]


@pytest.mark.parametrize("shared", ["", "shared: {accounts_per_server: 4}\n"])
def test_the_store_of_a_course_is_too(tmp_path: Path, profiles: list[str], shared: str) -> None:
    (tmp_path / "course.yaml").write_text("course: ml\n" + AWS + shared)
    make_private(tmp_path)
    paths = find_paths()
    folder = CourseFolder(tmp_path)
    open_lab_store(build_course_context(folder, paths, State(paths.database), SilentReporter()))
    assert profiles == ["staff"]
