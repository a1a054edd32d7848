"""rehearse: simulated clouds on this machine."""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from labctl.errors import LabError


@click.group("rehearse")
def rehearse_command() -> None:
    """A simulated cloud on this machine: the same commands, no account, no cost.

    \b
    labctl rehearse aws
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
    from labctl.cli.exits import clean

    click.echo(f"rehearsal: {clean(text)}", err=True)


def _progress(text: str, done: float, of: float) -> None:
    if done < of:
        _said(text)
