"""rehearse: simulated clouds on this machine, and servers that are taken back on purpose."""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, open_lab, rest, yes_option
from labctl.errors import LabError

if TYPE_CHECKING:
    from labctl.lifecycle.reclaim import Drill


@click.group("rehearse")
def rehearse_command() -> None:
    """A simulated cloud on this machine; a server taken back on purpose.

    \b
    labctl rehearse aws
    labctl rehearse reclaim
    """


@rehearse_command.command("aws")
@click.option(
    "--scenario",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A YAML file of settings; docs/rehearsal.md lists them.",
)
@click.option(
    "--set",
    "switches",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting over the file's: delays.boot=20s, capacity=[{zone: us-east-1a}].",
)
@click.option(
    "--boot",
    type=click.Choice(["cloud-init", "sshd", "none"]),
    help="What an instance is: a whole machine, one that only accepts SSH, or nothing.",
)
@click.option("--region", "regions", multiple=True, help="A region that there is; may be repeated.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On 127.0.0.1; 0: any.")
def _aws(
    path: Path | None,
    switches: tuple[str, ...],
    boot: str | None,
    regions: tuple[str, ...],
    port: int,
) -> None:
    """A simulated EC2 until Ctrl-C; it prints the environment to export first.

    \b
    labctl rehearse aws
    labctl rehearse aws --boot none --set delays.visible=30s
    """
    from labctl.rehearsal.scenario import load

    given = [*switches]
    given += [f"boot={boot}"] if boot else []
    given += [f"regions=[{', '.join(regions)}]"] if regions else []
    scenario = load(path, given)
    try:
        from labctl.rehearsal.images import here
        from labctl.rehearsal.simulation import Rehearsal
    except ModuleNotFoundError as error:
        raise LabError(
            "rehearsing needs more than labctl itself",
            why=f"there is no module {error.name}",
            hint="pip install 'labctl[rehearse]'",
        ) from error
    with _signals() as told, Rehearsal(scenario, here(_progress), port, _said) as rehearsal:
        _announce(rehearsal)
        try:
            told.recv(1)
        except KeyboardInterrupt:
            click.echo(err=True)
        ending = sum(state != "terminated" for state in rehearsal.instances.values())
        _said(f"ending; {ending} instance{' goes' if ending == 1 else 's go'} with it")


@rehearse_command.command("reclaim")
@click.argument("run", default="")
@click.option("--without-notice", is_flag=True, help="The server goes at once.")
@click.option("--notice", default="120s", metavar="SPAN", help="From the notice to the end.")
@yes_option
@json_option
@click.pass_context
def _reclaim(
    ctx: click.Context, run: str, without_notice: bool, notice: str, yes: bool, json_: bool
) -> None:
    """Have the lab's server taken back while RUN goes on, and measure what that costs.

    The server really ends, with its disk. The run is recovered on another one.

    \b
    labctl rehearse reclaim
    labctl rehearse reclaim --notice 30s
    labctl rehearse reclaim --without-notice --json
    """
    from labctl.cli.rehearsal import rehearsed_taker
    from labctl.cli.screen import as_json
    from labctl.config import parse_duration
    from labctl.errors import UsageError
    from labctl.lifecycle.reclaim import drill

    try:
        notice_s = 0 if without_notice else parse_duration(notice)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl rehearse reclaim --notice 30s") from None
    lab = open_lab(ctx, yes=yes, quiet=json_)
    done = drill(lab.ground, run, notice_s, rehearsed_taker(lab.ground))
    if json_:
        as_json({"drill": done})
    else:
        rest(ctx)
        _draw_drill(done)


def _draw_drill(done: Drill) -> None:
    from labctl.cli.screen import span, table

    def at(moment: float | None) -> str:
        return "-" if moment is None else f"{moment - done.began_at:+.1f} s"

    def step(number: float | None) -> str:
        return "" if number is None else f"step {number:.0f}"

    told = "its provider gave it" if done.announced else "handed to the watchdog"
    with_notice = [
        ("notice", at(done.notice_at), f"{span(done.notice_s)} before the end; {told}"),
        ("SIGTERM", at(done.sigterm_at), ""),
        ("checkpoint whole", at(done.checkpoint_at), done.checkpoint or "none was written"),
        ("in the store", at(done.mirrored_at), ""),
    ]
    rows = [
        *(with_notice if done.notice_s else []),
        ("last step before", "", step(done.last_step_before) or "the run tells none"),
        ("server gone", at(done.gone_at), done.server_id),
        ("first step after", at(done.first_step_at), step(done.first_step_after)),
    ]
    table(rows, ("WHAT", "AT", "SAID"))
    lost = "unknown" if done.lost_steps is None else f"{done.lost_steps:.0f} steps"
    lost += "" if done.lost_s is None else f", {done.lost_s:.1f} s of work"
    took = "it took no step again" if done.recover_s is None else f"{done.recover_s:.1f} s"
    cost = "unknown" if done.cost_usd is None else f"{done.cost_usd:.4f} dollars"
    click.echo(f"\nlost: {lost}; from the kill to the first new step: {took}; cost: {cost}")


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """The first SIGINT or SIGTERM is a KeyboardInterrupt, and a byte to read; no later one counts.

    Also where SIGINT was ignored at the start, as it is in a script's background job. A second one
    must not break off the removal of the machines.
    """
    ends = (signal.SIGINT, signal.SIGTERM)

    def told(*_: object) -> None:
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    reading, writing = socket.socketpair()
    writing.setblocking(False)
    # A signal may reach another thread; a main thread that waits for anything else sleeps on then.
    woken = signal.set_wakeup_fd(writing.fileno())
    before = {each: signal.signal(each, told) for each in ends}
    try:
        yield reading
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(woken)
        reading.close()
        writing.close()


def _announce(rehearsal: Any) -> None:
    click.echo("unset AWS_PROFILE AWS_SESSION_TOKEN")
    for name, value in rehearsal.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    _said("this is a simulated AWS: put the lines above into another shell; Ctrl-C ends it")


def _said(text: str) -> None:
    from labctl.cli.exit_codes import clean

    click.echo(f"rehearsal: {clean(text)}", err=True)


def _progress(text: str, done: float, of: float) -> None:
    if done < of:
        _said(text)
