"""`labctl course push`: the files of assignments on students' running servers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from course_context import Class, a_class, roster
from lab_world import unreachable

from labctl.agent.files.edits import edits
from labctl.cli.starter_output import print_delivered
from labctl.courses.broadcast import PushOutcome, push_files
from labctl.courses.servers import bring_up_servers
from labctl.courses.starters import publish_starters
from labctl.errors import NotFoundError
from labctl.wire.verbs import LabRequest

NAMES = ("alice", "bob", "carol")
ASSIGNMENTS = """\
assignments:
  hw2: {template: hw2}
  hw1: {template: hw1, due: 2099-01-01 12:00 UTC}
"""


@pytest.fixture
def ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    made = a_class(tmp_path, monkeypatch, roster(NAMES), ASSIGNMENTS)
    write(made, "hw1", "train.py", "one\n")
    write(made, "hw1", "net.py", "net\n")
    write(made, "hw2", "train.py", "two\n")
    write(made, "hw2", "more.py", "more\n")
    return made


def write(ml: Class, assignment: str, path: str, text: str) -> None:
    file = ml.folder.path / assignment / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def push(ml: Class) -> dict[str, PushOutcome]:
    staff = ml.staff()
    publish_starters(staff.folder, staff.paths)
    return {one.seat: one for one in push_files(staff, staff.folder.list_seats())}


def code(ml: Class, name: str) -> Path:
    return ml.machine(name).home / "labctl" / ml.seat(name).lab / "code"


def texts(ml: Class, name: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in code(ml, name).iterdir()}


def test_a_push_brings_files_and_updates_what_students_left_as_it_was(
    ml: Class, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    staff = ml.staff()
    publish_starters(staff.folder, staff.paths)
    with pytest.raises(NotFoundError, match="no seat has a server"):
        push_files(staff, staff.folder.list_seats())
    bring_up_servers(staff, [ml.seat("alice"), ml.seat("bob")])
    outcomes = push(ml)
    assert set(outcomes) == {"alice", "bob"}, "carol has no server"
    expected = {"train.py": "one\n", "net.py": "net\n", "more.py": "more\n"}
    assert (texts(ml, "alice"), texts(ml, "bob")) == (expected, expected)
    print_delivered(list(outcomes.values()))
    assert capsys.readouterr().out.splitlines() == [
        "assignments' files in /lab/code: 6 added, on 2 servers",
        "! alice, bob: train.py of hw2 was not written; hw1 has a file of this path",
    ]
    # They are nobody's work: nothing has to be saved before the server ends.
    seat = ml.seat("alice")
    monkeypatch.setenv("HOME", str(ml.machine("alice").home))
    (code(ml, "alice") / "own.py").write_text("mine\n")
    assert [file.path for file in edits(LabRequest(seat.lab, seat.lab_id)).files] == ["own.py"]

    (code(ml, "alice") / "train.py").write_text("mine\n")
    (code(ml, "alice") / "more.py").unlink()
    write(ml, "hw1", "train.py", "one, corrected\n")
    write(ml, "hw2", "more.py", "more, corrected\n")
    outcomes = push(ml)
    print_delivered(list(outcomes.values()))
    assert capsys.readouterr().out.splitlines() == [
        "assignments' files in /lab/code: 2 updated, on 1 server",
        "! alice: train.py of hw1 was changed there; the course's version is in train.py.conflict",
        "! alice: more.py of hw2 was deleted or changed there, and stays so",
        "! alice, bob: train.py of hw2 was not written; hw1 has a file of this path",
    ]
    assert texts(ml, "alice") == {
        "train.py": "mine\n", "train.py.conflict": "one, corrected\n", "net.py": "net\n",
        "own.py": "mine\n",
    }  # fmt: skip
    assert texts(ml, "bob") == {
        "train.py": "one, corrected\n", "net.py": "net\n", "more.py": "more, corrected\n",
    }  # fmt: skip
    edited = [file.path for file in edits(LabRequest(seat.lab, seat.lab_id)).files]
    assert edited == ["own.py", "train.py", "train.py.conflict"]


def test_a_server_that_does_not_answer_stops_no_other(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice"), ml.seat("bob")])
    ml.machine("alice").error = unreachable()
    outcomes = push(ml)
    assert outcomes["alice"].error
    assert outcomes["alice"].starters == ()
    assert not outcomes["bob"].error
    fields = json.loads(msgspec.json.encode(outcomes["bob"].as_json()))
    assert fields["starters"] == [
        {
            "assignment": "hw1",
            "changes": [
                {"path": path, "action": "added", "beside": "", "why": "", "blocked_by": ""}
                for path in ("net.py", "train.py")
            ],
        },
        {
            "assignment": "hw2",
            "changes": [
                {"path": "more.py", "action": "added", "beside": "", "why": "", "blocked_by": ""},
                {
                    "path": "train.py",
                    "action": "kept",
                    "beside": "",
                    "why": "hw1 has a file of this path",
                    "blocked_by": "",
                },
            ],
        },
    ]
    assert not (ml.machine("alice").home / "labctl" / ml.seat("alice").lab / "code").exists()
    ml.machine("alice").error = None
    assert not push(ml)["alice"].error
    assert texts(ml, "alice")["train.py"] == "one\n"
