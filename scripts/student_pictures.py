"""The pictures of the page for students; `pictures.py` sets the path for its imports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import msgspec
from dashboard_bed import Bed, fill, make
from playwright.sync_api import Browser, Page, expect
from test_submit import HOST_KEY

from labctl.courses import join_codes
from labctl.courses.claims import SeatClaim, SeatState
from labctl.courses.keys import keeper_dir
from labctl.courses.publish import publish_assignments
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_operations import SeatOperations
from labctl.courses.server_submissions import WorkerProcesses
from labctl.courses.servers import CourseOperator
from labctl.courses.submission_worker import (
    PreparedFile,
    PreparedSubmission,
    PublicTestSummary,
)
from labctl.events import SilentReporter
from labctl.model import Offer, Run
from labctl.services.remote_terminal import RemoteTerminal
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver
from labctl.web import factory, http_server
from labctl.web.student_actions import StudentActions

ROOT = Path(__file__).parents[1]
CODE = "abcdefgh" * 4
# In place of the server, a shell of this machine has the terminal.
SHELL = (
    "setsid", "--ctty", "env", "PS1=student@ml-2026:~/labctl/ml-2026/code$ ", "TERM=dumb",
    "sh", "-c", f"cd {ROOT}/templates/image-classifier; exec sh -i",
)  # fmt: skip
LOG = "".join(
    f"epoch {epoch}/20  step {epoch * 40}/800  loss {2.1 / epoch:.4f}  val {1 - 0.4 / epoch:.4f}\n"
    for epoch in range(1, 13)
).encode()
TITLES = {
    "student-sign-in": "Where students sign in",
    "student": "A student's page",
    "student-log": "The log of a run, live",
    "student-terminal": "A terminal on the server",
    "student-regrade": "A request for a regrade",
    "student-submission": "What would be submitted",
}
PREPARED = PreparedSubmission(
    run="1124-093012-abcd",
    checkpoint="step-00001200",
    sha256="0" * 64,
    bundle_bytes=3_412_992,
    file_count=5,
    files=(
        PreparedFile(path="model/step-00001200/model.safetensors", size=3_391_204),
        PreparedFile(path="logs/run.log", size=14_310),
        PreparedFile(path="run.json", size=1_210),
        PreparedFile(path="code/train.py", size=3_905),
        PreparedFile(path="code/model.py", size=1_677),
    ),
    notes=("changed since the run began: model.py",),
    tests=PublicTestSummary(text="all 6 public tests pass", all_pass=True),
)


def make_class(scratch: Path, student_code: str) -> tuple[Bed, str]:
    """Make a course with assignments, and a student who uses a server on record; return its id."""
    scratch.mkdir()
    bed = fill(make(scratch))
    seat = bed.seat(0)
    student = seat.students[0]
    claim = SeatClaim(
        token="aa" * 8,
        student=student,
        lab=seat.lab,
        lab_id=seat.lab_id,
        public_key="",
        offer=Offer(provider="aws", type="g4dn.xlarge"),
        at=bed.now,
    )
    state = keeper_dir(bed.folder) / "seats" / f"{seat.name}.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    server = bed.state.get_lab_server(seat.lab_id)
    held = SeatState(claims=(claim,), server=server, ready=(claim.token,))
    state.write_bytes(msgspec.json.encode(held))
    public = join_codes.derive_key_pair(bed.folder.id, student, student_code)[1]
    join_codes.store_page_code(bed.folder, student, public, int(bed.now) + 3600)
    feedback = Feedback("hw3", 1, 92, 100, "accuracy 0.968", "")
    Receiver(bed.folder.drop).release_feedback("hw3", student, feedback)
    with (bed.folder.path / "course.yaml").open("a") as file:
        file.write("keeper: {host: keeper.example.edu, user: labctl}\n")
    bed.folder.refresh()
    publish_assignments(bed.folder, HOST_KEY)
    return bed, student


def draw_student_pages(folder: Path, scratch: Path, browser: Browser) -> dict[str, str]:
    """Draw the pages of a student whose server is on record only; return names and titles."""
    bed, student = make_class(scratch, CODE)
    staff = CourseOperator(bed.folder, bed.paths, bed.state, SilentReporter())
    request_handler = RequestHandler(bed.folder, SeatOperations(staff))
    request_handler.list_seat_servers()
    stop = threading.Event()
    settings = http_server.StudentSettings(port=0, services_port=0)
    with ExitStack() as patches:
        patches.callback(bed.state.close)
        patches.callback(stop.set)
        patches.enter_context(patch.object(WorkerProcesses, "run", lambda *_: PREPARED))
        patches.enter_context(patch.object(StudentActions, "open_log", lambda *_: TrainingLog()))
        patches.enter_context(patch.object(factory, "open_seat_terminal", open_terminal))
        url = http_server.serve_student_page(
            bed.folder, bed.paths, bed.state, settings, request_handler=request_handler, stop=stop
        )
        context = patches.enter_context(
            browser.new_context(viewport={"width": 1280, "height": 800})
        )
        page = context.new_page()
        page.goto(url)

        def draw(name: str) -> None:
            page.screenshot(path=folder / f"{name}.png")

        visit_pages(page, url, student, draw)
    return TITLES


def visit_pages(page: Page, url: str, student: str, draw: Callable[[str], None]) -> None:
    """Sign in and go through the pages, and draw each."""
    draw("student-sign-in")
    page.fill("#student", student)
    page.fill("#code", CODE)
    page.click("button.go")
    expect(page.locator("#live")).to_have_text("live")
    draw("student")
    terminal = page.get_by_role("link", name="Terminal").get_attribute("href")
    page.goto(f"{url}/?run=1120-100000-bbbb")
    expect(page.locator("section.log")).to_contain_text("epoch 12/20")
    draw("student-log")
    page.goto(f"{url}{terminal}")
    expect(page.locator("#terminal-state")).to_have_text("connected")
    page.keyboard.type("ls\n")
    expect(page.locator(".xterm-rows")).to_contain_text("train.py")
    draw("student-terminal")
    page.goto(f"{url}/submissions/hw3/regrade")
    page.locator("textarea").fill("My model reaches 0.968. Which part of the report is missing?")
    draw("student-regrade")
    page.goto(f"{url}/submissions/hw3/new")
    page.click("button.go")
    page.get_by_role("heading", name="This would be submitted").wait_for()
    draw("student-submission")


class TrainingLog:
    """Stands for the log of a run that is still training, on a server that does not exist."""

    run = Run(id="1120-100000-bbbb", lab_id="", server_id="", state="running")
    began_anew = 0
    rest = LOG

    def read_on(self, on_bytes: Callable[[bytes], None]) -> None:
        on_bytes(self.rest)
        self.rest = b""


def open_terminal(course: object, key: object, columns: int, rows: int) -> RemoteTerminal:
    return RemoteTerminal(SHELL, columns, rows)
