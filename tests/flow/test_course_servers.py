"""Servers for a class: made together, failed apart, ended whole, paid for once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from botocore.exceptions import ClientError
from course_context import Class, ClassCloud, StoppableCloud, a_class, roster
from lab_world import Machine, Recorded, unreachable
from terminal import attach_tmux

from labctl.course import Course
from labctl.courses import broadcast, join_codes, leftovers
from labctl.courses.broadcast import extend_server, find_run, push_files, send_message
from labctl.courses.context import build_own_context, build_seat_contexts
from labctl.courses.end_consent import AccessCount
from labctl.courses.image_check import check_reference
from labctl.courses.leftovers import list_leftovers
from labctl.courses.material import NAME, add_handouts
from labctl.courses.plan import compute_plan
from labctl.courses.preflight import check_course
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.plan_changes import list_cautions
from labctl.courses.records.spending import spent_usd
from labctl.courses.seat_reporter import SeatDone, SeatNews
from labctl.courses.servers import CourseOperator, bring_up_servers
from labctl.courses.starters import publish_starters
from labctl.courses.status import read_status
from labctl.courses.teardown import end_of_term, end_seats
from labctl.errors import (
    InterruptError,
    LinkLostError,
    NotFoundError,
    PolicyError,
    ProviderError,
    UsageError,
)
from labctl.errors.subject import COURSE, Subject
from labctl.events import Event
from labctl.model import Check, Endpoint, Need, Offer, Resource, Run
from labctl.providers.aws.errors import translate_client_error
from labctl.servers import guard
from labctl.servers.context import LabContext
from labctl.servers.kept_disks import SAVED
from labctl.transports.failures import make_link_lost_error, make_refused_error
from labctl.wire.watchdog import WatchReply

NAMES = ("alice", "bob", "carol")
ARM = guard.arm  # what conftest replaces, lest a watchdog end this machine


@pytest.fixture
def ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    return a_class(tmp_path, monkeypatch, roster(NAMES))


def test_one_seats_unexpected_error_stops_no_other(ml: Class) -> None:
    ml.cloud.create_errors = [FileNotFoundError("prepare.log")]
    outcomes = bring_up_servers(ml.staff(), ml.folder.list_seats(), at_once=1)
    assert [bool(one.error) for one in outcomes] == [True, False, False]
    assert "FileNotFoundError" in outcomes[0].why
    (logged,) = [e for e in ml.reporter.events if isinstance(e, SeatNews) and "Traceback" in e.text]
    assert (logged.seat, logged.warning) == ("alice", True)
    assert [one.error for one in bring_up_servers(ml.staff(), ml.folder.list_seats())] == [
        "",
        "",
        "",
    ]


class KeepingCloud(ClassCloud):
    """One whose disks can outlive their servers."""

    can_keep_itself = False

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        self.calls.append("keep_disk")
        disk = Resource(provider="cloud", kind="volume", id="vol", expires_at=expires_at)
        self.left.append(disk)
        return [disk]

    def release_disk(self, server_id: str) -> None:
        self.left = [one for one in self.left if one.id != "vol"]

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        raise AssertionError("nothing is attached here")


def at_its_name(clouds: dict[str, ClassCloud], name: str) -> type[ClassCloud]:
    """A provider's class, of which all are this one."""

    class There(ClassCloud):
        def __new__(cls, *_: object) -> There:
            return clouds[name]  # type: ignore[return-value]

    return There


def started(one: Class, *, login_only: bool = False) -> None:
    found = bring_up_servers(one.staff(), one.folder.list_seats(), login_only=login_only)
    assert [seat.error for seat in found] == [""] * len(found)


def test_a_class_is_one_question_and_a_server_each(ml: Class) -> None:
    found = bring_up_servers(ml.staff(), ml.folder.list_seats())
    assert [one.seat for one in found] == list(NAMES)
    assert all(one.made and not one.error for one in found)
    assert len(ml.cloud.machines) == 3
    (asked_once,) = [one for one in ml.reporter.asked if one.about == "price"]
    assert "3 servers" in asked_once.question
    assert "$1.50/h" in asked_once.question
    assert "$12.00 at most" in asked_once.detail
    done = [event.seat for event in ml.reporter.events if isinstance(event, SeatDone)]
    assert sorted(done) == list(NAMES)


def test_a_price_that_nobody_agrees_to_makes_nothing(ml: Class) -> None:
    ml.reporter.answers = [False]
    with pytest.raises(PolicyError, match="nothing was started"):
        bring_up_servers(ml.staff(), ml.folder.list_seats())
    assert not ml.cloud.machines


def test_a_class_whose_results_nobody_saves_at_the_end_is_started_by_who_types_it(
    ml: Class,
) -> None:
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert not found["saving results"].ok
    assert "store" in found["saving results"].next
    ml.reporter.answers = [True, False]
    with pytest.raises(PolicyError, match="nothing was started"):
        bring_up_servers(ml.staff(), ml.folder.list_seats())
    assert not ml.cloud.machines
    assert [one.typed for one in ml.reporter.asked] == ["", "lose results"]
    started(ml)
    assert "saving results" in {
        one.name for one in check_course(ml.staff(), ml.folder.list_seats())
    }


@pytest.mark.parametrize("saved_by", ["disk", "keeper", "store"])
def test_a_class_whose_results_somebody_saves_is_one_question(
    saved_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {
        "keeper": "keeper: {host: keeper.example, user: labctl}\n",
        "store": "store: s3://bucket/ml\n",
    }
    ml = a_class(tmp_path, monkeypatch, roster(NAMES), more.get(saved_by, ""))
    if saved_by == "disk":
        ml.cloud = KeepingCloud(ml.cloud.key)
    assert "saving results" not in {
        one.name for one in check_course(ml.staff(), ml.folder.list_seats())
    }
    bring_up_servers(ml.staff(), ml.folder.list_seats())
    assert [one.about for one in ml.reporter.asked] == ["price"]


def test_again_it_finds_what_is_there_and_asks_nothing(ml: Class) -> None:
    started(ml)
    ml.reporter.asked.clear()
    found = bring_up_servers(ml.staff(), ml.folder.list_seats())
    assert not any(one.made or one.error for one in found)
    assert not ml.reporter.asked
    assert ml.cloud.calls.count("create") == 3
    assert len(ml.folder.ledger.list_entries(kind="up")) == 3


def test_one_seats_failure_stops_no_other_and_the_same_again_mends_it(ml: Class) -> None:
    ml.cloud.full = {ml.seat("bob").lab}
    found = {one.seat: one for one in bring_up_servers(ml.staff(), ml.folder.list_seats())}
    assert [name for name, one in found.items() if one.error] == ["bob"]
    assert found["bob"].server is None
    assert found["bob"].hint
    ml.cloud.full = set()
    again = {one.seat: one for one in bring_up_servers(ml.staff(), ml.folder.list_seats())}
    assert [name for name, one in again.items() if one.made] == ["bob"]
    assert len(ml.cloud.machines) == 3


def test_an_interrupted_class_says_so_and_goes_on_with_the_same_command(ml: Class) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, SeatDone):
            raise KeyboardInterrupt

    ml.reporter.on_event = interrupt
    with pytest.raises(InterruptError) as stopped:
        bring_up_servers(ml.staff(), ml.folder.list_seats(), at_once=1)
    assert "labctl course up   # continues" in stopped.value.hint
    assert "once what has started is finished" in ml.reporter.said
    assert len(ml.cloud.machines) < 3
    ml.reporter.on_event = lambda event: None
    started(ml)
    assert len(ml.cloud.machines) == 3
    assert len(ml.folder.ledger.list_entries(kind="up")) == 3


def test_a_provider_is_told_pseudonyms_and_no_name(ml: Class) -> None:
    started(ml)
    for request in ml.cloud.requests:
        told = repr((request.lab, request.lab_id, request.group, request.tags))
        assert request.group == ml.folder.id
        assert not any(name in told.lower() for name in NAMES)


def test_a_team_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = a_class(tmp_path, monkeypatch, roster(["alice"]) + roster(["bob", "carol"], team="owls"))
    found = bring_up_servers(two.staff(), two.folder.list_seats())
    assert [(one.seat, one.students) for one in found] == [
        ("alice", ("alice",)),
        ("owls", ("bob", "carol")),
    ]
    assert len(two.cloud.machines) == 2


def test_three_hundred_are_listed_once_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = a_class(tmp_path, monkeypatch, roster([f"s{n:03}" for n in range(300)]))
    found = bring_up_servers(many.staff(), many.folder.list_seats(), login_only=True)
    assert [one.error for one in found if one.error] == []
    assert sum(one.made for one in found) == 300
    assert many.cloud.calls.count("create") == 300
    assert many.cloud.listings == 1
    now = read_status(many.staff(), many.folder.list_seats())
    assert (now.running, round(now.usd_per_hour)) == (300, 150)


def test_a_spent_budget_refuses_one_seat_and_says_so(ml: Class) -> None:
    line = {"server_id": "old", "from": 0.0, "until": 3600.0, "usd": 20.0, "idle_s": 0.0}
    up_line = {"server_id": "old", "usd_per_hour": 20.0, "created_at": 0.0}
    ml.folder.ledger.append("up", seat="bob", **up_line)
    ml.folder.ledger.append("cost", seat="bob", **line)
    ml.folder.ledger.append("down", seat="bob", server_id="old")
    found = {one.seat: one for one in bring_up_servers(ml.staff(), ml.folder.list_seats())}
    assert "budget" in found["bob"].error
    assert [one.seat for one in ml.folder.ledger.list_entries(kind="refused")] == ["bob"]
    assert len(ml.cloud.machines) == 2
    ml.folder.ledger.append("budget", seat="bob", by="ta", usd=5.0)
    found = {one.seat: one for one in bring_up_servers(ml.staff(), ml.folder.list_seats())}
    assert not found["bob"].error


def test_the_watchdog_gets_what_the_ledger_leaves(ml: Class, guarded: list[float | None]) -> None:
    line = {"server_id": "old", "from": 0.0, "until": 3600.0, "usd": 12.5, "idle_s": 0.0}
    ml.folder.ledger.append("cost", seat="bob", **line)
    ml.folder.ledger.append("down", seat="bob", server_id="old")
    bring_up_servers(ml.staff(), [ml.seat("bob")])
    (armed,) = guarded
    assert armed == pytest.approx(7.5, abs=0.01)


def test_a_lost_ledger_and_state_reset_no_budget(ml: Class) -> None:
    started(ml)
    for server_id in list(ml.cloud.machines):
        made_at = ml.cloud.machines[server_id].created_at - 10 * 3600
        ml.cloud.change(server_id, created_at=made_at)
    ml.folder.ledger.path.unlink()
    ml.places.database.unlink()
    read_status(ml.staff(), ml.folder.list_seats(), refresh=True)
    fresh = ml.staff().folder.ledger.list_entries()
    now = fresh[-1].at
    assert spent_usd(fresh, "alice", now) == pytest.approx(5.0, abs=0.1)


def test_what_a_student_left_in_a_lab_of_their_own_is_home_before_the_end(ml: Class) -> None:
    started(ml)
    ml.machine("alice").run_with("night", **{"model.pt": "weights"})
    found = {one.seat: one for one in end_seats(ml.staff(), ml.folder.list_seats())}
    assert all(one.ended for one in found.values())
    assert "digits" in found["alice"].saved.labs
    here = ml.folder.private / "seats" / "alice" / "labs"
    (brought,) = here.glob("*/runs/night/checkpoints/model.pt")
    assert brought.read_text() == "weights"
    assert not ml.cloud.machines
    assert {one.seat for one in ml.folder.ledger.list_entries(kind="down")} == set(NAMES)


def test_files_in_a_home_directory_are_saved_before_the_server_ends(ml: Class) -> None:
    started(ml)
    ml.machine("alice").run_with("night", **{"model.pt": "weights"})
    (ml.machine("alice").home / "essay.ipynb").write_text("hi")
    endings = {one.seat: one for one in end_seats(ml.staff(), ml.folder.list_seats())}
    assert all(one.ended for one in endings.values())
    assert (endings["alice"].saved.home_files, endings["bob"].saved.home_files) == (1, 0)
    (essay,) = (ml.folder.private / "seats/alice/server-home").rglob("essay.ipynb")
    assert essay.read_text() == "hi"
    assert "files in home directories are downloaded" in ml.reporter.asked[-1].detail


def test_a_server_with_a_large_home_directory_stays_with_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there to type that hours of a download are fine."""
    monkeypatch.setattr("labctl.lifecycle.home_files.LARGEST_UNASKED_BYTES", 3)
    one = a_class(tmp_path, monkeypatch, roster(["alice"]))
    one.cloud = StoppableCloud(one.cloud.key)
    started(one)
    essay = one.machine("alice").home / "essay.ipynb"
    essay.write_text("long")
    (kept,) = end_seats(one.staff(), one.folder.list_seats())
    assert not kept.ended
    assert "1 file (4 B) outside the lab: essay.ipynb" in kept.why
    assert "only if you copy them yourself" in kept.why
    assert one.server("alice").state == "stopped"
    commands = [line.partition("   #")[0] for line in kept.hint.splitlines()]
    assert commands == [
        "labctl course up --only alice",
        "labctl course ssh alice -- ls -l",
        "labctl course down --only alice",
        "labctl course down --only alice --discard",
    ]
    essay.unlink()
    (ended,) = end_seats(one.staff(), one.folder.list_seats())
    assert ended.ended


def test_a_server_whose_results_cannot_come_home_does_not_end(ml: Class) -> None:
    started(ml)
    ml.machine("bob").error = unreachable()
    found = {one.seat: one for one in end_seats(ml.staff(), ml.folder.list_seats())}
    assert [name for name, one in found.items() if not one.ended] == ["bob"]
    assert "course down --only bob" in found["bob"].hint
    assert [one.lab_id for one in ml.cloud.machines.values()] == [ml.seat("bob").lab_id]
    assert ml.cloud.machines[ml.server("bob").id].state == "running"


def test_a_server_that_was_stopped_over_it_is_started_to_save_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = a_class(tmp_path, monkeypatch, roster(["alice"]))
    one.cloud = StoppableCloud(one.cloud.key)
    started(one)
    machine = one.machine("alice")
    machine.run_with("night", **{"model.pt": "weights"})
    machine.error = unreachable()
    (kept,) = end_seats(one.staff(), one.folder.list_seats())
    assert not kept.ended
    assert one.server("alice").state == "stopped"
    machine.error = None
    (ended,) = end_seats(one.staff(), one.folder.list_seats())
    assert ended.ended
    here = one.folder.private / "seats" / "alice" / "labs"
    assert list(here.glob("*/runs/night/checkpoints/model.pt"))
    assert not one.cloud.machines


def test_nothing_ends_without_a_yes(ml: Class) -> None:
    started(ml)
    ml.reporter.answers = [False, False]
    with pytest.raises(PolicyError, match="nothing was ended") as refused:
        end_seats(ml.staff(), ml.folder.list_seats())
    assert refused.value.hint == "", "an instructor who says no needs no way to say yes"
    with pytest.raises(PolicyError, match="nothing was ended"):
        end_seats(ml.staff(), [ml.seat("alice")], discard=True)
    assert len(ml.cloud.machines) == 3


def test_the_question_calls_free_servers_free(ml: Class) -> None:
    ml.cloud.price = 0.0
    started(ml)
    ml.reporter.answers = [False]
    with pytest.raises(PolicyError) as refused:
        end_seats(ml.staff(), ml.folder.list_seats())
    assert refused.value.why == "still running: 3 servers (free)"


def test_what_is_shared_stays_until_the_last_server_ends(ml: Class) -> None:
    started(ml)
    group = Resource(provider="cloud", kind="security-group", id="sg", lab_id=ml.folder.id)
    baked = Resource(provider="cloud", kind="image", id="ami", lab_id=ml.folder.id, expires_at=9e9)
    ml.cloud.left = [group, baked]
    end_seats(ml.staff(), [ml.seat("alice")], discard=True)
    assert ml.cloud.left == [group, baked]
    end_seats(ml.staff(), ml.folder.list_seats(), discard=True)
    assert ml.cloud.left == [baked]


def test_what_was_there_for_one_server_goes_with_it(ml: Class) -> None:
    """A timer at the provider, which would stand there for hours as a leftover of the course."""
    started(ml)

    def timer(name: str, **more: Any) -> Resource:
        lab_id = ml.seat(name).lab_id
        return Resource(provider="cloud", kind="schedule", id=name, lab_id=lab_id, **more)

    bobs = timer("bob")
    disk = timer("alice", price_usd_per_month=8.0)  # whatever costs something is told at the end
    kept = timer("carol", expires_at=9e9)
    ml.cloud.left = [timer("alice"), bobs, timer("carol"), disk, kept]
    end_seats(ml.staff(), [ml.seat("alice"), ml.seat("carol")], discard=True)
    assert ml.cloud.left == [bobs, disk, kept]


def test_shared_things_that_cannot_go_yet_hide_no_outcome(ml: Class) -> None:
    started(ml)
    ml.cloud.left = [
        Resource(provider="cloud", kind="security-group", id="sg", lab_id=ml.folder.id)
    ]

    def held(resource: Resource) -> None:
        raise ProviderError("it is in use")

    ml.cloud.remove = held  # type: ignore[method-assign]
    found = end_seats(ml.staff(), ml.folder.list_seats(), discard=True)
    assert [one.ended for one in found] == [True] * 3
    assert "it is in use" in ml.reporter.said


def test_the_end_of_the_term_is_proven_by_the_provider(ml: Class) -> None:
    started(ml)
    keys = ml.places.keys_dir / ml.folder.id
    assert keys.exists()
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 7)
    assert (proof.is_clean, proof.revoked_keys) == (True, 7)
    assert [one.ended for one in proof.endings] == [True] * 3
    assert not keys.exists()
    again = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0)
    assert again.is_clean


def test_the_end_of_the_term_is_one_question_that_names_everything(ml: Class) -> None:
    started(ml)
    asked = len(ml.reporter.asked)
    ml.reporter.answers = [False]
    access = AccessCount(students=2, invitations=1)
    with pytest.raises(PolicyError, match="nothing was ended") as refused:
        end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 2, access=access)
    assert refused.value.why == "still running: 3 servers ($1.50/h)"
    assert len(ml.cloud.machines) == 3
    assert end_of_term(
        ml.staff(), collect=lambda name: "", revoke=lambda: 2, access=access
    ).is_clean
    (first, second) = ml.reporter.asked[asked:]
    assert first == second
    assert "- end 3 servers ($1.50/h)\n" in first.detail
    assert "- revoke the keys of 2 students and 1 open invitation\n" in first.detail
    assert "files in home directories are downloaded first" in first.detail


def test_timers_of_servers_that_ended_earlier_go_at_the_end_of_the_term(ml: Class) -> None:
    started(ml)

    def timer(lab_id: str, kind: str = "schedule") -> Resource:
        return Resource(provider="cloud", kind=kind, id=lab_id[:6], lab_id=lab_id)

    end_seats(ml.staff(), [ml.seat("alice")], discard=True)
    foreign = timer("f" * 16)
    ml.cloud.left = [timer(ml.seat("alice").lab_id), timer(ml.seat("bob").lab_id), foreign]
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0, discard=True)
    assert proof.is_clean
    assert [left.resources for left in proof.left] == [()]
    assert ml.cloud.left == [foreign]


def test_leftovers_of_two_settings_of_a_provider_are_named_once(
    ml: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(ml)
    disk = Resource(
        provider="cloud", kind="volume", id="vol", lab_id=ml.seat("bob").lab_id, expires_at=9e9
    )
    ml.cloud.left = [disk]
    course = ml.staff().course(everywhere=True, plain=True)
    monkeypatch.setattr(leftovers, "build_provider_contexts", lambda *_, **__: [course, course])
    first, second = list_leftovers(ml.staff())
    assert (len(first.servers), first.resources) == (3, (disk,))
    assert (second.servers, second.resources) == ((), ())


def test_a_disk_that_bills_is_no_clean_end(ml: Class) -> None:
    started(ml)
    disk = Resource(
        provider="cloud",
        kind="volume",
        id="vol",
        lab_id=ml.seat("alice").lab_id,
        price_usd_per_month=8.0,
        expires_at=9e9,
    )
    ml.cloud.left = [disk]
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0, discard=True)
    assert not proof.is_clean
    assert list_leftovers(ml.staff())[0].resources == (disk,)


def test_the_end_takes_the_layers_of_the_course_and_nobody_elses(ml: Class) -> None:
    started(ml)
    folder = ml.folder
    pool = f"{folder.config.name}-{folder.id[:6]}"
    kept = [
        Resource(provider="cloud", kind="cache", id=name, lab=lab)
        for name, lab in (("ours", pool), ("another course", "ml-2025-abcdef"), ("everybody", ""))
    ]
    ml.cloud.left = list(kept)
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0, discard=True)
    assert proof.is_clean
    assert ml.cloud.left == kept[1:]


def test_keys_stay_while_a_server_could_not_end(ml: Class) -> None:
    started(ml)
    ml.machine("bob").error = unreachable()
    taken: list[int] = []

    def revoke() -> int:
        taken.append(1)
        return 1

    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=revoke)
    assert not proof.is_clean
    assert not taken


def test_who_left_the_course_ends_with_the_term(ml: Class) -> None:
    started(ml)
    file = ml.folder.roster_file
    file.write_text(file.read_text().replace("carol,Carol,,,,yes", "carol,Carol,,,,no"))
    staff = ml.staff()
    assert "carol" not in [seat.name for seat in staff.folder.list_seats()]
    end_seats(staff, staff.folder.list_seats(), discard=True)
    assert len(ml.cloud.machines) == 1
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0, discard=True)
    assert proof.is_clean
    assert not ml.cloud.machines


def test_handouts_reach_every_lab_and_what_is_made_later(ml: Class, tmp_path: Path) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice"), ml.seat("bob")])
    ml.machine("alice").run_with("night")
    slides = tmp_path / "slides.pdf"
    slides.write_text("one")
    staff = ml.staff()
    assert add_handouts(staff.folder, [slides]) == ["slides.pdf"]
    assert not any(one.error for one in push_files(staff, staff.folder.list_seats()))
    bring_up_servers(ml.staff(), ml.folder.list_seats())
    for name in NAMES:
        labs = ml.machine(name).home / "labctl"
        found = sorted(path.parts[-4] for path in labs.glob(f"*/data/{NAME}/slides.pdf"))
        wanted = ["digits"] if name == "alice" else []
        assert found == sorted([*wanted, ml.seat(name).lab])


def test_the_courses_own_folder_is_never_handed_out(ml: Class, tmp_path: Path) -> None:
    for bad in (ml.folder.path, ml.folder.path.parent, ml.folder.private / "course.json"):
        with pytest.raises(UsageError):
            add_handouts(ml.folder, [bad])
    with pytest.raises(UsageError):
        add_handouts(ml.folder, [ml.folder.roster_file])
    link = tmp_path / "link"
    link.symlink_to(ml.folder.roster_file)
    with pytest.raises(UsageError):
        add_handouts(ml.folder, [link])
    with pytest.raises(NotFoundError):
        add_handouts(ml.folder, [tmp_path / "none"])


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only terminal of the servers: without it, messages appear in those of this machine."""
    terminals = tmp_path / "pts"
    terminals.mkdir()
    (terminals / "1").touch()
    script = broadcast._SHOW_SCRIPT.replace("/dev/pts", str(terminals))
    monkeypatch.setattr(
        broadcast, "_SHOW_SCRIPT", script.replace("/tmp/tmux-", f"{tmp_path}/tmux-")
    )
    return terminals / "1"


def test_a_message_is_text_and_no_command(ml: Class, terminal: Path) -> None:
    started(ml)
    text = "room '204'; $(touch pwned) `id` 100%"
    answers = send_message(ml.staff(), ml.folder.list_seats(), text)
    assert [one.code for one in answers] == [0, 0, 0]
    home = ml.machine("alice").home
    assert (home / "labctl" / "messages.txt").read_text().endswith(f" {text}\n")
    assert not list(ml.root.rglob("pwned"))
    assert f"*** course: {text} ***" in terminal.read_text()
    for bad in ("", "\x1b[2J", "two\nlines", "x" * 501):
        with pytest.raises(UsageError):
            send_message(ml.staff(), ml.folder.list_seats(), bad)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_long_message_in_tmux_names_the_file_that_has_all_of_it(
    ml: Class, terminal: Path, columns: int
) -> None:
    started(ml)
    text = "#1 50% of the GPUs are down until noon: please end runs that you do not need. Thanks!"
    sockets = terminal.parent.parent / f"tmux-{os.getuid()}"
    sockets.mkdir()
    with attach_tmux(sockets / "default", columns) as screen:
        send_message(ml.staff(), ml.folder.list_seats()[:1], text)
        shown = screen.wait_for("course: #1 50% of the GPUs")[-1]
    assert len(shown) <= columns
    if columns == 120:
        assert shown == f"course: {text}"
    else:
        begin, rest = shown.split(" (all: ")
        assert f"course: {text} ".startswith(f"{begin.rstrip()} ")
        assert rest == "~/labctl/messages.txt)"


def test_status_shows_the_run_of_a_students_own_lab(ml: Class) -> None:
    started(ml)
    ml.machine("alice").run_with("night")
    now = read_status(ml.staff(), ml.folder.list_seats(), refresh=True)
    run = {one.seat: one.run for one in now.seats}["alice"]
    assert isinstance(run, Run)
    assert (run.id, run.state) == ("night", "exited")
    lab, server, found = find_run(ml.staff(), ml.seat("alice"))
    assert (lab.config.name, server.id, found.id) == ("digits", ml.server("alice").id, "night")
    assert lab.get_server().id == server.id


def test_a_server_that_does_not_answer_is_told_with_its_seat(ml: Class) -> None:
    started(ml)
    ml.machine("bob").error = unreachable()
    now = read_status(ml.staff(), ml.folder.list_seats(), refresh=True)
    assert [one.seat for one in now.seats if one.error] == ["bob"]


def test_news_of_a_seat_bears_its_name(ml: Class) -> None:
    started(ml)
    seats = {event.seat for event in ml.reporter.events if isinstance(event, SeatNews)}
    assert seats == set(NAMES)


def test_the_check_names_quota_and_disks(ml: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    ml.cloud.most = 2
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert not found["quota"].ok
    assert found["quota"].next == "ask"
    assert "3 x small" in found["quota"].detail
    assert "$1.50/h" in found["prices"].detail
    assert not found["image"].ok  # it is built on each server
    ml.cloud.most = 3
    started(ml)
    ml.machine("carol").error = unreachable()
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert "2 of 3" in found["logins"].detail
    assert found["logins"].next == "labctl course up --only carol"
    assert found["disks"].detail


def test_the_check_of_a_large_class_invites_all_who_have_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def next_step(count: int) -> str:
        (tmp_path / str(count)).mkdir()
        names = [f"student-{number}" for number in range(count)]
        keeper = "keeper: {host: keeper.example}\n"
        ml = a_class(tmp_path / str(count), monkeypatch, roster(names), keeper)
        found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
        return found["students' keys"].next.partition("   #")[0]

    assert next_step(2) == "labctl course invite student-0 student-1"
    assert next_step(6) == "labctl course invite --all"


def test_a_student_who_used_the_page_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inviting them again would end their access to the page."""
    keeper = "keeper: {host: keeper.example}\n"
    ml = a_class(tmp_path, monkeypatch, roster(["alice", "bob"]), keeper)
    join_codes.store_page_code(ml.folder, "alice", "public", 2**40)
    join_codes.mark_page_code_used(ml.folder, "alice")
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert found["students' keys"].detail.startswith("1 of 2 students have joined")
    assert found["students' keys"].next.startswith("labctl course invite bob ")


def test_the_check_calls_free_servers_free(ml: Class) -> None:
    ml.cloud.price = 0.0
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert found["prices"].detail == "3 x small, free"


def test_the_check_speaks_of_one_server_as_of_one(ml: Class) -> None:
    ml.cloud.price = 0.5
    found = {one.name: one for one in check_course(ml.staff(), [ml.seat("alice")])}
    assert found["prices"].detail == "one small at $0.50/h"
    assert found["quota"].detail.startswith("one small needs 1 machines, ")
    several = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert several["prices"].detail == "3 x small at $0.50/h: $1.50/h together"


def test_the_quota_is_for_those_who_are_up_too_and_for_whole_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quota(one: Class) -> Check:
        return next(
            o for o in check_course(one.staff(), one.folder.list_seats()) if o.name == "quota"
        )

    (tmp_path / "own").mkdir()
    own = a_class(tmp_path / "own", monkeypatch, roster(NAMES))
    own.cloud.most = 2
    bring_up_servers(own.staff(), [own.seat("alice")])
    assert (quota(own).ok, quota(own).detail[:9]) == (False, "3 x small")
    (tmp_path / "shared").mkdir()
    more = "shared: {accounts_per_server: 2}\n"
    shared = a_class(tmp_path / "shared", monkeypatch, roster(NAMES), more)
    shared.cloud.most = 2
    assert (quota(shared).ok, quota(shared).detail[:9]) == (True, "2 x small")


def test_a_measured_boot_leaves_no_server(ml: Class) -> None:
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats(), boot=True)}
    assert "ready after" in found["boot"].detail
    assert ml.cloud.calls.count("create") == 1
    assert not ml.cloud.machines
    assert [one.about for one in ml.reporter.asked] == ["price"]


def test_the_check_of_a_class_without_a_cloud_says_what_failed(ml: Class) -> None:
    reporter = Recorded()
    ml.reporter = reporter

    def servers() -> list[object]:
        raise unreachable()

    ml.cloud.servers = servers  # type: ignore[method-assign, assignment]
    (only,) = check_course(ml.staff(), ml.folder.list_seats())
    assert (only.name, only.ok) == ("provider", False)


def test_servers_at_the_provider_of_before_are_neither_forgotten_nor_proven_gone(
    ml: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(ml)
    before = ml.cloud
    ml.cloud = ClassCloud(before.key)
    ml.cloud.name = "another"  # type: ignore[misc]
    monkeypatch.setattr(
        "labctl.servers.context.get_provider_class",
        lambda name: at_its_name({"cloud": before}, name),
    )
    for action in (
        lambda: read_status(ml.staff(), ml.folder.list_seats(), refresh=True),
        lambda: end_seats(ml.staff(), ml.folder.list_seats()),
    ):
        with pytest.raises(PolicyError) as stopped:
            action()
        assert stopped.value.what.startswith("the server of alice is at cloud")
        assert stopped.value.hint == (
            "set `server: {provider: cloud}` in course.yaml, then:\nlabctl course down --only alice"
        )
    assert len(ml.state.list_servers()) == 3  # with the keys and names by which they are reached
    # Where another machine made them, the ledger alone knows.
    ml.places.database.unlink()
    (of_alice, *_) = compute_plan(ml.staff()).cautions
    assert of_alice.startswith("3 still running at cloud, which course.yaml no longer names")
    assert compute_plan(ml.staff()).running == ()
    assert not ml.folder.ledger.list_entries(kind="down")
    proof = end_of_term(ml.staff(), collect=lambda name: "", revoke=lambda: 0)
    assert [(one.provider, len(one.servers)) for one in proof.left if one.has_costs] == [
        ("cloud", 3)
    ]
    assert not proof.is_clean


def test_a_disk_that_was_kept_ends_the_cost_and_says_how_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = a_class(tmp_path, monkeypatch, roster(["alice"]))
    one.cloud = KeepingCloud(one.cloud.key)
    started(one)
    one.machine("alice").error = unreachable()
    (kept,) = end_seats(one.staff(), one.folder.list_seats())
    assert not kept.ended
    assert kept.hint.startswith("labctl course up --only alice   # restores")
    assert "copy the files of the home directory" in kept.hint
    assert one.folder.ledger.list_entries(kind="down")


def test_a_kept_disk_goes_with_the_server_that_brought_all_of_it_home(ml: Class) -> None:
    started(ml)
    home, other = (
        Resource(
            provider="cloud", kind="volume", id=name, lab_id=ml.seat(who).lab_id, expires_at=9e9
        )
        for name, who in (("vol-1", "alice"), ("vol-2", "bob"))
    )
    ml.cloud.left = [home, other]
    detail = {"disk": msgspec.to_builtins(home)}
    ml.state.record(SAVED, lab_id=home.lab_id, detail=detail)
    assert all(one.ended for one in end_seats(ml.staff(), ml.folder.list_seats()))
    assert ml.cloud.left == [other]


@pytest.fixture
def kept_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    """Without a keeper; alice's disk has outlived its server, and the time of bob's is over."""
    one = a_class(tmp_path, monkeypatch, roster(NAMES))
    one.cloud = KeepingCloud(one.cloud.key)
    lasting = Resource(
        provider="cloud",
        kind="volume",
        id="vol-alice",
        lab_id=one.seat("alice").lab_id,
        price_usd_per_month=8.0,
        expires_at=9e9,
    )
    over = msgspec.structs.replace(
        lasting, id="vol-bob", lab_id=one.seat("bob").lab_id, expires_at=1.7e9
    )
    one.cloud.left = [lasting, over]
    return one


@pytest.mark.parametrize("are_up", [False, True])
def test_without_a_keeper_down_removes_expired_disks_and_says_what_the_others_cost(
    kept_disks: Class, are_up: bool
) -> None:
    if are_up:
        started(kept_disks)
    assert all(one.ended for one in end_seats(kept_disks.staff(), kept_disks.folder.list_seats()))
    assert [one.id for one in kept_disks.cloud.left] == ["vol-alice"]
    assert "removed the kept disk vol-bob" in kept_disks.reporter.said
    assert "1 kept disk costs $8.00 a month" in kept_disks.reporter.said


def test_the_disk_of_a_seat_that_nobody_has_any_more_is_no_clean_end(kept_disks: Class) -> None:
    started(kept_disks)
    end_seats(kept_disks.staff(), kept_disks.folder.list_seats())
    file = kept_disks.folder.roster_file
    file.write_text(file.read_text().replace("alice,Alice,,,", "alice,Alice,,t1,"))
    proof = end_of_term(kept_disks.staff(), collect=lambda name: "", revoke=lambda: 0)
    assert [one.id for left in proof.left for one in left.resources] == ["vol-alice"]
    assert not proof.is_clean


def test_the_plan_of_a_class_says_that_disks_stay_and_cost(kept_disks: Class) -> None:
    started(kept_disks)
    [asked] = [one for one in kept_disks.reporter.asked if one.about == "price"]
    assert "the disk of a server that stops by itself is kept for 14 days" in asked.detail


def test_the_disk_of_a_server_without_results_is_not_kept(
    kept_disks: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watchdog:
        def call(self, *_: object, **__: object) -> WatchReply:
            return WatchReply()

    staff = kept_disks.staff()
    own = build_own_context(staff.folder, staff.course(), "check")
    server = kept_disks.cloud.add("srv", own.config.name, own.lab_id)
    kept_disks.state.save_server(server)
    monkeypatch.setattr(LabContext, "open_agent", lambda *_: Watchdog())
    ARM(own, server, always=True)
    assert "keep_disk" not in kept_disks.cloud.calls
    (seat,) = build_seat_contexts(
        staff.folder, staff.paths, staff.state, staff.reporter, [kept_disks.seat("carol")]
    )
    ARM(seat, server, always=True)
    assert "keep_disk" in kept_disks.cloud.calls


def test_down_from_python_is_of_those_who_left_too(ml: Class) -> None:
    started(ml)
    file = ml.folder.roster_file
    file.write_text(file.read_text().replace("alice,Alice,,,,yes", "alice,Alice,,,,no"))
    course = Course(CourseFolder(ml.folder.path), paths=ml.places, reporter=ml.reporter)
    assert len(course.down(discard=True)) == 3
    assert not ml.cloud.machines


def test_what_is_to_be_typed_for_a_seat_of_before_never_means_the_teams(ml: Class) -> None:
    started(ml)
    ml.machine("alice").error = unreachable()
    alone, file = ml.seat("alice").lab_id, ml.folder.roster_file
    file.write_text(file.read_text().replace("alice,Alice,,,", "alice,Alice,,t1,"))
    staff = ml.staff()
    started(Class(ml.root, ml.cloud, staff.folder, ml.machines, ml.reporter))
    (kept,) = end_seats(
        staff, [one for one in staff.folder.list_seats(former=True) if not one.students]
    )
    assert "labctl course down --only former:alice" in kept.hint
    assert staff.folder.find_seat("alice").name == "t1"
    (before,) = staff.folder.choose_seats(["former:alice"])
    assert (before.lab_id, before.students) == (alone, ())
    (ended,) = end_seats(staff, [before], discard=True)
    assert ended.ended
    assert alone not in {one.lab_id for one in ml.cloud.machines.values()}
    assert len(ml.cloud.machines) == 3
    with pytest.raises(NotFoundError):
        ml.staff().folder.choose_seats(["former:bob"])


def test_what_a_seat_is_told_is_the_courses(ml: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever notices it, with or without a context: the seat's name, and its own commands."""
    refused = make_refused_error(Endpoint(host="10.0.0.1"), "")
    monkeypatch.setattr(Machine, "_answer", Mock(side_effect=refused))
    ml.cloud.full = {ml.seat("bob").lab}
    found = {one.seat: one for one in bring_up_servers(ml.staff(), ml.folder.list_seats())}
    alice, bob = found["alice"], found["bob"]
    assert alice.error.startswith("could not log in to alice within")
    assert alice.hint == "labctl course up --only alice   # creates another one"
    assert bob.error == "cloud has no machine left for bob"
    assert bob.hint == "labctl course up --only bob"
    for text in (alice.error, alice.why, alice.hint, bob.why):
        assert ml.seat("alice").lab not in text
    assert refused.hint.startswith("labctl up   # finds")
    refused.subject = Subject("seat", "alice")
    assert refused.hint.startswith("labctl course up --only alice   # finds")


LOST = Endpoint(host="10.0.0.1")


@pytest.mark.parametrize(
    "action",
    [lambda staff, seat: extend_server(staff, seat, 3600), find_run],
    ids=["extend", "logs"],
)
def test_errors_of_a_command_for_one_seat_are_the_courses(
    ml: Class,
    action: Callable[[CourseOperator, Seat], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started(ml)
    monkeypatch.setattr(guard, "arm", ARM)  # it reaches no server here
    ml.machine("alice").error = make_link_lost_error(LOST, "")
    with pytest.raises(LinkLostError) as raised:
        action(ml.staff(), ml.seat("alice"))
    assert raised.value.hint == "labctl course status --only alice --refresh"


def test_a_server_that_a_message_does_not_reach_is_named_by_its_seat(
    ml: Class, terminal: Path
) -> None:
    started(ml)
    ml.machine("bob").error = make_link_lost_error(LOST, "")
    answers = send_message(ml.staff(), ml.folder.list_seats(), "hello")
    assert [one.hint for one in answers] == [
        "",
        "labctl course status --only bob --refresh",
        "",
    ]


def test_checks_and_plans_name_the_commands_of_the_course(
    ml: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply: Any = {"Error": {"Code": "InsufficientInstanceCapacity", "Message": "no"}}

    def offers(need: Need) -> list[Offer]:
        raise translate_client_error(ClientError(reply, "RunInstances"))

    monkeypatch.setattr(ml.cloud, "offers", offers)
    assert compute_plan(ml.staff()).problem_next == "labctl course up"
    assert ml.staff().course()._build_provider_context("cloud").subject == COURSE
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert found["offers"].next == "labctl course up"
    refused = make_refused_error(LOST, "")
    monkeypatch.setattr(ml.cloud, "servers", Mock(side_effect=refused))
    (only,) = check_course(ml.staff(), ml.folder.list_seats())
    assert only.next.startswith("labctl course up   # finds")


def test_only_an_image_that_the_course_names_is_loaded_before_students_come(
    ml: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, labs have images of their own, and a missing registry is nobody's problem."""
    loaded: list[str] = []
    monkeypatch.setattr("labctl.courses.servers.images.has_image", lambda *_: False)
    monkeypatch.setattr(
        "labctl.courses.servers.images.ensure_image", lambda *words: loaded.append(words[-1])
    )
    text = (ml.folder.path / "course.yaml").read_text()
    for image, expected in (
        ("", []),
        ("image: registry.example/ml:1\n", ["registry.example/ml:1"]),
    ):
        replaced = text.replace("image: {build: .}\n", image)
        assert replaced != text
        (ml.folder.path / "course.yaml").write_text(replaced)
        seat = ml.seat("alice" if not image else "bob")
        (outcome,) = bring_up_servers(ml.staff(), [seat])
        assert (outcome.error, loaded) == ("", expected)


def test_the_check_of_a_course_without_an_image_tries_none(ml: Class) -> None:
    file = ml.folder.path / "course.yaml"
    file.write_text(file.read_text().replace("image: {build: .}\n", ""))
    found = {one.name: one for one in check_course(ml.staff(), ml.folder.list_seats())}
    assert (found["image"].ok, found["image"].skipped) == (True, False)
    cautions = " ".join(list_cautions(ml.folder.config, 0.0))
    detail = found["image"].detail.removeprefix("none in course.yaml: ")
    assert found["image"].warning
    assert f"no image: {detail}; {found['image'].next}" in cautions, "plan and check agree"


def test_the_check_of_a_class_with_slurm_misses_no_image(ml: Class) -> None:
    file = ml.folder.path / "course.yaml"
    text = file.read_text().replace("image: {build: .}\n", "")
    file.write_text(f"{text}shared: {{engine: slurm}}\n")
    judged = check_reference(ml.staff())
    assert judged is not None
    assert (judged.ok, judged.warning) == (True, False)
    assert "programs of their machine" in judged.detail


def test_the_check_of_a_course_whose_assignments_bring_an_image_warns_of_none(ml: Class) -> None:
    file = ml.folder.path / "course.yaml"
    text = file.read_text().replace("image: {build: .}\n", "").partition("assignments:")[0]
    file.write_text(f"{text}assignments: {{hw3: {{template: starter}}}}\n")
    (ml.folder.path / "starter").mkdir()
    (ml.folder.path / "starter" / "Dockerfile").write_text("FROM scratch\n")
    staff = ml.staff()
    found = {one.name: one for one in check_course(staff, staff.folder.list_seats())}
    assert found["image"].warning, "nothing is published yet"
    publish_starters(staff.folder, staff.paths)
    found = {one.name: one for one in check_course(staff, staff.folder.list_seats())}
    assert (found["image"].ok, found["image"].warning) == (True, False)
