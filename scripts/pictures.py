"""Make a picture of each screen and page of labctl, and a page that shows them all.

    python scripts/pictures.py FOLDER

The screens are what the program prints, the pages are what Chromium shows of them; CHROMIUM names
its program. No server is needed: figures of servers, runs and courses are those of the tests.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from playwright.sync_api import Browser, expect, sync_playwright
from rich.console import Console, RenderableType
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in (".", "cli", "unit")]
from dashboard_bed import fill, make  # noqa: E402  # after the path above
from guide_session import make_guide_session  # noqa: E402
from report_facts import evaluation, facts  # noqa: E402
from test_top import ABOUT, NOW, PROCESS, seen  # noqa: E402

from labctl.cli.top_screen import render_server  # noqa: E402
from labctl.insight.report.page import build_page  # noqa: E402
from labctl.insight.report.render import render  # noqa: E402
from labctl.web import http_server  # noqa: E402

WIDTH = 88  # columns
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
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


def make_screens(folder: Path, scratch: Path) -> Iterator[Picture]:
    session = make_guide_session(scratch)
    (session.directory / "lab.yaml").write_text("lab: birds\nrun: python train.py\n")
    for name, (title, command) in COMMANDS.items():
        text = Text.from_ansi(session.run(command))
        (folder / f"{name}.svg").write_text(draw_terminal(text, command))
        yield Picture(f"{name}.svg", title, command)
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


def make_dashboard(folder: Path, scratch: Path, browser: Browser) -> Iterator[Picture]:
    bed = fill(make(scratch))
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
                yield Picture(f"{name}.png", title, "labctl course serve --dashboard")
    finally:
        stop.set()
        bed.state.close()


def make_pictures(folder: Path) -> list[Picture]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        return [
            *make_screens(folder, Path(scratch)),
            *make_report(folder, Path(scratch), browser),
            *make_dashboard(folder, Path(scratch), browser),
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
