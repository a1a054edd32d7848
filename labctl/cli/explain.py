"""The command explain: why a run is slow or wrong."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.findings_output import (
    INDENT,
    print_finding,
    print_headline,
    print_labeled,
    print_wrapped,
)
from labctl.cli.options import RUN, json_option, open_lab, stop_drawing
from labctl.cli.tables import print_json
from labctl.cli.wrapping import indent_words, wrap_lines
from labctl.text import duration_text

if TYPE_CHECKING:
    from labctl.insight.explanation import Explanation, InputSummary
    from labctl.model import Run


@click.command("explain")
@RUN
@click.option(
    "--all",
    "-a",
    "everything",
    is_flag=True,
    help="Also explain good results, and how to measure what is unknown.",
)
@json_option
@click.pass_context
def explain_command(ctx: click.Context, run: str, everything: bool, json_: bool) -> None:
    """Explain why RUN (default: the latest run) is slow or wrong, and what to try next.

    Rules read the server's telemetry, TensorBoard's curves, the run's record and its log. Each
    finding names its evidence and its source. What cannot be measured is listed as unknown.
    `labctl docs explain` lists the rules.

    \b
    labctl explain
    labctl explain night --json
    """
    lab = open_lab(ctx, quiet=json_)
    explanation = lab.explain(run)
    stop_drawing(ctx)
    if json_:
        print_json(explanation)
        return
    print_explanation(explanation, everything)


def print_explanation(explanation: Explanation, everything: bool) -> None:
    """Print an explanation. Good results are one line each unless `everything` is set."""
    _print_title(explanation)
    for finding in explanation.findings:
        if finding.level != "good" or everything:
            click.echo()
            print_finding(finding)
    good = [finding for finding in explanation.findings if finding.level == "good"]
    if good and not everything:
        click.echo()
        for finding in good:
            print_headline(finding)
    _print_unknown(explanation, everything)
    _print_conclusion(explanation)


def _print_unknown(explanation: Explanation, everything: bool) -> None:
    """List what could not be measured; briefly if there are problems, which matter more."""
    if not explanation.unknown:
        return
    has_problem = any(finding.level == "problem" for finding in explanation.findings)
    short = has_problem and not everything
    click.echo()
    more = "   (labctl explain --all: how to find out)" if short else ""
    click.echo(click.style("Unknown", bold=True) + click.style(more, dim=True))
    for gap in explanation.unknown:
        print_wrapped(f"{gap.what}: {gap.why}", first="? ", indent=INDENT)
        if not short:
            print_labeled("next", gap.next)


def _print_title(explanation: Explanation) -> None:
    run, read = explanation.run, explanation.read
    title = clean(f"run {run.id}: {_describe_state(run)}")
    lines = wrap_lines(title, len(INDENT), has_commands=False, err=False)
    click.secho(f"\n{INDENT}".join(lines), bold=True)
    if run.command:
        click.echo(indent_words(clean(shlex.join(run.command)), INDENT))
    sources = [
        f"{_count_text(read.samples, 'sample')} of telemetry" if read.samples else "no telemetry",
        f"{_count_text(read.curves, 'curve')} with {_count_text(read.points, 'point')}"
        if read.curves
        else "no curves",
        _describe_log(read),
    ]
    print_wrapped(f"based on {', '.join(sources)}", indent=INDENT, first=INDENT, dim=True)
    for flaw in read.flaws[:3]:
        growing = " (perhaps still being written)" if flaw.cut and not run.has_ended else ""
        text = f"{flaw.file} from byte {flaw.at_byte}: {flaw.what}{growing}"
        print_wrapped(text, indent=INDENT, first=INDENT, dim=True)


def _describe_log(read: InputSummary) -> str:
    if read.log_bytes:
        return "its log"
    return "its log, which is empty" if read.has_log else "no log"


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _describe_state(run: Run) -> str:

    elapsed = ""
    if run.started_at:
        end = run.ended_at or run.seen_at
        elapsed = duration_text(end - run.started_at) if end > run.started_at else ""
    if run.has_ended:
        return f"{run.summary or run.state_text}{f' after {elapsed}' if elapsed else ''}"
    return f"{run.state_text}{f' for {elapsed}' if elapsed else ''}"


def _print_conclusion(explanation: Explanation) -> None:
    """Print the conclusion as the last line, which people read first."""
    problems = [finding for finding in explanation.findings if finding.level == "problem"]
    advice = [finding for finding in explanation.findings if finding.level == "advice"]
    click.echo()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        text = f"{count}; start with: {problems[0].what}"
    elif advice:
        text = f"no problem; worth a try: {advice[0].what}"
    elif explanation.findings:
        text = "no problem found" + (" in the available data" if explanation.unknown else "")
    else:
        text = "Not enough data to diagnose."
    print_wrapped(text, first="", indent=INDENT, bold=True)
