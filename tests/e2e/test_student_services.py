"""Jupyter and TensorBoard of a real server in a student's browser, and what they cannot reach.

The page is at 127.0.0.1 and the services are at localhost: two hosts, as in a course.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import websockets
from chromium import keep_picture, sign_in
from playwright.sync_api import Browser, BrowserContext, Page, expect
from service_lab import LAB_ID, ServiceLab
from sshd_container import wait_for

from labctl.services.socket_forward import SocketForward, SocketForwardSpec
from labctl.transports.ssh_client import runtime_dir
from labctl.web.student_services import ServiceKey

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from service_proxy_bed import CODE, Campus, ServiceVisitor, serve_campus

pytest_plugins = ["browser_fixtures", "service_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
PAGE_MS = 60_000


@pytest.fixture(scope="module")
def campus(service_lab: ServiceLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campus]:
    def open_service(key: ServiceKey) -> SocketForward:
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

    for name in ("jupyter", "tensorboard"):
        service_lab.ensure(name)  # builds their image
    with serve_campus(tmp_path_factory.mktemp("campus"), open_service, lab_id=LAB_ID) as campus:
        yield campus


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(PAGE_MS)
        yield context


def enter(campus: Campus, context: BrowserContext) -> Page:
    campus.invite("lovelace")
    return sign_in(context, campus.url, "lovelace", CODE)


def open_in_browser(page: Page, title: str) -> Page:
    with page.context.expect_page() as opened:
        page.get_by_text(title).click()
    opened.value.get_by_role("button", name="Continue").click()
    return opened.value


@pytest.mark.long
def test_a_notebook_runs_in_the_browser_and_reaches_nothing_of_the_page(
    campus: Campus, context: BrowserContext
) -> None:
    page = enter(campus, context)
    notebook = open_in_browser(page, "Open Jupyter")
    # Another test's notebook may be open in this JupyterLab.
    notebook.wait_for_url("**/lab**")
    notebook.goto(notebook.url.partition("?")[0] + "?reset")
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
    keep_picture(notebook, "student-jupyter")

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


@pytest.mark.long
def test_tensorboard_shows_the_scalars(
    campus: Campus, context: BrowserContext, service_lab: ServiceLab
) -> None:
    board = open_in_browser(enter(campus, context), "Open TensorBoard")
    board.wait_for_url("**/tensorboard/**")
    service_lab.write_scalars("first-run")
    tags = board.url.partition("#")[0] + "data/plugin/timeseries/tags"
    wait_for(lambda: "first-run" in board.request.get(tags).text())
    board.goto(board.url.partition("#")[0] + "#timeseries")
    expect(board.get_by_text("loss_of_digits").first).to_be_visible(timeout=PAGE_MS)
    keep_picture(board, "student-tensorboard")


async def read_all(socket: websockets.ClientConnection) -> None:
    async for _ in socket:
        pass


def test_a_kernel_answers_until_the_student_loses_access(campus: Campus) -> None:
    ada = campus.open("lovelace")
    origin = f"http://{ada.host}"
    assert json.loads(ada.ask("/api/status")[2])["kernels"] >= 0
    mode = (runtime_dir() / f"test-{os.getpid()}-jupyter").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "no other account of the keeper's machine gets in"
    kernel = json.loads(ada.ask("/api/kernels", "POST", "{}", Origin=origin)[2])["id"]
    uri = f"ws://{ada.host}/api/kernels/{kernel}/channels"

    async def scenario() -> None:
        socket = await websockets.connect(
            uri, origin=websockets.Origin(origin), additional_headers={"Cookie": ada.cookie}
        )
        header = {"msg_id": "1", "msg_type": "kernel_info_request", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": {}}
        await socket.send(json.dumps({**message, "channel": "shell"}))
        async with asyncio.timeout(60):
            async for answer in socket:
                if json.loads(answer)["parent_header"].get("msg_id") == "1":
                    break
            campus.invite("lovelace", "z" * 32)
            with pytest.raises(websockets.ConnectionClosedError):
                await read_all(socket)
            assert socket.close_code == 1008

    with ThreadPoolExecutor(1) as pool:  # Playwright's own loop runs in this thread
        pool.submit(asyncio.run, scenario()).result()
    assert ada.ask("/api/status")[0] == 403


def test_another_student_reaches_neither_notebook_nor_kernel(campus: Campus) -> None:
    ada, turing = campus.open("lovelace"), campus.enter("turing")
    origin = f"http://{ada.host}"
    kernel = json.loads(ada.ask("/api/kernels", "POST", "{}", Origin=origin)[2])["id"]
    uri = f"ws://{ada.host}/api/kernels/{kernel}/channels"
    name, _, own = ada.cookie.partition("=")
    other = turing.cookie.partition("=")[2]
    cookies = ("", turing.cookie, f"{name}={other}", f"{name}={own[:-4]}AAAA")

    async def connect(cookie: str) -> None:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(
                uri, origin=websockets.Origin(origin), additional_headers={"Cookie": cookie}
            )
        assert refused.value.response.status_code == 403

    with ThreadPoolExecutor(1) as pool:  # Playwright's own loop runs in this thread
        for cookie in cookies:
            stranger = ServiceVisitor(f"{origin}/")
            stranger.cookie = cookie
            for path in ("/lab", f"/api/kernels/{kernel}", "/api/contents"):
                assert stranger.ask(path)[0] == 403, (path, cookie)
            pool.submit(asyncio.run, connect(cookie)).result()
    assert ada.ask(f"/api/kernels/{kernel}")[0] == 200
