"""The code of a join file as the password of the page for students, from the invitation on."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest

from labctl.courses.invitation import JoinInvitation, enroll, invite, read_join, withdraw_expired
from labctl.courses.join_codes import (
    is_page_code,
    list_page_users,
    make_unusable_key,
    mark_page_code_used,
    page_codes_dir,
    read_page_code,
    withdraw_page_codes,
)
from labctl.courses.keys import AuthorizedKeys, parse_key
from labctl.courses.records.folder import CourseFolder

sys.path.append(str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import KEY, course_folder

HOST_KEY = "ssh-ed25519 " + "A" * 68


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    return course_folder(tmp_path / "ml")


@pytest.fixture
def keys(folder: CourseFolder, tmp_path: Path) -> AuthorizedKeys:
    return AuthorizedKeys(folder, tmp_path / "authorized_keys")


def invited(
    folder: CourseFolder, keys: AuthorizedKeys, student: str = "alice", valid_s: int = 60
) -> JoinInvitation:
    file = invite(folder, student, folder.path / "join", keys, HOST_KEY, valid_s).path
    return read_join(file.read_bytes(), now=0)


def test_the_code_is_that_students_and_is_not_stored(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    join, now = invited(folder, keys), time.time()
    assert is_page_code(folder, "alice", join.code, now)
    assert not is_page_code(folder, "bob", join.code, now)
    assert not is_page_code(folder, "alice", join.code.upper(), now)
    assert not is_page_code(folder, "alice", "", now)
    assert not is_page_code(folder, "alice", "é" * 32, now)
    assert not is_page_code(folder, "../alice", join.code, now)
    (file,) = page_codes_dir(folder).iterdir()
    assert join.code not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_new_invitation_replaces_the_code(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    first, now = invited(folder, keys), time.time()
    mark_page_code_used(folder, "alice")
    second = invited(folder, keys)
    assert not is_page_code(folder, "alice", first.code, now)
    assert is_page_code(folder, "alice", second.code, now)
    assert list_page_users(folder) == []


def test_joining_keeps_the_code_valid_for_the_page(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    join = invited(folder, keys)
    late = join.expires + 1.0
    assert not is_page_code(folder, "alice", join.code, late)
    enroll(folder, "alice", KEY, keys, time.time())
    assert is_page_code(folder, "alice", join.code, late)
    assert list_page_users(folder) == ["alice"]


def test_an_unused_code_expires_with_its_file(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    join = invited(folder, keys)
    assert withdraw_expired(folder, keys, join.expires + 1.0) == ["alice"]
    assert not is_page_code(folder, "alice", join.code, join.expires + 1.0)


def test_who_left_needs_a_new_invitation_to_return(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    alice, bob = invited(folder, keys), invited(folder, keys, "bob")
    mark_page_code_used(folder, "alice")
    withdraw_page_codes(folder, {"bob", "carol"})
    assert read_page_code(folder, "alice") is None
    assert not is_page_code(folder, "alice", alice.code, time.time())
    assert is_page_code(folder, "bob", bob.code, time.time())


def test_a_key_that_nobody_has_is_a_key() -> None:
    one, other = make_unusable_key(), make_unusable_key()
    assert one != other
    assert parse_key(one)[0] == "ssh-ed25519"
