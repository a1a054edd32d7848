"""What the keeper does by itself: warnings, ends, class hours, who has left, a lost ledger."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from course_keeper_context import KEY, Course, Pretended, create, patched_course
from directory_server import wait_until
from lab_world import DiskCloud, World, world

from labctl.courses import tasks as course_tasks
from labctl.courses.join_codes import read_page_code, store_page_code
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.requests import RequestHandler
from labctl.courses.scheduler import CourseScheduler, make_course_log_reporter
from labctl.courses.tasks import GRACE_S, CourseTasks
from labctl.model import Endpoint, Resource
from labctl.servers import guard
from labctl.transports.failures import make_refused_error
from labctl.wire.watchdog import WatchRecord

# Three days from now: most tests take place now, and no class may begin or end meanwhile.
CLASS_START = (datetime.now(UTC) + timedelta(days=3)).replace(hour=10, minute=0, second=0)
CLASS = CLASS_START.timestamp()
WEEKDAY = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[CLASS_START.weekday()]
HOURS = (
    f'hours: [{{days: [{WEEKDAY}], from: "10:00", to: "12:00", zone: UTC, prewarm: 20m}}]\n'
    "per_student: {budget: 2.00}\n"
)


@pytest.fixture
def lab(tmp_path: Path) -> World:
    return world(tmp_path)


@pytest.fixture
def course(lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    return patched_course(lab, tmp_path / "ml", monkeypatch, HOURS)


class Kept:
    """Rounds at a time of our choosing, with what they told and what was shown on servers."""

    def __init__(self, course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
        self.course = course
        self.told: list[tuple[str, str]] = []
        self.shown: list[str] = []
        self.at = time.time()
        course.folder.ledger.now = lambda: self.at
        self.busy = WatchRecord()
        staff = course.staff(make_course_log_reporter(self._notify))
        self.work = Pretended(course.folder)
        self.request_handler = RequestHandler(course.folder, self.work)
        self.keys = AuthorizedKeys(course.folder, course.folder.path / "authorized_keys")
        self.tasks = CourseTasks(
            staff, self.request_handler, self.keys, self._notify, now=lambda: self.at
        )

        def message(staff: object, seats: Any, text: str) -> list[Any]:
            self.shown.append(text)
            return []

        monkeypatch.setattr(course_tasks.broadcast, "send_message", message)
        monkeypatch.setattr(guard, "read_watchdog", lambda *_: self.busy)

    def _notify(self, name: str, text: str) -> None:
        self.told.append((name, text))

    def round(self) -> None:
        snapshot = self.tasks.take_snapshot()
        self.tasks.sweep(snapshot)
        self.tasks.apply_class_hours(snapshot)

    def lines(self, kind: str) -> list[CourseLedgerEntry]:
        return self.course.folder.ledger.list_entries(kind=kind)


@pytest.fixture
def kept(course: Course, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(course, monkeypatch)


def test_a_deed_that_nobody_expected_to_fail_comes_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a round does apart for one seat is told as well."""
    course_scheduler = CourseScheduler(
        kept.tasks.staff, kept.request_handler, kept.keys, notify=kept._notify
    )
    task = course_scheduler.scheduler.tasks["roster"]
    course_scheduler.scheduler.tasks = {"roster": task}
    roster = kept.course.folder.path / "roster.csv"
    roster.rename(roster.with_name("away"))
    roster.mkdir()  # reading it is an error of the system's
    for thread in course_scheduler.scheduler.start_due_tasks():
        thread.join(120)
    assert task.error
    roster.rmdir()
    roster.with_name("away").rename(roster)
    task.due_at = 0.0
    for thread in course_scheduler.scheduler.start_due_tasks():
        thread.join(120)
    assert task.error == ""
    assert any(text.startswith("roster: working") for _, text in kept.told)

    def broken(*_: object, **__: object) -> None:
        raise FileNotFoundError("prepare.log")

    kept.course.add("alice", price=1.0, age_s=7300)
    kept.round()
    kept.at += GRACE_S + 60
    with monkeypatch.context() as patch:
        patch.setattr("labctl.courses.tasks.teardown.end_seats", broken)
        kept.round()
    assert any(name == "alice" and "Traceback" in text for name, text in kept.told)
    kept.round()
    assert kept.course.cloud.machines == {}


def test_what_a_task_fails_with_names_the_command_of_the_course(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def servers() -> None:
        raise make_refused_error(Endpoint(host="192.0.2.1"), "")

    scheduler = CourseScheduler(
        kept.tasks.staff, kept.request_handler, kept.keys, notify=kept._notify
    ).scheduler
    scheduler.tasks = {"sweep": scheduler.tasks["sweep"]}
    monkeypatch.setattr(kept.course.cloud, "servers", servers)
    for thread in scheduler.start_due_tasks():
        thread.join(120)
    (told,) = [text for _, text in kept.told if text.startswith("sweep: ")]
    assert "\n  next: labctl course up\n        (finds" in told


def test_each_warning_comes_once_and_anew_for_another_budget(kept: Kept) -> None:
    kept.course.add("alice", price=1.0, age_s=3700)
    for _ in range(3):
        kept.round()
    assert [one.detail["percent"] for one in kept.lines("warned")] == [50]
    assert len(kept.shown) == 1
    assert "of $2.00" in kept.shown[0]
    kept.course.cloud.change("srv-alice", created_at=time.time() - 7300)
    kept.round()
    assert [one.detail["percent"] for one in kept.lines("warned")] == [50, 100]
    assert "save a checkpoint now" in kept.shown[-1]
    kept.course.folder.ledger.append("budget", seat="alice", usd=2.0)
    kept.round()
    assert kept.lines("warned")[-1].detail["percent"] == 50


def test_a_budget_that_is_over_ends_the_server_after_its_grace(kept: Kept) -> None:
    kept.course.add("alice", price=1.0, age_s=7300)
    kept.round()
    assert list(kept.course.cloud.machines) == ["srv-alice"]
    kept.at += GRACE_S + 60
    kept.round()
    assert kept.course.cloud.machines == {}
    assert ("alice", "ending its server: its budget is used up") in kept.told
    assert kept.lines("down")[-1].detail["server_id"] == "srv-alice"


def test_what_cannot_be_saved_is_not_lost_for_a_budget(kept: Kept) -> None:
    """Compute ends, the disk stays, and the log says so."""
    from lab_world import unreachable

    kept.course.add("alice", price=1.0, age_s=7300)
    kept.round()
    kept.course.world.machine.error = unreachable()
    kept.at += GRACE_S + 60
    kept.round()
    assert kept.course.cloud.machines["srv-alice"].state == "stopped"
    assert any("could be saved" in text for name, text in kept.told if name == "alice")


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_never_answers_keeps_nobody_elses_from_its_end(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Nor one whose answers are nonsense: students are root on them."""
    for name in ("alice", "owls"):
        kept.course.add(name, price=1.0, age_s=7300)
    kept.round()
    never = threading.Event()
    crashes: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda said: crashes.append(str(said.exc_value)))

    def down(staff: Any, seats: Any) -> Any:
        if seats[0].name == "alice" and hangs:
            never.wait(30)
        elif seats[0].name == "alice":
            raise AttributeError("a list has no get")
        kept.course.cloud.machines.pop(f"srv-{seats[0].name}", None)
        return []

    monkeypatch.setattr(course_tasks.teardown, "end_seats", down)
    monkeypatch.setattr(course_tasks, "PATIENCE_S", 0.4 if hangs else 30.0)
    kept.at += GRACE_S + 60
    end = time.monotonic() + 120
    while len(kept.course.cloud.machines) > 1 and time.monotonic() < end:
        kept.round()
    assert set(kept.course.cloud.machines) == {"srv-alice"}
    told = [text for name, text in kept.told if name == "alice" and "ending its server" in text]
    assert len(told) == 1, "not begun again while the first goes on"
    assert crashes == []
    logged = [name for name, text in kept.told if "AttributeError: a list has no get" in text]
    assert logged == ([] if hangs else ["alice"])
    never.set()
    monkeypatch.setattr(course_tasks, "PATIENCE_S", 30.0)
    kept.tasks._join_threads()
    assert bool(kept.course.cloud.machines) != hangs


@pytest.mark.parametrize("rescued", [False, True], ids=["after-the-grace", "near-its-end"])
def test_results_that_never_end_outlast_no_budget(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, rescued: bool
) -> None:
    """A student's server may send them for ever, and the lab is held meanwhile."""
    kept.course.add("alice", price=1.0, age_s=7300)
    kept.round()
    never = threading.Event()
    monkeypatch.setattr(course_tasks.teardown, "end_seats", lambda *_: never.wait(30) and [])
    monkeypatch.setattr(course_tasks, "PATIENCE_S", 0.2)
    monkeypatch.setattr(course_tasks.server_shutdown, "is_near_end", lambda *_: rescued)
    monkeypatch.setattr(course_tasks.server_shutdown, "await_shutdown", lambda *_: "budget")
    kept.at += GRACE_S + 60
    kept.round()
    kept.at += course_tasks.SAVE_S
    kept.round()
    assert kept.course.cloud.machines["srv-alice"].state == "running", "not before its time"
    kept.at += 60
    kept.round()
    # A round waits no longer than PATIENCE_S for the thread that stops the server.
    wait_until(lambda: kept.course.cloud.machines["srv-alice"].state == "stopped")
    wait_until(lambda: any("could be saved within 1 h" in text for _, text in kept.told))
    never.set()
    kept.tasks._join_threads()


def test_a_lost_ledger_resets_no_budget(kept: Kept) -> None:
    kept.course.add("alice", price=1.0, age_s=7300)
    kept.round()
    kept.course.folder.ledger.path.unlink()
    kept.round()
    assert kept.lines("warned")[-1].detail["percent"] == 100
    assert sum(one.detail["usd"] for one in kept.lines("cost")) == pytest.approx(2.03, abs=0.02)


def test_what_outlives_its_longest_life_ends(kept: Kept) -> None:
    kept.course.add("alice", price=0.01, age_s=12 * 3600 + GRACE_S + 60)
    kept.round()
    assert kept.course.cloud.machines == {}
    kept.course.add("bob", price=0.0, age_s=12 * 3600 + GRACE_S + 60)  # costs nothing
    kept.round()
    assert list(kept.course.cloud.machines) == ["srv-bob"]


def test_servers_are_there_before_class_and_once_only(kept: Kept) -> None:
    kept.course.cloud.settle_s = 0.0
    kept.at = CLASS - 21 * 60
    kept.round()
    assert kept.course.cloud.machines == {}
    kept.at = CLASS - 19 * 60
    kept.round()
    seats = {one.lab_id for one in kept.course.folder.list_seats()}
    assert {one.lab_id for one in kept.course.cloud.machines.values()} == seats
    assert len(seats) == 2  # alice, and the team of bob and carol
    # Whoever puts theirs down in class does not get it again unasked; who loses it does.
    down, lost = list(kept.course.cloud.machines)
    by_id = {one.id: one for one in kept.course.cloud.machines.values()}
    names = {one.lab_id: one.name for one in kept.course.folder.list_seats()}
    name = names[by_id[down].lab_id]
    kept.course.folder.ledger.append("down", seat=name, server_id=down)
    kept.course.folder.ledger.append(
        "down", seat=names[by_id[lost].lab_id], server_id=lost, why="ended unseen: lost"
    )
    kept.course.cloud.machines.clear()
    kept.at = CLASS + 600
    kept.round()
    assert [one.lab_id for one in kept.course.cloud.machines.values()] == [by_id[lost].lab_id]


def test_no_server_is_made_for_a_class_on_a_holiday(kept: Kept) -> None:
    file = kept.course.folder.path / "course.yaml"
    text = file.read_text()
    file.write_text(f"{text}holidays: [{CLASS_START:%Y-%m-%d}]\n")
    kept.course.folder.refresh()
    kept.at = CLASS + 600
    kept.round()
    assert kept.course.cloud.machines == {}
    file.write_text(text)
    kept.course.folder.refresh()
    kept.round()
    assert kept.course.cloud.machines != {}


def test_after_class_what_is_not_used_goes(kept: Kept) -> None:
    kept.course.add("alice", price=0.0)
    kept.course.add("owls", price=0.0)
    kept.work.server = kept.course.cloud.machines["srv-owls"]
    create(kept.request_handler, "bob")
    assert kept.request_handler.wait(120)
    kept.at = CLASS + 7200 + 60
    kept.busy = WatchRecord(busy=("a container runs",))
    kept.round()
    assert len(kept.course.cloud.machines) == 2
    kept.busy = WatchRecord()
    kept.round()
    assert list(kept.course.cloud.machines) == ["srv-owls"]  # bob holds it for half an hour more
    kept.at += 1860
    kept.round()
    assert kept.course.cloud.machines == {}


def test_who_leaves_the_course_gets_in_no_longer(kept: Kept) -> None:
    kept.keys.admit("alice", KEY)
    create(kept.request_handler, "alice")
    assert kept.request_handler.wait(120)
    kept.tasks.apply_roster()
    assert kept.keys.list_students() == ["alice"]
    store_page_code(kept.course.folder, "alice", KEY, 0)
    file = kept.course.folder.roster_file
    file.write_text(file.read_text().replace("alice@example.edu,,,yes", "alice@example.edu,,,no"))
    kept.tasks.apply_roster()
    assert kept.keys.list_students() == []
    assert read_page_code(kept.course.folder, "alice") is None
    assert kept.request_handler.wait(120)
    assert kept.work.calls == ["make", "end"]


def test_a_broken_roster_leaves_everybody_in(kept: Kept) -> None:
    kept.keys.admit("alice", KEY)
    kept.tasks.apply_roster()
    kept.course.folder.roster_file.write_text("id,name\n-oProxyCommand=id,x\n")
    with pytest.raises(course_tasks.LabError):
        kept.tasks.apply_roster()
    assert kept.keys.list_students() == ["alice"]
    assert kept.course.folder.find_student("alice").active


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud is one whose disks can outlive their servers."""
    monkeypatch.setattr(DiskCloud, "can_keep_itself", False, raising=False)
    for name in ("keep_disk", "release_disk", "attach_kept_disk"):
        monkeypatch.setattr(DiskCloud, name, lambda *_: [], raising=False)


@pytest.mark.usefixtures("keeps")
def test_seats_disks_go_when_their_time_is_over(kept: Kept) -> None:
    folder, cloud = kept.course.folder, kept.course.cloud
    over = Resource(
        provider="cloud",
        kind="volume",
        id="vol-1",
        lab_id=folder.find_seat("alice").lab_id,
        expires_at=kept.at - 60,
    )
    later = msgspec.structs.replace(over, id="vol-2", expires_at=kept.at + 3600)
    image = msgspec.structs.replace(over, id="ami-1", kind="image", lab_id=folder.id)
    others = msgspec.structs.replace(over, id="vol-3", lab_id="ffffffffffff")
    cloud.left += [over, later, image, others]
    kept.tasks.remove_disks()
    assert cloud.left == [later, image, others]
    assert any("removed the kept disk vol-1" in text for _, text in kept.told)


def test_values_of_the_ledger_are_plain(kept: Kept) -> None:
    kept.course.add("alice", price=1.0, age_s=3700)
    kept.round()
    for one in kept.course.folder.ledger.list_entries():
        assert msgspec.json.decode(msgspec.json.encode(one), type=CourseLedgerEntry) == one
        assert "alice" not in kept.course.cloud.machines["srv-alice"].lab
