"""Submitting and asking for a regrade on the page for students: what is shown, and who may."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from course_keeper_context import create
from draft_bed import EVIL, HOST_KEY, Worker, publish
from service_proxy_bed import Campus, serve_bed

from labctl.config.times import local_time_text
from labctl.courses import server_submissions
from labctl.courses.publish import publish_assignments
from labctl.courses.records.regrade_requests import MOST_REQUESTS
from labctl.courses.records.timetable import find_zone
from labctl.courses.regrades import answer_regrade
from labctl.courses.server_submissions import Choice, ServerSubmissions, WorkerProcesses
from labctl.courses.submission_worker import (
    PreparedSubmission,
    SubmissionOrder,
)
from labctl.errors import BusyError, LabError, NotFoundError, PolicyError
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, Visitor, fill, make, wait_until

LAB_ID = "a" * 12


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(WorkerProcesses, "run", lambda _, order: worker.run(order))
    return worker


@pytest.fixture
def campus(tmp_path: Path, worker: Worker) -> Iterator[Campus]:
    bed = fill(make(tmp_path))
    publish(bed)
    with serve_bed(bed, lab_id=LAB_ID) as campus:
        create(campus.request_handler, "lovelace", lab="mine", lab_id=LAB_ID)
        create(campus.request_handler, "hopper", "bb" * 8, lab="mine", lab_id="b" * 12)
        assert campus.request_handler.wait(60)
        yield campus


def token(page: str) -> str:
    return page.partition('name="csrf" value="')[2].partition('"')[0]


def collect(visitor: Visitor, source: str, name: str = "hw4") -> tuple[int, str]:
    """Send the form; return its status, and the page that then shows the draft or a problem."""
    word = token(visitor.ask("/")[2])
    status, headers, page = visitor.form(f"/submissions/{name}/new", csrf=word, source=source)
    if status != 303:
        return status, page
    wait_until(lambda: "Collecting" not in visitor.ask(headers["location"])[2])
    return status, visitor.ask(headers["location"])[2]


def draft_of(page: str) -> str:
    return page.partition('name="draft" value="')[2].partition('"')[0]


def submit(visitor: Visitor, draft: str, name: str = "hw4") -> str:
    word = token(visitor.ask("/")[2])
    visitor.form(f"/submissions/{name}/submit", csrf=word, draft=draft)
    return visitor.ask("/")[2]


def run_of(campus: Campus, seat: int) -> str:
    lab_id = campus.bed.seat(seat).lab_id
    return next(run.id for run in campus.bed.state.list_runs() if run.lab_id == lab_id)


# submitting


def test_a_student_sees_what_they_submit_and_gets_its_receipt(
    campus: Campus, worker: Worker
) -> None:
    visitor = campus.enter("lovelace")
    run = run_of(campus, 0)
    page = visitor.ask("/submissions/hw4/new")[2]
    assert f'value="run:{run}"' in page
    assert f'value="lab:{LAB_ID}"' in page
    _, page = collect(visitor, f"run:{run}")
    assert "Not up to date: the evaluation is older" in page
    assert "1 of 2 public tests fail" in page
    assert EVIL not in page
    assert f"code/{html.escape(EVIL)}" in page
    (order,) = worker.orders
    assert (order.student, order.seat, order.run) == ("lovelace", campus.bed.seat(0).name, run)
    receiver = Receiver(campus.bed.folder.drop)
    assert receiver.receipts("hw4", "lovelace") == [], "nothing is submitted before it is confirmed"
    page = submit(visitor, draft_of(page))
    assert "hw4 is submitted: number 1" in page
    (signed,) = receiver.receipts("hw4", "lovelace")
    receipt = visitor.ask("/submissions/hw4/1/receipt")[2]
    assert signed.receipt.bundle_sha256 in receipt
    left = campus.bed.folder.private / server_submissions.DIRECTORY
    assert list(left.iterdir()) == []


def test_code_alone_is_chosen_by_its_lab(campus: Campus, worker: Worker) -> None:
    visitor = campus.enter("lovelace")
    collect(visitor, f"lab:{LAB_ID}")
    assert (worker.orders[0].lab_id, worker.orders[0].run) == (LAB_ID, "")


def test_labs_of_one_name_on_two_devices_are_told_apart(campus: Campus) -> None:
    create(campus.request_handler, "lovelace", "cc" * 8, lab="mine", lab_id="c" * 12)
    assert campus.request_handler.wait(60)
    visitor = campus.enter("lovelace")
    page = visitor.ask("/")[2]
    for label in (f"mine ({LAB_ID[:4]})", "mine (cccc)"):
        assert f"Terminal of {label}</a>" in page
        assert label in visitor.ask("/submissions/hw4/new")[2]


def test_nobody_submits_or_sees_the_draft_of_another(campus: Campus) -> None:
    ada, grace = campus.enter("lovelace"), campus.enter("hopper")
    _, page = collect(ada, f"run:{run_of(campus, 0)}")
    draft = draft_of(page)
    assert draft
    assert draft not in grace.ask("/submissions/hw4/new")[2]
    assert "no longer what you would submit" in submit(grace, draft)
    assert Receiver(campus.bed.folder.drop).students("hw4") == []
    # Neither with the run or the lab of another student.
    for source in (f"run:{run_of(campus, 0)}", f"lab:{LAB_ID}", "run:../x", "lab:", ""):
        assert collect(grace, source)[0] == 404, source
    form = {"csrf": token(ada.ask("/")[2]), "draft": draft}
    assert grace.form("/submissions/hw4/submit", **form)[0] == 403, "another session's token"
    assert Visitor(f"{campus.url}/").form("/submissions/hw4/submit", **form)[0] == 403
    assert "hw4 is submitted" in submit(ada, draft)


def test_a_draft_counts_once_and_for_its_assignment(campus: Campus) -> None:
    visitor = campus.enter("lovelace")
    _, page = collect(visitor, f"run:{run_of(campus, 0)}")
    draft = draft_of(page)
    assert "no longer what you would submit" in submit(visitor, draft, "hw3")
    assert "no longer what you would submit" in submit(visitor, "x" + draft)
    assert "hw4 is submitted" in submit(visitor, draft)
    # A second click gets the same receipt.
    assert "hw4 is submitted: number 1" in submit(visitor, draft)
    assert draft not in visitor.ask("/submissions/hw4/new")[2]
    assert len(Receiver(campus.bed.folder.drop).receipts("hw4", "lovelace")) == 1


def end_server(campus: Campus) -> None:
    seat = campus.request_handler.get_seat_server(campus.bed.seat(0))
    for claim in seat.claims:
        seat.release(claim.token, "lovelace")
    assert campus.request_handler.wait(60)


def test_what_was_shown_is_submitted_although_its_server_has_ended(campus: Campus) -> None:
    visitor = campus.enter("lovelace")
    _, page = collect(visitor, f"lab:{LAB_ID}")
    end_server(campus)
    assert "hw4 is submitted: number 1" in submit(visitor, draft_of(page))


def test_a_server_that_ends_while_files_are_collected_is_named(
    campus: Campus, worker: Worker
) -> None:
    visitor = campus.enter("lovelace")
    worker.gate.clear()
    word = token(visitor.ask("/")[2])
    form = {"csrf": word, "source": f"lab:{LAB_ID}"}
    assert visitor.form("/submissions/hw4/new", **form)[0] == 303
    end_server(campus)
    worker.problem = PreparedSubmission(what="the server did not answer")
    worker.gate.set()
    wait_until(lambda: "Collecting" not in visitor.ask("/submissions/hw4/new")[2])
    page = visitor.ask("/submissions/hw4/new")[2]
    assert "Nothing can be submitted: the server did not answer." in page
    assert draft_of(page) == ""
    # Its lab is gone with it, and a form that an open page still has says so.
    assert visitor.form("/submissions/hw4/new", **form)[0] == 404
    assert visitor.form("/server/extend", csrf=word, by="1h")[0] == 303
    assert "You have no server now." in visitor.ask("/")[2]


def test_an_unknown_assignment_has_no_page(campus: Campus) -> None:
    visitor = campus.enter("lovelace")
    for name in ("hw9", "..", "%2e%2e%2fhw4"):
        for action in ("new", "regrade"):
            assert visitor.ask(f"/submissions/{name}/{action}")[0] == 404


def test_a_problem_is_shown_and_nothing_can_be_submitted(campus: Campus, worker: Worker) -> None:
    worker.problem = PreparedSubmission(what="the submission contains secrets", why=f"a.py {EVIL}")
    visitor = campus.enter("lovelace")
    _, page = collect(visitor, f"run:{run_of(campus, 0)}")
    assert "Nothing can be submitted: the submission contains secrets" in page
    assert EVIL not in page
    assert draft_of(page) == ""
    assert "Collect the files" in page, "they can choose again"


# of 30 hours, two days have begun, and one of them is free
@pytest.mark.parametrize(("late_h", "penalty"), [(30, "10% off"), (3, "no points off")])
def test_late_work_shows_its_penalty_after_free_days(
    tmp_path: Path, worker: Worker, late_h: int, penalty: str
) -> None:
    bed = make(tmp_path)
    file = bed.folder.path / "course.yaml"
    due = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() - late_h * 3600))
    late = "{per_day: 10%, at_most: 5d, free_days: 1}"
    text = file.read_text().partition("  hw3:")[0]
    file.write_text(f'{text}  hw3: {{due: "{due}", late: {late}, points: 100}}\n')
    publish(bed)
    with serve_bed(bed) as campus:
        page = campus.enter("lovelace").ask("/submissions/hw3/new")[2]
    assert f"late, {penalty} <small>uses 1 of 1 free days</small>" in page
    assert "at most 500 MB" in page
    assert "Start your server first" in page


def test_a_closed_assignment_says_so_unless_the_student_has_an_extension(
    tmp_path: Path, worker: Worker
) -> None:
    bed = fill(make(tmp_path))
    publish(bed)
    file = bed.folder.path / "course.yaml"
    due_at = int(time.time()) // 60 * 60 - 3 * 86_400
    due = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(due_at))
    hw3 = next(line for line in file.read_text().splitlines() if line.startswith("  hw3:"))
    closed = f'  hw3: {{due: "{due}", late: 48h, penalty: 10, points: 100}}'
    file.write_text(file.read_text().replace(hw3, closed))
    bed.folder.refresh()
    publish_assignments(bed.folder, HOST_KEY)
    Receiver(bed.folder.drop).extend("hw3", "hopper", 7 * 86_400)
    with serve_bed(bed, lab_id=LAB_ID) as campus:
        create(campus.request_handler, "lovelace", lab="mine", lab_id=LAB_ID)
        create(campus.request_handler, "hopper", "bb" * 8, lab="mine", lab_id="b" * 12)
        assert campus.request_handler.wait(60)
        page = campus.enter("lovelace").ask("/")[2]
        extended = campus.enter("hopper").ask("/")[2]
    closed_at = local_time_text(due_at + 2 * 86_400, find_zone(bed.folder.config))
    assert f"Closed on {closed_at}: no more submissions are accepted." in page
    assert 'href="/submissions/hw3/new"' not in page
    assert 'href="/submissions/hw4/new"' in page
    assert "Closed on" not in extended
    assert 'href="/submissions/hw3/new"' in extended


# floods and faults


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    bed = make(tmp_path)
    publish(bed)
    return bed


def wait_for_draft(submissions: ServerSubmissions, student: str) -> str:
    def is_done() -> bool:
        draft = submissions.find(student, "hw4")
        return draft is not None and draft.prepared is not None

    wait_until(is_done)
    draft = submissions.find(student, "hw4")
    assert draft is not None
    return draft.id


def test_drafts_are_limited_by_time_and_number(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, now = Worker(), [0.0]
    monkeypatch.setattr(server_submissions, "MOST_DRAFTS", 3)
    monkeypatch.setattr(server_submissions, "MOST_AT_ONCE", 2)
    submissions = ServerSubmissions(bed.folder.path, bed.paths, worker.run, lambda: now[0])
    choice = Choice(assignment="hw4", lab_id=LAB_ID)
    worker.gate.clear()
    submissions.begin("lovelace", "lovelace", choice)
    with pytest.raises(BusyError, match="being collected"):
        submissions.begin("lovelace", "lovelace", Choice(assignment="hw4", run="r1"))
    submissions.begin("lovelace", "lovelace", choice)  # a second click
    submissions.begin("turing", "turing", choice)
    with pytest.raises(BusyError, match="many students"):
        submissions.begin("hopper", "hopper", choice)
    worker.gate.set()
    wait_for_draft(submissions, "turing")
    for _ in range(2):
        wait_for_draft(submissions, "lovelace")
        submissions.begin("lovelace", "lovelace", choice)
    draft = wait_for_draft(submissions, "lovelace")
    with pytest.raises(PolicyError, match="too often"):
        submissions.begin("lovelace", "lovelace", choice)
    left = bed.folder.private / server_submissions.DIRECTORY
    assert len(list(left.iterdir())) == 2, "one of each student"
    now[0] += server_submissions.DRAFT_S + 1
    with pytest.raises(NotFoundError, match="no longer"):
        submissions.submit("lovelace", "hw4", draft)
    assert list(left.iterdir()) == []
    now[0] += server_submissions.WINDOW_S
    submissions.begin("lovelace", "lovelace", choice)
    wait_for_draft(submissions, "lovelace")


def test_many_clicks_submit_once(bed: Bed) -> None:
    submissions = ServerSubmissions(bed.folder.path, bed.paths, Worker().run)
    submissions.begin("lovelace", "lovelace", Choice(assignment="hw4", lab_id=LAB_ID))
    draft = wait_for_draft(submissions, "lovelace")
    numbers: list[int] = []

    def click() -> None:
        numbers.append(submissions.submit("lovelace", "hw4", draft).receipt.number)

    threads = [threading.Thread(target=click) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == [1] * 6
    assert len(Receiver(bed.folder.drop).receipts("hw4", "lovelace")) == 1


def test_a_bundle_that_is_not_the_students_is_refused_by_the_receiver(bed: Bed) -> None:
    def swap(order: SubmissionOrder) -> PreparedSubmission:
        return Worker().run(msgspec.structs.replace(order, student="turing"))

    submissions = ServerSubmissions(bed.folder.path, bed.paths, swap)
    submissions.begin("lovelace", "lovelace", Choice(assignment="hw4", lab_id=LAB_ID))
    draft = wait_for_draft(submissions, "lovelace")
    with pytest.raises(LabError, match="refused"):
        submissions.submit("lovelace", "hw4", draft)
    assert Receiver(bed.folder.drop).receipts("hw4", "lovelace") == []


def test_an_unexpected_error_does_not_hold_a_draft(bed: Bed) -> None:
    def fail(order: SubmissionOrder) -> PreparedSubmission:
        raise OSError("no more processes")

    notes: list[str] = []
    submissions = ServerSubmissions(bed.folder.path, bed.paths, fail, notify=notes.append)
    for _ in range(2):
        submissions.begin("lovelace", "lovelace", Choice(assignment="hw4", lab_id=LAB_ID))
        wait_for_draft(submissions, "lovelace")
    draft = submissions.find("lovelace", "hw4")
    assert draft is not None
    assert draft.prepared is not None
    assert "unexpected error" in draft.prepared.what
    assert "no more processes" in notes[0]


def test_what_an_earlier_keeper_left_is_deleted(bed: Bed) -> None:
    left = bed.folder.private / server_submissions.DIRECTORY / "old"
    left.mkdir(parents=True)
    ServerSubmissions(bed.folder.path, bed.paths)
    assert not left.exists()


def test_the_process_that_prepares_says_why_it_failed(bed: Bed, tmp_path: Path) -> None:
    """The real process: the student has no server."""
    order = SubmissionOrder(
        course=str(bed.folder.path),
        paths={name: str(getattr(bed.paths, name)) for name in bed.paths.__struct_fields__},
        seat="lovelace",
        student="lovelace",
        assignment="hw4",
        directory=str(tmp_path),
        lab_id=LAB_ID,
    )
    prepared = WorkerProcesses().run(order)
    assert prepared.what == "lovelace has no server"
    with pytest.raises(LabError, match="could not be collected"):
        WorkerProcesses().run(msgspec.structs.replace(order, directory=str(tmp_path / "none")))


# regrades


def release(bed: Bed, student: str) -> None:
    feedback = Feedback("hw3", 1, 60, 100, "accuracy 0.9", "<h1>feedback</h1>")
    Receiver(bed.folder.drop).release_feedback("hw3", student, feedback)


def ask_regrade(visitor: Visitor, text: str) -> str:
    word = token(visitor.ask("/")[2])
    visitor.form("/submissions/hw3/regrade", csrf=word, text=text)
    return visitor.ask("/")[2]


def test_a_regrade_is_requested_answered_and_limited(campus: Campus) -> None:
    bed = campus.bed
    visitor = campus.enter("lovelace")
    assert "has not been released" in ask_regrade(visitor, "please")
    assert "Ask for a regrade" not in visitor.ask("/")[2]
    release(bed, "lovelace")
    wait_until(lambda: "Ask for a regrade" in visitor.ask("/")[2])
    assert "3 are left" in visitor.ask("/submissions/hw3/regrade")[2]
    assert "has 1001 characters" in ask_regrade(visitor, "x" * 1001)
    assert "has no text" in ask_regrade(visitor, "  ")
    page = ask_regrade(visitor, f"question 2\nis right {EVIL}")
    assert "was sent to staff" in page
    assert "has not answered yet" in page
    assert EVIL not in page
    assert "Ask for a regrade" not in page
    (line,) = bed.folder.ledger.list_entries(kind="regrade")
    assert (line.student, line.by) == ("lovelace", "lovelace")
    assert "no answer yet" in ask_regrade(visitor, "again")
    other = campus.enter("turing").ask("/")[2]
    assert "question 2" not in other
    answer_regrade(bed.folder, "hw3", "lovelace", f"two points more {EVIL}", accepted=True, by="ta")
    wait_until(lambda: "two points more" in visitor.ask("/")[2])
    assert EVIL not in visitor.ask("/")[2]
    for _ in range(MOST_REQUESTS - 1):
        assert "was sent to staff" in ask_regrade(visitor, "and this")
        answer_regrade(bed.folder, "hw3", "lovelace", "no", by="ta")
    wait_until(lambda: "<strong>Declined</strong>" in visitor.ask("/")[2])
    assert "At most 3 requests" in ask_regrade(visitor, "and that")
    assert len(bed.folder.ledger.list_entries(kind="regrade")) == MOST_REQUESTS


def test_a_flood_of_requests_records_one(campus: Campus) -> None:
    release(campus.bed, "lovelace")
    visitor = campus.enter("lovelace")
    word = token(visitor.ask("/")[2])

    def send() -> None:
        copy = Visitor(visitor.url)
        copy.cookie = visitor.cookie
        copy.form("/submissions/hw3/regrade", csrf=word, text="look again")

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(campus.bed.folder.ledger.list_entries(kind="regrade")) == 1


def test_messages_are_sentences_and_times_are_in_the_zone_of_the_course(campus: Campus) -> None:
    file = campus.bed.folder.path / "course.yaml"
    hours = 'hours: [{days: [mon], from: "10:00", to: "12:00", zone: Europe/Berlin}]\n'
    file.write_text(file.read_text() + hours)
    visitor = campus.enter("lovelace")
    page = ask_regrade(visitor, "why?")
    assert "Your grade for hw3 has not been released yet. Only a grade" in page
    _, page = collect(visitor, f"run:{run_of(campus, 0)}")
    page = submit(visitor, draft_of(page))
    [signed] = Receiver(campus.bed.folder.drop).receipts("hw4", "lovelace")
    received = local_time_text(signed.receipt.received_at, ZoneInfo("Europe/Berlin"))
    assert f"received {received}. Download" in page
    assert f">{received}</time>" in visitor.ask("/")[2]


def test_the_penalty_of_a_receipt_is_before_free_days(campus: Campus) -> None:
    late = campus.enter("dijkstra")
    assert "10% off" in late.ask("/")[2]
    assert "before free days" not in late.ask("/")[2]
    file = campus.bed.folder.path / "course.yaml"
    rules = "late: {per_day: 10%, at_most: 2d, free_days: 2}"
    file.write_text(file.read_text().replace("late: 48h, penalty: 10", rules))
    wait_until(lambda: "10% off before free days" in late.ask("/")[2])
