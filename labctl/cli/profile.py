"""The command profile: where a training step spends its time and its memory."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.browser import open_in_browser, relative_path
from labctl.cli.exit_codes import clean
from labctl.cli.findings_output import INDENT, print_finding
from labctl.cli.interrupt import close_at_interrupt, wait_until_interrupted
from labctl.cli.memory_output import print_memory
from labctl.cli.number_range import NumberRange
from labctl.cli.options import RUN, json_option, open_lab, stop_drawing
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message, wrap_lines
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import bytes_text, count_text, timing_text
from labctl.wire.run_ids import PROFILE_PREFIX

if TYPE_CHECKING:
    from labctl.insight.nsight import NsightResult
    from labctl.insight.profile import ProfileResult
    from labctl.lab import Lab

with lazy_imports(__name__):
    from labctl.insight import memory_comparison, profile
    from labctl.insight import nsight as nsights
    from labctl.lifecycle import gang_runs


@click.command("profile")
@RUN
@click.option("--steps", default=5, show_default=True, help="Trace this many optimizer steps.")
@click.option("--warmup", default=10, show_default=True, help="Skip this many steps first.")
@click.option(
    "--port", type=NumberRange(8000, 0, 65535), default=0, help="Show the page on this local port."
)
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
@click.option("--no-page", is_flag=True, help="Download the page without showing it.")
@click.option("--memory", is_flag=True, help="Also show what memory holds, beside the estimate.")
@click.option("--nsight", is_flag=True, help="Record with nsys of the image instead.")
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
    memory: bool,
    nsight: bool,
    json_: bool,
) -> None:
    """Record a few steps of RUN's command (default: the latest run) with PyTorch's profiler.

    labctl runs the command again as a short run, with the current code and without changes to it,
    and ends it after these steps. A forward shows the page with the trace until Ctrl-C. To see a
    profile again, give its id as RUN.

    \b
    labctl profile
    labctl profile night --steps 3 --open
    labctl profile --memory
    labctl profile --nsight
    labctl profile --no-page --json
    """
    _require_one_tool(run, memory=memory, nsight=nsight)
    lab = open_lab(ctx, quiet=json_)
    gang_runs.require_one_server(lab.context, "profile", "labctl top   # shows all servers")
    if nsight:
        report = nsights.profile_with_nsight(lab.context, run, steps=steps, warmup=warmup)
        stop_drawing(ctx)
        _print_report(report, json_)
        return
    profiled = profile.profile(lab.context, run, steps=steps, warmup=warmup, memory=memory)
    if memory or profiled.profile.memory is not None:
        profiled = memory_comparison.add_prediction(lab.context, profiled)
    stop_drawing(ctx)
    if json_:
        print_json(profiled)
        return
    _print_profile(profiled)
    # A container on the server shows the page; without one, the downloaded file does. Only the
    # latter has the estimate of this machine.
    has_service = profiled.there and lab.config.uses_containers and profiled.predicted is None
    if has_service and not no_page:
        with close_at_interrupt(ctx):
            _show_page(lab, profiled, port, open_)
        return
    click.echo(f"page: {_find_page(profiled)}")
    if open_ and not no_page:
        open_in_browser(Path(profiled.directory, "index.html").resolve().as_uri())


def _require_one_tool(run: str, *, memory: bool, nsight: bool) -> None:
    if not nsight:
        return
    if memory:
        raise UsageError(
            "--nsight cannot be combined with --memory",
            why="nsys records the program alone, without PyTorch's profiler",
            hint="labctl profile --memory",
        )
    if run.startswith(PROFILE_PREFIX):
        raise UsageError(
            f"--nsight cannot be combined with {run}, which is a profile",
            hint="labctl profile --nsight   # records the latest run's command",
        )


def _print_report(report: NsightResult, json_: bool) -> None:
    if json_:
        print_json(report)
        return
    path = clean(relative_path(Path(report.report)))
    click.echo(f"report: {path} ({bytes_text(report.size_bytes)})")
    print_message(f"To open it in Nsight Systems: nsys-ui {path}")


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
    title = f"{count_text(profile.steps, 'step')} of {shlex.join(profile.command)}{device}"
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
    print_memory(profiled)
    for finding in profiled.findings:
        click.echo()
        print_finding(finding)
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
