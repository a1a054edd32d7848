"""Render the page as one HTML file with its style inside, without scripts or external files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labctl.insight.report.formatting import visible
from labctl.insight.report.page import Page


def render(page: Page, templates: Path) -> str:
    """Render the report. `templates` holds report.html.j2 and report.css. All text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Our own file, and the only text that is inserted without escaping.
    style = Markup((templates / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("report.html.j2").render(page=page, style=style)


def _make_visible(value: Any) -> Any:
    """Replace control characters in plain text; text that is already HTML stays as it is."""
    return visible(value) if type(value) is str else value
