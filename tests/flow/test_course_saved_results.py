"""Results that the keeper saved: their owner fetches them, and nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from course_keeper_context import Pretended, asked, course_folder

from labctl.courses.context import SEATS
from labctl.courses.requests import RequestHandler
from labctl.courses.saved_results import fetch_saved_results
from labctl.courses.server_contents import LABS
from labctl.errors import NotFoundError, ProviderError, UsageError
from labctl.events import SilentReporter
from labctl.providers import ProviderContext
from labctl.providers.course import CourseProvider, CourseProviderSettings
from labctl.servers.context import LabContext

CONTENT = os.urandom(100_000)


class Line:
    """The connection of one student's key to the keeper; `edit` changes its replies."""

    def __init__(self, handler: RequestHandler, student: str, edit: dict[str, Any]) -> None:
        self.handler, self.student, self.edit = handler, student, edit

    def exchange(self, line: bytes) -> bytes:
        reply = json.loads(self.handler.answer(self.student, line))
        changed = {key: value for key, value in self.edit.items() if key in reply}
        return json.dumps({**reply, **changed}).encode() + b"\n"

    def close(self) -> None:
        pass


@dataclass
class Student:
    """What fetching needs of a lab."""

    provider: Any
    config: Any
    name: str = "ml"
    reporter: Any = field(default_factory=SilentReporter)


@dataclass
class Config:
    root: Path


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RequestHandler:
    monkeypatch.setattr("labctl.courses.saved_files.SAVED_PART_BYTES", 30_000)
    folder = course_folder(tmp_path / "ml")
    for seat, run in (("alice", "r1"), ("owls", "r2")):
        logs = folder.path / SEATS / seat / "runs" / run / "logs"
        logs.mkdir(parents=True)
        (logs / "train.log").write_bytes(CONTENT)
        (logs / "empty").touch()
        (logs / ".labctl-partial").mkdir()
        (logs / ".labctl-partial" / "half").touch()
        (logs.parents[2] / "lab.yaml").write_text("staff's own")
    return RequestHandler(folder, Pretended(folder))


def lab_of(handler: RequestHandler, root: Path, student: str, **edit: Any) -> LabContext:
    around = ProviderContext(
        data_dir=root,
        owner=student,
        connect=lambda endpoint: None,
        settle_host_key=lambda endpoint: endpoint,
        progress=lambda text, done, total: None,
        talk=lambda endpoint, request: Line(handler, student, edit),
    )
    settings = CourseProviderSettings(
        keeper="ssh://k@keeper.example", host_key="ssh-ed25519 " + "A" * 68
    )
    return cast("LabContext", Student(CourseProvider(settings, around), Config(root / student)))


def test_each_student_fetches_their_own_seats_results(
    handler: RequestHandler, tmp_path: Path
) -> None:
    for student, run in (("alice", "r1"), ("bob", "r2"), ("carol", "r2")):
        found = fetch_saved_results(lab_of(handler, tmp_path, student))
        assert found.downloaded == (f"{run}/logs/empty", f"{run}/logs/train.log")
        log = tmp_path / student / "from-course" / run / "logs" / "train.log"
        assert log.read_bytes() == CONTENT
        assert [path.name for path in log.parent.iterdir()].count(".labctl-partial") == 0
    again = fetch_saved_results(lab_of(handler, tmp_path, "alice"))
    assert (again.downloaded, len(again.present)) == ((), 2)


def test_results_of_the_labs_that_students_created_are_fetched_too(
    handler: RequestHandler, tmp_path: Path
) -> None:
    lab = handler.folder.path / SEATS / "owls" / LABS / "hw1-ml-bob-5d1f0c"
    (lab / "runs" / "r2" / "logs").mkdir(parents=True)
    (lab / "runs" / "r2" / "logs" / "train.log").write_text("of bob's own lab")
    (lab / ".labctl").mkdir()
    (lab / ".labctl" / "index.json").write_text("the keeper's own")
    for student in ("bob", "carol"):
        found = fetch_saved_results(lab_of(handler, tmp_path, student))
        own = "hw1-ml-bob-5d1f0c/r2/logs/train.log"
        assert found.downloaded == (own, "r2/logs/empty", "r2/logs/train.log")
        assert (found.directory / own).read_text() == "of bob's own lab"
    # A run of the seat's own lab may be called like the other lab.
    same = handler.folder.path / SEATS / "owls" / "runs" / lab.name / "logs"
    same.mkdir(parents=True)
    (same / "train.log").write_text("of a run")
    found = fetch_saved_results(lab_of(handler, tmp_path, "bob"))
    assert found.downloaded == (f"{lab.name}/logs/train.log",)
    for student, path in (
        ("bob", "hw1-ml-bob-5d1f0c/../.labctl/index.json"),
        ("bob", "hw1-ml-bob-5d1f0c"),
        ("alice", own),
    ):
        reply = asked(handler, student, "saved-file", path=path, offset=0)
        assert reply["error"]["kind"] == "NotFoundError"


def test_files_of_the_servers_home_directory_are_fetched_too(
    handler: RequestHandler, tmp_path: Path
) -> None:
    home = handler.folder.path / SEATS / "alice" / "server-home" / "2026-05-04T10-00-00"
    home.mkdir(parents=True)
    (home / "notes.txt").write_text("mine")
    (home / "link").symlink_to(home.parents[1] / "runs" / "lab.yaml")
    own = f"server-home/{home.name}/notes.txt"
    found = fetch_saved_results(lab_of(handler, tmp_path, "alice"))
    assert own in found.downloaded
    assert not [path for path in found.downloaded if path.endswith("link")]
    assert (found.directory / own).read_text() == "mine"
    for student, path in (
        ("bob", own),
        ("alice", f"server-home/{home.name}/link"),
        ("alice", "server-home/../runs/lab.yaml"),
    ):
        reply = asked(handler, student, "saved-file", path=path, offset=0)
        assert reply["error"]["kind"] == "NotFoundError"


@pytest.mark.parametrize(
    "path",
    [
        "../../owls/runs/r2/logs/train.log",
        "../lab.yaml",
        "/etc/passwd",
        "r1/logs",
        "r1/out",
        "r1/there/train.log",
        "r1/pipe",
        "r1/\x00",
        "",
    ],
)
def test_nothing_else_can_be_fetched(handler: RequestHandler, path: str) -> None:
    run = handler.folder.path / SEATS / "alice" / "runs" / "r1"
    (run / "out").symlink_to(handler.folder.private / "course.json")
    (run / "there").symlink_to(handler.folder.path / SEATS / "owls" / "runs" / "r2" / "logs")
    os.mkfifo(run / "pipe")
    reply = asked(handler, "alice", "saved-file", path=path, offset=0)
    assert reply["error"]["kind"] == "NotFoundError"
    listed = [one["path"] for one in asked(handler, "alice", "saved")["files"]]
    assert listed == ["r1/logs/empty", "r1/logs/train.log"]


def test_a_keeper_cannot_write_elsewhere_or_pass_on_a_damaged_file(
    handler: RequestHandler, tmp_path: Path
) -> None:
    for path in ("../../x", "/tmp/x"):
        files = [{"path": path, "size_bytes": 1}]
        with pytest.raises(Exception, match="leaves its directory"):
            fetch_saved_results(lab_of(handler, tmp_path, "alice", files=files))
    with pytest.raises(ProviderError, match="changed while it was downloaded"):
        fetch_saved_results(lab_of(handler, tmp_path, "alice", sha256="ab" * 32))
    with pytest.raises(ProviderError, match="invalid part"):
        fetch_saved_results(lab_of(handler, tmp_path, "alice", data="?"))
    written = [path for path in (tmp_path / "alice").rglob("*") if path.is_file()]
    assert [path.name for path in written] == [".gitignore"]


def test_a_link_in_the_lab_is_not_followed(handler: RequestHandler, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "alice" / "from-course"
    root.mkdir(parents=True)
    (root / "r1").symlink_to(outside)
    found = fetch_saved_results(lab_of(handler, tmp_path, "alice"))
    assert len(found.skipped) == 2
    assert list(outside.iterdir()) == []


def test_where_nothing_was_saved_and_where_there_is_no_course(
    handler: RequestHandler, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="no saved results of yours"):
        fetch_saved_results(lab_of(handler, tmp_path, "alice", files=[]))
    other = cast("LabContext", Student(object(), Config(tmp_path)))
    with pytest.raises(UsageError, match="do not come from a course"):
        fetch_saved_results(other)
