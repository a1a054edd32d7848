"""The page for students in Chromium: by keyboard alone, with two clicks, and in two tabs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import keep_picture
from playwright.sync_api import Browser, BrowserContext, Page, expect

from labctl.courses.records.folder import Seat
from labctl.courses.records.regrade_requests import draft_answer_line
from labctl.courses.regrades import list_regrades
from labctl.courses.server_submissions import WorkerProcesses
from labctl.model import Server
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver
from labctl.web import factory

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import Pretended, create
from dashboard_bed import fill, make, wait_until
from draft_bed import Worker, publish
from service_proxy_bed import CODE, LAB_ID, Campus, serve_bed

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(WorkerProcesses, "run", lambda _, order: worker.run(order))
    return worker


@pytest.fixture
def campus(tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campus]:
    monkeypatch.setattr(factory, "EVERY_S", 0.2)
    bed = fill(make(tmp_path))
    publish(bed)
    feedback = Feedback("hw3", 1, 60, 100, "accuracy 0.9", "<h1>feedback</h1>")
    Receiver(bed.folder.drop).release_feedback("hw3", "lovelace", feedback)
    with serve_bed(bed) as campus:
        create(campus.request_handler, "lovelace", lab="mine", lab_id=LAB_ID)
        assert campus.request_handler.wait(60)
        yield campus


@pytest.fixture
def context(browser: Browser, campus: Campus) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        name, _, value = campus.enter("lovelace").cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "url": campus.url}])
        yield context


def open_page(context: BrowserContext, campus: Campus, path: str = "/") -> Page:
    page = context.new_page()
    page.goto(campus.url + path)
    return page


def press_link(page: Page, text: str) -> None:
    """Press Tab until a link or button with this text has the focus, then Enter."""
    read = "document.activeElement.innerText?.trim() || ''"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(read) == text:
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"no Tab leads to {text}")


def test_a_student_submits_and_asks_for_a_regrade_without_a_mouse(
    context: BrowserContext, campus: Campus
) -> None:
    page = open_page(context, campus)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    expect(page.locator("#live")).to_have_text("live")
    press_link(page, "Submit from my server")
    expect(page.locator("h1")).to_have_text("Submit hw3")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "radio":
            break
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("Your code alone")).to_be_checked()
    press_link(page, "Collect the files")
    expect(page.get_by_role("heading", name="This would be submitted")).to_be_visible()
    press_link(page, "Submit hw3")
    expect(page.locator(".said")).to_contain_text("hw3 is submitted: number 1")
    press_link(page, "Ask for a regrade")
    expect(page.locator("h1")).to_have_text("Ask for a regrade of hw3")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "text":
            break
    page.keyboard.type("Question 2 is right.")
    press_link(page, "Send the request")
    expect(page.locator(".regrade")).to_contain_text("Question 2 is right.")
    assert troubles == []


def test_a_request_that_was_typed_outlives_the_session(
    context: BrowserContext, campus: Campus
) -> None:
    page = open_page(context, campus, "/submissions/hw3/regrade")
    page.get_by_label("Your request").fill("Question 2 is right.")
    code = CODE[::-1]
    campus.invite("lovelace", code)  # which ends the sessions of the earlier code
    page.click("button.go")
    expect(page.locator(".said.bad")).to_contain_text(
        "Your session has ended, and nothing was sent."
    )
    keep_picture(page, "student-session-ended")
    page.fill("#student", "lovelace")
    page.fill("#code", code)
    page.click("button.go")
    page.get_by_role("link", name="Ask for a regrade").click()
    expect(page.get_by_label("Your request")).to_have_value("Question 2 is right.")
    page.click("button.go")
    expect(page.locator(".regrade")).to_contain_text("Question 2 is right.")
    campus.bed.folder.ledger.append_all(
        [draft_answer_line(list_regrades(campus.bed.folder, "hw3")[0], "no", accepted=False)]
    )
    page.goto(f"{campus.url}/submissions/hw3/regrade")
    wait_until(lambda: "2 are left" in (page.reload() and page.locator("main").inner_text()))
    expect(page.get_by_label("Your request")).to_have_value("")


def test_the_focus_stays_where_it_is_while_the_page_is_updated(
    context: BrowserContext, campus: Campus
) -> None:
    page = open_page(context, campus)
    expect(page.locator("#live")).to_have_text("live")
    bed = campus.bed
    for number, link in enumerate(("Open Jupyter", "All feedback", "Receipt"), 1):
        page.get_by_role("link", name=link).last.focus()
        bed.folder.ledger.append("budget", seat="lovelace", by="staff", usd=5.0)
        bed.hand_in("lovelace", "hw4", number)
        expect(page.locator("#server")).to_contain_text(f"of ${25 + 5 * number}.00")
        expect(page.get_by_role("link", name="Receipt")).to_have_count(1 + number)
        assert page.evaluate("document.activeElement.innerText") == link


def test_a_double_click_is_one(
    context: BrowserContext, campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[int] = []
    was_clicked_again = threading.Event()

    def extend(work: Pretended, seat: Seat, server: Server, span_s: int, by: str) -> None:
        spans.append(span_s)
        assert was_clicked_again.wait(60)

    monkeypatch.setattr(Pretended, "extend", extend)
    page = open_page(context, campus, "/server/extend?by=1h")
    box = page.get_by_role("button", name="Extend by 1 h").bounding_box()
    assert box is not None
    place = (box["x"] + 5, box["y"] + 5)
    page.mouse.click(*place)
    wait_until(lambda: bool(spans))
    page.mouse.click(*place)
    was_clicked_again.set()
    expect(page.locator(".said")).to_have_text("Extended by 1 h.")
    assert spans == [3600]
    # Going back shows the question again, which can be answered again.
    page.go_back()
    page.get_by_role("button", name="Extend by 1 h").click()
    expect(page.locator(".said")).to_have_text("Extended by 1 h.")
    assert spans == [3600, 3600]


def test_two_tabs_submit_what_each_shows(context: BrowserContext, campus: Campus) -> None:
    one = open_page(context, campus, "/submissions/hw3/new")
    two = open_page(context, campus, "/submissions/hw3/new")
    one.get_by_role("button", name="Collect the files").click()
    expect(one.get_by_role("heading", name="This would be submitted")).to_be_visible()
    # The other tab still asks; what it collects replaces the draft of the first.
    two.get_by_text("Your code alone").click()
    two.get_by_role("button", name="Collect the files").click()
    expect(two.get_by_text("the code without a run")).to_be_visible()
    one.get_by_role("button", name="Submit hw3").click()
    expect(one.locator(".said.bad")).to_contain_text("no longer what you would submit")
    assert Receiver(campus.bed.folder.drop).receipts("hw3", "lovelace") == []
    two.get_by_role("button", name="Submit hw3").click()
    expect(two.locator(".said")).to_contain_text("hw3 is submitted: number 1")
    assert len(Receiver(campus.bed.folder.drop).receipts("hw3", "lovelace")) == 1
