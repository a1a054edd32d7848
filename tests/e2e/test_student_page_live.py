"""A student who uses the browser alone: from the join file to the end of a real server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import sshd_container
from chromium import keep_picture, measure_overflow
from lab_servers import wait_for
from playwright.sync_api import Browser, BrowserContext, Page, TimeoutError, expect

from labctl.config import find_paths
from labctl.courses import teardown
from labctl.courses.context import SEATS
from labctl.courses.invitation import invite
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import publish_assignments
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_operations import CachingCourseOperator, SeatOperations
from labctl.courses.server_submissions import WorkerProcesses
from labctl.courses.status import build_seat_context
from labctl.events import AGREE_TO_ALL, PolicyReporter
from labctl.runs import run_specs, runs
from labctl.state import State
from labctl.submissions.bundle import open_member, read_members
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver
from labctl.web import factory, http_server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from dashboard_bed import Bed, fill, make
from draft_bed import Worker, publish
from service_proxy_bed import serve_bed

pytest_plugins = ["browser_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
PAGE_MS = 90_000
RUN = "live-run"
EVIL = "<img src=x onerror=alert(1)>"
LOOP = f"echo 'first {EVIL}'; i=0; while :; do echo \"line $i\"; i=$((i+1)); sleep 0.2; done"
COURSE = """\
course: ml-2026
server: {provider: local, gpu: none}
image: IMAGE
keeper: {host: keeper.example.edu, user: labctl}
per_student: {budget: 5.00, ttl: 1h, max_ttl: 2h}
assignments:
  hw1: {require: [code, logs]}
"""
# What a student leaves among their code: a link, a name of two lines, what git would run, and data
# that their ignore rules leave out.
WORK = r"""
mkdir -p ~/labctl/*/code && cd ~/labctl/*/code && mkdir -p .git data
echo 'print(1)' > train.py
ln -sf /etc/passwd passwords.txt
touch "$(printf 'two\nlines.py')"
printf '[core]\n\tfsmonitor = touch /tmp/labctl-was-run\n' > .git/config
printf 'data/\n' > .labignore
echo secret > data/large.bin
"""
TOKEN = "ghp_" + "a1" * 18


# Jupyter takes minutes to install: this answers where it would, and as it would be started.
STAND_IN = r"""
FROM labctl-test-small:1
RUN mkdir -p /srv/lab && echo '<h1>In place of Jupyter</h1>' > /srv/lab/index.html
RUN printf '#!/bin/sh\n[ "$*" = "server --version" ] && echo 2.20.0 && exit\n\
while [ "$1" != --port ]; do shift; done\nexec httpd -f -p "$2" -h /srv\n' > /usr/bin/jupyter \
    && chmod 755 /usr/bin/jupyter && ln -s jupyter /usr/bin/jupyter-lab
"""


@dataclass
class School:
    staff: CachingCourseOperator
    url: str
    join_file: Path
    notices: list[str]


@pytest.fixture
def school(
    tmp_path: Path, base_image: str, server_image: str, small_image: str
) -> Iterator[School]:
    path = tmp_path / "ml-2026"
    path.mkdir()
    image = sshd_container.build("labctl-test-small-jupyter:1", STAND_IN)
    (path / "course.yaml").write_text(COURSE.replace("IMAGE", image))
    roster = path / "roster.csv"
    roster.write_text("id,name,email,team,section,active\nalice,Alice Ash,,,,yes\nbob,Bob,,,,yes\n")
    roster.chmod(0o600)
    make_private(path)
    folder = CourseFolder(path)
    Receiver(folder.drop).init()
    host_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
    publish_assignments(folder, host_key)
    keys = AuthorizedKeys(folder, tmp_path / "authorized_keys")
    join_file = invite(folder, "alice", tmp_path / "join", keys, host_key).path
    places = find_paths({"HOME": str(tmp_path / "home")})
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch, State(places.database) as state:
        patch.setenv("LABCTL_BASE_IMAGE", base_image)
        patch.setattr(factory, "EVERY_S", 0.5)
        reporter = PolicyReporter(lambda event: None, AGREE_TO_ALL)
        staff = CachingCourseOperator(folder, places, state, reporter, by="keeper")
        notices: list[str] = []
        request_handler = RequestHandler(folder, SeatOperations(staff))
        settings = http_server.StudentSettings(port=0, services_port=0)
        try:
            url = http_server.serve_student_page(
                folder,
                places,
                state,
                settings,
                request_handler=request_handler,
                notify=notices.append,
                stop=stop,
            )
            yield School(staff, url, join_file, notices)
        finally:
            stop.set()
            assert request_handler.wait(300)
            teardown.end_seats(staff, folder.list_seats(), discard=True)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(PAGE_MS)
        yield context.new_page()


def require_state(page: Page, state: str) -> None:
    try:
        expect(page.locator("#server .state")).to_have_text(state, timeout=PAGE_MS)
    except AssertionError:
        raise AssertionError(page.locator("main").inner_text()) from None


def confirm_service(opened: Page, school: School) -> None:
    try:
        opened.get_by_role("button", name="Continue").click(timeout=PAGE_MS)
    except TimeoutError:
        raise AssertionError([opened.locator("body").inner_text(), *school.notices]) from None


@contextmanager
def hang_server(school: School) -> Iterator[None]:
    """Keep the machine from answering."""
    server = school.staff.state.get_lab_server(school.staff.folder.find_seat("alice").lab_id)
    assert server is not None
    label = f"label=labctl.server={server.id}"
    container = sshd_container.docker("ps", "--quiet", "--filter", label).strip()
    sshd_container.docker("exec", container, "sh", "-c", "kill -STOP -1")
    try:
        yield
    finally:
        sshd_container.docker("exec", container, "sh", "-c", "kill -CONT -1")


def type_on_server(school: School, script: str) -> None:
    """Run a script in the account that Jupyter's files belong to."""
    seat = school.staff.folder.find_seat("alice")
    context = build_seat_context(school.staff, seat)
    server = context.state.get_lab_server(context.lab_id)
    assert server is not None
    context.connections.reopen(server).run(script, timeout_s=30.0)


def collect_files(page: Page, source: str) -> None:
    """Choose what to submit, and wait until the page shows it or says why not."""
    page.get_by_role("link", name="Submit from my server").click()
    if (again := page.get_by_role("link", name="Choose again")).count():
        again.click()
    page.get_by_text(source).click()
    page.get_by_role("button", name="Collect the files").click()
    expect(page.locator("h1")).to_have_text("Submit hw1", timeout=PAGE_MS)


def refuse_unsafe_files(page: Page, school: School) -> None:
    """Secrets, files that run code, and a bundle without a required part are not submitted."""
    type_on_server(school, f"cd ~/labctl/*/code && echo 'token = \"{TOKEN}\"' > config.py")
    collect_files(page, RUN)
    expect(page.locator(".said.bad")).to_contain_text("code/config.py, line 1: a GitHub token")
    assert TOKEN not in page.content()
    type_on_server(school, "cd ~/labctl/*/code && rm config.py && printf 'cos\nsystem\n.' > w.pkl")
    page.get_by_text(RUN).click()
    page.get_by_role("button", name="Collect the files").click()
    expect(page.locator(".said.bad")).to_contain_text("code/w.pkl", timeout=PAGE_MS)
    page.get_by_text("Your code alone").click()
    page.get_by_role("button", name="Collect the files").click()
    expect(page.locator(".said.bad")).to_contain_text("hw1 requires the logs", timeout=PAGE_MS)


def submit_from_server(page: Page, school: School) -> None:
    """Submit what is seen, whatever happens on the server meanwhile; what is unsafe is refused."""
    receiver = Receiver(school.staff.folder.drop)
    type_on_server(school, WORK)
    collect_files(page, RUN)
    expect(page.get_by_role("heading", name="This would be submitted")).to_be_visible()
    listed = page.locator(".path").all_text_contents()
    assert {"code/train.py", "code/.labignore", "run.json"} <= set(listed)
    assert not [name for name in listed if "lines" in name or "passw" in name or "git/" in name]
    assert not [name for name in listed if "data" in name]
    assert not Path("/tmp/labctl-was-run").exists(), "git ran what a student's config names"
    notes = " ".join(page.locator(".said.warn").all_text_contents())
    assert "passwords.txt: it is a link" in notes
    assert "lines.py: a control character in its name" in notes
    keep_picture(page, "student-submission", full_page=True)
    type_on_server(school, "cd ~/labctl/*/code && echo 'print(2)' >> train.py")
    page.get_by_role("button", name="Submit hw1").click()
    expect(page.locator(".said")).to_contain_text("hw1 is submitted: number 1")
    (signed,) = receiver.receipts("hw1", "alice")
    with receiver.find_bundle("hw1", "alice").open("rb") as file:
        contents = {member.path: open_member(file, member).read() for member in read_members(file)}
    assert contents["code/train.py"] == b"print(1)\n"
    assert signed.receipt.run == RUN
    with page.expect_download() as download:
        page.get_by_role("link", name="Receipt").click()
    assert signed.receipt.bundle_sha256 in Path(download.value.path()).read_text()

    refuse_unsafe_files(page, school)
    assert len(receiver.receipts("hw1", "alice")) == 1
    type_on_server(school, "cd ~/labctl/*/code && rm -f w.pkl")
    page.get_by_role("link", name="My seat").click()


def begin_run(school: School) -> None:
    seat = school.staff.folder.find_seat("alice")
    context = build_seat_context(school.staff, seat)
    server = context.state.get_lab_server(context.lab_id)
    assert server is not None
    wanted = run_specs.build_spec(context, server, ("sh", "-c", LOOP), RUN, False)
    runs.start(
        context,
        server,
        wanted,
        follow=False,
        on_start=lambda run, found: None,
        on_log=lambda block: None,
    )


def test_from_the_join_file_to_the_end_of_the_server(page: Page, school: School) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.goto(school.url)
    page.set_input_files("#file", school.join_file)  # this signs in
    expect(page.get_by_role("heading", name="Alice Ash")).to_be_visible()

    page.get_by_role("link", name="Start my server").click()
    page.get_by_role("button", name="Start the server").click()
    expect(page.locator("#server .state")).to_have_text("starting")
    require_state(page, "up")
    with hang_server(school), page.context.expect_page() as opened:
        page.get_by_role("link", name="Open Jupyter").click()
        failed = opened.value.get_by_role("heading", name="Jupyter could not be started")
        expect(failed).to_be_visible(timeout=PAGE_MS)
    keep_picture(opened.value, "student-service-failed")
    opened.value.get_by_role("link", name="Try again").click()
    confirm_service(opened.value, school)
    expect(opened.value.locator("h1")).to_have_text("In place of Jupyter")
    opened.value.close()

    page.get_by_role("link", name="Extend by 1 h").click()
    page.get_by_role("button", name="Extend by 1 h").click()
    expect(page.locator(".said")).to_contain_text("Extended by")
    page.get_by_role("link", name="Extend by 1 h").click()
    page.get_by_role("button", name="Extend by 1 h").click()
    expect(page.locator(".said.bad")).to_contain_text("Servers of this course run for at most 2 h")
    ledger = school.staff.folder.ledger
    assert {line.by for line in ledger.list_entries(kind="extend")} == {"alice"}

    begin_run(school)
    page.get_by_role("link", name=RUN).click()
    log = page.locator("#log")
    expect(log).to_contain_text("line 3", timeout=PAGE_MS)
    assert f"first {EVIL}" in log.inner_text()
    assert log.locator("img").count() == 0
    keep_picture(page, "student-live", full_page=True)
    submit_from_server(page, school)
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator(".said")).to_contain_text("was canceled")
    (line,) = ledger.list_entries(kind="cancel")
    assert (line.seat, line.student, line.by) == ("alice", "alice", "alice")
    assert line.detail["run"] == RUN

    page.get_by_role("link", name="End the server").click()
    page.get_by_role("button", name="End the server").click()
    require_state(page, "no server")
    wait_for(lambda: [one.kind for one in ledger.list_entries(kind="down")] == ["down"])
    saved = school.staff.folder.path / SEATS / "alice" / "server-edits"
    assert [one.name for one in saved.glob("*/two*")] == ["two%0Alines.py"]
    assert dialogs == []


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(390, 844, "dark"), (1280, 720, "light"), (1920, 1080, "dark")],
)
def test_it_fits_every_screen_and_asks_nobody_else(
    browser: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    height: int,
    scheme: Literal["light", "dark"],
) -> None:
    requests: list[str] = []
    bed = fill(make(tmp_path))
    publish(bed)
    monkeypatch.setattr(WorkerProcesses, "run", lambda processes, order: Worker().run(order))
    with (
        serve_bed(bed) as campus,
        browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        ) as context,
    ):
        context.on("request", lambda request: requests.append(request.url))
        page = context.new_page()
        page.goto(campus.url)
        assert measure_overflow(page) <= 0, page.url
        enter(campus.url, context, campus.enter("lovelace").cookie)
        release(bed, "lovelace")
        for path in (
            *("/", "/server/start", "/submissions/hw9/feedback"),
            *("/submissions/hw3/regrade", "/submissions/hw3/new"),
        ):
            page.goto(campus.url + path)
            assert measure_overflow(page) <= 0, page.url
        keep_picture(page, f"student-choice-{width}", full_page=True)
        page.get_by_role("button", name="Collect the files").click()
        expect(page.get_by_role("heading", name="This would be submitted")).to_be_visible()
        assert measure_overflow(page) <= 0
        keep_picture(page, f"student-draft-{width}", full_page=True)
        page.get_by_role("button", name="Submit hw3").click()
        expect(page.locator(".said")).to_contain_text("hw3 is submitted: number 1")
        page.goto(campus.url + "/submissions/hw3/regrade")
        page.get_by_label("Your request").fill(f"Question 2 is right. {EVIL} " + "w" * 300)
        keep_picture(page, f"student-regrade-{width}", full_page=True)
        assert page.get_by_label("Your request").evaluate("(field) => field.clientHeight") >= 150
        page.get_by_role("button", name="Send the request").click()
        expect(page.locator(".regrade")).to_contain_text(EVIL)
        assert measure_overflow(page) <= 0
        expect(page.locator("#live")).to_have_text("live")
        keep_picture(page, f"student-{width}", full_page=True)
    assert {url for url in requests if not url.startswith((campus.url, "data:"))} == set()


def release(bed: Bed, student: str) -> None:
    feedback = Feedback("hw3", 1, 60, 100, "accuracy 0.9", "<h1>feedback</h1>")
    Receiver(bed.folder.drop).release_feedback("hw3", student, feedback)


def enter(url: str, context: BrowserContext, cookie: str) -> None:
    name, _, value = cookie.partition("=")
    context.add_cookies([{"name": name, "value": value, "url": url}])
