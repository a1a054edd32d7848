"""The files of an assignment on the command line: what staff publishes and a student receives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.starter_output import has_failed, print_image_change, print_starters
from labctl.courses.join import JoinResult
from labctl.courses.starter_delivery import DeliveredStarter
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver
from labctl.sync.starter_update import FileChange

# A result has `code`, `out` and `err`.
Result = Any
Labctl = Callable[..., Result]
ASSIGNMENT = """
assignments:
  hw3:
    template: starter
"""


@pytest.fixture
def course(labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    (home / "roster.csv").write_text("id,name\nalice,Alice\n")
    assert labctl("course", "init", "ml", "--roster", "roster.csv").code == 0
    folder = home / "ml"
    with (folder / "course.yaml").open("a") as file:
        file.write(ASSIGNMENT)
    (folder / "starter").mkdir()
    (folder / "starter" / "train.py").write_text("print('train')\n")
    return folder


def test_a_plan_and_a_push_say_which_files_students_have(labctl: Labctl, course: Path) -> None:
    plan = labctl("-C", "ml", "course", "plan", "--offline")
    text = "hw3: 1 file from starter; not published yet (labctl course push)"
    assert text in " ".join(plan.out.split())
    pushed = labctl("-C", "ml", "course", "push", "--json")
    assert json.loads(pushed.out)["starters"] == [
        {"assignment": "hw3", "files": 1, "changed": True}
    ]
    assert (course / "handouts" / "hw3" / "train.py").is_file()
    again = labctl("-C", "ml", "course", "push")
    assert "hw3: published already; students get them with labctl join, or on" in again.out
    plan = labctl("-C", "ml", "course", "plan", "--offline", "--json")
    (starter,) = json.loads(plan.out)["plan"]["starters"]
    assert (starter["published"], starter["files"]) == ("current", 1)


def test_a_plan_warns_only_of_assignments_without_an_image(labctl: Labctl, course: Path) -> None:
    def read_plan() -> str:
        return " ".join(labctl("-C", "ml", "course", "plan", "--offline").out.split())

    warning = "labs that name none get python:3.12-slim"
    assert f"no image: {warning}" in read_plan()
    (course / "starter" / "Dockerfile").write_text("FROM scratch\n")
    assert warning not in read_plan()
    with (course / "course.yaml").open("a") as file:
        file.write("  hw4:\n    template: other\n")
    (course / "other").mkdir()
    (course / "other" / "lab.yaml").write_text("run: python train.py\n")
    assert f"no image for hw4: {warning}" in read_plan()
    (course / "other" / "lab.yaml").write_text("image: pytorch:2\n")
    assert warning not in read_plan()


@pytest.mark.parametrize("command", [("plan", "--offline"), ("push",)])
def test_an_unknown_template_is_an_error_with_its_line(
    command: tuple[str, ...], labctl: Labctl, course: Path
) -> None:
    text = (course / "course.yaml").read_text().replace("template: starter", "template: nowhere")
    (course / "course.yaml").write_text(text)
    said = labctl("-C", "ml", "course", *command)
    line = text.splitlines().index("    template: nowhere") + 1
    assert said.code == 2
    assert f"line {line}: assignments.hw3.template: there is no directory 'nowhere'" in said.err
    assert not (course / "handouts").exists()


def test_join_without_a_file_needs_a_lab_of_a_course(labctl: Labctl) -> None:
    said = labctl("join")
    assert said.code == 2
    assert "do not come from a course" in said.err
    assert labctl("join", "--into", "x").code == 2


@pytest.mark.parametrize("words", [(), ("--restore", "train.py")])
def test_join_outside_of_a_course_says_how_a_student_joins(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(home)
    for place in (".", "no-directory"):
        said = labctl("-C", place, "join", *words)
        assert (said.code, "no course was joined in" in said.err) == (4, True), said.err
        assert "labctl join FILE\n        (with the join file from your instructor)" in said.err
        assert "labctl init" not in said.err
    missing = labctl("join", "ml-alice.join")
    assert "where you saved the join file from your instructor" in missing.err


@pytest.mark.parametrize("run", ["", "run: python train.py\n"])
def test_joining_suggests_labctl_run_where_there_is_something_to_run(
    run: str, labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.yaml").write_text(f"lab: ml-a\n{run}")
    joined = JoinResult(course="ml", student="a", directory=tmp_path)
    monkeypatch.setattr("labctl.cli.join.fetch_join_file", lambda place: b"")
    monkeypatch.setattr("labctl.cli.join.join_course", lambda *_, **__: joined)
    said = labctl("join", "ml.join")
    expected = "labctl run" if run else "labctl run -- COMMAND"
    assert said.out.splitlines()[-1] == f"  {expected}"


def test_joining_suggests_the_open_assignment_that_is_due_next(
    labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.yaml").write_text("lab: ml-a\n")
    dues = {
        "a": "2020-01-01 12:00 UTC",
        "b": "",
        "c": "2098-01-01 12:00 UTC",
        "d": "2097-01-01 12:00 UTC",
    }
    receiver = Receiver(tmp_path / "drop")
    receiver.init()
    (tmp_path / "assignments").mkdir()
    for name, due in dues.items():
        given = {
            "course": "ml",
            "host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFAKE",
            "due": due,
        }
        text = write_assignment(receiver, name, "ssh://a@127.0.0.1", given)
        (tmp_path / "assignments" / f"{name}.yaml").write_text(text)
    joined = JoinResult(course="ml", student="a", directory=tmp_path, assignments=tuple(dues))
    monkeypatch.setattr("labctl.cli.join.fetch_join_file", lambda place: b"")
    monkeypatch.setattr("labctl.cli.join.join_course", lambda *_, **__: joined)
    expected = "  labctl submit --assignment assignments/d.yaml"
    assert labctl("join", "ml.join").out.splitlines()[-1] == expected


def test_a_student_with_an_own_lab_file_reads_how_to_use_the_new_image(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"course": "ml", "student": "a", "directory": tmp_path, "image": "x:2"}
    print_image_change(JoinResult(**values, image_change="updated"))
    print_image_change(JoinResult(**values, image_change="differs"))
    assert capsys.readouterr().out.splitlines() == [
        "lab.yaml: the course's image is now x:2",
        "! lab.yaml does not use the course's image; your file is unchanged",
        "  next: to use it, write there: image: x:2",
    ]


def test_a_student_reads_what_happened_to_each_file_and_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    starter = DeliveredStarter(
        assignment="hw3",
        directory=tmp_path / "ml" / "hw3",
        state="updated",
        changes=(
            FileChange(path="new.py", action="added"),
            FileChange(path="model.py", action="merged"),
            FileChange(path="mine.py", action="kept"),
            FileChange(path="util.py", action="kept"),
            FileChange(path="train.py", action="conflict", beside="train.py.conflict"),
            FileChange(
                path="data/x.csv", action="blocked", why="data is a link", blocked_by="data"
            ),
        ),
    )
    starter.directory.mkdir(parents=True)
    (starter.directory / "mine.py").touch()
    failed = DeliveredStarter(
        assignment="hw4",
        directory=tmp_path,
        state="failed",
        problem="no\x1b",
        next="labctl join",
    )
    joined = JoinResult(course="ml", student="a", directory=tmp_path, starters=(starter, failed))
    print_starters(joined)
    assert capsys.readouterr().out.splitlines() == [
        "hw3: 1 new file in ml/hw3",
        "  model.py: merged with your changes",
        "  mine.py: left as you changed it",
        "  util.py: changed in the course; not written, as you deleted it",
        "! train.py: you and the course changed the same lines; your file is unchanged",
        "  next: edit ml/hw3/train.py.conflict, then:",
        "        mv ml/hw3/train.py.conflict ml/hw3/train.py",
        "! data/x.csv: not written: data is a link",
        "  next: move ml/hw3/data away, then:",
        "        labctl join",
        "- hw4: no\\x1b",
        "  next: labctl join",
    ]
    assert has_failed(joined)


def test_a_new_course_may_have_the_sample_assignment(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests/template lets them make the hidden data and train the solution.
    monkeypatch.setattr("labctl.courses.sample_assignments.GENERATORS", ())
    monkeypatch.chdir(home)
    (home / "roster.csv").write_text("id,name\nalice,Alice\n")
    words = ("course", "init", "ml", "--roster", "roster.csv", "--assignment", "hands-on")
    said = labctl(*words, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["assignment"]["name"] == "hands-on"
    course_yaml = (home / "ml" / "course.yaml").read_text()
    assert course_yaml.count("assignments:\n") == 1
    assert max(map(len, course_yaml.splitlines())) <= 80
    plan = labctl("-C", "ml", "course", "plan", "--offline")
    assert plan.code == 0, plan.err
    line = "24 files (1 test file among them) from image-classifier-starter; not published"
    assert line in " ".join(plan.out.split())


def test_the_course_yaml_of_an_existing_course_is_left_to_its_instructor(
    labctl: Labctl, course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = (course / "course.yaml").read_bytes()
    words = ("course", "init", "ml", "--roster", "roster.csv", "--assignment", "hands-on")
    said = labctl(*words)
    assert said.code == 0, said.err
    assert "Add these lines to it:\n\nassignments:\n  hands-on:\n" in said.out
    assert "scikit-learn is not installed here, so the hidden data is missing" in said.err
    assert "PyTorch is not installed here" in said.err
    assert (course / "course.yaml").read_bytes() == before
    assert (course / "assignments" / "hands-on" / "rubric.md").is_file()
