"""The feedback page of a grade: everything in it is escaped, nothing in it is active."""

from __future__ import annotations

from html import escape

from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults, GraderTest, clean_text

CSP = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#8882;padding:.75rem;"
    "border-radius:4px}table{border-collapse:collapse;width:100%}td,th{text-align:left;"
    "padding:.25rem .75rem .25rem 0;vertical-align:top}td{overflow-wrap:anywhere}"
    "td:last-child{white-space:pre-wrap}"
    # On a phone, what a test printed and the notes are below its row.
    "@media(max-width:640px){table,tbody{display:block}tr{display:grid;"
    "grid-template-columns:1fr 4.5rem 2.5rem}td:last-child{grid-column:1/-1}}"
    "@media(prefers-color-scheme:dark){body{background:#181a1b;color:#e8e6e3}}"
)


def render_page(
    record: GradeRecord, results: GradeResults, output: str, comments: str = "", received: str = ""
) -> str:
    """Return the page as HTML. `results` are those that the student may see.

    `received` is when the submission arrived, in the course's zone; "" without a submission.
    `output` is what the submission's program printed. It is untrusted, as staff open the page too.
    `comments` are those on lines of the submission.
    """
    rows = "".join(
        f"<tr><td>{_escape_html(test.name)}</td><td>{_points_text(test.score)}</td>"
        f"<td>{_points_text(test.max_score)}</td><td>{_escape_html(test.output)}</td></tr>"
        for test in results.tests
    )
    table = f"<table><tr><th>part</th><th>points</th><th>of</th><th></th></tr>{rows}</table>"
    printed = (
        f"<h2>What your program printed</h2><pre>{_escape_html(output)}</pre>" if output else ""
    )
    notes = (
        f"<h2>Comments on your files</h2><pre>{_escape_html(comments)}</pre>" if comments else ""
    )
    number = f", submission {record.number}" if record.number else ""
    title = _escape_html(f"{record.assignment}{number}")
    bundle = f", bundle {_escape_html(record.bundle_sha256[:16])}" if record.bundle_sha256 else ""
    arrival = f" Received {_escape_html(received)}{bundle}." if received else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p><strong>{record.score or 0.0:g}</strong> of {record.points:g} points.{arrival}</p>"
        f"<pre>{_escape_html(results.output)}</pre>{table if rows else ''}{notes}{printed}"
        "</body></html>\n"
    )


def render_text(results: GradeResults) -> str:
    """Return the same as plain text: the grader's output, and a line for each of several tests."""
    lines = [results.output] if results.output else []
    if len(results.tests) > 1:
        lines += [_render_test(test) for test in results.tests]
    return clean_text("\n".join(lines))


def _render_test(test: GraderTest) -> str:
    points = "/".join(filter(None, [_points_text(test.score), _points_text(test.max_score)]))
    return f"{test.name}: {points or test.status}"


def _escape_html(text: str) -> str:
    return escape(clean_text(text, 40_000), quote=True)


def _points_text(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
