"""The page for students: who gets in, what they see, what they can do, and what nobody can."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from course_keeper_context import Pretended

from labctl.courses import claims, join_codes
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.released_grades import draft_released_line
from labctl.courses.requests import RequestHandler
from labctl.errors import CapacityError, PolicyError, UsageError
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver
from labctl.web import http_server, student_access
from labctl.web.http_server import StudentSettings, parse_origin

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, Stream, Visitor, fill, make, stream_of, wait_until

CODE = "abcdefgh" * 4
EVIL = "<script>alert(1)</script>"


@dataclass
class School:
    """A course with its page for students; `work` only remembers what it is to do."""

    bed: Bed
    work: Pretended
    request_handler: RequestHandler
    url: str
    stop: threading.Event

    def invite(self, student: str, code: str = CODE, valid_s: float = 1000.0) -> None:
        folder = self.bed.folder
        public = join_codes.derive_key_pair(folder.id, student, code)[1]
        join_codes.store_page_code(folder, student, public, int(time.time() + valid_s))

    def try_code(self, student: str, code: str = CODE, **headers: str) -> tuple[int, Visitor]:
        visitor = Visitor(f"{self.url}/")
        status, _, _ = visitor.ask(
            "/sign-in",
            "POST",
            f"csrf=&student={student}&code={code}",
            Origin=self.url,
            Content_Type="application/x-www-form-urlencoded",
            **headers,
        )
        return status, visitor

    def enter(self, student: str) -> Visitor:
        self.invite(student)
        status, visitor = self.try_code(student)
        assert status == 303
        return visitor

    def edit_roster(self, before: str, after: str) -> None:
        file = self.bed.folder.roster_file
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))


@pytest.fixture
def school(tmp_path: Path) -> Iterator[School]:
    bed = fill(make(tmp_path))
    work = Pretended(bed.folder)
    request_handler = RequestHandler(bed.folder, work)
    stop = threading.Event()
    url = http_server.serve_student_page(
        bed.folder,
        bed.paths,
        bed.state,
        StudentSettings(port=0, services_port=0),
        request_handler=request_handler,
        stop=stop,
    )
    yield School(bed, work, request_handler, url, stop)
    stop.set()
    assert request_handler.wait(60)
    bed.state.close()


def act(visitor: Visitor, path: str, **fields: str) -> tuple[int, str]:
    """Open an action's page, send its form, and return the status and the page that follows."""
    page = visitor.ask(path)[2]
    word = page.partition('name="csrf" value="')[2].partition('"')[0]
    status, headers, body = visitor.form(path.partition("?")[0], csrf=word, **fields)
    return (status, visitor.ask("/")[2]) if headers.get("location") == "/" else (status, body)


# who gets in


def test_the_code_of_the_join_file_signs_in(school: School) -> None:
    school.invite("lovelace")
    status, visitor = school.try_code("lovelace")
    assert status == 303
    status, headers, page = visitor.ask("/")
    assert status == 200
    assert "Ada Lovelace" in page
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert join_codes.list_page_users(school.bed.folder) == ["lovelace"]


def test_the_cookie_is_kept_from_scripts_and_apart_from_the_staffs(school: School) -> None:
    school.invite("lovelace")
    visitor = Visitor(f"{school.url}/")
    _, headers, _ = visitor.form("/sign-in", csrf="", student="lovelace", code=CODE)
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert cookie.startswith("labctl-student-")
    assert CODE not in cookie
    stop = threading.Event()
    try:
        staff = Visitor(school.bed.start(stop))
        staff.enter()
        assert Visitor(f"{school.url}/").ask("/", Cookie=staff.cookie)[0] == 303
        assert Visitor(staff.url).ask("/", Cookie=visitor.cookie)[0] == 403
        # not even under the other's name: the keys that sign them differ
        name = visitor.cookie.partition("=")[0]
        forged = f"{name}={staff.cookie.partition('=')[2]}"
        assert Visitor(f"{school.url}/").ask("/", Cookie=forged)[0] == 303
    finally:
        stop.set()


@pytest.mark.parametrize(
    ("student", "code"),
    [("lovelace", "b" * 32), ("turing", CODE), ("nobody", CODE), ("../x", CODE), ("lovelace", "")],
)
def test_a_wrong_code_opens_nothing(school: School, student: str, code: str) -> None:
    school.invite("lovelace")
    status, visitor = school.try_code(student, code)
    assert status == 403
    assert visitor.ask("/")[0] == 303


def test_codes_cannot_be_tried_without_end(school: School) -> None:
    school.invite("lovelace")
    for number in range(student_access.MOST_TRIES):
        assert school.try_code("lovelace", f"{number:032}")[0] == 403
    status, visitor = school.try_code("lovelace")
    assert status == 403, "the right code comes too late"
    assert visitor.ask("/")[0] == 303
    # Another address and another student are not shut out.
    assert school.try_code("lovelace", X_Forwarded_For="192.0.2.9")[0] == 303
    school.invite("turing")
    assert school.try_code("turing")[0] == 303


def test_one_student_cannot_be_tried_from_many_addresses() -> None:
    now = [0.0]
    limiter = student_access.SignInLimiter(lambda: now[0])
    for number in range(student_access.MOST_TRIES_IN_ALL):
        limiter.check("ada", f"192.0.2.{number}")
        limiter.record_failure("ada", f"192.0.2.{number}")
    with pytest.raises(PolicyError):
        limiter.check("ada", "198.51.100.1")
    now[0] += student_access.WINDOW_S + 1
    limiter.check("ada", "198.51.100.1")


def test_a_code_expires_unless_it_was_used(school: School) -> None:
    school.invite("lovelace", valid_s=-5)
    assert school.try_code("lovelace")[0] == 403
    join_codes.mark_page_code_used(school.bed.folder, "lovelace")  # as `labctl join` does
    assert school.try_code("lovelace")[0] == 303


def test_a_student_who_left_loses_access_at_once_and_open_streams_too(school: School) -> None:
    visitor = school.enter("lovelace")
    page = visitor.ask("/")[2]
    with Stream(visitor, stream_of(page)) as stream:
        assert stream.status == 200
        school.edit_roster("lovelace@example.edu,,a1,yes", "lovelace@example.edu,,a1,no")
        assert visitor.ask("/")[0] == 303
        assert visitor.ask("/events", Sec_Fetch_Mode="cors")[0] == 403
        with contextlib.suppress(OSError, AttributeError):
            while stream.update():
                pass
    assert school.try_code("lovelace")[0] == 403


def test_a_new_invitation_ends_the_sessions_of_the_old_one(school: School) -> None:
    visitor, other = school.enter("lovelace"), school.enter("turing")
    with Stream(visitor, stream_of(visitor.ask("/")[2])) as stream:
        school.invite("lovelace", "z" * 32)
        assert visitor.ask("/")[0] == 303
        with contextlib.suppress(OSError, AttributeError):
            while stream.update():
                pass
    assert school.try_code("lovelace")[0] == 403
    assert school.try_code("lovelace", "z" * 32)[0] == 303
    assert other.ask("/")[0] == 200


def test_a_roster_that_is_being_edited_locks_nobody_out(school: School) -> None:
    visitor = school.enter("lovelace")
    school.edit_roster("id,name", 'id,"name')
    assert visitor.ask("/sign-in")[0] == 200
    assert visitor.ask("/")[0] in (200, 503)
    school.edit_roster('id,"name', "id,name")
    wait_until(lambda: visitor.ask("/")[0] == 200)


# what they see


def test_nobody_sees_anything_of_another_student(school: School) -> None:
    bed = school.bed
    visitor = school.enter("lovelace")
    _, _, page = visitor.ask("/")
    others = [one for one in bed.folder.list_students() if one.id != "lovelace"]
    assert not [one.id for one in others if one.id in page or one.name in page]
    theirs = next(run.id for run in bed.state.list_runs() if run.lab_id != bed.seat(0).lab_id)
    key = bed.seat(1).pseudonym
    for path in (
        f"/?run={theirs}", f"/runs/{theirs}/log", f"/runs/{theirs}/cancel",
        "/submissions/hw3/2/receipt", "/submissions/hw3/1/../../x",
        "/submissions/hw4/feedback", "/submissions/../feedback",
        # the staff's addresses
        f"/seats/{key}", f"/seats/{key}/extend", "/costs", "/another", "/assignments/hw3",
        f"/events/seats/{key}", f"/seats/{key}/handed/{key}/hw3/1/bundle",
    ):  # fmt: skip
        status, _, body = visitor.ask(path)
        assert status == 404, path
        assert "Turing" not in body
    assert visitor.form(f"/runs/{theirs}/cancel", csrf="x")[0] == 403


@pytest.mark.parametrize(
    "path", ["/", "/events", "/runs/x/log", "/submissions/hw3/1/receipt", "/costs"]
)
def test_a_stranger_sees_nothing(school: School, path: str) -> None:
    status, headers, body = Visitor(f"{school.url}/").ask(path)
    assert (status, headers["location"], body) == (303, "/sign-in", "")
    assert "Lovelace" not in Visitor(f"{school.url}/").ask("/sign-in")[2]


def test_the_sign_in_page_says_that_a_session_has_ended(school: School) -> None:
    visitor = school.enter("lovelace")
    school.invite("lovelace", CODE[::-1])
    assert visitor.ask("/")[1]["location"] == "/sign-in?ended"
    assert "Your session has ended. Sign in again." in visitor.ask("/sign-in?ended")[2]
    status, headers, _ = visitor.form("/submissions/hw3/regrade", csrf="x", text="why?")
    assert (status, headers["location"]) == (303, "/sign-in?unsent")
    assert "nothing was sent" in visitor.ask("/sign-in?unsent")[2]


def test_grades_are_seen_once_they_are_released(school: School) -> None:
    school.bed.grade("lovelace", "hw3", 43.21, "a secret hint")
    visitor = school.enter("lovelace")
    page = visitor.ask("/")[2]
    assert "43.21" not in page
    assert "secret" not in page
    assert visitor.ask("/submissions/hw3/feedback")[0] == 404
    feedback = Feedback("hw3", 1, 87.5, 100, f"well done {EVIL}", f"<h1>All of it</h1>{EVIL}")
    receiver = Receiver(school.bed.folder.drop)
    receiver.release_feedback("hw3", "lovelace", feedback)
    wait_until(lambda: "<strong>87.5</strong> of 100 points" in visitor.ask("/")[2])
    page = visitor.ask("/")[2]
    assert "well done &lt;script&gt;" in page
    status, headers, body = visitor.ask("/submissions/hw3/feedback")
    assert (status, "All of it" in body) == (200, True)
    assert headers["content-security-policy"].startswith("sandbox;")
    receiver.release_feedback("hw3", "lovelace", None)
    wait_until(lambda: "87.5" not in visitor.ask("/")[2])


def test_a_released_grade_that_is_dropped_says_so(school: School) -> None:
    folder = school.bed.folder
    group = "assignment_groups: {homework: {assignments: [hw3, hw4], drop_lowest: 1}}\n"
    file = folder.path / "course.yaml"
    file.write_text(file.read_text() + group)
    receiver, visitor = Receiver(folder.drop), school.enter("lovelace")
    assert "Total so far" not in visitor.ask("/")[2]
    for name, score in (("hw3", 40), ("hw4", 45)):
        points = folder.config.assignments[name].points
        receiver.release_feedback(name, "lovelace", Feedback(name, 1, score, points, "", ""))
        grade = Grade(student="lovelace", score=score, points=points)
        folder.ledger.append_all([draft_released_line(name, grade, "staff")])
    wait_until(lambda: "<strong>45</strong> of 50 points" in visitor.ask("/")[2])
    page = visitor.ask("/")[2]
    assert "Total so far: <strong>45</strong> of 50 points" in page
    assert "hw3 is dropped: the lowest of 2 in homework" in page
    assert "<small>submission 1; dropped: the lowest of 2 in homework</small>" in page
    receiver.release_feedback("hw3", "lovelace", Feedback("hw3", 0, 40, 100, "an oral exam", ""))
    wait_until(lambda: "submission 0" not in visitor.ask("/")[2])
    wait_until(lambda: "<small>dropped: the lowest of 2 in homework" in visitor.ask("/")[2])
    assert "Total so far" not in school.enter("turing").ask("/")[2]
    weighted = (
        "{homework: {assignments: [hw3], weight: 25%}, exams: {assignments: [hw4], weight: 75%}}"
    )
    file.write_text(file.read_text().replace(group, f"assignment_groups: {weighted}\n"))
    # 40 of 100 and 45 of 50: 0.25 * 40% + 0.75 * 90%
    wait_until(lambda: "Total so far: <strong>77.5%</strong>" in visitor.ask("/")[2])
    assert "<small>homework (25%): 40 of 100;</small>" in visitor.ask("/")[2]


def test_what_students_write_is_shown_as_text(school: School) -> None:
    server = next(
        one for one in school.bed.state.list_servers() if one.lab_id == school.bed.seat(0).lab_id
    )
    run = school.bed.run(server, "evil", "exited")
    school.bed.state.save_run(msgspec.structs.replace(run, command=(EVIL,)))
    school.edit_roster("Ada Lovelace", f"Ada {EVIL}")
    page = school.enter("lovelace").ask("/")[2]
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(1)") >= 2


# what they do


def test_the_price_of_a_server_is_written_as_in_a_terminal(school: School) -> None:
    visitor = school.enter("lovelace")
    assert "$0.526/h" in visitor.ask("/")[2]
    assert "at $0.526/h" in visitor.ask("/runs/1120-100000-bbbb/cancel")[2].replace("\n", " ")


def test_start_extend_and_end_are_the_keepers_own_requests(school: School) -> None:
    visitor = school.enter("liskov")  # has no server
    assert "Start my server" in visitor.ask("/")[2]
    wait_until(lambda: "$1.00/h" in visitor.ask("/")[2])
    assert "small, $1.00/h." in visitor.ask("/server/start")[2]
    status, page = act(visitor, "/server/start")
    assert status == 303
    assert "starting" in page
    assert school.request_handler.wait(60)
    status, page = act(visitor, "/server/extend?by=2h", by="2h")
    assert "Extended by 2\N{NO-BREAK SPACE}h." in page
    assert school.work.calls == ["make", "extend 7200 liskov"]
    status, page = act(visitor, "/server/end")
    assert status == 303
    wait_until(lambda: school.work.calls[-1] == "end")
    status, page = act(visitor, "/server/end")
    assert "You have no server now" in page or "you have no server now" in page


def test_a_machine_that_runs_is_not_up_until_it_is_prepared(school: School) -> None:
    visitor = school.enter("liskov")
    school.work.gate.clear()
    status, page = act(visitor, "/server/start")
    assert status == 303
    assert 'class="said' not in page, "the live part says it, until it is over"
    lab = school.bed.serve_up(4).lab_id  # the machine runs, and Docker is not installed there yet
    wait_until(lambda: '<dd class="words">T4' in visitor.ask("/")[2])
    page = visitor.ask("/")[2]
    assert 'class="state starting"' in page
    for path in (f"/services/{lab}/jupyter", f"/terminal/{lab}", "/server/extend"):
        assert path not in page
    status, headers, _ = visitor.ask(f"/services/{lab}/jupyter")
    assert (status, headers["refresh"]) == (200, "2")
    assert visitor.ask(f"/terminal/{lab}")[0] == 404
    assert "/server/end" in page, "the machine costs money"
    school.work.gate.set()
    wait_until(lambda: f"/services/{lab}/jupyter" in visitor.ask("/")[2])
    assert 'class="state running"' in visitor.ask("/")[2]


def test_a_server_that_staff_started_is_to_be_used_not_started(school: School) -> None:
    visitor = school.enter("liskov")
    school.bed.serve_up(4)
    wait_until(lambda: "Staff started it." in visitor.ask("/")[2])
    page = visitor.ask("/")[2]
    assert "submit, select <strong>Use this server</strong> above, or use" in page
    assert "start your server" not in page


def test_a_refusal_names_its_reason_and_is_on_record(school: School) -> None:
    school.work.refusal = PolicyError("your budget is used up", why=f"you have spent {EVIL}")
    visitor = school.enter("liskov")
    _, page = act(visitor, "/server/start")
    assert "our budget is used up" in page
    assert EVIL not in page
    assert school.work.calls == []
    last = school.bed.folder.ledger.list_entries(kind="refused")[-1]
    assert last.student == "liskov"


def test_a_server_that_could_not_start_is_explained(school: School) -> None:
    school.work.error = CapacityError("no machine left", why="zone a")
    visitor = school.enter("liskov")
    act(visitor, "/server/start")
    wait_until(lambda: "no machine left. zone a" in visitor.ask("/")[2])
    assert "Start my server" in visitor.ask("/")[2]


def test_a_server_that_cannot_be_saved_says_why_and_what_to_do(school: School) -> None:
    visitor = school.enter("liskov")
    act(visitor, "/server/start")
    wait_until(lambda: school.work.keys == [("liskov",)])
    school.work.error = PolicyError(
        f"{school.bed.folder.path}/seats/liskov cannot be written",
        why=f"no space left\nthe server is still running {EVIL}",
    )
    act(visitor, "/server/end")
    assert school.request_handler.wait(60)
    wait_until(lambda: "could not be saved" in visitor.ask("/")[2])
    page = visitor.ask("/")[2]
    assert "Its results are being saved" not in page
    assert "<p>no space left</p>" in page
    assert str(school.bed.folder.path) not in page
    assert "labctl course down --only liskov" in page
    assert EVIL not in page
    school.work.error = None
    for seat in school.request_handler.list_seat_servers():
        seat.resume()
    wait_until(lambda: "Start my server" in visitor.ask("/")[2])
    assert "could not be saved" not in visitor.ask("/")[2]


def test_a_server_whose_saving_never_finishes_says_so(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor, saving, done = school.enter("liskov"), threading.Event(), threading.Event()
    act(visitor, "/server/start")
    wait_until(lambda: school.work.keys == [("liskov",)])

    def save(*_: object) -> None:
        saving.set()
        assert done.wait(60)

    monkeypatch.setattr(school.work, "save_and_remove_server", save)
    act(visitor, "/server/end")
    assert saving.wait(60)
    assert "could not be saved" not in visitor.ask("/")[2]
    monkeypatch.setattr(claims, "LONG_SAVE_S", 0.0)
    wait_until(lambda: "it has taken longer than" in visitor.ask("/")[2])
    assert "labctl course down --only liskov" in visitor.ask("/")[2]
    done.set()


def test_a_member_of_a_team_does_not_end_the_others_server(school: School) -> None:
    one, other = (student.id for student in school.bed.folder.list_students()[-2:])
    first, second = school.enter(one), school.enter(other)
    act(first, "/server/start")
    wait_until(lambda: school.work.keys == [(one,)])
    act(second, "/server/start")
    wait_until(lambda: school.work.keys[-1] == tuple(sorted((one, other))))
    act(first, "/server/end")
    wait_until(lambda: school.work.keys[-1] == (other,))
    assert "end" not in school.work.calls


@pytest.mark.parametrize("path", ["/server/start", "/server/extend", "/server/end", "/sign-out"])
def test_another_page_cannot_act_for_a_student(school: School, path: str) -> None:
    visitor = school.enter("liskov")
    other = school.enter("turing")
    token = other.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
    form = "application/x-www-form-urlencoded"
    own = school.url
    assert visitor.ask(path, "POST", f"csrf={token}&by=1h", Origin=own, Content_Type=form)[0] == 403
    mine = visitor.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": own, "Sec_Fetch_Site": "same-site"},  # a notebook on another port
        {},
    ):
        body = f"csrf={mine}&by=1h"
        assert visitor.ask(path, "POST", body, Content_Type=form, **headers)[0] == 403
    assert (
        visitor.ask(path, "POST", f"csrf={mine}", Origin=own, Content_Type="text/plain")[0] == 415
    )
    assert school.work.calls == []
    assert visitor.ask("/")[0] == 200


def test_a_link_elsewhere_opens_the_page_and_nothing_more(school: School) -> None:
    visitor = school.enter("liskov")
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert visitor.ask("/", Sec_Fetch_Dest="document", **link)[0] == 200
    assert visitor.ask("/", Sec_Fetch_Dest="iframe", **link)[0] == 403
    assert visitor.ask("/submissions/hw3/1/receipt", Sec_Fetch_Dest="document", **link)[0] == 403
    assert visitor.ask("/", Host="evil.example")[0] == 400


def test_signing_out_ends_the_session_of_the_browser(school: School) -> None:
    visitor = school.enter("liskov")
    word = visitor.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
    cookie = visitor.cookie
    status, headers, _ = visitor.form("/sign-out", csrf=word)
    assert (status, headers["location"]) == (303, "/sign-in")
    assert visitor.ask("/")[0] == 303
    assert Visitor(f"{school.url}/").ask("/", Cookie=cookie)[0] == 303, "nor for a copy of it"


@pytest.mark.parametrize("text", ["labs.example.edu", "ftp://x", "https://x/path", "https://"])
def test_an_address_that_browsers_cannot_open_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_origin(text)
    assert parse_origin("https://labs.example.edu:8443/") == "https://labs.example.edu:8443"


# what takes connections


def open_connection(school: School, text: str) -> socket.socket:
    host, port = school.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(text.format(host=f"{host}:{port}", url=school.url).encode())
    return connection


FORM_HEAD = (
    "POST /sign-in HTTP/1.1\r\nHost: {host}\r\nOrigin: {url}\r\n"
    "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\n"
)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ("", b""),
        ("GET / HTTP/1.1\r\nX-Long: ", b""),
        (f"{FORM_HEAD}csrf=", b"HTTP/1.1 408 "),
        # The answer does not wait for the body, and the connection not for its rest.
        (FORM_HEAD.replace("urlencoded", "unknown"), b"HTTP/1.1 415 "),
    ],
)
def test_a_request_that_does_not_arrive_keeps_no_connection(
    school: School, monkeypatch: pytest.MonkeyPatch, sent: str, answer: bytes
) -> None:
    monkeypatch.setattr("labctl.web.request_deadline.HEAD_S", 1.0)
    monkeypatch.setattr("labctl.web.csrf.FORM_S", 1.0)
    with open_connection(school, sent) as connection:
        connection.settimeout(0.2)
        received, is_open = b"", True
        ends_at = time.monotonic() + 30
        while is_open and time.monotonic() < ends_at:
            try:
                block = connection.recv(65536)
                received, is_open = received + block, bool(block)
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.sendall(b"a")  # one byte after the other
            except OSError:
                is_open = False
    assert not is_open
    assert received[: len(answer)] == answer


def test_a_stream_outlives_the_time_for_a_request(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.web.request_deadline.HEAD_S", 0.5)
    ada = school.enter("lovelace")
    path = stream_of(ada.ask("/")[2])
    head = f"GET {path} HTTP/1.1\r\nHost: {{host}}\r\nCookie: {ada.cookie}\r\n\r\n"
    with open_connection(school, head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(1.5)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert connection.recv(65536) != b"", "the stream has ended"


def test_a_cookie_of_another_course_opens_nothing(school: School, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    bed = fill(make(tmp_path / "second"))
    second = School(bed, school.work, school.request_handler, "", threading.Event())
    second.url = http_server.serve_student_page(
        bed.folder,
        bed.paths,
        bed.state,
        StudentSettings(port=0, services_port=0),
        request_handler=school.request_handler,
        stop=second.stop,
    )
    try:
        name = second.enter("lovelace").cookie.partition("=")[0]
        ada = school.enter("lovelace")
        stranger = Visitor(f"{second.url}/")
        for cookie in (ada.cookie, f"{name}={ada.cookie.partition('=')[2]}"):
            stranger.cookie = cookie
            assert stranger.ask("/")[0] == 303
    finally:
        second.stop.set()
        bed.state.close()


@pytest.mark.parametrize("name", ["x" * 100_000, "../lovelace", "%00", "lovelace%00"])
def test_what_is_no_students_name_is_a_wrong_code(school: School, name: str) -> None:
    school.invite("lovelace")
    assert school.try_code(name)[0] == 403
    assert school.try_code("lovelace")[0] == 303


def test_a_student_who_changes_the_team_sees_nothing_of_the_old_one_at_once(
    school: School,
) -> None:
    ada = school.enter("lovelace")
    page = ada.ask("/")[2]
    run = page.partition("/runs/")[2].partition("/")[0]
    with Stream(ada, f"/runs/{run}/log") as log:
        assert log.status == 200
    # Before the next snapshot of the course, which the pages show otherwise.
    school.edit_roster("lovelace@example.edu,,a1,yes", "lovelace@example.edu,owls,a1,yes")
    assert run not in ada.ask("/")[2]
    assert ada.ask(f"/runs/{run}/log")[0] == 404
    assert ada.ask(f"/runs/{run}/cancel")[0] == 404
    school.edit_roster("lovelace@example.edu,owls,a1,yes", "lovelace@example.edu,,a1,yes")
    assert run in ada.ask("/")[2]
