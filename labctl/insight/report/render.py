"""Render the page as one HTML file with its style inside, without scripts or external files."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from labctl.insight.report.formatting import visible
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import jinja2
    import markupsafe


def render(
    page: object, templates: Path, name: str = "report.html.j2", other: object | None = None
) -> str:
    """Render a page by a template of `templates`, with report.css. All text is escaped.

    `other` is a second page for slides, that of the comparison. A template with a script allows
    this script alone, by its hash.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Our own files, and the only texts that are inserted without escaping.
    style, deck_style, script = (
        markupsafe.Markup((templates / file).read_text(encoding="utf-8"))
        for file in ("report.css", "slides.css", "slides.js")
    )
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    return environment.get_template(name).render(
        page=page,
        other=other,
        style=style,
        deck_style=deck_style,
        script=script,
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
    )


def _make_visible(value: Any) -> Any:
    """Replace control characters in plain text; text that is already HTML stays as it is."""
    return visible(value) if type(value) is str else value
