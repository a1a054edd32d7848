"""top."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab

if TYPE_CHECKING:
    from labctl.errors import LabError
    from labctl.insight.top import ServerNow
    from labctl.lab import Lab

FOOT = "Ctrl-C ends this view; what runs goes on"


@click.command("top")
@click.option("--once", is_flag=True, help="One picture, then end; so too without a terminal.")
@json_option
@click.pass_context
def top_command(ctx: click.Context, once: bool, json_: bool) -> None:
    """The server live: processor, memory, disk, network, GPUs, runs, and whose processes they are.

    \b
    labctl top
    labctl top --once
    labctl top --json
    """
    lab = open_lab(ctx, quiet=json_)
    if json_:
        from labctl.cli.screen import as_json

        as_json({"lab": lab.config.name, "lab_id": lab.id, "server": lab.top()})
    elif once or not sys.stdout.isatty():
        _draw_once(lab, lab.top())
    else:
        _live(lab)


def _draw_once(lab: Lab, now: ServerNow) -> None:
    from rich.console import Console

    from labctl.cli.top_history import History
    from labctl.cli.top_screen import About, picture

    console = Console(highlight=False)
    history = History()
    history.add(now)
    about = About(server=lab.ground.server(), lab_id=lab.id, bars=_bars(console.encoding))
    console.print(picture(history, about, console.width))


def _live(lab: Lab) -> None:
    from rich.console import Console
    from rich.live import Live

    from labctl.cli.top_history import History
    from labctl.cli.top_screen import About, picture
    from labctl.insight.top import follow

    console = Console(highlight=False)
    history = History()
    about = About(
        server=lab.ground.server(), lab_id=lab.id, foot=FOOT, bars=_bars(console.encoding)
    )

    def draw(cut: str = "") -> None:
        import msgspec

        now = msgspec.structs.replace(about, cut=cut) if cut else about
        live.update(picture(history, now, console.width, console.height), refresh=True)

    def sampled(now: ServerNow) -> None:
        history.add(now)
        draw()

    def cut(error: LabError, pause_s: float) -> None:
        history.gap()
        when = time.strftime("%H:%M:%S")
        draw(f"{when} {error.what}; what runs goes on; trying again in {pause_s:g} s")

    with Live(console=console, screen=True, auto_refresh=False) as live:
        draw()
        try:
            follow(lab.ground, sampled, on_cut=cut)
        except KeyboardInterrupt:
            return


def _bars(encoding: str) -> str:
    """What the bars are drawn with: plain letters where the terminal knows no others."""
    from labctl.cli.top_history import BARS, PLAIN_BARS

    return BARS if encoding.lower().startswith("utf") else PLAIN_BARS
