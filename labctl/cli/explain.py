"""explain, profile: why a run is slow or wrong."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab, rest

if TYPE_CHECKING:
    from labctl.insight.explain.evidence import Finding
    from labctl.insight.explanation import Explanation
    from labctl.insight.profile import Profiled
    from labctl.lab import Lab
    from labctl.model import Run

WIDEST = 110
INDENT = "  "
# Columns of `because`, `seen`, `next`, `source`.
LABEL = 8
MARKS = {"problem": ("✗", "red"), "advice": ("!", "yellow"), "good": ("✓", "green")}


@click.command("explain")
@click.argument("run", default="")
@click.option(
    "--all",
    "-a",
    "everything",
    is_flag=True,
    help="More words: on what is good, and on what is not known.",
)
@json_option
@click.pass_context
def explain_command(ctx: click.Context, run: str, everything: bool, json_: bool) -> None:
    """Why RUN (the latest) is slow or wrong: what is seen, what it means, what to try next.

    Rules look at the server's telemetry, TensorBoard's curves, the run's record and its log. Each
    answer names its evidence and its source; what cannot be told is said. docs/explain.md lists
    the rules.

    \b
    labctl explain
    labctl explain night --json
    """
    from labctl.cli.screen import as_json

    lab = open_lab(ctx, quiet=json_)
    found = lab.explain(run)
    rest(ctx)
    if json_:
        as_json({name: getattr(found, name) for name in found.__struct_fields__})
        return
    draw(found, everything)


def draw(found: Explanation, everything: bool) -> None:
    _title(found)
    for one in found.findings:
        if one.level != "good" or everything:
            click.echo()
            _finding(one)
    good = [one for one in found.findings if one.level == "good"]
    if good and not everything:
        click.echo()
        for one in good:
            _headline(one)
    _gaps(found, everything)
    _last(found)


def _gaps(found: Explanation, everything: bool) -> None:
    """What could not be told. Where something is wrong that comes first, and this is kept short."""
    if not found.unknown:
        return
    short = any(one.level == "problem" for one in found.findings) and not everything
    click.echo()
    more = "   (labctl explain --all: how it could be known)" if short else ""
    click.echo(click.style("Not known", bold=True) + click.style(more, dim=True))
    for gap in found.unknown:
        _say(f"{gap.what}: {gap.why}", first="? ", indent=INDENT)
        if not short:
            _label("next", gap.next)


def _title(found: Explanation) -> None:
    from labctl.cli.exit_codes import clean

    read = found.read
    click.secho(f"run {found.run.id}: {clean(_ended(found.run))}", bold=True)
    if found.run.command:
        click.echo(f"{INDENT}{clean(shlex.join(found.run.command))}")
    looked = [
        f"{_many(read.samples, 'sample')} of telemetry" if read.samples else "no telemetry",
        f"{_many(read.curves, 'curve')} with {_many(read.points, 'point')}"
        if read.curves
        else "no curves",
        "its log" if read.log_bytes else "no log",
    ]
    _say(f"looked at {', '.join(looked)}", indent=INDENT, first=INDENT, dim=True)
    for flaw in read.flaws[:3]:
        growing = " (being written, perhaps)" if flaw.cut and not found.run.ended else ""
        said = f"{flaw.file} from byte {flaw.at_byte}: {flaw.what}{growing}"
        _say(said, indent=INDENT, first=INDENT, dim=True)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _ended(run: Run) -> str:
    from labctl.cli.screen import span

    took = ""
    if run.started_at:
        end = run.ended_at or run.seen_at
        took = f" after {span(end - run.started_at)}" if end > run.started_at else ""
    if run.ended:
        return f"{run.told or run.state}{took}"
    return f"{run.state}{took.replace(' after', ' for')}"


def _finding(one: Finding) -> None:
    _headline(one)
    _say(one.why, indent=INDENT, first=INDENT)
    for number, evidence in enumerate(one.evidence):
        text = f"{evidence.said} [{evidence.of}]"
        _label("seen" if number == 0 else "", text)
    if one.level != "good":
        _label("next", one.next, bold=True)
    _label("source", f"{one.source.title}; {one.source.url}", dim=True)


def _headline(one: Finding) -> None:
    mark, color = MARKS[one.level]
    _say(one.what, first=f"{mark} ", indent=INDENT, color=color, bold=one.level != "good")


def _label(label: str, text: str, *, bold: bool = False, dim: bool = False) -> None:
    start = f"{INDENT}{label:<{LABEL}}"
    if text.startswith("labctl "):
        # Not wrapped: what is copied from a terminal must be one line.
        from labctl.cli.exit_codes import clean

        click.echo(start + click.style(clean(text), bold=bold))
        return
    _say(text, first=start, indent=" " * len(start), dim=dim)


def _say(
    text: str,
    *,
    first: str,
    indent: str,
    color: str | None = None,
    bold: bool = False,
    dim: bool = False,
) -> None:
    from labctl.cli.exit_codes import clean

    width = min(shutil.get_terminal_size((100, 24)).columns, WIDEST)
    wrapped = textwrap.fill(
        clean(text).replace("\n", " "),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo(click.style(wrapped, fg=color, bold=bold or None, dim=dim or None))


def _last(found: Explanation) -> None:
    """What it comes to, where the eye ends."""
    problems = [one for one in found.findings if one.level == "problem"]
    advice = [one for one in found.findings if one.level == "advice"]
    click.echo()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        _say(f"{count}; begin with: {problems[0].what}", first="", indent=INDENT, bold=True)
    elif advice:
        _say(f"no problem; worth a try: {advice[0].what}", first="", indent=INDENT, bold=True)
    elif found.findings:
        far = ", as far as it can be told" if found.unknown else ""
        _say(f"nothing wrong was seen{far}", first="", indent=INDENT, bold=True)
    else:
        _say("nothing could be told", first="", indent=INDENT, bold=True)


@click.command("profile")
@click.argument("run", default="")
@click.option("--steps", default=5, show_default=True, help="Optimizer steps to trace.")
@click.option("--warmup", default=10, show_default=True, help="Steps before them.")
@click.option("--port", default=0, help="The local port of its page.")
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
@click.option("--no-page", is_flag=True, help="Figures only; the page comes home all the same.")
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
    """A few steps of RUN's command (the latest's) in PyTorch's profiler: what takes the time.

    It runs the command again, with the code as it is now, in a short run of its own, without any
    change to the code, and ends it after the steps. The page with the trace is shown through a
    forward until Ctrl-C; give the id of a profile to see it again.

    \b
    labctl profile
    labctl profile night --steps 3 --open
    labctl profile --no-page --json
    """
    from labctl.cli.screen import as_json
    from labctl.insight import profile

    lab = open_lab(ctx, quiet=json_)
    found = profile.profile(lab.ground, run, steps=steps, warmup=warmup)
    rest(ctx)
    if json_:
        as_json({name: getattr(found, name) for name in found.__struct_fields__})
        return
    _draw_profile(found)
    if found.there and not no_page:
        _page(lab, found, port, open_)
    else:
        click.echo(f"its page: {found.directory}/index.html")


PHASES = {
    "data": "getting the next batch",
    "waiting": "waiting for the GPU",
    "optimizer": "optimizer",
    "backward": "backward pass",
    "forward": "forward pass and loss",
    "other": "Python between operations",
}


def _draw_profile(found: Profiled) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import table

    seen = found.profile
    on = f" on {seen.device}, PyTorch {seen.torch}" if seen.torch else ""
    title = f"{_many(seen.steps, 'step')} of {shlex.join(seen.command)}{on}"
    click.secho(clean(title), bold=True)
    busy = "" if seen.gpu_busy is None else f"; the GPU works {seen.gpu_busy:.0%} of it"
    click.echo(f"{INDENT}a step takes {_time(seen.step_us)} (median){busy}\n")
    parts = sorted(seen.phases.items(), key=lambda item: -item[1])
    table(
        [
            (PHASES.get(name, name), f"{_time(share * seen.step_us):>8}", _bar(share))
            for name, share in parts
            if share >= 0.0005
        ],
        ("PART OF A STEP", "    TIME", "SHARE"),
    )
    click.echo()
    rows = seen.kernels or seen.operations
    what = "KERNEL ON THE GPU" if seen.kernels else "OPERATION"
    table(
        [
            (f"{_time(row.us):>8}", f"{row.count:>7.1f}", f"{row.share:>5.0%}", row.name)
            for row in rows[:8]
        ],
        ("  A STEP", "  CALLS", "SHARE", what),
    )
    for one in found.findings:
        click.echo()
        _finding(one)
    click.echo()


def _bar(share: float) -> str:
    return f"{share:>4.0%} {'█' * round(share * 30)}"


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def _page(lab: Lab, found: Profiled, port: int, open_: bool) -> None:
    from labctl.insight import profile

    with profile.forward(lab.ground, found, port) as opened:
        click.echo(f"profile: {opened.url}")
        click.echo(
            f"Ctrl-C ends; again: labctl profile {found.run}; "
            f"here: runs/{found.run}/logs/profile/index.html",
            err=True,
        )
        if open_:
            click.launch(opened.url)
        with contextlib.suppress(KeyboardInterrupt):
            opened.wait()
