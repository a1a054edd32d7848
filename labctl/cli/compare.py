"""The command compare: several runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import print_json, print_table, shorten
from labctl.cli.wrapping import print_message, read_output_width
from labctl.lazy import lazy_imports
from labctl.shell import command

if TYPE_CHECKING:
    from labctl.insight.compare.comparison import ComparisonResult

with lazy_imports(__name__):
    from labctl.insight.compare import page, wording
    from labctl.insight.report import formatting

# the narrowest column of values on a terminal
LEAST_WIDTH = 12
HEADINGS = ("RUN", "NAME", "ACCURACY", "95% INTERVAL", "CORRECT", "TIME", "COST")


@click.command("compare")
@click.argument("runs", nargs=-1, metavar="RUN RUN...", shell_complete=complete_runs)
@json_option
@click.pass_context
def compare_command(ctx: click.Context, runs: tuple[str, ...], json_: bool) -> None:
    """Compare up to six runs: results, settings, cost, and whether a difference is chance.

    Accuracies have their 95% intervals. McNemar's test decides whether two runs differ, if both
    were evaluated on the same test set by an evaluate.py that wrote its predictions. Uses the files
    on this machine, so call labctl pull and labctl eval for each run first. labctl report RUN RUN
    writes the same as a page, with the runs' curves in one plot.

    \b
    labctl compare 1121-071855-50dd 1121-083012-9c1e
    labctl compare baseline augmented distilled --json
    """
    lab = open_lab(ctx, quiet=json_)
    comparison = lab.compare(runs)
    if json_:
        print_json({"comparison": comparison})
        return
    print_comparison(comparison)
    report = command("labctl", "report", *runs, "--open").render()
    print_message(f"{clean(report)}   shows curves and intervals in your browser")


def print_comparison(comparison: ComparisonResult) -> None:
    """Print runs, differing settings, curves, and what the tests say."""
    rows = [page.make_run_row(run) for run in comparison.runs]
    cells = [
        tuple(map(_fit, (r.label, r.run, r.accuracy, r.interval, r.items, r.time, r.cost)))
        for r in rows
    ]
    print_table(cells, HEADINGS, optional=("CORRECT", "TIME"))
    labels = tuple(run.label for run in comparison.runs)
    click.echo()
    if comparison.differences:
        settings = [(one.name, *one.values) for one in comparison.differences]
        _print_values("SETTING", labels, settings)
    else:
        click.echo(wording.SAME_SETTINGS)
    if comparison.code:
        print_message(clean(comparison.code), err=False)
    if curves := page.make_curve_rows(comparison.curves):
        click.echo()
        _print_values("BEST VALUE", labels, [(row.name, *row.values) for row in curves])
    click.echo()
    for text in wording.describe_pairs(comparison.pairs):
        print_message(clean(_fit(text)), err=False)
    for hint in dict.fromkeys(pair.hint for pair in comparison.pairs if pair.hint):
        click.echo(f"  next: {clean(hint)}")
    for note in comparison.notes:
        print_message(clean(note))


def _print_values(title: str, labels: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a row for each name with the value of each run, shortened to fit a terminal."""
    names = max(len(title), *(len(row[0]) for row in rows))
    room = (read_output_width() - names) // len(labels) - 2
    room = max(LEAST_WIDTH, room)
    cells = [(row[0], *(shorten(_fit(value), room) for value in row[1:])) for row in rows]
    print_table(cells, (title, *labels))


def _fit(text: str) -> str:
    """Return a page's text for a terminal: plain spaces, and a dash for what was not measured."""
    return "-" if text == formatting.NOT_MEASURED else text.replace(formatting.SPACE, " ")
