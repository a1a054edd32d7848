"""Options that several commands share, and the function that opens the lab they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from labctl.cli.screen import Screen
from labctl.errors import LabError
from labctl.events import Note

if TYPE_CHECKING:
    from labctl.lab import Lab

# key of the command's Screen in click's context
SCREEN = "labctl.screen"
F = TypeVar("F", bound=Callable[..., Any])


def yes_option(function: F) -> F:
    """Add `-y`."""
    return click.option("-y", "--yes", is_flag=True, help="Answer yes to every yes/no question.")(
        function
    )


def json_option(function: F) -> F:
    """Add `--json`."""
    return click.option(
        "--json", "json_", is_flag=True, help="Print one JSON object to standard output."
    )(function)


def need_options(function: F) -> F:
    """Add the options of `up` and `offers` that override the server section of lab.yaml."""
    for option in reversed(
        (
            click.option("--provider", help="Overrides server.provider in lab.yaml."),
            click.option("--gpu", help="GPU to use: auto, none, any, T4, A100:2, '>=24GB'."),
            click.option(
                "--min-gpu-memory", "gpu_memory", help="Least memory per GPU, for example 16GB."
            ),
            click.option(
                "--arch", type=click.Choice(["x86_64", "arm64"]), help="CPU architecture."
            ),
            click.option(
                "--work",
                type=click.Choice(["fp32", "fp16", "bandwidth"]),
                help="Sort offers by price per unit of this work instead of price per hour.",
            ),
            click.option(
                "--spot",
                is_flag=False,
                flag_value="only",
                type=click.Choice(["never", "prefer", "only"]),
                help="Use spot servers. Without a value: only.",
            ),
            click.option("--max-price", help="Highest price in dollars per hour."),
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
    """Load the lab in -C's directory, with events drawn on the screen.

    An override that is None leaves lab.yaml's value. Expired disks are removed on the way, unless
    only the record is read.
    """
    from labctl.lab import Lab

    set_overrides = {k: v for k, v in (overrides or {}).items() if v is not None}
    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.stop_drawing)
    lab = Lab.load(
        ctx.find_root().obj or ".",
        overrides=set_overrides,
        reporter=screen,
        record_only=record_only,
        needs_file=needs_file,
        everywhere=everywhere,
        in_process=False,
    )
    if not record_only:
        _remove_expired(lab)
    return lab


def _remove_expired(lab: Lab) -> None:
    """Remove the lab's expired disks, which cost money. A failure is a warning.

    It must not stop the command that was called.
    """
    from labctl.state.disks import has_expired

    if not has_expired(lab.context.state, lab.id, lab.config.server.provider):
        return
    from labctl.servers import kept_disks

    try:
        kept_disks.remove_expired(lab.context)
    except LabError as error:
        text = f"an expired disk could not be removed: {error.what}"
        lab.context.reporter.emit(Note(text=text, level="warning"))


def stop_drawing(ctx: click.Context) -> None:
    """Stop live drawing before another program's output begins."""
    ctx.meta[SCREEN].stop_drawing()
