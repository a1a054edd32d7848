"""Options that several commands share, and opening the lab they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from labctl.lab import Lab

SCREEN = "labctl.screen"
F = TypeVar("F", bound=Callable[..., Any])


def yes_option(function: F) -> F:
    return click.option("-y", "--yes", is_flag=True, help="Answer every question with yes.")(
        function
    )


def json_option(function: F) -> F:
    return click.option(
        "--json", "json_", is_flag=True, help="One JSON object on standard output."
    )(function)


def need_options(function: F) -> F:
    """What a lab asks of a server, over lab.yaml, for `up` and `offers`."""
    for option in reversed(
        (
            click.option("--provider", help="Over lab.yaml's server.provider."),
            click.option("--gpu", help="auto, none, any, T4, A100:2, '>=24GB'."),
            click.option("--min-gpu-memory", "gpu_memory", help="Of one GPU: 16GB."),
            click.option(
                "--arch", type=click.Choice(["x86_64", "arm64"]), help="Of the processor."
            ),
            click.option(
                "--work",
                type=click.Choice(["fp32", "fp16", "bandwidth"]),
                help="Rank by the price of this work, not per hour.",
            ),
            click.option(
                "--spot",
                is_flag=False,
                flag_value="only",
                type=click.Choice(["never", "prefer", "only"]),
                help="Alone: only.",
            ),
            click.option("--max-price", help="USD per hour."),
        )
    ):
        function = option(function)
    return function


def open_lab(
    ctx: click.Context,
    *,
    yes: bool = False,
    quiet: bool = False,
    overrides: dict[str, str] | None = None,
    record_only: bool = False,
    needs_file: bool = True,
    everywhere: bool = False,
) -> Lab:
    """The lab in -C's directory, drawn on this screen. Options set to None do not override."""
    from labctl.cli.screen import Screen
    from labctl.lab import Lab

    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.rest)
    lab = Lab.load(
        ctx.find_root().obj or ".",
        overrides=given,
        reporter=screen,
        record_only=record_only,
        needs_file=needs_file,
        everywhere=everywhere,
    )
    if not record_only:
        _remove_expired(lab)
    return lab


def _remove_expired(lab: Lab) -> None:
    """Remove the lab's kept disks whose time is over: whatever the command is, they cost money.

    It does its own work all the same where that fails.
    """
    from labctl.errors import LabError
    from labctl.state.disks import has_expired

    if not has_expired(lab.ground.state, lab.id, lab.config.server.provider):
        return
    from labctl.events import Note
    from labctl.servers import kept_disks

    try:
        kept_disks.remove_expired(lab.ground)
    except LabError as error:
        text = f"a kept disk whose time is over is still there: {error.what}"
        lab.ground.reporter.emit(Note(text=text, level="warning"))


def rest(ctx: click.Context) -> None:
    """Take live drawing off the screen, before a program's own output begins."""
    ctx.meta[SCREEN].rest()
