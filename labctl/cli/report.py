"""The command report: the results on one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.browser import open_in_browser, relative_path
from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, make_empty_name_error, open_lab
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.lazy import lazy_imports
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.insight.report.document import DocumentForm, Report
    from labctl.lab import Lab

with lazy_imports(__name__):
    from labctl.insight.report import document


@click.command("report")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("--open", "open_", is_flag=True, help="Open the report in the browser.")
@click.option("--slides", is_flag=True, help="Write slides instead: one HTML file to present.")
@click.option("--pdf", is_flag=True, help="Write a PDF instead; needs Chromium or Chrome.")
@json_option
@click.pass_context
def report_command(
    ctx: click.Context,
    runs: tuple[str, ...],
    out: Path | None,
    open_: bool,
    slides: bool,
    pdf: bool,
    json_: bool,
) -> None:
    """Write the results of RUN (default: the latest run) on one page, for projector and paper.

    The page is one HTML file that needs no network: accuracy with its interval, curves, classes,
    the worst mistakes, hardware, cost, and how to reproduce the run. Missing figures appear as "not
    measured". It uses the files on this machine, so call labctl pull and labctl eval first. The
    default file is runs/RUN/report.html.

    With several runs, the page compares them as labctl compare does, with their curves in one plot,
    and its default file is comparison.html in the directory of the first one.

    Your own text comes from notes.md, in runs/RUN/ or beside lab.yaml. --slides shows each of its
    sections on a slide; arrow keys turn the pages. --slides --pdf prints the slides.

    \b
    labctl pull && labctl eval && labctl report
    labctl report --open
    labctl report --out results.html
    labctl report baseline augmented
    labctl report --slides --open
    """
    if "" in runs:
        raise make_empty_name_error("RUN")
    lab = open_lab(ctx, quiet=json_)
    form = document.DocumentForm(slides=slides, pdf=pdf)
    report = _write(lab, runs, out.absolute() if out else None, form)
    if open_:
        open_in_browser(Path(report.file).as_uri())
    if json_:
        print_json({"report": report})
        return
    for missing in report.lacks:
        print_message(clean(missing))
    click.echo(f"{clean(relative_path(Path(report.file)))} ({bytes_text(report.bytes)})")
    if not open_:
        words = [*runs, *(["--out", str(out)] if out else [])]
        words += ["--slides"] * slides + ["--pdf"] * pdf
        call = shlex.join(["labctl", "report", *words, "--open"])
        print_message(f"{clean(call)}   shows it in your browser")


def _write(lab: Lab, runs: tuple[str, ...], file: Path | None, form: DocumentForm) -> Report:
    if len(runs) > 1:
        return lab.report_comparison(runs, file, form)
    return lab.report("".join(runs), file, form)
