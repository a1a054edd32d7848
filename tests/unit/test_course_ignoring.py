"""What real git would keep of a course's folder: nothing that opens it, nobody's name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labctl.courses.creation import init_course
from labctl.courses.invitation import invite
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.gitignore import ignore_in_git
from labctl.errors import LabError
from labctl.events import SilentReporter

sys.path.append(str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import course_folder

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="there is no git on this machine")
TEMPLATES = Path(__file__).parents[2] / "templates"
HOST_KEY = "ssh-ed25519 " + "A" * 68


def git(directory: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *words], check=True, capture_output=True, text=True
    ).stdout


def added(directory: Path) -> list[str]:
    """What `git add --all` takes of a directory."""
    git(directory, "init", "--quiet")
    git(directory, "add", "--all")
    return git(directory, "ls-files").splitlines()


def invited(folder: CourseFolder, into: Path) -> Path:
    keys = AuthorizedKeys(folder, folder.path.parent / "home" / "authorized_keys")
    path = invite(folder, "alice", into, keys, HOST_KEY).path
    assert path.is_file()
    return path


def test_a_new_course_keeps_its_join_files_and_people_out_of_git(tmp_path: Path) -> None:
    roster = tmp_path / "people.csv"
    roster.write_text("id,name\nalice,Alice\n")
    course = tmp_path / "ml"
    init_course(TEMPLATES, course, roster, SilentReporter())
    (course / "join").mkdir()
    (course / "join" / "ml-alice.join").write_text("{}")
    assert added(course) == [".gitignore", "course.yaml"]


def test_an_invitation_adds_the_line_to_a_folder_of_before(tmp_path: Path) -> None:
    folder = course_folder(tmp_path / "ml")
    (folder.path / ".gitignore").write_text(".course/\nroster.csv\nimported/\nmine.txt")
    path = invited(folder, folder.path / "join")
    assert added(folder.path) == [".gitignore", "course.yaml"]
    lines = (folder.path / ".gitignore").read_text().splitlines()
    assert lines[:4] == [".course/", "roster.csv", "imported/", "mine.txt"]
    # A draft that a kill leaves holds the same code.
    path.rename(path.with_name(f".{path.name}.0badcafe"))
    assert added(folder.path) == [".gitignore", "course.yaml"]
    invited(folder, folder.path / "join")
    assert (folder.path / ".gitignore").read_text().splitlines() == lines


def test_join_files_written_elsewhere_are_ignored_there(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    folder = course_folder(tmp_path / "repository" / "ml")
    git(tmp_path / "repository", "init", "--quiet")
    invited(folder, tmp_path / "repository" / "join")
    found = added(tmp_path / "repository")
    assert not [one for one in found if one.endswith(".join") or "roster" in one]
    assert "ml/course.yaml" in found


def test_a_file_that_cannot_be_changed_is_named(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").mkdir()
    with pytest.raises(LabError, match="cannot write") as refused:
        ignore_in_git(tmp_path)
    assert "*.join" in refused.value.why
