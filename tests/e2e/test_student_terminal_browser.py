"""A student's terminal in Chromium, over real ssh, with tmux on the server and without."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chromium import keep_picture, measure_overflow, sign_in, watch_memory
from playwright.sync_api import Browser, BrowserContext, Page, expect
from sshd_container import Sshd, build_tmux_image, docker, start

from labctl.servers.connections import Connections
from labctl.services.remote_terminal import RemoteTerminal, open_server_terminal
from labctl.web import factory
from labctl.web.mutations import CourseActions
from labctl.web.student_terminal import TerminalKey

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from service_proxy_bed import CODE, LAB_ID, Campus, serve_bed

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from course_keeper_context import create
from dashboard_bed import make

pytest_plugins = ["browser_fixtures", "sshd_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    box = start(build_tmux_image(), tmp_path_factory.mktemp("keys") / "id_ed25519")
    box.sh("mkdir -p ~/labctl/mine/code", user="student")
    yield box
    docker("rm", "-f", "-v", box.name)


@pytest.fixture
def campus(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: Connections
) -> Iterator[Campus]:
    def open_terminal(
        course: CourseActions, key: TerminalKey, columns: int, rows: int
    ) -> RemoteTerminal:
        config = SimpleNamespace(name="mine")
        lab: Any = SimpleNamespace(config=config, lab_id=key.lab_id, connections=connections)
        return open_server_terminal(cast(Any, lab), server.server(), key.session, columns, rows)

    monkeypatch.setattr(factory, "open_seat_terminal", open_terminal)
    with serve_bed(make(tmp_path)) as campus:
        campus.bed.serve_up(0)
        create(campus.request_handler, "lovelace", lab="mine", lab_id=LAB_ID)
        assert campus.request_handler.wait(60)
        yield campus


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1000, "height": 700}) as context:
        yield context


def enter(campus: Campus, context: BrowserContext) -> Page:
    campus.invite("lovelace")
    return sign_in(context, campus.url, "lovelace", CODE)


def open_terminal(page: Page) -> Page:
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Terminal").click()
    expect(opened.value.locator("#terminal-state")).to_have_text("connected")
    expect(opened.value.locator("#reconnect")).not_to_be_visible()
    return opened.value


def test_a_command_is_typed_and_survives_the_tab(
    campus: Campus, context: BrowserContext, server: Sshd
) -> None:
    page = enter(campus, context)
    problems: list[str] = []
    requests: list[str] = []
    context.on("request", lambda request: requests.append(request.url))
    context.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    terminal = open_terminal(page)
    screen = terminal.locator(".xterm-rows")
    terminal.keyboard.type("pwd; echo $((6 * 7)) answers; echo '<b>bold</b>'\n")
    expect(screen).to_contain_text("42 answers")
    expect(screen).to_contain_text("/home/student/labctl/mine/code")
    expect(screen).to_contain_text("<b>bold</b>")
    terminal.keyboard.type("sleep 1000 & kept=here\n")
    size = terminal.evaluate("[terminal.cols, terminal.rows]")
    terminal.keyboard.type("clear; echo size $(tput cols)x$(tput lines)\n")
    expect(screen).to_contain_text(f"size {size[0]}x{size[1]}")
    terminal.set_viewport_size({"width": 700, "height": 500})
    terminal.wait_for_function(f"terminal.cols < {size[0]}")
    smaller = terminal.evaluate("terminal.cols")
    terminal.keyboard.type("clear; echo now $(tput cols)\n")
    expect(screen).to_contain_text(f"now {smaller}")
    keep_picture(terminal, "student-terminal")
    for width, height in ((390, 844), (1280, 720), (1920, 1080)):
        terminal.set_viewport_size({"width": width, "height": height})
        assert measure_overflow(terminal) <= 0, width
    terminal.close()
    again = open_terminal(page)
    again.keyboard.type("echo still $kept\n")
    expect(again.locator(".xterm-rows")).to_contain_text("still here")
    foreign = [url for url in requests if not url.startswith(f"{campus.url}/")]
    assert foreign == [], "nothing comes from another host"
    assert problems == []
    again.keyboard.type("exit\n")
    expect(again.locator("#terminal-state")).to_have_text("not connected")
    again.get_by_role("button", name="Connect again").click()
    expect(again.locator("#terminal-state")).to_have_text("connected")


@pytest.mark.long
def test_a_program_that_prints_without_end_takes_bounded_memory(
    campus: Campus, context: BrowserContext
) -> None:
    terminal = open_terminal(enter(campus, context))
    terminal.keyboard.type("yes spam and more spam\n")
    expect(terminal.locator(".xterm-rows")).to_contain_text(
        re.compile(r"(spam and more spam\s*){5}")
    )
    server_mb, browser_mb = watch_memory(10)
    assert (server_mb < 30, browser_mb < 200) == (True, True), (server_mb, browser_mb)
    terminal.keyboard.press("Control+c")
    terminal.keyboard.type("clear; echo still $((1 + 1)) here\n")
    expect(terminal.locator(".xterm-rows")).to_contain_text("still 2 here")


@pytest.mark.long
def test_what_was_typed_outlives_the_session(campus: Campus, context: BrowserContext) -> None:
    terminal = open_terminal(enter(campus, context))
    screen, help_text = terminal.locator(".xterm-rows"), terminal.locator("#terminal-help")
    terminal.keyboard.type("echo half a comm")
    expect(screen).to_contain_text("echo half a comm")
    other_code = CODE[::-1]
    campus.invite("lovelace", other_code)  # which ends the sessions of the earlier code
    expect(help_text).to_contain_text("You are signed out.")
    expect(terminal.locator("#terminal-state")).to_have_text("not connected")
    terminal.keyboard.type("lost")
    keep_picture(terminal, "student-terminal-signed-out")
    with context.expect_page() as opened:
        help_text.get_by_role("link", name="Sign in").click()
    opened.value.fill("#student", "lovelace")
    opened.value.fill("#code", other_code)
    opened.value.click("button.go")
    expect(opened.value.locator("#live")).to_have_text("live")
    terminal.bring_to_front()
    terminal.get_by_role("button", name="Connect again").click()
    expect(help_text).not_to_be_visible()
    expect(screen).to_contain_text("echo half a comm")
    terminal.keyboard.type("and\n")
    expect(screen).to_contain_text(re.compile(r"(?<!echo )half a command"))


@pytest.mark.long
def test_a_new_lab_has_a_directory_for_its_code(
    campus: Campus, context: BrowserContext, server: Sshd
) -> None:
    """A file that a student writes there is submitted; one in the home directory is not."""
    make_lab = f"mkdir -p labctl/mine/.labctl; echo {LAB_ID} > labctl/mine/.labctl/id"
    server.sh(f"cd; mv labctl before; {make_lab}", user="student")
    try:
        server.sh("tmux kill-server || true", user="student")
        terminal = open_terminal(enter(campus, context))
        terminal.keyboard.type("pwd; echo 1 > mine.py\n")
        expect(terminal.locator(".xterm-rows")).to_contain_text("/home/student/labctl/mine/code")
    finally:
        server.sh("cd; tmux kill-server; rm -rf labctl; mv before labctl", user="student")


def test_a_server_that_was_given_up_is_named(campus: Campus, context: BrowserContext) -> None:
    terminal = open_terminal(enter(campus, context))
    for seat in campus.request_handler.list_seat_servers():
        seat.release_all()
    expect(terminal.locator("#terminal-help")).to_contain_text("This server has ended")


def test_another_student_gets_nothing(campus: Campus, context: BrowserContext) -> None:
    page = enter(campus, context)
    open_terminal(page)
    alan = campus.enter("turing")
    assert alan.ask(f"/terminal/{LAB_ID}")[0] == 404
    page.goto(f"{campus.url}/terminal/{'a' * 12}")
    expect(page.locator("h1")).to_have_text(re.compile("no such lab", re.IGNORECASE))


@pytest.mark.long
def test_without_tmux_it_is_a_shell(campus: Campus, context: BrowserContext, server: Sshd) -> None:
    server.sh("mv /usr/bin/tmux /usr/bin/tmux.away; usermod -s /usr/bin/fish student")
    try:
        terminal = open_terminal(enter(campus, context))
        terminal.keyboard.type("echo (math 6 x 7) fish\n")
        expect(terminal.locator(".xterm-rows")).to_contain_text("42 fish")
    finally:
        server.sh("mv /usr/bin/tmux.away /usr/bin/tmux; usermod -s /bin/bash student")
