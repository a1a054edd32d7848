"""A course's folder: seats, pseudonyms, and servers that nobody has any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.roster import write_roster
from labctl.courses.records.student import Student
from labctl.errors import ConfigError, LabError, NotFoundError
from labctl.model import NAME_PATTERN, Endpoint, Offer, Server, ServerState

STUDENTS = [
    Student(id="ada"),
    Student(id="bob", team="t1"),
    Student(id="cy", team="t1", active=False),
    Student(id="gone", active=False),
]


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    make_private(tmp_path)
    name = "a-course-with-a-very-long-name-indeed-x"
    (tmp_path / "course.yaml").write_text(f"course: {name}\n")
    write_roster(tmp_path / "roster.csv", STUDENTS)
    return CourseFolder(tmp_path)


def server(lab_id: str, state: ServerState = "running") -> Server:
    return Server(
        id="i-1",
        provider="aws",
        lab="l",
        lab_id=lab_id,
        alias="l",
        endpoint=Endpoint(host="h"),
        offer=Offer(provider="aws", type="t", price_usd_per_hour=2.0),
        created_at=5.0,
        state=state,
    )


def test_a_team_has_one_seat_and_who_left_none_unless_asked_for(folder: CourseFolder) -> None:
    assert [(one.name, one.students) for one in folder.list_seats()] == [
        ("ada", ("ada",)),
        ("t1", ("bob",)),
    ]
    assert [(one.name, one.students) for one in folder.list_seats(active_only=False)] == [
        ("ada", ("ada",)),
        ("t1", ("bob", "cy")),
        ("gone", ("gone",)),
    ]
    assert (
        folder.find_seat_of("cy").name
        == folder.find_seat("bob").name
        == folder.find_seat("t1").name
        == "t1"
    )
    assert [one.name for one in folder.choose_seats(["cy", "t1", "ada"])] == ["t1", "ada"]
    assert folder.choose_seats([]) == folder.list_seats()


def test_what_a_provider_is_told_says_nothing_of_who_it_is(
    folder: CourseFolder, tmp_path: Path
) -> None:
    for one in folder.list_seats(active_only=False):
        assert NAME_PATTERN.fullmatch(one.lab)
        assert len(one.lab) <= 39
        assert one.lab.endswith(one.pseudonym)
        # The pseudonym is a keyed hash: a short name such as "ada" may occur in it by chance.
        plain = one.lab.removesuffix(one.pseudonym)
        assert one.name not in plain.removeprefix("a-course-with-a-very-long-name")
        assert one.lab_id != one.pseudonym[:12]
        assert len(one.lab_id) == 12
    other = tmp_path / "other"
    make_private(other)
    secret = CourseFolder(other)
    assert secret.pseudonym("ada") != folder.pseudonym("ada")
    assert CourseFolder(folder.path).list_seats() == folder.list_seats()


def test_an_unknown_name_is_told_the_nearest(folder: CourseFolder) -> None:
    for find in (folder.find_student, folder.find_seat, folder.find_seat_of):
        with pytest.raises(NotFoundError) as raised:
            find("adda")
        assert "did you mean ada?" in raised.value.why


def test_a_server_whose_student_went_into_a_team_is_not_forgotten(folder: CourseFolder) -> None:
    before = folder.find_seat("ada")
    folder.ledger.append("up", seat="ada", server_id="i-1", usd_per_hour=2.0)
    folder.ledger.append("up", seat="bob", server_id="i-2")
    folder.ledger.append("down", seat="bob", server_id="i-2")
    folder.ledger.append("up", seat=".check", server_id="i-3")
    write_roster(folder.roster_file, [Student(id="ada", team="t1"), *STUDENTS[1:]])
    folder.refresh()
    assert folder.find_seat("ada").name == "t1"
    assert before.lab_id not in {one.lab_id for one in folder.list_seats(active_only=False)}
    former = folder.list_seats(active_only=False, former=True)[-1]
    assert (former.name, former.students, former.lab_id) == ("ada", (), before.lab_id)
    (living,) = folder.list_running([server(before.lab_id), server("of-another")])
    assert (living.seat, living.usd_per_hour) == ("ada", 2.0)
    folder.ledger.append("down", seat="ada", server_id="i-1")
    assert folder.list_seats(active_only=False, former=True) == folder.list_seats(active_only=False)


def test_what_ended_is_not_alive_and_what_is_stopped_says_so(folder: CourseFolder) -> None:
    lab_id = folder.find_seat("ada").lab_id
    found = folder.list_running(
        [server(lab_id, state="terminated"), server(lab_id, state="stopped")]
    )
    assert [one.stopped for one in found] == [True]


def test_the_secret_is_made_once_and_its_loss_or_damage_is_told(folder: CourseFolder) -> None:
    file = folder.private / "course.json"
    data = file.read_bytes()
    assert (file.stat().st_mode & 0o777, folder.private.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not make_private(folder.path)
    assert file.read_bytes() == data
    for wrong in (b"{", b'{"version":2}', data.replace(b'"version":1', b'"version":9')):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match="damaged, or from a newer"):
            CourseFolder(folder.path).list_seats()
    file.unlink()
    with pytest.raises(ConfigError, match="not a course folder"):
        _ = CourseFolder(folder.path).id


def test_a_link_in_place_of_the_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".course").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match="is a link"):
        make_private(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
