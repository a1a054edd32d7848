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


def open_lab(
    ctx: click.Context,
    *,
    yes: bool = False,
    quiet: bool = False,
    overrides: dict[str, str] | None = None,
    record_only: bool = False,
) -> Lab:
    """The lab in -C's directory, drawn on this screen. Options set to None do not override."""
    from labctl.cli.screen import Screen
    from labctl.lab import Lab

    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.rest)
    return Lab.load(
        ctx.find_root().obj or ".", overrides=given, reporter=screen, record_only=record_only
    )


def rest(ctx: click.Context) -> None:
    """Take live drawing off the screen, before a program's own output begins."""
    ctx.meta[SCREEN].rest()
