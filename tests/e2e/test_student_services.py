"""Jupyter and TensorBoard of a real server in a student's browser, and what they cannot reach.

The page is at 127.0.0.1 and the services are at localhost: two hosts, as in a course.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import websockets
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from service_lab import LAB, LAB_ID, ServiceLab
from sshd_container import wait_for

from labctl.courses import join_codes
from labctl.courses.requests import RequestHandler
from labctl.services.socket_forward import SocketForward, SocketForwardSpec
from labctl.transports.ssh_client import runtime_dir
from labctl.web import factory, http_server
from labctl.web.student_services import ServiceKey

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import Pretended, create
from dashboard_bed import Bed, Visitor, make

pytest_plugins = ["service_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAGE_MS = 60_000
CODE = "abcdefgh" * 4


@dataclass
class Campus:
    """A course in which ada holds a server with Jupyter, and turing another lab of her seat."""

    bed: Bed
    url: str
    opened: list[ServiceKey]

    def invite(self, student: str) -> None:
        folder = self.bed.folder
        public = join_codes.derive_key_pair(folder.id, student, CODE)[1]
        join_codes.store_page_code(folder, student, public, int(time.time() + 1000))

    def enter(self, student: str) -> Visitor:
        self.invite(student)
        visitor = Visitor(f"{self.url}/")
        status, _, _ = visitor.form("/sign-in", csrf="", student=student, code=CODE)
        assert status == 303
        return visitor

    def open(self, student: str, name: str = "jupyter") -> Visitor:
        """Open a service as a browser does; the visitor of its origin."""
        page = self.enter(student)
        path = f"/services/{LAB_ID}/{name}"
        wait_for(lambda: "location" in page.ask(path)[1])
        address = page.ask(path)[1]["location"]
        origin, _, ticket = address.partition("/labctl-open")
        visitor = Visitor(f"{origin}/")
        assert visitor.ask(f"/labctl-open{ticket}")[0] == 303
        return visitor


@pytest.fixture(scope="module")
def campus(service_lab: ServiceLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campus]:
    for name in ("jupyter", "tensorboard"):
        service_lab.ensure(name)  # builds their image
    bed = make(tmp_path_factory.mktemp("campus"))
    request_handler = RequestHandler(bed.folder, Pretended(bed.folder))
    stop, opened = threading.Event(), list[ServiceKey]()

    def open_service(_: object, key: ServiceKey) -> SocketForward:
        opened.append(key)
        spec = service_lab.spec(service_lab.ensure(key.name))
        return SocketForward(
            SocketForwardSpec(
                config=spec.config,
                server_id=spec.server_id,
                endpoint=spec.endpoint,
                service=spec.service,
                path=str(runtime_dir() / f"test-{os.getpid()}-{key.name}"),
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "open_seat_service", open_service)
        settings = http_server.StudentSettings(port=0, services_port=0)
        url = http_server.serve_student_page(
            bed.folder, bed.paths, bed.state, settings, request_handler=request_handler, stop=stop
        )
        bed.serve_up(0)
        create(request_handler, "lovelace", lab=LAB, lab_id=LAB_ID)
        create(request_handler, "turing", "bb" * 8, lab=LAB, lab_id="a" * 12)
        assert request_handler.wait(60)
        try:
            yield Campus(bed, url, opened)
        finally:
            stop.set()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(PAGE_MS)
        yield context


def sign_in(campus: Campus, context: BrowserContext) -> Page:
    campus.invite("lovelace")
    page = context.new_page()
    page.goto(campus.url)
    page.fill("#student", "lovelace")
    page.fill("#code", CODE)
    page.click("button.go")
    expect(page.locator("#live")).to_have_text("live")
    return page


def open_in_browser(page: Page, title: str) -> Page:
    with page.context.expect_page() as opened:
        page.get_by_text(title).click()
    return opened.value


def keep(page: Page, name: str) -> None:
    folder = os.environ.get("LABCTL_SCREENSHOTS", "")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_a_notebook_runs_in_the_browser_and_reaches_nothing_of_the_page(
    campus: Campus, context: BrowserContext
) -> None:
    page = sign_in(campus, context)
    notebook = open_in_browser(page, "Open Jupyter")
    launcher = notebook.locator(".jp-LauncherCard", has_text="Python 3").first
    expect(launcher).to_be_visible(timeout=PAGE_MS)
    launcher.click()
    expect(notebook.get_by_text("| Idle")).to_be_visible(timeout=PAGE_MS)
    cell = notebook.locator(".jp-Notebook .cm-content").first
    cell.click()
    notebook.keyboard.type("print(6 * 7, __import__('os').getcwd())")
    expect(cell).to_contain_text("getcwd())")
    notebook.keyboard.press("Shift+Enter")
    expect(notebook.locator(".jp-OutputArea-output").first).to_contain_text("42 /lab/code")
    keep(notebook, "student-jupyter")

    # The notebook's scripts do not see the page, its cookie, or the cookie of their own session.
    assert "labctl" not in notebook.evaluate("document.cookie")
    own = campus.url
    read = "(url) => fetch(url, {credentials: 'include'}).then((r) => r.text(), () => 'failed')"
    assert notebook.evaluate(read, f"{own}/") == "failed"
    post = "(url) => fetch(url, {method: 'POST', credentials: 'include', mode: 'no-cors', "
    post += "headers: {'content-type': 'application/x-www-form-urlencoded'}, body: 'csrf='})"
    notebook.evaluate(f"{post}.catch(() => 0)", f"{own}/sign-out")
    assert notebook.evaluate("window.opener") is None
    frame = "(url) => { const f = document.createElement('iframe'); f.src = url; document.body"
    frame += ".append(f); return new Promise((done) => { f.onload = () => done(f.contentDocument "
    frame += "&& f.contentDocument.body.textContent); }); }"
    assert "Lovelace" not in (notebook.evaluate(frame, f"{own}/") or "")
    worker = "navigator.serviceWorker.register('/files/x.js').then(() => 'in', () => 'refused')"
    assert notebook.evaluate(worker) == "refused"
    # Nor can they set a cookie that the page would take for its own.
    names = [one["name"] for one in context.cookies(own)]
    for name in names:
        notebook.evaluate(f"document.cookie = '{name}=forged; path=/'")
    page.reload()
    expect(page.get_by_role("heading", name="Ada Lovelace")).to_be_visible(timeout=PAGE_MS)
    assert [one["name"] for one in context.cookies(own)] == names


def test_tensorboard_shows_the_scalars(
    campus: Campus, context: BrowserContext, service_lab: ServiceLab
) -> None:
    board = open_in_browser(sign_in(campus, context), "Open TensorBoard")
    board.wait_for_url("**/tensorboard/**")
    service_lab.write_scalars("first-run")
    tags = board.url.partition("#")[0] + "data/plugin/timeseries/tags"
    wait_for(lambda: "first-run" in board.request.get(tags).text())
    board.goto(board.url.partition("#")[0] + "#timeseries")
    expect(board.get_by_text("loss_of_digits").first).to_be_visible(timeout=PAGE_MS)
    keep(board, "student-tensorboard")


def test_no_other_student_and_no_stranger_opens_a_service(campus: Campus) -> None:
    ada = campus.open("lovelace")
    assert ada.ask("/api/status")[0] == 200
    turing = campus.enter("turing")
    status, _, body = turing.ask(f"/services/{LAB_ID}/jupyter")
    assert status == 404
    assert "no such lab" in body
    assert turing.ask(f"/services/{LAB_ID}/../x")[0] == 404
    assert turing.ask(f"/services/{'a' * 12}/etcd")[0] == 404
    origin = f"http://{ada.host}"
    assert Visitor(f"{origin}/").ask("/api/status")[0] == 403
    # Neither the page's cookie nor one that another key signed opens it.
    name = ada.cookie.partition("=")[0]
    for cookie in (turing.cookie, f"{name}={turing.cookie.partition('=')[2]}"):
        assert Visitor(f"{origin}/").ask("/api/status", Cookie=cookie)[0] == 403
    assert Visitor(f"{origin}/").ask("/labctl-open?ticket=x")[0] == 403
    assert ada.ask("/api/status", Host="evil.example")[0] == 400
    assert ada.ask("/api/status", Sec_Fetch_Site="same-site", Sec_Fetch_Mode="cors")[0] == 403
    body = json.dumps({"type": "notebook"})
    assert ada.ask("/api/contents", "POST", body, Origin=campus.url)[0] == 403
    assert ada.ask("/api/contents", "POST", body)[0] == 403
    print("DEBUG", ada.ask("/api/contents", "POST", body, Origin=origin))
    print("DEBUG", ada.ask("/api/contents", "POST", body, Origin=origin, Content_Type="application/json"))
    assert ada.ask("/files/x.js", Service_Worker="script")[0] == 403


def test_a_ticket_opens_once(campus: Campus) -> None:
    page = campus.enter("lovelace")
    wait_for(lambda: "location" in page.ask(f"/services/{LAB_ID}/jupyter")[1])
    address = page.ask(f"/services/{LAB_ID}/jupyter")[1]["location"]
    origin, _, ticket = address.partition("/labctl-open")
    assert Visitor(f"{origin}/").ask(f"/labctl-open{ticket}")[0] == 303
    assert Visitor(f"{origin}/").ask(f"/labctl-open{ticket}")[0] == 403


def test_websockets_are_authorized_and_end_with_the_students_access(campus: Campus) -> None:
    ada = campus.open("lovelace")
    origin = f"http://{ada.host}"
    kernel = json.loads(ada.ask("/api/kernels", "POST", "{}", Origin=origin)[2])["id"]
    uri = f"ws://{ada.host}/api/kernels/{kernel}/channels"

    async def connect(cookie: str, from_: str) -> websockets.ClientConnection:
        return await websockets.connect(
            uri, origin=websockets.Origin(from_), additional_headers={"Cookie": cookie}
        )

    async def scenario() -> None:
        turing = campus.enter("turing")
        for cookie, from_ in (
            ("", origin), (turing.cookie, origin), (ada.cookie, campus.url),
            (ada.cookie, "https://evil.example"),
        ):  # fmt: skip
            with pytest.raises(websockets.InvalidStatus) as refused:
                await connect(cookie, from_)
            assert refused.value.response.status_code == 403
        socket = await connect(ada.cookie, origin)
        header = {"msg_id": "1", "msg_type": "kernel_info_request", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": {}}
        await socket.send(json.dumps({**message, "channel": "shell"}))
        answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert answer["parent_header"]["msg_id"] == "1"
        campus.invite("lovelace")  # the same code: her sessions go on
        folder = campus.bed.folder
        public = join_codes.derive_key_pair(folder.id, "lovelace", "z" * 32)[1]
        join_codes.store_page_code(folder, "lovelace", public, int(time.time() + 1000))
        async with asyncio.timeout(60):
            async for _ in socket:
                pass  # until it is closed

    with ThreadPoolExecutor(1) as pool:  # Playwright's own loop runs in this thread
        pool.submit(asyncio.run, scenario()).result()
    assert ada.ask("/api/status")[0] == 403


def test_what_is_passed_on_holds_no_secret_of_the_keeper(campus: Campus) -> None:
    """The service sees its own host, and neither session; the browser does not see the token."""
    ada = campus.open("lovelace")
    connection = http.client.HTTPConnection(*ada.host.split(":"), timeout=60)
    connection.request("GET", "/lab", headers={"Host": ada.host, "Cookie": ada.cookie})
    answer = connection.getresponse()
    body = answer.read().decode()
    assert answer.status == 200
    assert "frame-ancestors 'self'" in str(answer.headers.get_all("content-security-policy"))
    assert "service-worker-allowed" not in answer.headers
    print("DEBUG", body[:3000])
    assert 0
