"""Getting an assignment's files on the page for students: what is offered, and to whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from course_keeper_context import create
from draft_bed import EVIL, publish
from service_proxy_bed import Campus, serve_bed

from labctl.courses.starters import publish_starters
from labctl.errors import TransferError
from labctl.sync.starter_update import FileChange
from labctl.web.mutations import CourseActions

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Visitor, fill, make

BUTTON = 'href="/assignments/hw3/files"'


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def write(_: object, seat: str, assignment: str) -> tuple[FileChange, ...]:
        calls.append((seat, assignment))
        if len(calls) > 2:
            raise TransferError("the files could not be written", why="its disk may be full")
        if len(calls) == 1:
            return (FileChange(path="train.py", action="added"),)
        return (
            FileChange(path="train.py", action="conflict", beside="train.py.conflict"),
            FileChange(path=EVIL, action="kept"),
        )

    monkeypatch.setattr(CourseActions, "write_starter", write)
    return calls


@pytest.fixture
def campus(tmp_path: Path) -> Iterator[Campus]:
    bed = fill(make(tmp_path))
    starter = bed.folder.path / "assignments" / "hw3" / "starter"
    starter.mkdir(parents=True)
    (starter / "train.py").write_text("print(1)\n")
    file = bed.folder.path / "course.yaml"
    file.write_text(file.read_text().replace("hw3: {", "hw3: {template: assignments/hw3/starter, "))
    publish(bed)
    publish_starters(bed.folder, bed.paths)
    with serve_bed(bed) as campus:
        for number, student in enumerate(("lovelace", "turing")):
            seat = bed.seat(number)
            # The second student uses labctl, with a lab of their own.
            lab_id = seat.lab_id if number == 0 else "b" * 12
            create(campus.request_handler, student, f"{number}" * 16, lab=seat.lab, lab_id=lab_id)
        assert campus.request_handler.wait(60)
        yield campus


def send(visitor: Visitor, path: str) -> str:
    word = visitor.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
    assert visitor.form(path, csrf=word)[0] == 303
    return visitor.ask("/")[2]


def test_a_student_gets_the_files_on_their_server(
    campus: Campus, written: list[tuple[str, str]]
) -> None:
    visitor = campus.enter("lovelace")
    page = visitor.ask("/")[2]
    assert BUTTON in page
    assert "/assignments/hw4/files" not in page, "it hands out nothing"
    assert "/lab/code" in visitor.ask("/assignments/hw3/files")[2]
    assert written == [], "a question writes nothing"
    assert "The files of hw3 are in /lab/code. Open" in send(visitor, "/assignments/hw3/files")
    page = send(visitor, "/assignments/hw3/files")
    assert "yours stay as they are: train.py, &lt;script&gt;" in page
    assert "The course&#39;s versions of them: train.py.conflict." in page
    assert EVIL not in page
    assert "Its disk may be full" in send(visitor, "/assignments/hw3/files")
    assert written == [(campus.bed.seat(0).name, "hw3")] * 3


@pytest.mark.parametrize("student", ["turing", "liskov"])
def test_only_who_uses_the_lab_of_the_page_gets_them(
    campus: Campus, written: list[tuple[str, str]], student: str
) -> None:
    visitor = campus.enter(student)
    page = visitor.ask("/")[2]
    assert BUTTON not in page
    word = page.partition('name="csrf" value="')[2].partition('"')[0]
    assert visitor.form("/assignments/hw3/files", csrf=word)[0] == 404
    assert written == []


def test_other_assignments_and_forged_forms_write_nothing(
    campus: Campus, written: list[tuple[str, str]]
) -> None:
    visitor = campus.enter("lovelace")
    word = visitor.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
    for name in ("hw4", "hw9", "..%2f..%2fhw3"):
        assert visitor.form(f"/assignments/{name}/files", csrf=word)[0] == 404
    assert visitor.form("/assignments/hw3/files", csrf="forged")[0] == 403
    assert written == []
