"""The command top: a live view of the server, or of all servers of the lab."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli.number_range import NumberRange
from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import print_json
from labctl.cli.top_history import BARS, PLAIN_BARS, History
from labctl.insight.top import ServerMetrics, follow
from labctl.lazy import lazy_imports
from labctl.lifecycle import gang

if TYPE_CHECKING:
    from labctl.errors import LabError
    from labctl.lab import Lab

with lazy_imports(__name__):
    from rich import console as rich_console
    from rich import live as rich_live

    from labctl.cli import keys, top_all, top_screen

HINT = "q quits; ? lists the keys; runs continue"
KEYS = "q or Ctrl-C: quit; runs continue    ?: hide this list"


class Foot:
    """The last line of a live view: a hint, or after ? the list of keys."""

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self.text = hint

    def switch(self) -> None:
        self.text = KEYS if self.text == self._hint else self._hint


@click.command("top")
@click.option(
    "--once", is_flag=True, help="Print one snapshot and exit (default without a terminal)."
)
@click.option(
    "--server",
    "rank",
    type=NumberRange(1, min=0),
    metavar="N",
    help="With several servers: show only this one, with its processes. The first is 0.",
)
@json_option
@click.pass_context
def top_command(ctx: click.Context, once: bool, rank: int | None, json_: bool) -> None:
    """Show the server live: CPU, memory, disk, network, GPUs, runs, and processes with their users.

    With several servers, show all of them: a row for each, and for each of their GPUs and runs.

    Press q to quit. The bars of disk and network are relative to the `max` beside them.

    \b
    labctl top
    labctl top --once
    labctl top --json
    """
    is_live = not json_ and not once and sys.stdout.isatty()
    # The live view fills the screen, and itself says that it connects again.
    lab = open_lab(ctx, quiet=json_ or is_live, rank=rank)
    if gang.has_several_servers(lab.context):
        if is_live:
            top_all.show_live(lab)
        else:
            top_all.print_once(ctx, lab, json_)
        return
    if json_:
        print_json({"lab": lab.config.name, "lab_id": lab.id, "server": lab.top()})
    elif not is_live:
        _print_once(lab, lab.top())
    else:
        _show_live(lab)


def _print_once(lab: Lab, now: ServerMetrics) -> None:
    console = rich_console.Console(highlight=False)
    history = History()
    history.add(now)
    about = top_screen.About(
        server=lab.context.get_server(), lab_id=lab.id, bars=choose_bars(console.encoding)
    )
    console.print(top_screen.render_server(history, about, console.width))


def _show_live(lab: Lab) -> None:
    console = rich_console.Console(highlight=False)
    history = History()
    about = top_screen.About(
        server=lab.context.get_server(),
        lab_id=lab.id,
        bars=choose_bars(console.encoding),
    )
    foot = Foot(HINT)

    def switch_foot() -> None:
        foot.switch()
        update_screen()

    def update_screen(cut: str = "") -> None:
        shown_about = msgspec.structs.replace(about, cut=cut, foot=foot.text)
        live.update(
            top_screen.render_server(history, shown_about, console.width, console.height),
            refresh=True,
        )

    def add_sample(now: ServerMetrics) -> None:
        nonlocal about
        # A recovered run may have moved to another server.
        about = msgspec.structs.replace(about, server=lab.context.get_server())
        history.add(now)
        update_screen()

    def show_cut(error: LabError, pause_s: float) -> None:
        history.add_gap()
        when = time.strftime("%H:%M:%S")
        update_screen(f"{when} {error.what}; retrying in {pause_s:g} s; q quits")

    with rich_live.Live(console=console, screen=True, auto_refresh=False) as live:
        update_screen()
        try:
            with read_view_keys(switch_foot):
                follow(lab.context, add_sample, on_cut=show_cut)
        except KeyboardInterrupt:
            return


def read_view_keys(on_help: Callable[[], None]) -> AbstractContextManager[None]:
    """Read the keys of a live view: q ends it, ? calls `on_help`."""

    def handle_key(key: str) -> None:
        if key == "q":  # the main thread waits for the server: end that as Ctrl-C does
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif key == "?":
            on_help()

    return keys.read_keys(handle_key)


def choose_bars(encoding: str) -> str:
    """Return the characters of the bars: ASCII if the terminal's encoding has no others."""
    return BARS if encoding.lower().startswith("utf") else PLAIN_BARS
