"""TensorBoard, JupyterLab and a profile as a person sees them: in a browser, through a forward."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator

import msgspec
import pytest
from chromium import keep_picture
from playwright.sync_api import Browser, Page, Route, expect
from service_lab import HOME, LAB, Recorder, ServiceLab
from sshd_container import docker, wait_for

from labctl.insight import profile
from labctl.insight.profiler.trace import summary
from labctl.services.port_forward import Forwarding

pytest_plugins = ["browser_fixtures", "service_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
PAGE_MS = 60_000


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """A page without cookies, and without a notebook that asks whether it may be left."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        yield context.new_page()


@pytest.mark.long
def test_tensorboard_shows_the_runs_scalars(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("tensorboard")
    service_lab.write_scalars("first-run")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        # The server reads the directory anew every few seconds; the page shows what it then knew.
        tags = forward.url + "data/plugin/timeseries/tags"
        wait_for(lambda: "first-run" in browser_page.request.get(tags).text())
        browser_page.goto(forward.url + "#timeseries")
        run = browser_page.get_by_text("first-run", exact=True).first
        expect(run).to_be_visible(timeout=PAGE_MS)
        name = browser_page.get_by_text("loss_of_digits").first
        expect(name).to_be_visible(timeout=PAGE_MS)
        chart = browser_page.locator("line-chart").first
        expect(chart).to_be_visible(timeout=PAGE_MS)
        keep_picture(browser_page, "tensorboard")


@pytest.mark.long
def test_jupyterlab_opens_with_its_token_and_runs_code(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("jupyter")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        browser_page.goto(forward.url)
        launcher = browser_page.locator(".jp-LauncherCard", has_text="Python 3").first
        expect(launcher).to_be_visible(timeout=PAGE_MS)
        keep_picture(browser_page, "jupyter-launcher")
        launcher.click()
        # A cell that is run before its kernel answers is dropped without a word.
        expect(browser_page.get_by_text("| Idle")).to_be_visible(timeout=PAGE_MS)
        cell = browser_page.locator(".jp-Notebook .cm-content").first
        cell.click(timeout=PAGE_MS)
        browser_page.keyboard.type("print(6 * 7, __import__('os').getcwd())")
        expect(cell).to_contain_text("getcwd())")
        browser_page.keyboard.press("Shift+Enter")
        said = browser_page.locator(".jp-OutputArea-output").first
        expect(said).to_contain_text("42 /lab/code", timeout=PAGE_MS)
        keep_picture(browser_page, "jupyter-notebook")


@pytest.mark.long
def test_jupyterlab_refuses_who_has_no_token(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("jupyter")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        browser_page.goto(forward.url.partition("?")[0])
        expect(browser_page.get_by_text("Token authentication is enabled")).to_be_visible()
        assert browser_page.locator(".jp-LauncherCard").count() == 0
        keep_picture(browser_page, "jupyter-refused")


# How Perfetto's page answers one that hands it a trace.
PERFETTO = """<script>addEventListener("message", (said) => {
  if (said.data === "PING") said.source.postMessage("PONG", "*");
  else {
    const { buffer, title } = said.data.perfetto;
    document.title = `${buffer.byteLength} bytes of ${title}`;
  }
});</script>"""


def profiled(lab: ServiceLab, run: str) -> int:
    """Leave a profile of one step with the run, as labctl's profiler does; its trace's size."""
    rows = [
        ("ProfilerStep#1", 0, 900),
        ("enumerate(DataLoader)#a", 0, 300),
        ("aten::mul", 400, 200),
    ]
    events = [
        {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": 1, "cat": "user_annotation"}
        for name, ts, dur in rows
    ]
    trace = {"traceEvents": events}
    about = {"run": run, "command": ["train.py", "</script>"], "torch": "2", "device": "cpu"}
    text = json.dumps({**summary(events), **about, "threads": 2, "cores": 2, "warmup": 3})
    page = profile.read_page().replace("PROFILE_AS_JSON", text.replace("<", "\\u003c"))
    packed = gzip.compress(json.dumps(trace).encode())
    folder = f"{HOME}/{LAB}/runs/{run}/logs/profile"
    for name, content in (
        ("index.html", page),
        ("trace.json.gz", base64.b64encode(packed).decode()),
    ):
        turn = "base64 -d" if name.endswith("gz") else "cat"
        line = f"mkdir -p {folder}; {turn} >{folder}/{name}"
        words = ("exec", "-i", "-u", "student", lab.box.name, "sh", "-c", line)
        docker(*words, stdin=content)
    return len(packed)


@pytest.mark.long
def test_a_profile_shows_where_a_step_goes_and_hands_its_trace_on(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    size = profiled(service_lab, "profile-1")
    service = service_lab.ensure("profile", *profile.page_server_command(), port=profile.PORT)
    wrong: list[str] = []
    browser_page.on("pageerror", lambda error: wrong.append(str(error)))
    browser_page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else 0)
    shown = msgspec.structs.replace(service, path="/profile-1/")
    with Forwarding(service_lab.spec(shown), recorder) as forward:
        browser_page.goto(forward.url)
        expect(browser_page.get_by_role("heading", level=1)).to_have_text(
            "1 step of train.py </script>"
        )
        expect(browser_page.locator("#phases")).to_contain_text("getting the next batch300 µs33%")
        expect(browser_page.locator("#step svg")).to_contain_text("mul")
        keep_picture(browser_page, "profile")

        def answer(route: Route) -> None:
            route.fulfill(body=PERFETTO, content_type="text/html")

        browser_page.context.route("https://ui.perfetto.dev/**", answer)
        with browser_page.context.expect_page() as opened:
            browser_page.get_by_role("button", name="Perfetto").click()
        title = f"{size} bytes of labctl profile profile-1"
        expect(opened.value).to_have_title(title, timeout=PAGE_MS)
    assert wrong == []
