"""The page as HTML: one file, its style inside, no script, nothing fetched from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labctl.insight.report.formatting import visible
from labctl.insight.report.page import Page


def render(page: Page, templates: Path) -> str:
    """`templates` holds report.html.j2 and report.css. Every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Ours, and the only text that is put in as it is.
    style = Markup((templates / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("report.html.j2").render(page=page, style=style)


def _shown(value: Any) -> Any:
    """Plain text without what would steer it; what is HTML already stays as it is."""
    return visible(value) if type(value) is str else value
