"""Render the page as one HTML file with its style inside, without scripts or external files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labctl.insight.report.formatting import visible
from labctl.insight.report.page import Page
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import jinja2
    import markupsafe


def render(page: Page, templates: Path) -> str:
    """Render the report. `templates` holds report.html.j2 and report.css. All text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Our own file, and the only text that is inserted without escaping.
    style = markupsafe.Markup((templates / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("report.html.j2").render(page=page, style=style)


def _make_visible(value: Any) -> Any:
    """Replace control characters in plain text; text that is already HTML stays as it is."""
    return visible(value) if type(value) is str else value
