"""A course's folder, join files, bundles and receipts of before."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from frozen import Frozen, Student

from labctl.cli.groups import cli
from labctl.courses.collect import collect
from labctl.courses.grades import list_grades
from labctl.courses.invitation import derive_enrollment_key, enroll, invite, read_join
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.spending import compute_spending, spent_usd
from labctl.errors import ConfigError, PolicyError
from labctl.submissions import bundle, receipt
from labctl.submissions.receiver import Receiver
from labctl.submissions.untrusted_json import UPGRADE


@pytest.fixture
def folder(frozen: Frozen) -> CourseFolder:
    frozen.unpack("course")
    (frozen.root / "teacher").mkdir()
    (frozen.root / "course").rename(frozen.root / "teacher" / "ml")
    return CourseFolder(frozen.root / "teacher" / "ml")


@pytest.fixture
def keys(frozen: Frozen, folder: CourseFolder) -> AuthorizedKeys:
    file = frozen.root / "teacher" / "authorized_keys"
    file.write_bytes(frozen.read("authorized_keys"))
    return AuthorizedKeys(folder, file)


def test_seats_keep_the_names_by_which_their_servers_are_found(
    frozen: Frozen, folder: CourseFolder
) -> None:
    seats = {one["name"]: one for one in frozen.value("json/course-roster.json")["seats"]}
    assert [one.name for one in folder.list_seats()] == ["alice", "owls", "dan"]
    for one in folder.list_seats():
        before = seats[one.name]
        assert (one.lab, one.lab_id, one.pseudonym) == (
            before["lab"], before["lab_id"], before["pseudonym"],
        )  # fmt: skip


def test_the_ledger_is_read_whole_and_gone_on_with(folder: CourseFolder) -> None:
    told: list[str] = []
    folder.ledger.notify = told.append
    entries = folder.ledger.list_entries()
    assert told == []
    assert {one.kind for one in entries} >= {
        "up", "cost", "down", "budget", "due", "closed", "collected", "graded", "released",
        "joined",
    }  # fmt: skip
    last = entries[-1]
    spent = compute_spending(entries, last.at)
    assert spent["dan"].hours == pytest.approx(3.0, rel=0.01)
    assert spent_usd(entries, "dan", last.at) == pytest.approx(1.5, rel=0.01)
    added = folder.ledger.append("extend", seat="alice", by="ta", why="a demo", seconds=1800)
    assert added.n > last.n
    assert len(folder.ledger.list_entries()) == len(entries) + 1


def test_grades_are_what_they_were(folder: CourseFolder) -> None:
    found = {one.student: one.score for one in list_grades(folder, "hw3")}
    assert found == {"alice": 87.5, "bob": 87.5, "carol": 87.5, "dan": 87.5}


def test_every_bundle_is_as_its_receipt_says(folder: CourseFolder) -> None:
    found = collect(folder, "hw3")
    assert not found.damaged
    assert {one.seat: (one.state, one.student) for one in found.submissions} == {
        "alice": ("in", "alice"), "owls": ("in", "carol"), "dan": ("in", "dan"),
    }  # fmt: skip
    assert [why for _, why in Receiver(folder.drop).check("hw3")] == ["", "", ""]


def test_a_changed_bundle_is_found(folder: CourseFolder) -> None:
    path = Receiver(folder.drop).find_bundle("hw3", "dan")
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:-1] + b"x")
    assert collect(folder, "hw3").damaged


def test_feedback_that_was_released_is_fetched(folder: CourseFolder) -> None:
    found = Receiver(folder.drop).feedback("hw3", "alice")
    assert found is not None
    assert msgspec.to_builtins(found)


# Join files


def test_a_join_file_is_read_and_its_code_still_opens(
    frozen: Frozen, folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    join = read_join((folder.path / "join" / "ml-bob.join").read_bytes())
    assert (join.course, join.student) == ("ml", "bob")
    assert (join.course_id, join.seat) == (folder.id, folder.find_seat_of("bob").lab_id)
    assert join.keeper == "ssh://labctl@keeper.example.edu:22"
    public = derive_enrollment_key(join)[1]
    assert public.split()[1] in keys.file.read_text()
    own = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
    enroll(folder, "bob", own, keys, 0.0)
    assert public.split()[1] not in keys.file.read_text()
    assert sorted(keys.list_students()) == ["alice", "bob"]


def test_a_used_one_opens_nothing(
    frozen: Frozen, folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    assert read_join(frozen.source.joinpath("alice.join").read_bytes()).student == "alice"
    with pytest.raises(PolicyError):
        enroll(folder, "alice", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43, keys, 0.0)


def test_todays_join_file_says_what_one_of_before_said(
    frozen: Frozen, folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path
) -> None:
    before = json.loads((frozen.source / "alice.join").read_bytes())
    made = invite(folder, "dan", tmp_path / "join", keys, before["join"]["host_key"])
    now = json.loads(made.path.read_bytes())
    assert now.keys() == before.keys(), "an earlier labctl reads no others"
    assert now["join"].keys() == before["join"].keys()
    assert now["join"]["version"] == before["join"]["version"]


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 2, "door": "of tomorrow"}])
def test_a_join_file_of_a_newer_labctl_says_what_to_update(
    frozen: Frozen, change: dict[str, Any]
) -> None:
    body = json.loads((frozen.source / "alice.join").read_bytes())
    body["join"].update(change)
    with pytest.raises(ConfigError) as caught:
        read_join(json.dumps(body).encode())
    assert "newer labctl" in caught.value.what
    assert caught.value.hint == UPGRADE


# Bundles and receipts, at the student's


@pytest.fixture
def handed_in(student: Student, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(student.home))
    return student.home / "digits" / ".labctl" / "submissions" / "hw3"


def verify(student: Student, *words: str) -> Any:
    lab = str(student.home / "digits")
    done = CliRunner().invoke(cli, ["-C", lab, "submit", "--verify", *words, "--json"])
    return done.exit_code, json.loads(done.stdout)["verified"]


def test_a_receipt_is_verified_with_its_bundle(student: Student, handed_in: Path) -> None:
    code, found = verify(student)
    assert (code, found["bundle"]) == (0, "same")
    assert found["receipt"]["student"] == "alice"


def test_a_bundle_that_was_changed_is_said(student: Student, handed_in: Path) -> None:
    path = handed_in / "bundle-0001.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, found = verify(student)
    assert (code, found["bundle"]) == (3, "changed")


def test_a_bundle_is_looked_through_today(student: Student, handed_in: Path) -> None:
    data = (handed_in / "bundle-0001.tar").read_bytes()
    found, _ = bundle.inspect(io.BytesIO(data))
    assert (found.student, found.run, found.checkpoint) == ("alice", "first", "step-00000040")


def test_a_receipt_of_a_newer_labctl_says_what_to_update(handed_in: Path) -> None:
    path = handed_in / "receipt-0001.json"
    body = json.loads(path.read_bytes())
    body["receipt"]["version"] = 2
    with pytest.raises(PolicyError) as caught:
        receipt.decode(json.dumps(body).encode())
    assert "newer labctl" in caught.value.why
    assert caught.value.hint == UPGRADE
