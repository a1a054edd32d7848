"""What an instructor types about servers, and what is said where nothing can be done."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from labctl.cli.course_table import ClassScreen
from labctl.cli.screen import Screen
from labctl.config import find_paths
from labctl.courses.join_codes import make_unusable_key
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_reporter import SeatDone, SeatNews
from labctl.courses.seat_results import SeatFailure
from labctl.courses.servers import SeatOutcome
from labctl.errors import LabError
from labctl.errors.subject import Subject
from labctl.events import Event, Note, Step
from labctl.model import Endpoint, Offer, Run, Server
from labctl.servers.connections import Connections
from labctl.state import State
from labctl.transports.failures import make_link_lost_error

COMMANDS = (
    *("up", "down", "status", "ssh", "logs", "explain"),
    *("push", "message", "extend", "check", "bake"),
)


@pytest.fixture
def course(home: Path) -> Path:
    """A course of three on this machine's containers; nothing was made."""
    from labctl.courses.records.folder import make_private

    folder = home / "ml"
    folder.mkdir()
    (folder / "course.yaml").write_text("course: ml\nserver: {provider: local}\n")
    (folder / "roster.csv").write_text(
        "id,name,email,team,section,active\n"
        "alice,Alice,,,lab-1,yes\nbob,Bob,,owls,lab-2,yes\ncarol,Carol,,owls,lab-2,yes\n"
    )
    make_private(folder)
    os.chdir(folder)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(labctl: Any, name: str) -> None:
    said = labctl("course", name, "--help")
    assert said.code == 0
    assert f"labctl course {name}" in said.out


def test_status_of_nothing_is_every_seat(labctl: Any, course: Path) -> None:
    said = labctl("course", "status", "--json")
    found = json.loads(said.out)
    assert [one["seat"] for one in found["seats"]] == ["alice", "owls"]
    assert [one["state"] for one in found["seats"]] == ["none", "none"]
    assert (found["running"], found["spent_usd"], said.code) == (0, 0.0, 0)
    assert "0 of 2 seats have a server" in labctl("course", "status").out


def test_status_shows_a_refusal_until_the_budget_changes(labctl: Any, course: Path) -> None:
    ledger = CourseFolder(course).ledger
    ledger.append("refused", student="alice", by="keeper", why="beyond the budget")
    assert "! beyond the budget" in labctl("course", "status").out
    assert json.loads(labctl("course", "status", "--json").out)["seats"][0]["refused"]
    ledger.append("budget", seat="alice", usd=5.0)
    assert "beyond the budget" not in labctl("course", "status").out


def test_status_shows_how_old_its_reports_are(
    labctl: Any, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with State(find_paths().database) as state:
        (server,) = state.list_servers()
        state.save_run(Run(id="r1", lab_id=server.lab_id, server_id="i-1", state="running"))
        detail = {"watch": {"alive": True}}
        state.record("watch", lab_id=server.lab_id, server_id="i-1", detail=detail)
    later = Mock(time=lambda: time.time() + 2700)
    monkeypatch.setattr("labctl.courses.status.time", later)
    said = labctl("course", "status")
    assert "unknown, last report 45 min ago" in said.out
    assert "r1 running" not in said.out
    assert "as reported 45 min ago" in " ".join(said.err.split())


@pytest.mark.parametrize("ttl_left_s", [None, 600.0], ids=["lease", "watchdog"])
def test_status_shows_the_time_left_that_is_known(
    labctl: Any, cut: Callable[..., None], ttl_left_s: float | None
) -> None:
    with State(find_paths().database) as state:
        (server,) = state.list_servers()
        state.save_server(msgspec.structs.replace(server, deadline_at=time.time() + 7210))
        assert find_left(labctl("course", "status").out) == ["2", "h"]
        detail = {"watch": {"alive": True, "ttl_left_s": ttl_left_s}}
        state.record("watch", lab_id=server.lab_id, server_id="i-1", detail=detail)
    shown = find_left(labctl("course", "status").out)
    assert shown == (["2", "h"] if ttl_left_s is None else ["10", "min"])


def test_a_stopped_server_has_no_time_left(labctl: Any, cut: Callable[..., None]) -> None:
    assert "1 of 2 seats has a server" in labctl("course", "status").out
    with State(find_paths().database) as state:
        (server,) = state.list_servers()
        ends = msgspec.structs.replace(server, deadline_at=time.time() + 7210, state="stopped")
        state.save_server(ends)
    shown = labctl("course", "status").out
    assert find_left(shown, "stopped") == ["-"]
    assert "0 of 2 seats have a server" in shown


def find_left(table: str, seat_state: str = "running") -> list[str]:
    """Return the words of the column LEFT of the only seat whose server has this state."""
    head, *rows = table.splitlines()
    (row,) = [line for line in rows if f" {seat_state} " in line]
    return row[head.index("LEFT") : head.index("COST")].split()


def test_a_section_and_names_choose_seats(labctl: Any, course: Path) -> None:
    def seats(*words: str) -> list[str]:
        found = json.loads(labctl("course", "status", "--json", *words).out)
        return [one["seat"] for one in found["seats"]]

    assert seats("--group", "lab-2") == ["owls"]
    assert seats("--only", "carol,alice") == ["owls", "alice"]
    assert labctl("course", "status", "--group", "lab-9").code == 4
    said = labctl("course", "status", "--only", "alcie")
    assert said.code == 4
    assert "did you mean alice?" in said.err


def test_status_shows_servers_that_a_change_of_team_has_left_behind(
    labctl: Any, course: Path
) -> None:
    detail = {"server_id": "i-1", "price_usd_per_hour": 0.5, "created_at": 1.0}
    CourseFolder(course).ledger.append("up", seat="eagles", **detail)
    said = labctl("course", "status")
    assert "eagles" in said.out
    assert "No longer needed (students left or changed teams): eagles" in said.err
    assert "next: labctl course down --only former:eagles" in said.err
    assert "eagles" not in labctl("course", "status", "--only", "alice").out


@pytest.mark.parametrize("bad", ["-oProxyCommand=x", "../alice", "a b", "alice;id"])
def test_a_name_is_never_an_option_or_a_path(labctl: Any, course: Path, bad: str) -> None:
    assert labctl("course", "status", f"--only={bad}").code == 4
    assert labctl("course", "ssh", "--", bad).code == 255
    assert labctl("course", "logs", "--", bad).code == 4
    assert labctl("course", "extend", "--", bad, "2h").code == 4


def test_ssh_passes_codes_on_and_says_its_own_as_ssh_does(labctl: Any, course: Path) -> None:
    said = labctl("course", "ssh", "alice")
    assert said.code == 255
    assert "next: labctl course up --only alice" in said.err
    assert "labctl course ssh --all -- uptime" in labctl("course", "ssh", "--all").err
    assert labctl("course", "ssh").code == 255
    assert labctl("course", "--as", "ann", "ssh").code == 255


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("--all",), "labctl course ssh --all -- uptime"),
        (("--only", "alice,bob"), "labctl course ssh --only alice,bob -- uptime"),
        (("--group", "lab 1"), "labctl course ssh --group 'lab 1' -- uptime"),
        (("--all", "--group", "lab-2"), "labctl course ssh --group lab-2 -- uptime"),
    ],
)
def test_a_shell_on_several_servers_is_refused_with_the_command_to_type(
    labctl: Any, course: Path, words: tuple[str, ...], command: str
) -> None:
    said = labctl("course", "ssh", *words)
    assert said.code == 255
    assert "labctl: no command was given" in said.err
    assert f"next: {command}" in said.err


@pytest.fixture
def cut(course: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """alice's server is on record, and the connection to it is cut; what raises the error."""
    with State(find_paths().database) as state:
        server = Server(
            id="i-1", lab="ml-1", lab_id=CourseFolder(course).find_seat("alice").lab_id,
            provider="local", alias="ml-1", endpoint=Endpoint(host="192.0.2.1"), state="running",
            created_at=1.0, offer=Offer(provider="local", type="small"),
        )  # fmt: skip
        state.save_server(server)

    def lose(*_: object, **__: object) -> None:
        raise make_link_lost_error(server.endpoint, "")

    monkeypatch.setattr(Connections, "reopen", Mock(return_value=Mock(run=lose)))
    return lose


STATUS_OF_ALICE = "next: labctl course status --only alice --refresh"


def test_what_fails_for_one_seat_names_the_command_for_it(
    labctl: Any, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert STATUS_OF_ALICE in labctl("course", "logs", "alice").err
    assert STATUS_OF_ALICE in labctl("course", "explain", "alice").err
    assert STATUS_OF_ALICE in labctl("course", "ssh", "--all", "--", "true").err
    monkeypatch.setattr(Connections, "write", cut)
    assert STATUS_OF_ALICE in labctl("course", "ssh", "alice").err


def test_a_log_that_is_cut_off_names_the_seat(
    labctl: Any, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Mock(subject=Subject("seat", "alice"))
    monkeypatch.setattr("labctl.courses.broadcast.find_run", lambda *_: (lab, Mock(), Mock()))
    monkeypatch.setattr("labctl.runs.runs.watch", cut)
    assert STATUS_OF_ALICE in labctl("course", "logs", "alice").err


def test_what_fails_for_the_class_names_the_course(
    labctl: Any, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.courses.status.read_status", cut)
    assert "next: labctl course status --refresh" in labctl("course", "status").err


def test_where_no_server_is_the_next_command_makes_one(labctl: Any, course: Path) -> None:
    for words in (("push",), ("message", "hello"), ("ssh", "--all", "--", "true")):
        said = labctl("course", *words)
        assert "labctl course up" in said.err
    assert labctl("course", "logs", "alice").code == 4
    assert labctl("course", "extend", "alice", "later").code == 2


def test_what_makes_no_images_says_so(labctl: Any, course: Path) -> None:
    said = labctl("course", "bake")
    assert said.code == 3
    assert "cannot make machine images" in said.err


def test_the_end_of_a_term_is_everybodys(labctl: Any, course: Path) -> None:
    assert labctl("course", "down", "--end-of-term", "--only", "alice").code == 2


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (("bob",), "bob"),
        (("alice", "bob", "--replace"), "alice bob --replace"),
        (("--all", "--into", "to mail"), "--all --into 'to mail'"),
        ((), "STUDENT"),
    ],
)
def test_a_wrong_validity_suggests_the_same_invitation(
    labctl: Any, course: Path, words: tuple[str, ...], suggested: str
) -> None:
    refused = labctl("course", "invite", *words, "--valid", "0d")
    assert refused.code == 2
    assert f"next: labctl course invite {suggested} --valid 14d\n" in refused.err


def test_the_check_suggests_a_machine_image_only_where_one_can_be_made(
    labctl: Any, course: Path
) -> None:
    file = course / "course.yaml"
    file.write_text(f"{file.read_text()}image: {{requirements: requirements.txt}}\n")
    checked = labctl("course", "check")
    assert "push it to a registry and name it in course.yaml\n" in checked.out + checked.err
    assert "bake" not in checked.out + checked.err


@pytest.fixture
def authorized_keys(home: Path, course: Path) -> Path:
    """Two of the three students have joined, and one has an open invitation."""
    file = home / ".ssh" / "authorized_keys"
    file.parent.mkdir()
    keys = AuthorizedKeys(CourseFolder(course), file)
    for student in ("alice", "bob"):
        keys.admit(student, make_unusable_key())
    keys.invite("carol", make_unusable_key())
    return file


def test_the_end_of_a_term_is_asked_for_without_a_server_too(
    labctl: Any, authorized_keys: Path
) -> None:
    before = authorized_keys.read_text()
    refused = labctl("course", "down", "--end-of-term")
    assert refused.code == 3
    assert "- revoke the keys of 2 students and 1 open invitation\n" in refused.err
    assert "- remove the course's images, caches and timers, and disks" in refused.err
    assert "end the course ml? no (not a terminal; use --yes to answer yes)" in refused.err
    assert "nothing was ended\n  no key was revoked\n" in refused.err
    assert authorized_keys.read_text() == before


def test_the_end_of_a_term_revokes_what_the_question_names(
    labctl: Any, authorized_keys: Path
) -> None:
    ended = labctl("course", "down", "--end-of-term", "--yes")
    assert "revoked 2 keys of students" in ended.out
    assert authorized_keys.read_text() == ""


def test_outside_of_a_course_it_says_what_one_is(labctl: Any, home: Path) -> None:
    said = labctl("course", "status")
    assert said.code == 2
    assert "labctl course init" in said.err


def test_without_a_terminal_each_seat_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ClassScreen(Screen(), ["alice", "bob"]) as screen:
        screen.emit(SeatNews(seat="alice", text="making a server"))
        for seat in ("alice", "bob"):
            screen.emit(SeatNews(seat=seat, text="no deadline at the provider", warning=True))
        screen.emit(SeatDone(seat="alice"))
        screen.emit(SeatDone(seat="bob", error="no \x1b[2Jmachine"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("  alice: ready")
    assert lines[1] == "  bob: failed: no \\x1b[2Jmachine"
    assert lines[2:] == ["2 seats: no deadline at the provider"]


def test_the_live_table_counts_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    screen = ClassScreen(Screen(quiet=True), [f"s{n:03}" for n in range(300)])
    for number in range(40):
        screen.emit(SeatDone(seat=f"s{number:03}", error="" if number else "no machine left " * 9))
    screen.emit(SeatNews(seat="s040", text="connecting over SSH"))
    console = Console(width=80, file=io.StringIO())
    console.print(screen._make_table())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("s000")
    assert "39 of 300 ready, 1 running, 1 failed" in lines[-1]


def test_two_never_draw_on_one_terminal() -> None:
    """A step that began below the live table left some of the table's lines on the screen."""
    order: list[str] = []

    class Inner(Screen):
        def emit(self, event: Event) -> None:
            order.append("step")

    class Live:
        def stop(self) -> None:
            order.append("table gone")

    screen = ClassScreen(Inner(), ["alice"])
    screen._live = Live()
    screen.emit(Step(name="ending 15 servers"))
    assert order == ["table gone", "step"]


def make_failed(seat: str, error: LabError, server: Server | None = None) -> SeatOutcome:
    failure = SeatFailure(Subject("seat", seat), error)
    return SeatOutcome(seat=seat, students=(), server=server, made=True, failure=failure)


def test_what_failed_alike_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also for a seat whose name is a part of the text."""
    from labctl.cli.course_results import print_failures

    def fail() -> LabError:
        return LabError(
            lambda subject: f"no machine for {subject.seat}", hint=lambda subject: subject.up
        )

    names = ["m", *(f"s{n}" for n in range(9))]
    print_failures(
        [
            *(make_failed(name, fail()) for name in names),
            make_failed("bob", LabError("no key", why="\x1b[2J", hint="ask")),
            make_failed("eve", fail()),
        ]
    )
    assert capsys.readouterr().err.splitlines() == [
        "m, s0, s1, s2, s3, s4, s5, s6 and 3 more: no machine for each",
        "  next: labctl course up --only m,s0,s1,s2,s3,s4,s5,s6,s7,s8,eve",
        "bob: no key",
        "  \\x1b[2J",
        "  next: ask",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_students_log_does_not_steer_staffs_terminal(
    terminal: bool, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the clipboard, a title, a cleared screen: what a program printed is text to staff."""
    from labctl.cli.course_inspect import make_safe_log_writer

    said = "50%\rdone ä\n\x1b]52;c;cm0=\x07\x1b[2J\u202e".encode()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show = make_safe_log_writer()
    for at in range(len(said)):
        show(said[at : at + 1])
    sys.stdout.flush()
    shown = capfdbinary.readouterr().out
    assert shown.startswith("50%\rdone ä\n".encode())
    assert (b"\x1b" in shown) is not terminal
    assert (shown == said) is not terminal


def test_only_one_drawing_is_live_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    screen = Screen()
    with ClassScreen(screen, ["ada"]) as drawn:
        drawn.emit(SeatNews(seat="ada", text="saving"))
        assert drawn._live is not None
        drawn.emit(Step(name="ending one server"))
        assert (drawn._live, bool(screen.live)) == (None, True)
        drawn.emit(SeatNews(seat="ada", text="saving"))
        assert (bool(drawn._live), screen.live) == (True, None)
        drawn.emit(Step(name="waiting until it is gone"))
    assert (drawn._live, screen.live) == (None, None)


def test_servers_that_are_up_and_not_ready_are_told_with_their_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from labctl.cli.course_results import print_up
    from labctl.model import Endpoint, Offer, Server

    offer = Offer(provider="cloud", type="small", price_usd_per_hour=0.5)
    server = Server(
        id="i-1", provider="cloud", lab="ml-1", lab_id="0f1e2d3c4b5a", alias="ml-1",
        endpoint=Endpoint(host="h"), offer=offer, created_at=1.0, state="running",
    )  # fmt: skip
    failed = [make_failed(seat, LabError("no image"), server) for seat in ("ada", "bob")]
    print_up([*failed, make_failed("eve", LabError("no machine"))])
    said = capsys.readouterr()
    assert said.out.startswith("0 of 3 seats are ready")
    assert "2 servers are running but not ready, at $1.00/h" in said.err
    assert "to remove servers: labctl course down" in said.err


def test_taking_the_table_away_never_waits_for_whoever_draws_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    drawn = ClassScreen(Screen(), ["ada"])
    drawn.emit(SeatNews(seat="ada", text="saving"))
    live, begun, stopping = drawn._live, threading.Event(), threading.Event()
    stop = live.stop

    def halt() -> None:
        stopping.set()
        stop()

    def refresh() -> None:  # as the live table's own thread does
        with live._lock:
            begun.set()
            stopping.wait(120)
            drawn._make_table()

    monkeypatch.setattr(live, "stop", halt)
    threading.Thread(target=refresh, daemon=True).start()
    assert begun.wait(120)
    ending = threading.Thread(target=drawn.emit, args=(Note(text="all said"),), daemon=True)
    ending.start()
    ending.join(120)
    assert not ending.is_alive()
    drawn.stop_drawing()
