"""The command report: the results on one page."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from labctl.cli.browser import open_in_browser, relative_path
from labctl.cli.exit_codes import clean
from labctl.cli.options import RUN, json_option, open_lab
from labctl.cli.screen import print_json
from labctl.cli.wrapping import print_message
from labctl.text import bytes_text


@click.command("report")
@RUN
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("--open", "open_", is_flag=True, help="Open the report in the browser.")
@json_option
@click.pass_context
def report_command(
    ctx: click.Context, run: str, out: Path | None, open_: bool, json_: bool
) -> None:
    """Write the results of RUN (default: the latest run) on one page, for projector and paper.

    The page is one HTML file that needs no network: accuracy with its interval, curves, classes,
    the worst mistakes, hardware, cost, and how to reproduce the run. Missing figures appear as "not
    measured". It uses the files on this machine, so call labctl pull and labctl eval first. The
    default file is runs/RUN/report.html.

    \b
    labctl pull && labctl eval && labctl report
    labctl report --open
    labctl report --out results.html
    """
    lab = open_lab(ctx, quiet=json_)
    report = lab.report(run, out.absolute() if out else None)
    if open_:
        open_in_browser(Path(report.file).as_uri())
    if json_:
        print_json({"report": report})
        return
    for missing in report.lacks:
        print_message(clean(missing))
    click.echo(f"{clean(relative_path(Path(report.file)))} ({bytes_text(report.bytes)})")
    if not open_:
        names = [run] * bool(run) + (["--out", str(out)] if out else [])
        call = shlex.join(["labctl", "report", *names, "--open"])
        print_message(f"{clean(call)}   shows it in your browser")
