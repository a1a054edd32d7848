"""The commands explain and profile: why a run is slow or wrong."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.browser import open_in_browser, relative_path
from labctl.cli.exit_codes import clean, format_next
from labctl.cli.interrupt import wait_until_interrupted
from labctl.cli.options import RUN, json_option, open_lab, stop_drawing
from labctl.cli.screen import print_json, print_table
from labctl.cli.wrapping import indent_words, print_message, read_output_width, wrap_lines
from labctl.lazy import lazy_imports
from labctl.text import duration_text, timing_text

if TYPE_CHECKING:
    from labctl.insight.explain.evidence import Finding
    from labctl.insight.explanation import Explanation, InputSummary
    from labctl.insight.profile import ProfileResult
    from labctl.lab import Lab
    from labctl.model import Run

with lazy_imports(__name__):
    from labctl.insight import profile
    from labctl.lifecycle import gang_runs

MAX_WIDTH = 110
INDENT = "  "
# width of the labels `seen`, `next` and `source`
LABEL = 8
MARKS = {"problem": ("✗", "red"), "advice": ("!", "yellow"), "good": ("✓", "green")}


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
    docs/explain.md lists the rules.

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
            _print_finding(finding)
    good = [finding for finding in explanation.findings if finding.level == "good"]
    if good and not everything:
        click.echo()
        for finding in good:
            _print_headline(finding)
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
        _print_wrapped(f"{gap.what}: {gap.why}", first="? ", indent=INDENT)
        if not short:
            _print_labeled("next", gap.next)


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
    _print_wrapped(f"based on {', '.join(sources)}", indent=INDENT, first=INDENT, dim=True)
    for flaw in read.flaws[:3]:
        growing = " (perhaps still being written)" if flaw.cut and not run.has_ended else ""
        text = f"{flaw.file} from byte {flaw.at_byte}: {flaw.what}{growing}"
        _print_wrapped(text, indent=INDENT, first=INDENT, dim=True)


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


def _print_finding(finding: Finding) -> None:
    _print_headline(finding)
    _print_wrapped(finding.why, indent=INDENT, first=INDENT)
    for number, evidence in enumerate(finding.evidence):
        text = f"{evidence.text} [{evidence.source}]"
        _print_labeled("seen" if number == 0 else "", text)
    if finding.level != "good":
        _print_labeled("next", finding.next, bold=True)
    _print_labeled("source", f"{finding.source.title}; {finding.source.url}", dim=True)


def _print_headline(finding: Finding) -> None:
    mark, color = MARKS[finding.level]
    bold = finding.level != "good"
    _print_wrapped(finding.what, first=f"{mark} ", indent=INDENT, color=color, bold=bold)


def _print_labeled(label: str, text: str, *, bold: bool = False, dim: bool = False) -> None:
    start = f"{INDENT}{label:<{LABEL}}"
    if not any(line.startswith("labctl ") for line in text.splitlines()):
        _print_wrapped(text, first=start, indent=" " * len(start), dim=dim)
        return
    # Commands are not wrapped: people copy them from the terminal as one line.
    for number, line in enumerate(format_next(text)):
        before = " " * len(start) if number else start
        if line.startswith("labctl "):
            click.echo(before + click.style(line, bold=bold and number == 0))
        else:
            margin = 1 if line.startswith("(") else 0
            _print_wrapped(line, first=before, indent=" " * (len(start) + margin))


def _print_wrapped(
    text: str,
    *,
    first: str,
    indent: str,
    color: str | None = None,
    bold: bool = False,
    dim: bool = False,
) -> None:
    width = read_output_width(MAX_WIDTH)
    wrapped = textwrap.fill(
        clean(text).replace("\n", " "),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo(click.style(wrapped, fg=color, bold=bold or None, dim=dim or None))


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
    _print_wrapped(text, first="", indent=INDENT, bold=True)


@click.command("profile")
@RUN
@click.option("--steps", default=5, show_default=True, help="Trace this many optimizer steps.")
@click.option("--warmup", default=10, show_default=True, help="Skip this many steps first.")
@click.option("--port", default=0, help="Show the page on this local port.")
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
@click.option("--no-page", is_flag=True, help="Download the page without showing it.")
@json_option
@click.pass_context
def profile_command(
    ctx: click.Context,
    run: str,
    steps: int,
    warmup: int,
    port: int,
    open_: bool,
    no_page: bool,
    json_: bool,
) -> None:
    """Record a few steps of RUN's command (default: the latest run) with PyTorch's profiler.

    labctl runs the command again as a short run, with the current code and without changes to it,
    and ends it after these steps. A forward shows the page with the trace until Ctrl-C. To see a
    profile again, give its id as RUN.

    \b
    labctl profile
    labctl profile night --steps 3 --open
    labctl profile --no-page --json
    """
    lab = open_lab(ctx, quiet=json_)
    gang_runs.require_one_server(lab.context, "profile", "labctl run")
    profiled = profile.profile(lab.context, run, steps=steps, warmup=warmup)
    stop_drawing(ctx)
    if json_:
        print_json(profiled)
        return
    _print_profile(profiled)
    # A container on the server shows the page; without one, the downloaded file does.
    if profiled.there and not no_page and lab.config.uses_containers:
        _show_page(lab, profiled, port, open_)
    else:
        click.echo(f"page: {_find_page(profiled)}")


PHASES = {
    "data": "getting the next batch",
    "waiting": "waiting for the GPU",
    "optimizer": "optimizer",
    "backward": "backward pass",
    "forward": "forward pass and loss",
    "other": "Python between operations",
}


def _print_profile(profiled: ProfileResult) -> None:
    profile = profiled.profile
    device = f" on {profile.device}, PyTorch {profile.torch}" if profile.torch else ""
    title = f"{_count_text(profile.steps, 'step')} of {shlex.join(profile.command)}{device}"
    for line in wrap_lines(clean(title), has_commands=False, err=False):
        click.secho(line, bold=True)
    busy = "" if profile.gpu_busy is None else f"; the GPU is busy {profile.gpu_busy:.0%} of it"
    step_s = profile.step_us / 1e6
    click.echo(f"{INDENT}a step takes {timing_text(step_s)} (median){busy}\n")
    parts = sorted(profile.phases.items(), key=lambda item: -item[1])
    print_table(
        [
            (PHASES.get(name, name), f"{timing_text(share * step_s):>8}", _bar_text(share))
            for name, share in parts
            if share >= 0.0005
        ],
        ("PART OF A STEP", "    TIME", "SHARE"),
    )
    click.echo()
    rows = profile.kernels or profile.operations
    kind = "KERNEL ON THE GPU" if profile.kernels else "OPERATION"
    print_table(
        [
            (
                f"{timing_text(one.us / 1e6):>8}",
                f"{one.count:>7.1f}",
                f"{one.share:>5.0%}",
                one.name,
            )
            for one in rows[:8]
        ],
        ("PER STEP", "  CALLS", "SHARE", kind),
    )
    for finding in profiled.findings:
        click.echo()
        _print_finding(finding)
    click.echo()


def _bar_text(share: float) -> str:
    return f"{share:>4.0%} {'█' * round(share * 30)}"


def _find_page(profiled: ProfileResult) -> str:
    return clean(relative_path(Path(profiled.directory, "index.html")))


def _show_page(lab: Lab, profiled: ProfileResult, port: int, open_: bool) -> None:
    with profile.open_page(lab.context, profiled, port) as forward:
        click.echo(f"profile: {forward.url}")
        print_message(
            f"Press Ctrl-C to close. To see it again: labctl profile {profiled.run}, "
            f"or open {_find_page(profiled)}"
        )
        if open_:
            open_in_browser(forward.url)
        wait_until_interrupted([forward])
