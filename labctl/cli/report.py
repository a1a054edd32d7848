"""report: the results presentation."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.options import json_option, open_lab


@click.command("report")
@click.argument("run", default="")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write it there.")
@click.option("--open", "open_", is_flag=True, help="Show it in the browser.")
@json_option
@click.pass_context
def report_command(
    ctx: click.Context, run: str, out: Path | None, open_: bool, json_: bool
) -> None:
    """The results of RUN (the latest) on one page: made for the projector and for paper.

    One HTML file that needs no network: accuracy with its interval, curves, classes, the worst
    mistakes, what it ran on and cost, and how to make it again. What was not measured says so.
    It stands on what is here: labctl pull and labctl eval first. By default runs/RUN/report.html.

    \b
    labctl pull && labctl eval && labctl report
    labctl report --open
    labctl report --out results.html
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json, size

    lab = open_lab(ctx, quiet=json_)
    made = lab.report(run, out.absolute() if out else None)
    if open_:
        click.launch(Path(made.file).as_uri())
    if json_:
        as_json({"report": made})
        return
    for one in made.lacks:
        click.echo(clean(one), err=True)
    click.echo(f"{clean(_near(Path(made.file)))} ({size(made.bytes)})")


def _near(file: Path) -> str:
    """The file as a person here would type it."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
