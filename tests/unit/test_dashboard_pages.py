"""What the dashboard shows, to whom, and what changes on it: over HTTP, from a course on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dashboard_bed import NAMES, Bed, Stream, Visitor, fill, make, stream_of, wait_until
from submission_bed import packed

from labctl.commands.slurm_accounting import ClassUser
from labctl.commands.slurm_jobs import ClassJobs
from labctl.courses.grading.record import FEEDBACK
from labctl.courses.records.course_total import CourseTotal
from labctl.courses.records.excuses import draft_excuse_line
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.gpu_minutes import record_gpu_minutes
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.released_grades import draft_released_line
from labctl.courses.records.spending import spent_usd
from labctl.servers.shared_server import account_name
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import BUNDLE
from labctl.web import factory
from labctl.web.app import Dashboard
from labctl.web.http_server import URL_FILE
from labctl.web.listing import ListView, count_seats
from labctl.web.live_updates import Channel
from labctl.web.pages import Pages
from labctl.web.pseudonyms import Pseudonyms
from labctl.web.snapshot import SnapshotTaker

EVIL = "<script>alert(1)</script>"
HOSTILE = f'Eve {EVIL}" onmouseover="alert(2)'


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come at once, as far as their own cost allows."""
    monkeypatch.setattr(factory, "EVERY_S", 0.1)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    found = fill(make(tmp_path))
    yield found
    found.state.close()


@pytest.fixture
def visitor(bed: Bed) -> Iterator[Visitor]:
    stop = threading.Event()
    found = Visitor(bed.start(stop))
    found.enter()
    yield found
    stop.set()


def pages_of(bed: Bed) -> list[str]:
    key = bed.seat(0).pseudonym
    seats = [f"/seats/{one.pseudonym}" for one in bed.folder.list_seats()]
    return ["/", "/costs", "/assignments/hw3", "/assignments/hw4", "/another", *seats,
            f"/seats/{key}/extend?by=2h", f"/seats/{key}/runs/1120-100000-bbbb/cancel"]  # fmt: skip


def row(page: str, key: str) -> str:
    return page.partition(f'<tr id="s-{key}"')[2].partition("</tr>")[0]


def test_the_board_tells_of_everybody(bed: Bed, visitor: Visitor) -> None:
    page = visitor.ask("/")[2]
    for name in NAMES[:-2]:
        assert name in page
    ada, alan, liskov = (row(page, bed.seat(n).pseudonym) for n in (0, 1, 4))
    assert 'class="state running"' in ada
    assert "90%" in ada
    assert "of $25.00" in ada  # five dollars were given on top
    assert "44\u00a0min" in alan
    assert "failed (1)" in alan
    assert 'class="state none"' in liskov
    owls = row(page, bed.seat(8).pseudonym)
    assert "perlman, hoare" in owls
    assert "idle 2" in page


def test_a_seats_page_tells_of_runs_money_and_hand_ins(bed: Bed, visitor: Visitor) -> None:
    page = visitor.ask(f"/seats/{bed.seat(0).pseudonym}")[2]
    for text in ("1120-100000-bbbb", "big model", "97</strong> of 100", "byte for byte"):
        assert text in page
    assert f'sse-connect="/seats/{bed.seat(0).pseudonym}/runs/1120-100000-bbbb/log"' in page
    assert visitor.ask(f"/seats/{bed.seat(0).pseudonym}?run=no-such-run")[0] == 404


def test_the_costs_show_the_gpu_minutes_that_slurm_counts(bed: Bed, visitor: Visitor) -> None:
    assert "GPU minutes" not in visitor.ask("/costs")[2]
    file = bed.folder.path / "course.yaml"
    file.write_text(file.read_text() + "shared: {engine: slurm, gpu_minutes: 1200}\n")
    account = account_name(bed.seat(0).name)
    jobs = ClassJobs(completed=7, out_of_memory=2, gpu_hours=0.54, median_wait_s=240)
    record_gpu_minutes(bed.folder.private, [ClassUser(account, used_minutes=31)], {account: jobs})
    wait_until(lambda: "31 of 1200" in visitor.ask("/costs")[2])
    page = visitor.ask("/costs")[2]
    cells = {
        "GPU hours": "0.5",
        "Done": "7",
        "Memory": "2",
        "Median wait": "4\N{NO-BREAK SPACE}min",
    }
    for label, text in cells.items():
        assert f'data-label="{label}">{text}</td>' in page


def test_the_board_says_what_a_queued_run_waits_for(tmp_path: Path) -> None:
    bed = make(tmp_path, NAMES[:2], teams=False)
    waiting = "waiting: the machines are reserved for <others>"
    run = bed.run(bed.serve_up(0), "r1")
    bed.state.save_run(
        msgspec.structs.replace(run, state="starting", executor="slurm", summary=waiting)
    )
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    try:
        assert "r1: waiting: the machines are reserved for &lt;others&gt;" in visitor.ask("/")[2]
    finally:
        stop.set()
        bed.state.close()


def test_a_figure_says_what_it_is_where_a_phone_leaves_no_headings(
    bed: Bed, visitor: Visitor
) -> None:
    for path in ("/costs", f"/seats/{bed.seat(0).pseudonym}"):
        page = visitor.ask(path)[2]
        bodies = [one.partition("</table>")[0] for one in page.split('<table class="list">')[1:]]
        cells = [one.partition(">")[0] for body in bodies for one in body.split("<td")[1:]]
        assert len(cells) > 8
        assert [one for one in cells if "data-label=" not in one and "wide" not in one] == []


def test_more_time_says_what_it_comes_to_before_it_is_given(bed: Bed, visitor: Visitor) -> None:
    """Up: 2 h at $0.526, 5 h to go, $25 in all; the third costs $3.06/h and has spent $17."""
    ask = {n: visitor.ask(f"/seats/{bed.seat(n).pseudonym}/extend?by=2h")[2] for n in (0, 2, 4)}
    assert "This costs at most $1.05." in ask[0]
    assert "of $25.00 is spent." in ask[0]
    assert "when it is idle" in ask[0]
    assert "will be refused" not in ask[0]
    # By the new end, seven hours from now, it is far beyond the $20.
    assert "The cost at the new end would be $38.86" in ask[2]
    assert "will be refused" in ask[2]
    assert "no running server" in ask[4]
    assert 'class="confirm"' not in ask[4]
    assert "$0.526/h" in visitor.ask(f"/seats/{bed.seat(0).pseudonym}")[2]
    run = f"/seats/{bed.seat(0).pseudonym}/runs/1120-100000-bbbb/cancel"
    assert "keeps running, at $0.526/h" in visitor.ask(run)[2].replace("\n", " ")


def test_what_was_taken_back_is_no_nothing(bed: Bed) -> None:
    ledger, seat = bed.folder.ledger, bed.seat(0)
    ledger.append("extend", seat=seat.name, by="staff", why="refused", seconds=-7200)
    ledger.append("extend", seat=seat.name, by="ada", span_s=3600)
    ledger.append("budget", seat=seat.name, by="staff", usd=-2.5)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    page = visitor.ask(f"/seats/{seat.pseudonym}")[2].replace("\u00a0", " ")
    stop.set()
    for text in ("extend -2 h", "extend 1 h", "budget -$2.50", "budget +$5.00"):
        assert text in page


def test_names_can_be_hidden_from_a_projector(bed: Bed, visitor: Visitor) -> None:
    people = bed.folder.list_students()
    bed.folder.ledger.append("refused", seat=people[4].id, why=f"{people[0].name} has no budget")
    assert visitor.post("/names", hidden="yes", back="/")[0] == 303
    for path in pages_of(bed):
        _, _, page = visitor.ask(path)
        shown = page.lower()
        for one in people:
            told = [part for part in (one.name, one.id, one.email, one.team) if part]
            assert not [part for part in told if part.lower() in shown], path
    with Stream(visitor, "/events/board?since=x-0") as stream:
        assert stream.update().keys() == {"reload"}
    assert "token=" not in visitor.ask("/another")[2]  # a token is none for everybody either
    assert bed.seat(0).pseudonym in visitor.ask("/")[2]
    assert visitor.post("/names", hidden="no", back="/")[0] == 303
    assert NAMES[0] in visitor.ask("/")[2]
    assert "token=" in visitor.ask("/another")[2]


def test_no_address_names_anybody(bed: Bed, visitor: Visitor) -> None:
    for path in pages_of(bed):
        for part in visitor.ask(path)[2].split('href="')[1:]:
            address = part.partition('"')[0]
            assert not [one.id for one in bed.folder.list_students() if one.id in address], address


def test_hostile_words_are_shown_and_do_nothing(tmp_path: Path) -> None:
    bed = make(tmp_path, (HOSTILE.replace('"', '""'), "Ada Lovelace", "Alan Turing"), teams=False)
    server = bed.serve_up(0)
    bed.watch(server, busy=(EVIL,))
    bed.state.save_run(msgspec.structs.replace(
        bed.run(server, "r1"), command=("python", EVIL, "\x1b[2J"), summary=EVIL))  # fmt: skip
    student = bed.folder.list_students()[0].id
    bed.hand_in(student, "hw3")
    bed.grade(student, "hw3", None, message=EVIL + "\x1b[2J\u202e")
    bed.folder.ledger.append("refused", seat=student, why=EVIL)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    try:
        for path in ("/", f"/seats/{bed.seat(0).pseudonym}", "/assignments/hw3", "/costs"):
            _, _, page = visitor.ask(path)
            assert EVIL not in page
            assert ' onmouseover="' not in page
            assert "\x1b" not in page
            assert "\u202e" not in page
            assert "&lt;script&gt;" in page
    finally:
        stop.set()
        bed.state.close()


def test_a_watcher_is_sent_what_changed_and_no_more(bed: Bed, visitor: Visitor) -> None:
    address = stream_of(visitor.ask("/")[2])
    key = bed.seat(4).pseudonym
    with Stream(visitor, address) as stream:
        bed.serve_up(4)
        parts = stream.update()
        assert 'class="state running"' in parts[f"s-{key}"]
        assert 'hx-swap-oob="true"' in parts[f"s-{key}"]
        assert len(parts) < 5
        version = stream.version
    # After a cut link the browser names what it has: nothing is missed, nothing told twice.
    with Stream(visitor, address) as stream:
        assert f"s-{key}" in stream.update()
    bed.folder.ledger.append("refused", seat=bed.seat(8).name, why="no machine is left")
    with Stream(visitor, address, last_event_id=version) as stream:
        assert stream.update().keys() == {"tiles", f"s-{bed.seat(8).pseudonym}"}


def test_another_keepers_version_has_the_page_loaded_anew(visitor: Visitor) -> None:
    for since in ("deadbeef-1", "", "x", "-1", "9" * 50):
        with Stream(visitor, f"/events/board?since={since}") as stream:
            assert stream.update().keys() == {"reload"}


def test_a_new_student_has_the_page_loaded_anew(bed: Bed, visitor: Visitor) -> None:
    with Stream(visitor, stream_of(visitor.ask("/")[2])) as stream:
        with bed.folder.roster_file.open("a") as file:
            file.write('ritchie,"Dennis Ritchie",,,,yes\n')
        assert stream.update().keys() == {"reload"}
    assert "Dennis Ritchie" in visitor.ask("/")[2]


def test_an_end_ends_every_stream(bed: Bed) -> None:
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    with Stream(visitor, stream_of(visitor.ask("/")[2])) as stream:
        stop.set()
        while stream.update():
            pass  # what was under way
    wait_until(lambda: not (bed.folder.private / "keeper" / URL_FILE).exists())


def test_a_browser_that_leaves_is_forgotten(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Dashboard] = []
    make_one = factory.build_dashboard

    def kept(*words: Any, **names: Any) -> Dashboard:
        found.append(make_one(*words, **names))
        return found[0]

    monkeypatch.setattr(factory, "build_dashboard", kept)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    with Stream(visitor, "/events/board?since=x"), Stream(visitor, "/events/costs?since=x"):
        wait_until(lambda: sorted(found[0].feed.open_pages) == ["board named", "costs named"])
    wait_until(lambda: not found[0].feed.open_pages)
    stop.set()


def test_a_report_is_in_a_sandbox_and_a_bundle_is_a_download(bed: Bed, visitor: Visitor) -> None:
    student = bed.folder.list_students()[0]
    key = bed.seat(0).pseudonym
    place = bed.folder.drop / "submissions" / "hw3" / student.id / "0001"
    place.mkdir(parents=True)
    page = f"<!doctype html><title>mine</title>{EVIL}".encode()
    content = packed({"model/m.safetensors": b"x", "report.html": page, "run.json": b"{}"})
    (place / BUNDLE).write_bytes(content)
    status, headers, body = visitor.ask(f"/seats/{key}/handed/{key}/hw3/1/report")
    assert (status, body.encode()) == (200, page)
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox;")
    assert "allow-" not in policy
    assert "script-src" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    status, headers, _ = visitor.ask(f"/seats/{key}/handed/{key}/hw3/1/bundle")
    assert status == 200
    assert headers["content-disposition"].startswith("attachment")
    assert int(headers["content-length"]) == len(content)
    # What is no bundle at all is told, not shown.
    (place / BUNDLE).chmod(0o600)
    (place / BUNDLE).write_bytes(b"\0\1" * 700)
    assert visitor.ask(f"/seats/{key}/handed/{key}/hw3/1/report")[0] == 503


def test_a_damaged_course_is_told_and_the_last_view_stays(bed: Bed, visitor: Visitor) -> None:
    with Stream(visitor, stream_of(visitor.ask("/")[2])) as stream:
        bed.folder.roster_file.write_text("id,name\n../x,Eve\n")
        assert "this page is out of date" in stream.update()["notes"]
    page = visitor.ask("/")[2]
    assert NAMES[0] in page


def test_damaged_files_of_one_student_stop_nothing(bed: Bed) -> None:
    place = bed.folder.grades / "hw3" / bed.folder.list_students()[1].id
    place.mkdir(parents=True)
    (place / "grade.json").write_bytes(b'{"assignment": "hw3"')
    (place / "results.json").write_bytes(b"[" * 100_000)
    with (bed.folder.drop / "receipts.jsonl").open("ab") as log:
        log.write(b'{"receipt": 1}\n\xff\xfe\n{"torn')
    with bed.folder.ledger.path.open("ab") as ledger:
        ledger.write(b'{"n": 99, "at"')
    found = SnapshotTaker(bed.folder, bed.state).take()
    assert found.people[1].grades[0].score is None
    assert found.people[0].hand_ins[0].assignment == "hw3"
    assert any("last line" in note for note in found.notes)


def test_a_receipt_that_arrives_in_two_pieces_is_read_once(bed: Bed) -> None:
    survey = SnapshotTaker(bed.folder, bed.state)
    person = bed.folder.list_students()[2]
    before = survey.take()
    receipt = bed.hand_in("nobody", "hw3")
    mine = msgspec.structs.replace(receipt, student=person.id)
    line = msgspec.json.encode(Signed(receipt=mine, key="", signature="")) + b"\n"
    log = bed.folder.drop / "receipts.jsonl"
    with log.open("ab") as file:
        file.write(line[:40])
    assert survey.take().people == before.people
    with log.open("ab") as file:
        file.write(line[40:])
    (one,) = survey.take().people[2].hand_ins
    assert (one.by, one.number) == (person.id, 1)
    assert isinstance(receipt, Receipt)


def test_a_grade_that_is_made_anew_is_not_released(bed: Bed) -> None:
    survey = SnapshotTaker(bed.folder, bed.state)
    student = bed.folder.list_students()[0]
    assert not survey.take().people[0].grades[0].released
    feedback = bed.folder.grades / "hw3" / student.id / FEEDBACK
    feedback.write_text("<p>well done</p>")
    assert not survey.take().people[0].grades[0].released
    bed.folder.ledger.append("released", student=student.id, assignment="hw3")
    assert survey.take().people[0].grades[0].released
    feedback.unlink()  # as a new grade does
    assert not survey.take().people[0].grades[0].released


def test_a_grade_that_is_dropped_says_so_to_staff(bed: Bed) -> None:
    file = bed.folder.path / "course.yaml"
    group = "assignment_groups: {homework: {assignments: [hw3, hw4], drop_lowest: 1}}\n"
    file.write_text(file.read_text() + group)
    bed.grade("lovelace", "hw4", 60)
    snapshot = SnapshotTaker(bed.folder, bed.state).take()
    people = snapshot.people
    dropped = people[0].find_dropped("hw3")
    assert dropped is not None
    assert dropped.text == "hw3 is dropped: the lowest of 2 in homework"
    assert people[0].find_dropped("hw4") is None
    assert people[0].totals.released == CourseTotal(), "nothing was released"
    assert people[1].totals.present == CourseTotal(), "nothing was graded"
    pages = Pages(bed.paths.data_dir / "templates" / "dashboard")
    seat = bed.seat(0).pseudonym
    rows = pages.assignment("hw3", Pseudonyms(), ListView())(snapshot)
    assert "dropped: the lowest of 2 in homework" in rows[f"p-{people[0].key}"]
    assert "dropped" not in rows[f"p-{people[1].key}"]
    handed = pages.seat(seat, Pseudonyms())(snapshot)["handed"]
    assert handed.count("dropped: the lowest of 2 in homework") == 1


def test_what_was_refused_is_trouble_until_something_is_given(bed: Bed) -> None:
    survey = SnapshotTaker(bed.folder, bed.state)
    bed.folder.ledger.append("refused", student="perlman", by="keeper", why="beyond the budget")
    found = survey.take()
    assert found.seats[8].trouble == "beyond the budget"
    assert found.happenings[0].seat == found.seats[8].key
    bed.serve_up(8, hours=0)
    assert survey.take().seats[8].trouble == ""


def test_a_refusal_is_no_problem_once_the_budget_was_raised(bed: Bed) -> None:
    survey, liskov = SnapshotTaker(bed.folder, bed.state), bed.seat(4)
    bed.folder.ledger.append("refused", student="liskov", by="keeper", why="beyond the budget")
    assert survey.take().seats[4].trouble == "beyond the budget"
    bed.folder.ledger.append("budget", seat=liskov.name, by="staff", usd=5.0)
    assert survey.take().seats[4].trouble == ""


def test_a_run_whose_server_is_gone_does_not_run(bed: Bed) -> None:
    server = bed.state.get_lab_server(bed.seat(0).lab_id)
    assert server is not None
    bed.state.drop_server(server.id)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    page = visitor.ask(f"/seats/{bed.seat(0).pseudonym}")[2]
    board = row(visitor.ask("/")[2], bed.seat(0).pseudonym)
    stop.set()
    for text in (page, board):
        assert 'class="run lost"' in text
        assert 'class="run running"' not in text
        assert "42%" not in text
    assert "its server has ended" in page
    assert "/cancel" not in page


def test_a_server_that_does_not_report_shows_when_it_last_did(bed: Bed) -> None:
    survey = SnapshotTaker(bed.folder, bed.state, now=lambda: bed.now + 2700)
    seat = survey.take().seats[0]
    assert seat.silent
    assert "running" not in seat.marks
    assert "trouble" in seat.marks
    pages = Pages(bed.paths.data_dir / "templates" / "dashboard")
    parts = pages.seat(seat.key, Pseudonyms())(survey.take())
    assert "The server does not report. Last report: <time" in parts["facts"]
    assert 'class="run running"' not in parts["runs"]
    assert "/cancel" not in parts["runs"]
    assert not SnapshotTaker(bed.folder, bed.state).take().seats[0].silent


def test_an_extension_that_came_later_takes_the_penalty_off(bed: Bed, visitor: Visitor) -> None:
    """Edsger Dijkstra handed in 90 minutes late, and is ill."""
    page = visitor.ask("/assignments/hw3")[2]
    assert "10% off" in page
    assert "<dt>Late</dt><dd>2</dd>" in page
    (bed.folder.drop / "extensions" / "hw3.json").write_text('{"dijkstra": 7200, "thompson": 7200}')
    wait_until(lambda: "<dt>Late</dt><dd>0</dd>" in visitor.ask("/assignments/hw3")[2])
    assert "% off" not in visitor.ask("/assignments/hw3")[2]
    assert "% off" not in visitor.ask(f"/seats/{bed.seat(3).pseudonym}")[2]


def test_ten_seconds_late_cost_nothing(bed: Bed) -> None:
    bed.hand_in("liskov", "hw3", late_s=10)
    (one, *_) = reversed(SnapshotTaker(bed.folder, bed.state).take().people[4].hand_ins)
    assert (one.late_s, one.penalty, one.accepted) == (0, 0, True)


def test_a_team_counts_once(bed: Bed) -> None:
    bed.hand_in("perlman", "hw4")
    people = SnapshotTaker(bed.folder, bed.state).take().people
    counts = count_seats(people, "hw4")
    assert (counts.seats, counts.submitted, counts.late) == (9, 1, 0)


def test_a_short_idle_time_is_shown_on_the_page_of_a_seat(bed: Bed) -> None:
    server = bed.serve_up(8)
    bed.watch(server, idle_s=40)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    assert "idle for 40" in visitor.ask(f"/seats/{bed.seat(8).pseudonym}")[2]
    stop.set()


def test_an_excused_student_is_neither_missing_nor_ungraded(bed: Bed) -> None:
    bed.hand_in("liskov", "hw4")
    lines = [
        draft_excuse_line("hw4", student, student, excused=True, why="ill")
        for student in ("lovelace", "liskov")
    ]
    bed.folder.ledger.append_all(lines)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    missing, ungraded, excused = (
        visitor.ask(f"/assignments/hw4?show={mark}")[2]
        for mark in ("missing", "ungraded", "excused")
    )
    assert "Ada Lovelace" not in missing
    assert "Alan Turing" in missing
    assert "Barbara Liskov" not in ungraded
    assert "Ada Lovelace" in excused
    assert "Barbara Liskov" in excused
    assert "Alan Turing" not in excused
    stop.set()


def test_only_a_bundle_with_a_report_has_a_link_to_one(bed: Bed) -> None:
    for student, files in (("lovelace", {"report.html": b"x"}), ("turing", {"run.json": b"{}"})):
        place = bed.folder.drop / "submissions" / "hw3" / student / "0001"
        place.mkdir(parents=True)
        (place / BUNDLE).write_bytes(packed({"model/m.safetensors": b"x", **files}))
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    with_report, without = (visitor.ask(f"/seats/{bed.seat(n).pseudonym}")[2] for n in (0, 1))
    assert ">Report</a>" in with_report
    assert ">Bundle</a>" in without
    assert ">Report</a>" not in without
    stop.set()


def test_sums_in_between_are_those_of_the_whole_ledger(bed: Bed) -> None:
    """What a seat has cost is the ledger's own arithmetic, whenever it is asked."""
    now = [bed.now]
    survey = SnapshotTaker(bed.folder, bed.state, now=lambda: now[0])
    for later_s in (0, 7, 40, 3600):
        now[0] = bed.now + later_s
        found = survey.take()
        entries = bed.folder.ledger.list_entries()
        living = bed.folder.list_running(bed.state.list_servers())
        for one in found.seats:
            whole = spent_usd(entries, one.name, now[0], living)
            assert one.spent_usd == pytest.approx(whole, abs=0.006)
        assert found.seats[0].budget_usd == 25.0


def test_a_team_hands_in_together(bed: Bed) -> None:
    bed.hand_in("perlman", "hw4")
    found = SnapshotTaker(bed.folder, bed.state).take()
    for person in found.people:
        handed = person.find_submission("hw4")
        assert (handed is not None) == (person.team == "owls")


def test_runs_of_a_students_own_lab_are_seen_on_their_seat(bed: Bed) -> None:
    server = bed.state.get_lab_server(bed.seat(0).lab_id)
    assert server is not None
    own = msgspec.structs.replace(bed.run(server, "own-run"), lab_id="0123456789ab")
    bed.state.save_run(own)
    found = SnapshotTaker(bed.folder, bed.state).take().seats[0]
    assert "own-run" in [one.id for one in found.runs]


def test_a_channel_sends_only_what_differs() -> None:
    channel = Channel(lambda snapshot: {})
    assert channel.replace_parts({"a": "1", "b": "2"})
    assert not channel.replace_parts({"a": "1", "b": "2"})
    assert channel.replace_parts({"a": "1", "b": "3"})
    assert channel.encode_event(1) == b"event: part\ndata: 3\n\n"
    assert channel.encode_event(1) is channel.encode_event(1)
    assert channel.replace_parts({"b": "3"})
    assert b"reload" in channel.encode_event(2)
    assert b"reload" in channel.encode_event(99)


def test_an_assignment_shows_what_students_see_until_the_next_release(
    bed: Bed, visitor: Visitor
) -> None:
    student = bed.folder.list_students()[0].id
    grade = Grade(student=student, score=40, points=100)
    bed.folder.ledger.append_all([draft_released_line("hw3", grade, "ann")])
    released = "40<small>until the next release</small>"
    wait_until(lambda: released in visitor.ask("/assignments/hw3")[2])
    seat = visitor.ask(f"/seats/{bed.seat(0).pseudonym}")[2]
    assert "students see 40 until the next release" in seat


def test_a_late_submission_shows_the_penalty_after_free_days(bed: Bed, visitor: Visitor) -> None:
    file = bed.folder.path / "course.yaml"
    text = file.read_text()
    assert "late: 48h, penalty: 10" in text
    late = "late: {at_most: 2d, per_day: 10%, free_days: 2}"
    file.write_text(text.replace("late: 48h, penalty: 10", late))
    late_student, other = "turing", "hopper"
    for name in (late_student, other):
        bed.hand_in(name, "hw3", number=2, late_s=5400)
    bed.grade(late_student, "hw3", 90, number=2, free_days=FreeDays(used=1, total=2))
    graded = "no points off, uses 1 of 2 free days"
    wait_until(lambda: graded in visitor.ask("/assignments/hw3")[2])
    assert "10% off before free days" in visitor.ask("/assignments/hw3")[2]
