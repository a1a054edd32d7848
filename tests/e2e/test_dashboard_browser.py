"""The dashboard in a browser, over a course with one real server on which a run goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from chromium import keep_picture, measure_overflow, watch_memory
from lab_servers import wait_for
from playwright.sync_api import Browser, BrowserContext, Page, expect

from labctl.config import find_paths
from labctl.courses import servers, teardown
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.servers import CourseOperator
from labctl.courses.status import build_seat_context
from labctl.events import Event, Question
from labctl.model import Server
from labctl.runs import run_specs, runs
from labctl.state import State
from labctl.submissions.receiver import Receiver
from labctl.web import factory, http_server
from labctl.web.log_streams import KEPT, MAX_LINE, MAX_SHOWN

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, fill, make

pytest_plugins = ["browser_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
PAGE_MS = 30_000
RUN = "live-run"
EVIL = "<img src=x onerror=alert(1)>"
LOOP = f"""\
echo 'first line {EVIL}'; printf '\\033[2J\\033[31mred\\033[0m 10%%\\r20%%\\n'
i=0; while :; do echo "line $i"; i=$((i+1)); sleep 0.2; done"""
FLOOD = "while :; do yes spam and more spam | head -c 3000000; sleep 0.05; done"
FLOOD_S = 12.0
COURSE = """\
course: ml-2026
server: {provider: local, gpu: none}
image: IMAGE
per_student: {budget: 5.00, ttl: 1h, max_ttl: 2h}
"""


# Dialogs, errors and words in any page's console: there are to be none.
TROUBLE: list[str] = []


@pytest.fixture(autouse=True)
def quiet_pages() -> Iterator[None]:
    TROUBLE.clear()
    yield
    assert TROUBLE == []


class Yes:
    """A reporter that agrees."""

    def emit(self, event: Event) -> None:
        pass

    def confirm(self, decision: Question) -> bool:
        return True


@dataclass
class Live:
    """A course with alice's server up, her run going on, and its dashboard."""

    staff: CourseOperator
    server: Server
    url_file: Path

    @property
    def key(self) -> str:
        return self.staff.folder.find_seat("alice").pseudonym


@pytest.fixture(scope="module")
def live(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str, small_image: str
) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("dashboard")
    folder = root / "ml-2026"
    folder.mkdir()
    (folder / "course.yaml").write_text(COURSE.replace("IMAGE", small_image))
    roster = folder / "roster.csv"
    roster.write_text("id,name,email,team,section,active\nalice,Alice Ash,,,,yes\nbob,Bob,,,,yes\n")
    roster.chmod(0o600)
    make_private(folder)
    course = CourseFolder(folder)
    Receiver(course.drop).init()
    places = find_paths({"HOME": str(root / "home")})
    with pytest.MonkeyPatch.context() as patch, State(places.database) as state:
        patch.setenv("LABCTL_BASE_IMAGE", base_image)
        patch.setattr(factory, "EVERY_S", 0.5)
        staff = CourseOperator(course, places, state, Yes(), by="staff")
        stop = threading.Event()
        try:
            (outcome,) = servers.bring_up_servers(staff, [course.find_seat("alice")])
            assert outcome.server is not None, (outcome.error, outcome.why)
            begin(staff, outcome.server, RUN)
            http_server.serve_dashboard(course, places, state, port=0, stop=stop)
            yield Live(staff, outcome.server, course.private / "keeper" / http_server.URL_FILE)
        finally:
            stop.set()
            teardown.end_seats(staff, course.list_seats(), discard=True)


def begin(staff: CourseOperator, server: Server, run_id: str, line: str = LOOP) -> None:
    """A run that prints until it is cancelled."""
    context = build_seat_context(staff, staff.folder.find_seat("alice"))
    wanted = run_specs.build_spec(context, server, ("sh", "-c", line), run_id, False)
    runs.start(
        context,
        server,
        wanted,
        follow=False,
        on_start=lambda run, found: None,
        on_log=lambda block: None,
    )


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    """A page of a browser that was let in by the next URL; no dialog, nothing in its console."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        yield entered(context, live.url_file.read_text().strip())


def entered(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    context.on("dialog", lambda dialog: TROUBLE.append(dialog.message))
    context.on("weberror", lambda error: TROUBLE.append(str(error.error)))
    context.on("console", lambda message: TROUBLE.append(message.text))
    page.goto(url)
    page.wait_for_url(url.partition("?")[0])
    return page


def test_a_log_is_live_and_does_nothing_but_stand_there(page: Page, live: Live) -> None:
    page.get_by_role("link", name="Alice Ash").click()
    log = page.locator("#log")
    expect(log).to_contain_text("line 3", timeout=PAGE_MS)
    later = int(log.inner_text().rsplit("line ", 1)[1]) + 5
    expect(log).to_contain_text(f"line {later}", timeout=PAGE_MS)
    text = log.inner_text()
    assert f"first line {EVIL}" in text
    assert "\nred 20%" not in text  # a carriage return begins its line anew
    assert "\n20%\n" in text
    assert "\x1b" not in text
    assert log.locator("img").count() == 0
    expect(page.locator("#live")).to_have_text("live")
    # The server is asked how busy it is while its page is open.
    expect(page.locator("#facts")).to_contain_text("CPU", timeout=PAGE_MS)
    keep_picture(page, "dashboard-log", full_page=True)


@pytest.mark.long
def test_a_run_that_prints_without_end_takes_bounded_memory(page: Page, live: Live) -> None:
    """The log grows by about 60 MB a second, of which the page shows the end."""
    begin(live.staff, live.server, "flood", FLOOD)
    page.get_by_role("link", name="Alice Ash").click()
    page.get_by_role("link", name="flood").click()
    log = page.locator("#log")
    expect(log).to_contain_text("spam", timeout=PAGE_MS)
    server_mb, browser_mb = watch_memory(FLOOD_S)
    assert (server_mb < 35, browser_mb < 300) == (True, True), (server_mb, browser_mb)
    assert len(log.text_content() or "") < MAX_SHOWN + KEPT + MAX_LINE
    seat = live.staff.folder.find_seat("alice")
    runs.cancel(build_seat_context(live.staff, seat), live.server, "flood", 1)


def test_more_time_is_given_after_a_confirmation(page: Page, live: Live) -> None:
    page.goto(f"{page.url}seats/{live.key}")
    page.get_by_role("link", name="Extend by 1 h").click()
    expect(page.locator("h1")).to_have_text("Extend Alice Ash by 1 h?")
    assert not live.staff.folder.ledger.list_entries(kind="extend")  # nothing was done yet
    page.get_by_label("Reason, for the ledger").fill("a big model")
    page.get_by_role("button", name="Extend by 1 h").click()
    expect(page.locator(".said")).to_contain_text("Extended by 1 h", timeout=PAGE_MS)
    (line,) = live.staff.folder.ledger.list_entries(kind="extend")
    assert (line.seat, line.why, line.by) == ("alice", "a big model", "dashboard")
    assert line.detail["seconds"] == 3600
    page.reload()
    expect(page.locator(".said")).to_have_count(0)
    expect(page.locator("#history")).to_contain_text("a big model")
    keep_picture(page, "dashboard-extended", full_page=True)


def test_a_run_is_cancelled_after_a_confirmation(page: Page, browser: Browser, live: Live) -> None:
    base = page.url
    with browser.new_context() as context:
        # Another browser that has the board open sees it without doing anything.
        board = entered(context, live.url_file.read_text().strip())
        row = board.locator(f"#s-{live.key}")
        expect(row.locator(".run")).to_have_text("running")
        page.goto(f"{base}seats/{live.key}")
        page.get_by_role("link", name="Cancel").click()
        page.get_by_role("link", name="Go back").click()
        page.get_by_role("link", name="Cancel").click()
        page.get_by_role("button", name="Cancel the run").click()
        expect(page.locator(".said")).to_contain_text("was canceled", timeout=PAGE_MS)
        expect(row.locator(".run")).to_have_text("canceled", timeout=PAGE_MS)
    context = build_seat_context(live.staff, live.staff.folder.find_seat("alice"))
    wait_for(lambda: runs.refresh(context, live.server) and runs.find_run(context, RUN).has_ended)
    assert runs.find_run(context, RUN).state == "cancelled"
    (line,) = live.staff.folder.ledger.list_entries(kind="cancel")
    assert (line.seat, line.by, line.detail["run"]) == ("alice", "dashboard", RUN)
    expect(page.locator("#runs")).to_contain_text("canceled", timeout=PAGE_MS)
    expect(page.locator("#log-state")).not_to_be_empty(timeout=PAGE_MS)
    page.goto(f"{base}seats/{live.key}/runs/{RUN}/cancel")
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator(".said")).to_contain_text("had already ended", timeout=PAGE_MS)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bed, Path]]:
    """A course with a morning's work on record, and where its dashboard's next URL stands."""
    bed = fill(make(tmp_path_factory.mktemp("full")))
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "EVERY_S", 0.2)
        bed.start(stop)
    yield bed, bed.folder.private / "keeper" / http_server.URL_FILE
    stop.set()
    bed.state.close()


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(390, 844, "dark"), (1280, 720, "light"), (1920, 1080, "dark")],
)
def test_it_fits_every_screen_and_asks_nobody_else(
    browser: Browser,
    full: tuple[Bed, Path],
    width: int,
    height: int,
    scheme: Literal["light", "dark"],
) -> None:
    bed, url_file = full
    asked: list[str] = []
    with browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme
    ) as context:
        context.on("request", lambda request: asked.append(request.url))
        page = entered(context, url_file.read_text().strip())
        base = page.url
        pages = {
            "board": "",
            "seat": f"seats/{bed.seat(0).pseudonym}",
            "assignment": "assignments/hw3",
            "costs": "costs",
        }
        for name, path in pages.items():
            page.goto(base + path)
            expect(page.locator("#live")).to_have_text("live")
            assert measure_overflow(page) == 0, name
            keep_picture(page, f"dashboard-{name}-{width}-{scheme}", full_page=True)
        if width < 1000:  # the costs: figures stay whole
            assert page.evaluate("getComputedStyle($('costs').querySelector('td.n')).whiteSpace") \
                == "nowrap"  # fmt: skip
            command = page.get_by_text("labctl course cost --csv").bounding_box()
            assert command is not None
            assert command["height"] < 30, "the command is broken within an option"
        if width > 1900:  # to be read from the back row
            assert float(page.evaluate("getComputedStyle(document.body).fontSize")[:-2]) >= 20
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 19, 24)"}[scheme]
        others = [one for one in asked if not one.startswith((base, "data:"))]
        assert others == []


def test_a_list_is_narrowed_and_sorted_and_stays_so(
    browser: Browser, full: tuple[Bed, Path]
) -> None:
    bed, url_file = full
    with browser.new_context() as context:
        page = entered(context, url_file.read_text().strip())
        rows = page.locator("#board tbody tr:visible")
        expect(rows).to_have_count(9)
        page.get_by_role("link", name="idle 2").click()
        expect(rows).to_have_count(2)
        expect(page.get_by_role("link", name="idle 2")).to_be_focused()
        page.reload()
        expect(rows).to_have_count(2)
        # A list that one comes back to in this tab is as it was left.
        page.get_by_role("link", name="Alan Turing").click()
        page.locator(".back a").click()
        expect(rows).to_have_count(2)
        page.get_by_role("link", name="all 9").click()
        expect(rows).to_have_count(9)
        page.get_by_role("link", name="Cost", exact=True).click()
        expect(rows.first).to_contain_text("Grace Hopper")
        expect(page.locator("th[aria-sort=descending]")).to_have_text("Cost")
        page.get_by_placeholder("Find").fill("KNU")
        expect(rows).to_have_count(1)
        assert "knu" not in page.url.lower()
        # What comes in by the stream is narrowed and sorted as well, and keeps the focus.
        page.get_by_role("link", name="Donald Knuth").focus()
        last = bed.seat(5)
        bed.folder.ledger.append("budget", seat=last.name, by="staff", usd=7.0)
        expect(rows.first).to_contain_text("of $27.00", timeout=PAGE_MS)
        expect(rows).to_have_count(1)
        expect(page.get_by_role("link", name="Donald Knuth")).to_be_focused()
        # A link whose figure changes under the finger is still that link.
        link = page.locator("#show-trouble")
        link.focus()
        before = link.inner_text()
        bed.folder.ledger.append("refused", seat=bed.seat(4).name, why="none is left")
        expect(link).not_to_have_text(before, timeout=PAGE_MS)
        expect(link).to_be_focused()
        # Where nobody is found, one link shows everybody again.
        page.get_by_placeholder("Find").fill("nobody")
        expect(rows).to_have_count(0)
        page.get_by_role("link", name="Show all").click()
        expect(rows).to_have_count(9)
        expect(page.get_by_placeholder("Find")).to_have_value("")


def test_the_last_of_two_fast_clicks_counts(browser: Browser, full: tuple[Bed, Path]) -> None:
    """The second one comes before the answer to the first, which replaces the list."""
    _, url_file = full
    with browser.new_context() as context:
        page = entered(context, url_file.read_text().strip())
        rows = page.locator("#board tbody tr:visible")
        expect(rows).to_have_count(9)
        for first, second, count in (("idle", "all", 9), ("all", "idle", 2), ("up", "idle", 2)):
            page.evaluate(f"$('show-{first}').click(); $('show-{second}').click()")
            expect(page.locator(f"#show-{second}")).to_have_attribute("aria-current", "true")
            expect(rows).to_have_count(count)
        page.evaluate("$('by-cost').click(); $('by-name').click()")
        expect(page.locator("th[aria-sort]")).to_have_text("Student")
        expect(page.locator("#live")).to_have_text("live")
    # htmx writes a request that it gave up to the console.
    given_up = ("htmx:afterRequest", "htmx:sendAbort")
    TROUBLE[:] = [line for line in TROUBLE if not line.startswith(given_up)]


def test_a_list_is_narrowed_and_sorted_where_no_script_runs(
    browser: Browser, full: tuple[Bed, Path]
) -> None:
    _, url_file = full
    with browser.new_context(java_script_enabled=False) as context:
        page = entered(context, url_file.read_text().strip())
        rows = page.locator("#board tbody tr")
        expect(rows).to_have_count(9)
        page.get_by_role("link", name="idle 2").click()
        expect(rows).to_have_count(2)
        page.get_by_role("link", name="Student").click()
        expect(rows.first).to_contain_text("Alan Turing")
        page.get_by_role("link", name="Student").click()
        expect(rows.first).to_contain_text("Frances Allen")


def test_a_row_that_others_join_moves_to_its_place(
    browser: Browser, full: tuple[Bed, Path]
) -> None:
    """Another order is another list: htmx loads it, and what somebody types stays."""
    bed, url_file = full
    with browser.new_context() as context:
        page = entered(context, url_file.read_text().strip())
        page.get_by_role("link", name="idle 2").click()
        rows = page.locator("#board tbody tr:visible")
        expect(rows).to_have_count(2)
        page.get_by_placeholder("Find").press_sequentially("al")
        server = bed.state.get_lab_server(bed.seat(0).lab_id)
        assert server is not None
        bed.watch(server, idle_s=4000)
        expect(page.locator("#board tbody tr")).to_have_count(3, timeout=PAGE_MS)
        expect(page.locator("#show-idle")).to_have_text("idle 3")
        expect(page.get_by_placeholder("Find")).to_be_focused()
        expect(page.get_by_placeholder("Find")).to_have_value("al")
        expect(rows).to_have_count(2)
        expect(page.locator("#live")).to_have_text("live")


def test_a_page_that_nobody_sees_gives_its_connection_back(
    browser: Browser, full: tuple[Bed, Path]
) -> None:
    """And is as new as the course when somebody looks again."""
    bed, url_file = full
    with browser.new_context() as context:
        page = entered(context, url_file.read_text().strip())
        expect(page.locator("#live")).to_have_text("live")
        page.evaluate("close()")
        assert page.evaluate("sources.size") == 0
        bed.folder.ledger.append("refused", seat=bed.seat(8).name, why="missed while away")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        row = page.locator(f"#s-{bed.seat(8).pseudonym}")
        expect(row).to_contain_text("missed while away", timeout=PAGE_MS)
        bed.folder.ledger.append("refused", seat=bed.seat(8).name, why="live once more")
        expect(row).to_contain_text("live once more", timeout=PAGE_MS)
        assert page.evaluate("sources.size") == 1


def test_a_seat_that_is_gone_is_told_on_its_open_page(browser: Browser, tmp_path: Path) -> None:
    bed = fill(make(tmp_path))
    stop = threading.Event()
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(bed.start(stop))
        page.get_by_role("link", name="Barbara Liskov").click()
        expect(page.locator("#live")).to_have_text("live")
        roster = bed.folder.roster_file
        lines = roster.read_text().splitlines(keepends=True)
        roster.write_text("".join(line for line in lines if not line.startswith("liskov")))
        expect(page.locator("h1")).to_contain_text("seat does not exist", timeout=PAGE_MS)
        page.get_by_role("link", name="Everybody").last.click()
        expect(page.locator("#board tbody tr")).to_have_count(8)
    stop.set()
    bed.state.close()


def test_a_keeper_that_goes_away_is_told_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    bed = fill(make(tmp_path))
    stop = threading.Event()
    with browser.new_context(viewport={"width": 390, "height": 844}) as context:
        page = context.new_page()
        url = bed.start(stop)
        page.goto(url)
        expect(page.locator("#live")).to_have_text("live")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(page.locator("#live")).not_to_be_in_viewport()
        cookies = context.cookies()
        context.clear_cookies()
        page.evaluate("renew()")
        expect(page.locator("#live")).to_contain_text("no longer signed in", timeout=PAGE_MS)
        context.add_cookies(cookies)  # type: ignore[arg-type]
        stop.set()
        expect(page.locator("#live")).to_contain_text("does not answer", timeout=PAGE_MS)
        expect(page.locator("#live")).to_be_in_viewport()
        keep_picture(page, "dashboard-lost", full_page=True)
        # The same browser goes on once the keeper is there again, with what happened meanwhile.
        wait_for(lambda: not (bed.folder.private / "keeper" / http_server.URL_FILE).exists())
        bed.folder.ledger.append("refused", seat=bed.seat(4).name, why="while it was away")
        stop = threading.Event()
        port = int(url.partition("/?")[0].rpartition(":")[2])
        http_server.serve_dashboard(bed.folder, bed.paths, bed.state, port=port, stop=stop)
        expect(page.locator("#live")).to_have_text("live", timeout=PAGE_MS)
        row = page.locator(f"#s-{bed.seat(4).pseudonym}")
        expect(row).to_contain_text("while it was away", timeout=PAGE_MS)
        stop.set()
    bed.state.close()
