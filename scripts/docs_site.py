"""Hooks of mkdocs: pages that are not in docs/, links that lead out of it, and pictures in pages.

LABCTL_PICTURES names the folder that scripts/pictures.py has filled. In a page of docs/, the
comment `<!-- picture: up.svg The plan of a server -->` stands for one of its pictures. It is a
comment because the repository has no pictures.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files at the top of the repository that are pages of the site.
TOP_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"<!-- picture: (\S+) (.+) -->")
# In lists, Python's Markdown wants four spaces where GitHub's is content with two.
INDENTED = re.compile(r"^ {2,3}(?=\S)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in TOP_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    pictures = os.environ.get("LABCTL_PICTURES")
    if not pictures:
        text = "# Pictures\n\n`scripts/docs` makes them. This site was built without it.\n"
        files.append(File.generated(config, "pictures/index.md", content=text))
        return files
    for path in sorted(Path(pictures).iterdir()):
        name = f"pictures/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    if source.startswith("pictures/"):
        return markdown
    folder = "" if source in TOP_PAGES.values() else "docs"

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in TOP_PAGES:
            return f"[{text}]({TOP_PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        # The site has no copy of other files; the test of the pages' links checks that they exist.
        return text

    # A phone shows a picture small; a tap opens it alone.
    shown = r"[![\2](pictures/\1)](pictures/\1)" if os.environ.get("LABCTL_PICTURES") else ""
    return indent_lists(PICTURE.sub(shown, LINK.sub(rewrite, markdown)))


def indent_lists(markdown: str) -> str:
    """Indent what belongs to a list item by four spaces, and code blocks in it by the same."""
    lines, added, is_code = [], 0, False
    for line in markdown.splitlines():
        if not is_code:
            found = INDENTED.match(line)
            added = 4 - found.end() if found else 0
        if line.lstrip().startswith("```"):
            is_code = not is_code
        lines.append(" " * added + line if line else line)
    return "\n".join(lines)
