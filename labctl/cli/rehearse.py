"""The commands below rehearse: a simulated cloud, and a spot interruption on purpose."""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.number_range import NumberRange
from labctl.cli.options import json_option, open_lab, stop_drawing, yes_option
from labctl.cli.screen import Screen
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config import parse_duration
from labctl.config.installation import install_command
from labctl.errors import LabError, UsageError
from labctl.events import report_wait
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.rehearsal import aws, azure, gcp, lambda_cloud, runpod, vast
from labctl.rehearsal.core.scenario import load_scenario
from labctl.text import dollars_text, duration_text, optional_text

if TYPE_CHECKING:
    from labctl.lifecycle.reclaim_drill import Drill

with lazy_imports(__name__):
    from labctl.lifecycle import reclaim_drill
    from labctl.rehearsal.core import images


@click.group("rehearse")
def rehearse_command() -> None:
    """Simulate a cloud on this machine, or interrupt a server on purpose.

    \b
    labctl rehearse aws
    labctl rehearse azure
    labctl rehearse gcp
    labctl rehearse lambda
    labctl rehearse runpod
    labctl rehearse vast
    labctl rehearse reclaim
    """


def _cloud_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every simulated cloud has."""
    for option in (
        click.option(
            "--port",
            type=NumberRange(8600, 0, 65535),
            default=0,
            help="Listen on this port of 127.0.0.1; 0 chooses one.",
        ),
        click.option(
            "--region", "regions", multiple=True, help="Simulate this region; repeatable."
        ),
        click.option(
            "--boot",
            type=click.Choice(["cloud-init", "sshd", "none"]),
            help="Simulate complete machines, SSH servers only, or records only.",
        ),
        click.option(
            "--set",
            "switches",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a setting: delays.boot=20s, expired=true.",
        ),
        click.option(
            "--scenario",
            "path",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Read settings from this YAML file; `labctl docs rehearsal` lists them.",
        ),
    ):
        command = option(command)
    return command


class SimulatedCloud(Value, frozen=True):
    """A cloud that can be simulated here.

    `simulation` is the context manager ("MODULE:CLASS"), imported when it starts. `example` is a
    setting of the scenario for the help.
    """

    command: str
    name: str
    scenario: type[Any]
    simulation: str
    example: str


_ROOM = "labctl.rehearsal"
CLOUDS = (
    SimulatedCloud(
        "aws", "AWS", aws.Scenario, f"{_ROOM}.aws.simulation:Rehearsal", "delays.visible=30s"
    ),
    SimulatedCloud(
        "azure", "Azure", azure.AzureScenario,
        f"{_ROOM}.azure.simulation:AzureRehearsal", "operation=5s",
    ),
    SimulatedCloud(
        "gcp", "Google Cloud", gcp.GcpScenario,
        f"{_ROOM}.gcp.simulation:GcpRehearsal", "operation=5s",
    ),
    SimulatedCloud(
        "lambda", "Lambda", lambda_cloud.LambdaScenario,
        f"{_ROOM}.lambda_cloud.simulation:LambdaRehearsal", "quota=1",
    ),
    SimulatedCloud(
        "runpod", "RunPod", runpod.RunPodScenario,
        f"{_ROOM}.runpod.simulation:RunPodRehearsal", "balance=0.10",
    ),
    SimulatedCloud(
        "vast", "Vast.ai", vast.VastScenario,
        f"{_ROOM}.vast.simulation:VastRehearsal", "balance=0.10",
    ),
)  # fmt: skip


def _add_command(cloud: SimulatedCloud) -> None:
    call = f"labctl rehearse {cloud.command}"

    @rehearse_command.command(
        cloud.command,
        short_help=f"Simulate {cloud.name} until Ctrl-C.",
        help=f"Simulate {cloud.name} until Ctrl-C; print the environment variables to export "
        f"first.\n\n\b\n{call}\n{call} --boot none --set {cloud.example}",
    )
    @_cloud_options
    def run(**options: Any) -> None:
        _run_cloud(cloud, **options)


def _run_cloud(
    cloud: SimulatedCloud,
    path: Path | None,
    switches: tuple[str, ...],
    boot: str | None,
    regions: tuple[str, ...],
    port: int,
) -> None:
    """Run the simulation of a cloud until a signal arrives."""
    settings = [*switches]
    settings += [f"boot={boot}"] if boot else []
    settings += [f"regions=[{', '.join(regions)}]"] if regions else []
    scenario = load_scenario(cloud.scenario, path, settings)
    module, _, attribute = cloud.simulation.partition(":")
    try:
        with report_wait(Screen(), f"loading the simulation of {cloud.name}"):
            rehearsal = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise LabError(
            "the rehearse extra is not installed",
            why=f"the module {error.name} is missing",
            hint=install_command("rehearse"),
        ) from error
    building = images.default_building(_log_progress)
    with _catch_signals() as wakeup, rehearsal(scenario, building, port, _log) as running:
        _print_environment(cloud.name, running)
        try:
            wakeup.recv(1)
        except KeyboardInterrupt:
            click.echo(err=True)
        count = sum(state not in ("terminated", "ended") for state in running.instances.values())
        _log(f"stopping; removing {count} instance{'' if count == 1 else 's'}")


for _cloud in CLOUDS:
    _add_command(_cloud)


@rehearse_command.command("reclaim", short_help="Interrupt the lab's server on purpose.")
@click.argument("run", default="", shell_complete=complete_runs)
@click.option("--without-notice", is_flag=True, help="Terminate the server without a notice.")
@click.option(
    "--notice", default="120s", metavar="SPAN", help="Time to the termination (default: 120s)."
)
@yes_option
@json_option
@click.pass_context
def _reclaim(
    ctx: click.Context, run: str, without_notice: bool, notice: str, yes: bool, json_: bool
) -> None:
    """Interrupt the lab's server while RUN is active, and measure what is lost.

    The server is really terminated, with its disk unless the provider keeps it. The run is
    recovered on a new server.

    \b
    labctl rehearse reclaim
    labctl rehearse reclaim --notice 30s
    labctl rehearse reclaim --without-notice --json
    """
    try:
        notice_s = 0 if without_notice else parse_duration(notice)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl rehearse reclaim --notice 30s") from None
    lab = open_lab(ctx, yes=yes, quiet=json_)
    result = reclaim_drill.run_drill(lab.context, run, notice_s)
    if json_:
        print_json({"drill": result})
    else:
        stop_drawing(ctx)
        _print_drill(result)


def _print_drill(drill: Drill) -> None:
    def offset_text(moment: float | None) -> str:
        return "-" if moment is None else f"{moment - drill.began_at:+.1f} s"

    def step_text(number: float | None) -> str:
        return "" if number is None else f"step {number:.0f}"

    source = "from the provider" if drill.announced else "sent to the watchdog"
    notice = f"{duration_text(drill.notice_s)} before the end; {source}"
    with_notice = [
        ("notice", offset_text(drill.notice_at), notice),
        ("SIGTERM", offset_text(drill.sigterm_at), ""),
        (
            "checkpoint",
            offset_text(drill.checkpoint_at),
            drill.checkpoint or "none was written",
        ),
        ("in the store", offset_text(drill.mirrored_at), ""),
    ]
    rows = [
        *(with_notice if drill.notice_s else []),
        ("last step before", "", step_text(drill.last_step_before) or "not reported by the run"),
        ("server gone", offset_text(drill.gone_at), drill.server_id),
        ("first step after", offset_text(drill.first_step_at), step_text(drill.first_step_after)),
    ]
    print_table(rows, ("EVENT", "TIME", "RESULT"))
    lost = "unknown" if drill.lost_steps is None else f"{drill.lost_steps:.0f} steps"
    lost += "" if drill.lost_s is None else f", {drill.lost_s:.1f} s of work"
    missing = "unknown" if drill.last_step_before is None else "never reached"
    recovery = missing if drill.recover_s is None else f"{drill.recover_s:.1f} s"
    cost = optional_text(drill.cost_usd, dollars_text, "unknown")
    text = f"lost: {lost}; from the kill to the first new step: {recovery}; cost: {cost}"
    print_message(f"\n{text}", err=False)


@contextmanager
def _catch_signals() -> Iterator[socket.socket]:
    """Turn the first SIGINT or SIGTERM into a KeyboardInterrupt and a byte to read.

    This holds even if SIGINT was ignored at the start, as in a script's background job. Later
    signals are ignored, because they must not interrupt the removal of the machines.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt(*_: object) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    reading, writing = socket.socketpair()
    writing.setblocking(False)
    # A signal may reach another thread. The byte then wakes the main thread, which reads it.
    previous_fd = signal.set_wakeup_fd(writing.fileno())
    previous_handlers = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield reading
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        reading.close()
        writing.close()


def _print_environment(name: str, rehearsal: Any) -> None:
    if rehearsal.conflicting_variables:
        click.echo(f"unset {' '.join(rehearsal.conflicting_variables)}")
    for variable, value in rehearsal.environment.items():
        click.echo(f"export {variable}={shlex.quote(value)}")
    _log(f"simulated {name} is running: paste the lines above into another shell; Ctrl-C stops it")


def _log(text: str) -> None:
    print_message(f"rehearsal: {clean(text)}")


def _log_progress(text: str, done: float, total: float) -> None:
    if done < total:
        _log(text)
