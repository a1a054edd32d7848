"""The pages that show similar code to staff: a table of pairs, and each pair side by side.

A page is one file without scripts, and loads nothing. All text of students is escaped.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labctl.config.identity import write_private
from labctl.courses.similarity_worker import (
    ComparisonRequest,
    FileMatch,
    SimilarPair,
    Spans,
)
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import jinja2
    import markupsafe

INDEX = "index.html"


def write_pages(
    directory: Path,
    name: str,
    request: ComparisonRequest,
    pairs: Sequence[SimilarPair],
    templates: Path,
) -> Path:
    """Replace `directory` by the pages of these pairs; return the first page's path.

    `templates` holds page.html.j2 and similarity.css.
    """
    texts = {document.name: document.files for document in request.documents}
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{name}-") as scratch:
        draft = Path(scratch) / name
        rows = []
        for number, pair in enumerate(pairs, 1):
            title = f"{name}: {pair.name} and {pair.other}"
            matches = [
                _describe_match(match, texts[pair.name], texts[pair.other]) for match in pair.files
            ]
            file = f"{number}.html"
            page = _render(templates, title=title, pair=pair, matches=matches, rows=())
            write_private(draft / file, page.encode())
            shares = {"share": share_text(pair.share), "other_share": share_text(pair.other_share)}
            rows.append({"pair": pair, "file": file, **shares})
        title = f"{name}: similar code"
        page = _render(templates, title=title, pair=None, matches=(), rows=rows)
        write_private(draft / INDEX, page.encode())
        shutil.rmtree(directory, ignore_errors=True)
        draft.rename(directory)
    return directory / INDEX


def share_text(share: float) -> str:
    return f"{share:.0%}"


def _render(templates: Path, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Our own file, and the only text that is inserted without escaping.
    style = markupsafe.Markup((templates / "similarity.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html.j2").render(style=style, **values)


def _describe_match(
    match: FileMatch, texts: dict[str, str], other_texts: dict[str, str]
) -> dict[str, object]:
    return {
        "path": match.path,
        "other_path": match.other_path,
        "sides": (
            _split_text(texts[match.path], match.spans),
            _split_text(other_texts[match.other_path], match.other_spans),
        ),
    }


def _split_text(text: str, spans: Spans) -> list[tuple[str, bool]]:
    """Split a text at its common parts: (part, whether it is one)."""
    parts, at = [], 0
    for begin, end in spans:
        parts += [(text[at:begin], False), (text[begin:end], True)]
        at = end
    return [(part, is_common) for part, is_common in (*parts, (text[at:], False)) if part]
