"""The student's own text, notes.md, as HTML for the report.

The text may come from somebody else, with a lab: it is Markdown without HTML, its links lead to the
web alone, and its pictures are small PNG and JPEG files below the lab, which become part of the
page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from labctl.insight.report import pictures
from labctl.insight.report.facts import TextSection
from labctl.insight.report.formatting import visible
from labctl.lazy import lazy_imports
from labctl.wire.containment import is_inside

if TYPE_CHECKING:
    from markdown_it.token import Token

with lazy_imports(__name__):
    import markdown_it
    import markupsafe

FILE = "notes.md"
MOST_CHARACTERS = 200_000
MOST_PICTURES = 30
LARGEST_PICTURE_BYTES = 2_000_000
MOST_PICTURE_BYTES = 10_000_000
LONGEST_SIDE = 4_096
# Headings of the text are below the report's own.
LOWEST_HEADING = 6
HEADING_SHIFT = 2
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_WEB = re.compile(r"(?:https?|mailto):", re.IGNORECASE)

# Returns a picture as (data URI, why it is not shown), one of them "".
PictureReader = Callable[[str], tuple[str, str]]


def read_notes(root: Path, run_directory: Path, notes: list[str]) -> tuple[TextSection, ...]:
    """Read and render the notes of a run, else those of the lab; () without any.

    What cannot be shown is added to `notes`.
    """
    for directory in (run_directory, root):
        path = directory / FILE
        if not path.is_file():
            continue
        if not is_inside(path, root):
            notes.append(f"skipped {FILE}: it is a link that leads out of the lab")
            return ()
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(MOST_CHARACTERS + 1)
        except OSError as error:
            notes.append(f"skipped {FILE}: {error.strerror}")
            return ()
        if len(text) > MOST_CHARACTERS:
            notes.append(f"{FILE}: only its first {MOST_CHARACTERS:,} characters are shown")
        reader = _PictureFolder(root, directory, notes)
        return render_notes(text[:MOST_CHARACTERS], reader.read)
    return ()


class _PictureFolder:
    """Reads the pictures that a text names, relative to its directory, within limits."""

    def __init__(self, root: Path, directory: Path, notes: list[str]) -> None:
        self.root = root
        self.directory = directory
        self.notes = notes
        self.count = 0
        self.bytes = 0

    def read(self, source: str) -> tuple[str, str]:
        picture, why = self._read(source)
        self.count += 1
        self.bytes += len(picture)
        if why:
            self.notes.append(f"{FILE}: the picture {source[:80]} is not shown: {why}")
        return picture, why

    def _read(self, source: str) -> tuple[str, str]:
        if self.count >= MOST_PICTURES:
            return "", f"a page has at most {MOST_PICTURES}"
        if self.bytes >= MOST_PICTURE_BYTES:
            return "", f"the page's pictures have more than {MOST_PICTURE_BYTES // 10**6} MB"
        if source.startswith("data:"):
            return pictures.check_picture(source, LARGEST_PICTURE_BYTES, LONGEST_SIDE)
        name = unquote(source)
        if _SCHEME.match(name) or "\0" in name:
            return "", "it is not a file of this lab"
        path = self.directory / name
        try:
            if not is_inside(path, self.root):
                return "", "it is not below the lab"
            if not path.is_file():
                return "", "there is no such file"
            with path.open("rb") as file:
                content = file.read(LARGEST_PICTURE_BYTES + 1)
        except (OSError, ValueError) as error:
            return "", getattr(error, "strerror", "") or "it cannot be read"
        return pictures.check_bytes(content, LARGEST_PICTURE_BYTES, LONGEST_SIDE)


def render_notes(text: str, read_picture: PictureReader) -> tuple[TextSection, ...]:
    """Render Markdown; each heading of the first two levels begins a section."""
    parser = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = _is_allowed  # type: ignore[method-assign]

    def render_image(
        renderer: Any, tokens: Sequence[Token], index: int, options: Any, env: Any
    ) -> str:
        token = tokens[index]
        source, alt = str(token.attrGet("src") or ""), token.content
        picture, why = read_picture(source)
        if why:
            return str(markupsafe.Markup("<em>[{}: {}]</em>").format(alt or source[:80], why))
        return str(markupsafe.Markup('<img src="{}" alt="{}">').format(picture, alt))

    parser.add_render_rule("image", render_image)
    tokens = parser.parse(visible(text))
    _adapt(tokens)
    return tuple(
        TextSection(title=title, html=parser.renderer.render(part, parser.options, {}))
        for title, part in _split(tokens)
        if title or part
    )


def _is_allowed(url: str) -> bool:
    """Whether a link or picture may have this address; else its Markdown is shown as text."""
    if _WEB.match(url) or url.startswith(tuple(pictures.PREFIXES)):
        return True
    return not _SCHEME.match(url) and not url.startswith("//")


def _adapt(tokens: Sequence[Token]) -> None:
    """Shift the headings below the page's own, and let no link lead to a file."""
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(LOWEST_HEADING, int(token.tag[1]) + HEADING_SHIFT)}"
        for child in token.children or ():
            if child.type == "link_open":
                href = str(child.attrs.pop("href", ""))
                if _WEB.match(href):
                    child.attrSet("href", href)
                    child.attrSet("rel", "noreferrer noopener")


def _split(tokens: Sequence[Token]) -> list[tuple[str, list[Token]]]:
    """Split at the headings of the first two levels; return (title, tokens after it)."""
    sections: list[tuple[str, list[Token]]] = [("", [])]
    highest = (f"h{1 + HEADING_SHIFT}", f"h{2 + HEADING_SHIFT}")
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token.type == "heading_open" and token.level == 0 and token.tag in highest:
            sections.append((_plain_text(tokens[place + 1]), []))
            place += 3  # the heading, its text and its end
            continue
        sections[-1][1].append(token)
        place += 1
    return sections


def _plain_text(inline: Token) -> str:
    return "".join(child.content for child in inline.children or ()).strip()
