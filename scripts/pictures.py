"""Make a picture of each screen and page of labctl, and a page that shows them all.

    python scripts/pictures.py FOLDER

The screens are what the program prints, the pages are what Chromium shows of them; CHROMIUM names
its program. No server is needed: figures of servers, runs and courses are those of the tests, and
offers and prices are those of the simulated cloud.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import msgspec
from playwright.sync_api import Browser, expect
from rich.console import Console, Group, RenderableType
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in (".", "cli", "unit")]
from chromium import open_browser  # noqa: E402  # after the path above
from dashboard_bed import fill, make  # noqa: E402
from guide_session import GUIDE, make_guide_session  # noqa: E402
from marking_pictures import draw_marking_pages  # noqa: E402
from report_facts import evaluation, facts  # noqa: E402
from student_pictures import draw_student_pages  # noqa: E402
from terminal import open_terminal  # noqa: E402
from test_course_similarity import OWN, RENAMED, STARTER  # noqa: E402
from test_profiler_trace import gpu_step, trace  # noqa: E402
from test_submit import AT, HOST_KEY, checkpoint  # noqa: E402
from test_top import ABOUT, NOW, PROCESS, seen  # noqa: E402
from transcripts import Session, list_steps  # noqa: E402

from labctl.cli.screen import Screen  # noqa: E402
from labctl.cli.top_screen import render_server  # noqa: E402
from labctl.courses.similarity_page import write_pages  # noqa: E402
from labctl.courses.similarity_worker import (  # noqa: E402
    CodeDocument,
    ComparisonRequest,
    compare_documents,
)
from labctl.events import Progress, Step  # noqa: E402
from labctl.insight.profile import read_page  # noqa: E402
from labctl.insight.profiler.sitecustomize import PAGE_MARK, ProfiledProgram  # noqa: E402
from labctl.insight.profiler.trace import summary  # noqa: E402
from labctl.insight.report.page import build_page  # noqa: E402
from labctl.insight.report.render import render  # noqa: E402
from labctl.web import http_server  # noqa: E402

WIDTH = 88  # columns
BARS_WIDTH = 110  # columns that the texts of the bars need
MIB = 1024**2
COMMANDS = {
    "help": ("All commands", "labctl --help"),
    "status": ("The server and its runs", "labctl status"),
    "explain": ("Why a run is slow", "labctl explain slow"),
    "estimate": (
        "What a model needs",
        "labctl estimate --params 110M --train adam --batch 32 --seq 512 --hidden 768 --layers 12"
        " --price 0.53",
    ),
}
ASSIGN = (
    "labctl receive init ../drop > /dev/null && labctl receive assignment ../drop hw3"
    " --course ml-2026 --due \"$(date -u -d '7 days' +'%F 12:00 UTC')\""
    f" --at {AT} --host-key '{HOST_KEY}' --out assignment.yaml"
)
OFFERS = "labctl offers --provider aws --gpu any --min-gpu-memory 16GB --max-price 0.50"
UP = "labctl up --provider aws --spot --budget 5 --ttl 8h --idle 30m"
COMMAND_S = 60.0  # seconds that a command may take
PAST_S = 26 * 3600.0  # seconds since the due time of the assignment with late submissions
PASSED_S = 12.0  # seconds that the drawn bars have run
SUBMIT = "labctl submit slow --dry-run"
SERVE = "labctl course serve --dashboard"
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)


@dataclass(frozen=True)
class Picture:
    """A file in the folder, and what it shows."""

    file: str
    title: str
    command: str


def draw_terminal(picture: RenderableType, title: str, width: int = WIDTH) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(picture)
    # Without the addresses of fonts: a page of the documentation loads nothing from elsewhere.
    return FONT.sub("", console.export_svg(title=title))


def draw_output(folder: Path, session: Session, name: str, title: str, command: str) -> Picture:
    """Draw what a command prints, as a picture `name`."""
    text = Text.from_ansi(session.run(command))
    (folder / f"{name}.svg").write_text(draw_terminal(text, command))
    return Picture(f"{name}.svg", title, command)


def make_screens(folder: Path, session: Session) -> Iterator[Picture]:
    (session.directory / "lab.yaml").write_text("lab: birds\nrun: python train.py\n")
    for name, (title, command) in COMMANDS.items():
        yield draw_output(folder, session, name, title, command)
    for step, accuracy in ((40, 0.91), (80, 0.97)):
        checkpoint(session.directory / "runs" / "slow", step, accuracy)
    session.run(ASSIGN)
    yield draw_output(folder, session, "submit", "What a submission contains", SUBMIT)
    yield from make_live_screens(folder)
    yield from make_rehearsed_screens(folder, session)


def make_live_screens(folder: Path) -> Iterator[Picture]:
    """Draw the screens of commands that need a server, from their own parts and transcripts."""
    steps = list_steps(GUIDE, "machine")
    forward = "".join(f"{step.shown}{step.output}" for step in steps if "forward" in step.command)
    (folder / "forward.svg").write_text(draw_terminal(Text(forward), "labctl forward", 100))
    yield Picture("forward.svg", "JupyterLab in the background", "labctl forward jupyter --detach")
    (folder / "run.svg").write_text(draw_terminal(draw_bars(), "labctl run", BARS_WIDTH))
    yield Picture("run.svg", "The start of a run", "labctl run")
    process = msgspec.structs.replace(PROCESS, command="python train.py --epochs 20")
    now = msgspec.structs.replace(NOW, processes=(process,))
    uses = (3.0, 9.5, 8.2, 12.0, 7.1, 7.9, 11.4, 7.2)
    samples = (
        msgspec.structs.replace(now, at=now.at + number, cpu_cores=cores)
        for number, cores in enumerate(uses)
    )
    top = render_server(seen(*samples), ABOUT, 100)
    (folder / "top.svg").write_text(draw_terminal(top, "labctl top", 100))
    yield Picture("top.svg", "The server, live", "labctl top")


class Tty(io.StringIO):
    """Stands for a terminal: bars are only drawn on one."""

    def isatty(self) -> bool:
        return True


def draw_bars() -> Group:
    """Draw the bars of a run's start: the image is built while the data is uploaded."""
    building, uploading = "building the image", "uploading data"
    detail = "step 8 of 16, installing Python packages"
    screen = Screen()
    with patch.dict(os.environ, COLUMNS=str(BARS_WIDTH)), redirect_stderr(Tty()):
        screen.emit(Step(name=building))
        screen.emit(Progress(name=building, done=7, total=16, unit="steps", detail=detail))
        for done in (0, 310 * MIB):
            screen.emit(Progress(name=uploading, done=done, total=512 * MIB, unit="bytes"))
            screen.bars[uploading].started_at -= PASSED_S
        for task in screen.live.tasks:
            task.start_time -= PASSED_S
        bars = screen.live.get_renderable()
        screen.stop_drawing()
    return Group(Text("✓ uploading code 0.4 s"), bars)


@contextmanager
def rehearse(session: Session) -> Iterator[Session]:
    """Run a simulated AWS without machines; the session uses it."""
    environ = dict(session.environ)
    words = ["labctl", "rehearse", "aws", "--boot", "none"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as cloud:
        try:
            assert cloud.stdout is not None
            for line in cloud.stdout:
                if line.startswith("export "):
                    (setting,) = shlex.split(line.removeprefix("export "))
                    name, _, environ[name] = setting.partition("=")
                if "LABCTL_SERVER_AWS_ADDRESS_FROM" in line:  # the last one
                    break
            yield replace(session, environ=environ)
        finally:
            cloud.send_signal(signal.SIGINT)


def make_rehearsed_screens(folder: Path, session: Session) -> Iterator[Picture]:
    with rehearse(session) as rehearsed:
        yield draw_output(folder, rehearsed, "offers", "What AWS offers", OFFERS)
        with open_terminal(rehearsed.directory, rehearsed.environ, WIDTH) as terminal:
            plan = terminal.run(UP, ["n"], COMMAND_S)
            checks = terminal.run("labctl doctor", [], COMMAND_S)
    (folder / "up.svg").write_text(draw_terminal(Text(plan), UP))
    yield Picture("up.svg", "The plan and price of a server", UP)
    (folder / "doctor.svg").write_text(draw_terminal(Text(checks), "labctl doctor"))
    yield Picture("doctor.svg", "The checks of a machine", "labctl doctor")


def make_profile(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    steps = (event for number in range(5) for event in gpu_step(1000.0 * number))
    file = scratch / "profile.html"
    program = ProfiledProgram(
        run="profile-1121-072912-dd1d", command=("python", "train.py"), torch="2.8.0",
        device="T4", threads=4, cores=4, warmup=10,
    )  # fmt: skip
    figures = {**summary(trace(*steps)), **program._asdict()}
    file.write_text(read_page().replace(PAGE_MARK, json.dumps(figures)))
    with browser.new_context(viewport={"width": 1100, "height": 800}) as context:
        shown = context.new_page()
        shown.goto(file.as_uri())
        shown.screenshot(path=folder / "profile.png", full_page=True)
    yield Picture("profile.png", "Where a training step spends its time", "labctl profile")


def make_report(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    found = evaluation(tuple("01234567"))
    page = build_page(facts(evaluation=found, here=found, server=found))
    file = scratch / "report.html"
    file.write_text(render(page, ROOT / "templates" / "report"))
    with browser.new_context(viewport={"width": 1100, "height": 800}) as context:
        shown = context.new_page()
        shown.goto(file.as_uri())
        shown.screenshot(path=folder / "report.png", full_page=True)
    yield Picture("report.png", "The results as one page", "labctl report")


def make_similarity(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    documents = (
        CodeDocument(name="lovelace", files={"train.py": STARTER + OWN}),
        CodeDocument(name="turing", files={"train.py": RENAMED + STARTER}),
    )
    request = ComparisonRequest(documents=documents, handed_out={"train.py": STARTER})
    pairs = compare_documents(request).pairs
    page = write_pages(scratch / "similar", "hw3", request, pairs, ROOT / "templates/similarity")
    with browser.new_context(viewport={"width": 1280, "height": 720}) as context:
        shown = context.new_page()
        shown.goto((page.parent / "1.html").as_uri())
        shown.screenshot(path=folder / "similarity.png")
    yield Picture("similarity.png", "Similar code side by side", "labctl course similarity hw3")


def make_course(folder: Path, scratch: Path, environ: Mapping[str, str]) -> Iterator[Picture]:
    (scratch / "planned").mkdir()
    bed = make(scratch / "planned")
    bed.state.close()
    file = bed.folder.path / "course.yaml"
    file.write_text(re.sub("server: .*", "server: {provider: aws, gpu: any}", file.read_text()))
    with rehearse(Session(bed.folder.path, environ)) as session:
        yield draw_output(folder, session, "plan", "A course's plan", "labctl course plan")


def make_dashboard(
    folder: Path, scratch: Path, browser: Browser, environ: Mapping[str, str]
) -> Iterator[Picture]:
    bed = fill(make(scratch, due_in_s=-PAST_S))
    session = Session(bed.folder.path, environ)
    yield draw_output(folder, session, "course", "A course's seats", "labctl course status")
    stop = threading.Event()
    bed.start(stop)
    url = (bed.folder.private / "keeper" / http_server.URL_FILE).read_text().strip()
    pages = {
        "board": ("A course's servers", ""),
        "seat": ("One student's server", f"seats/{bed.seat(0).pseudonym}"),
        "assignment": ("An assignment's grades", "assignments/hw3"),
        "costs": ("A course's costs", "costs"),
    }
    try:
        with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
            shown = context.new_page()
            base = url.partition("?")[0]
            shown.goto(url)
            shown.wait_for_url(base)
            for name, (title, path) in pages.items():
                shown.goto(base + path)
                expect(shown.locator("#live")).to_have_text("live")
                shown.screenshot(path=folder / f"{name}.png")
                yield Picture(f"{name}.png", title, SERVE)
    finally:
        stop.set()
        bed.state.close()


def make_marking_pages(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    draw_marking_pages(folder, scratch, browser)
    yield Picture("marking.png", "A submission beside the rubric", SERVE)
    yield Picture("regrades.png", "Requests for a regrade", SERVE)


def make_student_page(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    for name, title in draw_student_pages(folder, scratch, browser).items():
        yield Picture(f"{name}.png", title, "labctl course serve --students")


def make_pictures(folder: Path) -> list[Picture]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open_browser() as browser:
        session = make_guide_session(Path(scratch))
        return [
            *make_screens(folder, session),
            *make_report(folder, Path(scratch), browser),
            *make_similarity(folder, Path(scratch), browser),
            *make_profile(folder, Path(scratch), browser),
            *make_course(folder, Path(scratch), session.environ),
            *make_dashboard(folder, Path(scratch), browser, session.environ),
            *make_marking_pages(folder, Path(scratch) / "marking", browser),
            *make_student_page(folder, Path(scratch) / "student", browser),
        ]


def main() -> None:
    folder = Path(sys.argv[1])
    parts = ["# Pictures", "Made by labctl itself, with made-up figures."]
    for picture in make_pictures(folder):
        parts.append(f"## {picture.title}\n\n`{picture.command}`\n")
        parts.append(f"![{picture.title}]({picture.file})")
    (folder / "index.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
