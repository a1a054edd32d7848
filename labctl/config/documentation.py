"""The pages of the documentation. They are installed with labctl, so that a hint can name them."""

from __future__ import annotations

from pathlib import Path

from labctl.config.directories import find_data_dir


def find_docs_dir() -> Path:
    return find_data_dir() / "docs"


def list_pages() -> list[str]:
    """List the names of all pages: `student`, and `lab.yaml` for a file that is not Markdown."""
    files = sorted(find_docs_dir().iterdir())
    return [file.stem if file.suffix == ".md" else file.name for file in files if _is_page(file)]


def find_page(name: str) -> Path | None:
    """Return the file of a page: `student`, `student.md`, or `docs/student.md#install`."""
    wanted = name.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    if wanted not in list_pages():
        return None
    return find_docs_dir() / (wanted if "." in wanted else f"{wanted}.md")


def find_title(name: str) -> str:
    """Return the heading of a page, or the first sentence of a settings file."""
    file = find_page(name)
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    text = next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
    return text.partition(". ")[0]


def _is_page(file: Path) -> bool:
    return file.suffix in (".md", ".yaml")
