"""The page for marking in Chromium: by keyboard alone, by two people, and with hostile files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import keep_picture, measure_overflow
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, expect

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, wait_until
from marking_bed import (
    EVIL,
    EVIL_NAME,
    FILES,
    grade_automatically,
    hand_in_files,
    make_marking,
    make_notebook,
)

from labctl.courses.commenting import list_comments, save_comment
from labctl.courses.records.marks import read_marks
from labctl.courses.records.regrade_requests import draft_request_line
from labctl.courses.regrades import list_regrades
from labctl.web import http_server
from labctl.web.http_server import URL_FILE
from labctl.web.marking_view import MarkingReader

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser
STUDENTS = ("lovelace", "turing", "hopper", "dijkstra", "liskov")
LONG = {
    **FILES,
    "logs/run.log": b"".join(b"step %d %s\n" % (n, b"x" * (n % 300)) for n in range(5000)),
    **{f"code/part_{n}.py": b"x = 1  # " + b"long " * 60 + b"\n" for n in range(9)},
    "code/train.py": b"".join(b"value_%d = %d\n" % (n, n) for n in range(400)),
}
# A report that tries to run scripts, to change the page around it, and to reach another host.
REPORT = f"""<!doctype html><title>evil</title><meta http-equiv="refresh" content="0;url=/costs">
<script>alert(1); top.location = "/costs"</script>{EVIL}
<img src="OUTSIDE/pixel.png"><style>@import "OUTSIDE/x.css";</style>
<a href="/costs" target="_top">top</a> <a href="OUTSIDE/" target="_blank">new</a>
<a href="javascript:alert(5)">script</a> <a href="OUTSIDE/here">here</a>
<form action="/person" method="post" target="_top"><input name="person" value="eve">
<button>send</button></form>"""


@pytest.fixture
def outside() -> Iterator[tuple[str, list[str]]]:
    """Another host, and the requests that reach it."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = make_marking(tmp_path)
    for student in ("lovelace", "turing", "hopper"):
        hand_in_files(made, student, LONG)
        grade_automatically(made, student, 25)
    save_comment(made.folder, "Name this constant.", by="ben")
    stop = threading.Event()
    made.start(stop)
    yield made
    stop.set()
    made.state.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        yield context


def enter(context: BrowserContext, bed: Bed, person: str, number: int = 0) -> Page:
    """Open a seat's page in a browser that is signed in, as this person."""
    page = context.new_page()
    url = (bed.folder.private / "keeper" / URL_FILE).read_text().strip()
    page.goto(url)
    page.wait_for_url(url.partition("?")[0])
    page.goto(f"{page.url}assignments/hw3/marking/{bed.seat(number).pseudonym}")
    page.get_by_label("Your name").fill(person)
    page.keyboard.press("Enter")
    expect(page.locator("#rubric")).to_be_visible()
    page.wait_for_load_state()  # the keys are those of its script
    return page


def marks_of(bed: Bed, student: str) -> dict[str, tuple[float, str, str]]:
    marks = read_marks(bed.folder.ledger.list_entries(), "hw3").get(student, {})
    return {item: (mark.points, mark.note, mark.by) for item, mark in marks.items()}


def test_a_regrade_request_is_answered_without_a_mouse(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    bed.folder.ledger.append_all([draft_request_line("hw3", "lovelace", 1, f"why? {EVIL}")])
    page.on("dialog", lambda dialog: dialog.dismiss())
    link = page.locator("#open-regrades")
    page.goto(f"{page.url.partition('/assignments')[0]}/")
    expect(link).to_have_text("1")
    link.click()
    row = page.locator("#regrades tbody tr")
    expect(row).to_contain_text(f"why? {EVIL}")
    keep(page, "regrades")
    row.locator("a").click()
    page.wait_for_load_state()
    page.keyboard.press("1")
    page.keyboard.type("20")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.type("You are right.")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#regrades .said")).to_contain_text("Choose Accept or Decline.")
    expect(page.locator(".answer textarea")).to_have_value("You are right.")
    expect(page.locator("#points-1")).to_have_value("20")
    keep(page, "answer")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#regrades .said")).to_contain_text("Accepted. Saved: code.")
    assert marks_of(bed, "lovelace") == {"code": (20, "", "ann")}
    (request,) = list_regrades(bed.folder, "hw3", "lovelace")
    assert (request.answer, request.answered_by) == ("You are right.", "ann")


@pytest.mark.parametrize(
    "width",
    [390, *(pytest.param(width, marks=pytest.mark.long) for width in (1280, 1920))],
)
def test_a_very_long_word_takes_no_room_of_a_name(
    context: BrowserContext, bed: Bed, width: int
) -> None:
    page = enter(context, bed, "ann")
    bed.folder.ledger.append_all([draft_request_line("hw3", "lovelace", 1, "o" * 900)])
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{page.url.partition('/assignments')[0]}/regrades")
    name = page.locator("#regrades tbody th a")
    expect(name).to_have_text("Ada Lovelace")
    keep(page, f"regrades-{width}")
    assert name.evaluate("link => link.getClientRects().length") == 1, "the name is broken"
    assert measure_overflow(page) == 0


def keep(page: Page, name: str) -> None:
    keep_picture(page, f"marking-{name}")


def expect_student(page: Page, name: str) -> None:
    """Wait for a student's page and its keys: the heading is there before the scripts have run."""
    expect(page.locator("h1")).to_have_text(name)
    page.wait_for_load_state()


def test_a_submission_is_marked_without_a_mouse(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    press = page.keyboard.press
    press("?")
    expect(page.locator("#keys")).to_be_visible()
    press("Escape")
    for key, text in (("l", "step 4999"), ("b", "train(epochs=2)"), ("c", "value_399 = 399")):
        press(key)
        expect(page.locator("#sheet")).to_contain_text(text)
    press("f")
    expect(page.locator(".files [aria-current]")).to_have_text("part_0.py")
    press("Shift+F")
    expect(page.locator(".files [aria-current]")).to_contain_text("train.py")
    press("1")
    expect(page.locator("#points-1")).to_be_focused()
    page.keyboard.type("20")
    expect(page.locator("[data-total]")).to_have_text("45")
    press("Tab")
    page.keyboard.type("clear names; s and n are letters here")
    # A comment is written while the rubric has text that is not saved.
    press("Escape")
    press("m")
    page.keyboard.type("120")
    press("ArrowDown")
    expect(page.locator("#l119, #l121").locator("visible=true")).to_have_count(2)
    expect(page.locator(".sheet .on")).to_be_in_viewport()
    press("Tab")
    page.keyboard.type("Why this value?")
    press("Control+Enter")
    expect(page.locator(".note")).to_contain_text("Why this value?")
    (comment,) = list_comments(bed.folder, "hw3", "lovelace")
    assert (comment.file, comment.line, comment.by) == ("code/train.py", 119, "ann")
    assert marks_of(bed, "lovelace") == {}
    expect(page.locator("#comment-text")).not_to_be_focused()
    press("s")
    expect(page.locator("#marks .said")).to_have_text("Saved: code.")
    assert marks_of(bed, "lovelace") == {
        "code": (20, "clear names; s and n are letters here", "ann")
    }
    expect(page.locator("#sheet")).to_contain_text("value_399")
    press("2")
    page.keyboard.type("30")
    press("Escape")
    press("Shift+S")
    expect_student(page, "Alan Turing")
    press("n")
    expect_student(page, "Grace Hopper")
    press("n")  # goes round, past what is marked
    expect_student(page, "Alan Turing")
    press("k")
    expect_student(page, "Ada Lovelace")


def focus_link(page: Page, text: str) -> None:
    """Press Tab until a link or button with this text has the focus."""
    read = "document.activeElement.innerText?.trim() || ''"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(read) == text:
            return
    raise AssertionError(f"no Tab leads to {text}")


@pytest.mark.long
def test_five_submissions_are_marked_without_a_mouse(context: BrowserContext, bed: Bed) -> None:
    names = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov")
    for student in ("dijkstra", "liskov"):
        hand_in_files(bed, student, LONG)
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((bed.folder.private / "keeper" / URL_FILE).read_text().strip())
    expect(page.locator("#live")).to_have_text("live")
    press, write = page.keyboard.press, page.keyboard.type
    focus_link(page, "hw3")
    press("Enter")
    expect(page.locator("h1")).to_have_text("hw3")
    focus_link(page, "Mark submissions")
    press("Enter")
    expect(page.locator("#person")).to_be_focused()
    write("ann")
    press("Enter")
    for number, name in enumerate(names):
        expect_student(page, name)
        press("c")
        expect(page.locator("#kind-code")).to_have_attribute("aria-current", "true")
        press("m")
        write("3")
        press("Tab")
        write("Why?")
        press("Control+Enter")
        expect(page.locator(".note")).to_contain_text("Why?")
        expect(page.locator("#sheet")).to_be_focused()
        press("1")
        write(f"{20 + number}")
        press("Tab")
        write("clear")
        press("Control+Enter")
        expect(page.locator("#marks .said")).to_have_text("Saved: code.")
        expect(page.locator("#save")).to_be_focused()
        press("2")
        expect(page.locator("#points-2")).to_be_focused()
        write("30")
        press("Tab")
        press("Escape")
        press("Shift+S" if number < len(names) - 1 else "s")
    expect(page.locator("#marks .said")).to_have_text("Saved: presentation.")
    expect(page.locator("#seats")).to_contain_text("0 to mark")
    assert [marks_of(bed, student) for student in STUDENTS] == [
        {"code": (20 + number, "clear", "ann"), "presentation": (30, "", "ann")}
        for number in range(len(names))
    ]
    # What removes itself leaves the focus where reading goes on.
    focus_link(page, "Remove")
    press("Enter")
    expect(page.locator(".note")).to_have_count(0)
    expect(page.locator("#sheet")).to_be_focused()
    assert troubles == []


def test_single_keys_can_be_turned_off(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    page.keyboard.press("?")
    page.get_by_label("Single keys").uncheck()
    page.keyboard.press("Escape")
    page.reload()
    page.keyboard.press("n")
    page.keyboard.press("1")
    expect(page.locator("#points-1")).not_to_be_focused()
    expect(page.locator("h1")).to_have_text("Ada Lovelace")


@pytest.mark.long
def test_two_graders_see_each_other_and_keep_their_text(
    context: BrowserContext, browser: Browser, bed: Bed
) -> None:
    ann = enter(context, bed, "ann")
    with browser.new_context() as other:
        ben = enter(other, bed, "ben")
        ben.fill("#points-1", "12")
        ben.fill("#note-1", "too long")
        ben.click("#save")
        expect(ben.locator("#marks .said")).to_have_text("Saved: code.")
    ann.keyboard.press("c")
    ann.fill("#comment-text", "half a comment")
    ann.fill("#points-1", "20")
    ann.fill("#note-1", "mine")
    ann.click("#save")
    expect(ann.locator("#stale-1")).to_contain_text("ben gave 12: too long meanwhile.")
    expect(ann.locator("#note-1")).to_have_value("mine")
    expect(ann.locator("#comment-text")).to_have_value("half a comment")
    assert marks_of(bed, "lovelace")["code"] == (12, "too long", "ben")
    keep(ann, "stale")
    ann.click("#save")
    expect(ann.locator("#marks .said")).to_have_text("Saved: code.")
    assert marks_of(bed, "lovelace")["code"] == (20, "mine", "ann")
    # Another file leaves what was typed.
    ann.keyboard.press("Escape")
    ann.click("#kind-log")
    expect(ann.locator("#sheet")).to_contain_text("step 4999")
    expect(ann.locator("#comment-text")).to_have_value("half a comment")


def test_the_same_key_twice_sends_once(
    context: BrowserContext, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the answer to the first takes its time."""
    is_pressed_again = threading.Event()
    real = MarkingReader.change

    def change(reader: MarkingReader, *words: Any) -> Any:
        assert is_pressed_again.wait(60)
        return real(reader, *words)

    monkeypatch.setattr(MarkingReader, "change", change)
    page = enter(context, bed, "ann")
    page.keyboard.press("c")
    expect(page.locator("#kind-code")).to_have_attribute("aria-current", "true")
    page.fill("#line", "3")
    page.fill("#comment-text", "Why?")
    for _ in range(3):
        page.keyboard.press("Control+Enter")
    is_pressed_again.set()
    expect(page.locator(".note")).to_have_count(1)
    page.fill("#points-1", "5")
    page.keyboard.press("Escape")
    is_pressed_again.clear()
    for _ in range(3):
        page.keyboard.press("s")
    is_pressed_again.set()
    expect(page.locator("#marks .said.good")).to_be_visible()
    page.reload()
    expect(page.locator("#points-1")).to_have_value("5")
    assert len(list_comments(bed.folder, "hw3", "lovelace")) == 1
    assert len(bed.folder.ledger.list_entries(kind="mark")) == 1


def test_nobody_leaves_typed_text_without_confirming(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    questions: list[str] = []

    def stay(dialog: Dialog) -> None:
        questions.append(dialog.type)
        dialog.dismiss()

    page.on("dialog", stay)
    page.fill("#note-2", "not saved yet")
    page.keyboard.press("Escape")
    with page.expect_event("dialog"):
        page.keyboard.press("n")
    assert questions == ["beforeunload"]
    expect(page.locator("#note-2")).to_have_value("not saved yet")
    page.fill("#points-2", "3")
    page.click("#save-next")
    expect(page.locator("h1")).to_have_text("Alan Turing")
    assert len(questions) == 1  # what was saved asks nobody


@pytest.mark.long
def test_typed_text_survives_a_restart_of_the_dashboard(
    context: BrowserContext, tmp_path: Path
) -> None:
    bed = make_marking(tmp_path)
    hand_in_files(bed, "lovelace", FILES)
    first, second = threading.Event(), threading.Event()
    port = urlsplit(bed.start(first)).port
    assert port is not None
    page = enter(context, bed, "ann")
    page.fill("#points-1", "12")
    page.fill("#note-1", "half a sentence")
    first.set()
    url_file = bed.folder.private / "keeper" / URL_FILE
    wait_until(lambda: not url_file.exists())
    page.click("#save")
    expect(page.locator("#sending")).to_have_text(
        "Nothing was sent: the dashboard does not answer. What you typed is still here."
    )
    expect(page.locator("#sending")).to_be_in_viewport()
    http_server.serve_dashboard(bed.folder, bed.paths, bed.state, port=port, stop=second)
    page.click("#save")
    expect(page.locator("#marks .said")).to_have_text("Saved: code.")
    expect(page.locator("#sending")).to_be_hidden()
    expect(page.locator("#live")).to_have_text("")
    assert marks_of(bed, "lovelace") == {"code": (12, "half a sentence", "ann")}
    second.set()
    bed.state.close()


def test_a_saved_comment_is_used_in_a_note_and_a_comment(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    page.keyboard.press("c")
    for field in ("#comment-text", "#note-1"):
        page.fill(field, "Good.")
        choice = page.locator(f"[data-into={field[1:]}]")
        choice.focus()
        choice.select_option("Name this constant.")
        expect(page.locator(field)).to_have_value("Good.\nName this constant.")


def test_hostile_files_run_nothing_and_reach_nothing(
    context: BrowserContext, bed: Bed, outside: tuple[str, list[str]]
) -> None:
    host, reached = outside
    files = {
        "report.html": REPORT.replace("OUTSIDE", host).encode(),
        f"logs/{EVIL_NAME.removeprefix('code/')}": EVIL.encode(),
        EVIL_NAME: EVIL.encode(),
        "code/evil.ipynb": make_notebook(EVIL),
    }
    hand_in_files(bed, "dijkstra", files)
    grade_automatically(bed, "dijkstra", 20)
    save_comment(bed.folder, EVIL, by="ben")
    dialogs: list[str] = []
    context.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page = enter(context, bed, "ann", 3)
    address = page.url.partition("?")[0]
    report = page.frame_locator("#report")
    for name in ("top", "new", "script"):
        report.get_by_role("link", name=name).click()
    report.get_by_role("button", name="send").click()
    report.get_by_role("link", name="here").click()
    keep(page, "hostile-report")
    for key in ("b", "l", "c"):
        page.locator("h1").click()  # the frame has the focus
        page.keyboard.press(key)
        expect(page.locator(f"#kind-{ {'b': 'notebook', 'l': 'log', 'c': 'code'}[key] }")
               ).to_have_attribute("aria-current", "true")  # fmt: skip
        assert page.locator("#work img:not([src^='data:image/png'])").count() == 0
        assert page.locator("#work script, #work svg, #work b").count() == 0
    page.fill("#line", "1")
    page.fill("#comment-text", f"</textarea>{EVIL}")
    page.click("#add-comment")
    expect(page.locator(".note bdi")).to_have_text(f"</textarea>{EVIL}")
    keep(page, "hostile-code")
    assert page.url.partition("?")[0] == address
    assert len(context.pages) == 1
    assert dialogs == []
    assert reached == []
    expect(page.locator("summary", has_text="You mark as")).to_have_text("You mark as ann")


def test_no_field_covers_its_label_or_is_pushed_out_of_view(
    context: BrowserContext, bed: Bed
) -> None:
    hand_in_files(bed, "dijkstra", {"code/train.py": b"x = 1\n"})
    page = enter(context, bed, "ann", 3)
    expect(page.locator("#add-comment")).to_be_in_viewport()
    page.get_by_text("You mark as ann").click()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        below = """(field) => {
            const label = document.createRange();
            label.selectNode(field.previousSibling);
            return field.getBoundingClientRect().top - label.getBoundingClientRect().bottom;
        }"""
        assert page.locator("#person").evaluate(below) >= 0


@pytest.mark.long
def test_it_fits_every_screen(context: BrowserContext, bed: Bed) -> None:
    page = enter(context, bed, "ann")
    page.fill("#note-1", "a long note " * 150)
    for width, height in ((390, 844), (1280, 720), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        for kind in ("report", "log", "notebook", "code"):
            page.click(f"#kind-{kind}")
            expect(page.locator(f"#kind-{kind}")).to_have_attribute("aria-current", "true")
            assert measure_overflow(page) == 0, (kind, width)
            keep(page, f"{kind}-{width}")
