"""Write a rendered page to a file: as HTML, or as a PDF that headless Chromium prints."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.model import Value

# Programs that print a page without a window, in the order in which they are tried.
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
# seconds that printing may take
PRINT_S = 180
LOG_CHARACTERS = 500


class DocumentForm(Value, frozen=True):
    """The form of a document: a page or slides, as HTML or as a PDF."""

    slides: bool = False
    pdf: bool = False

    @property
    def template(self) -> str:
        return "slides.html.j2" if self.slides else "report.html.j2"

    @property
    def step(self) -> str:
        return "writing the slides" if self.slides else "writing the report"

    def name_file(self, page: str) -> str:
        """Return the name of the document's file; `page` is that of the page."""
        return f"{'slides' if self.slides else page}.{'pdf' if self.pdf else 'html'}"


class Report(Value, frozen=True):
    """A written report. `lacks` lists missing data, each with the command that provides it."""

    run: str
    file: str
    bytes: int
    lacks: tuple[str, ...] = ()


def write_document(text: str, file: Path, form: DocumentForm) -> int:
    """Write a page to a file, replaced as a whole; return its size in bytes.

    NotFoundError if a PDF needs a browser that is not installed; LabError if it cannot be written.
    """
    browser = _find_browser() if form.pdf else ""
    staging = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if browser:
            _print_pdf(browser, text, staging)
        else:
            staging.write_text(text, encoding="utf-8")
        staging.replace(file)
    except OSError as error:
        raise LabError(
            f"{file} cannot be written", why=str(error), hint="labctl report --out FILE"
        ) from error
    finally:
        staging.unlink(missing_ok=True)
    return file.stat().st_size


def _find_browser() -> str:
    for name in BROWSERS:
        if program := shutil.which(name):
            return program
    raise NotFoundError(
        "no Chromium or Chrome is installed, which prints the PDF",
        why="labctl has no program of its own that draws a page",
        hint="sudo apt-get install chromium   # on Debian; on macOS: brew install --cask chromium\n"
        "labctl report --open   # or print the page to a PDF from your browser",
    )


def _print_pdf(browser: str, text: str, file: Path) -> None:
    """Print a page without network, by a browser with a profile of its own."""
    # Beside the result: Ubuntu's Chromium, a snap, sees no other program's /tmp.
    with tempfile.TemporaryDirectory(prefix="labctl-pdf-", dir=file.parent) as folder:
        page, result = Path(folder) / "page.html", Path(folder) / "page.pdf"
        page.write_text(text, encoding="utf-8")
        words = [
            browser,
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={Path(folder) / 'profile'}",
            "--no-pdf-header-footer",
            f"--print-to-pdf={result}",
        ]
        if os.geteuid() == 0:  # Chromium's own sandbox refuses to start as root.
            words.append("--no-sandbox")
        try:
            done = subprocess.run(
                [*words, page.as_uri()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PRINT_S,
            )
            output = done.stderr.strip()[-LOG_CHARACTERS:]
            why = output or f"it exited with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it took more than {PRINT_S} s"
        if not result.is_file():
            raise LabError(f"{browser} did not print the PDF", why=why, hint="labctl report --open")
        shutil.move(result, file)
